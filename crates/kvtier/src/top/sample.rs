//! What a server shows at one moment: `/status` and `/metrics`.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, bail};
use kvtier_api::Status;
use kvtier_server::escape::escape;

use crate::out;
use crate::web::{Client, refusal};

/// Series of one name: labels and value.
pub(super) type Series = Vec<(BTreeMap<String, String>, f64)>;

/// Both answers.
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: Status,
    metrics: BTreeMap<String, Series>,
}

impl Sample {
    /// Asks a server.
    pub(super) fn take(client: &Client) -> anyhow::Result<Self> {
        let (at, status) = (Instant::now(), get(client, "/status")?);
        let status = serde_json::from_str(&status).context("/status is not JSON")?;
        Ok(Self {
            at,
            status: kvtier_api::from_value(out::shown(&status))
                .context("/status has a field of another type")?,
            metrics: parse(&get(client, "/metrics")?),
        })
    }

    /// The series of this name.
    pub(super) fn series(&self, name: &str) -> &[(BTreeMap<String, String>, f64)] {
        self.metrics.get(name).map_or(&[], Vec::as_slice)
    }

    /// The sum of the series of this name whose labels include these.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |own: &BTreeMap<String, String>| {
            let mut labels = labels.iter();
            labels.all(|(label, value)| own.get(*label).is_some_and(|own| own == value))
        };
        let series = self.series(name).iter();
        series
            .filter(|(own, _)| has(own))
            .map(|(_, value)| value)
            .sum()
    }

    /// The values of a label, in order.
    pub(super) fn values(&self, name: &str, label: &str) -> Vec<String> {
        let series = self.series(name).iter();
        let mut values: Vec<_> = series
            .filter_map(|(own, _)| own.get(label).cloned())
            .collect();
        values.sort();
        values.dedup();
        values
    }
}

fn get(client: &Client, path: &str) -> anyhow::Result<String> {
    match client.get(path)? {
        (200, body) => Ok(body),
        (code, body) => bail!("{path} returned {}", refusal(code, &body)),
    }
}

/// Prometheus' text format. Lines of another form are left out; names chosen by clients are escaped for a terminal.
fn parse(text: &str) -> BTreeMap<String, Series> {
    let mut found = BTreeMap::<String, Series>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((name, labels, value)) = parse_line(line) {
            found.entry(name).or_default().push((labels, value));
        }
    }
    found
}

fn parse_line(line: &str) -> Option<(String, BTreeMap<String, String>, f64)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, value) = rest.trim_start_matches(',').split_once("=\"")?;
            let (value, after) = quoted(value)?;
            labels.insert(label.to_owned(), escape(&value).into_owned());
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name.to_owned(), labels, value))
}

/// A quoted text up to its end, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
pub(super) fn sample(status: serde_json::Value, metrics: &str) -> Sample {
    Sample {
        at: Instant::now(),
        status: kvtier_api::from_value(status).unwrap(),
        metrics: parse(metrics),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_labels() {
        let text = "# HELP a b\na_total{x=\"1\",y=\"q\\\"\\\\\\n,}\"} 3 17\na_total 2.5\nbroken{x=\"1\nother{} nan\n";
        let sample = sample(serde_json::json!({}), text);
        assert_eq!(sample.sum("a_total", &[]), 5.5);
        assert_eq!(sample.sum("a_total", &[("x", "1")]), 3.0);
        assert_eq!(sample.sum("a_total", &[("x", "2")]), 0.0);
        assert_eq!(sample.values("a_total", "y"), ["q\"\\\\n,}"]);
        assert!(sample.series("broken").is_empty());
    }
}
