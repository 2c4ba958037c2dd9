//! The text of `GET /metrics`, read again: series by name and labels.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::time::Instant;

/// One series: its labels and its value.
pub struct Series {
    labels: Vec<(String, String)>,
    /// Value of the series.
    pub value: f64,
}

impl Series {
    /// The value of a label.
    pub fn label(&self, name: &str) -> Option<&str> {
        let mut labels = self.labels.iter();
        labels
            .find(|(label, _)| label == name)
            .map(|(_, value)| value.as_str())
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        let mut labels = labels.iter();
        labels.all(|(label, value)| self.label(label) == Some(value))
    }
}

/// All series of one moment.
pub struct Metrics {
    /// When they were read.
    pub at: Instant,
    by_name: BTreeMap<String, Vec<Series>>,
}

/// Reads the text of `/metrics` as it is written, line by line. Lines of another form are left out.
#[derive(Default)]
pub struct MetricsReader<'a> {
    /// Prefixes of the names that are read.
    pub prefixes: &'a [&'a str],
    /// Labels that are read; none for all of them. Series that differ in nothing else are summed.
    pub labels: Option<&'a [&'a str]>,
    line: String,
    by_name: BTreeMap<String, Vec<Series>>,
}

impl<'a> MetricsReader<'a> {
    /// Reader of the series whose names begin with one of these, with all labels or only these.
    pub fn new(prefixes: &'a [&'a str], labels: Option<&'a [&'a str]>) -> Self {
        Self {
            prefixes,
            labels,
            ..Self::default()
        }
    }

    /// What was read, of this moment.
    #[must_use]
    pub fn finish(self, at: Instant) -> Metrics {
        Metrics {
            at,
            by_name: self.by_name,
        }
    }

    fn take(&mut self) {
        let is_wanted = |prefix: &&str| self.line.starts_with(prefix);
        let parsed = self.prefixes.iter().any(is_wanted);
        let Some((name, mut series)) = parsed.then(|| parse_line(&self.line)).flatten() else {
            return;
        };
        let all = series.labels.len();
        if let Some(read) = self.labels {
            let labels = &mut series.labels;
            labels.retain(|(label, _)| read.contains(&label.as_str()));
        }
        let Some(known) = self.by_name.get_mut(name) else {
            self.by_name.insert(name.to_owned(), vec![series]);
            return;
        };
        // One that has all its labels differs from all others.
        let is_same = |other: &&mut Series| other.labels == series.labels;
        let mut candidates = known.iter_mut().filter(|_| series.labels.len() < all);
        match candidates.find(is_same) {
            Some(same) => same.value += series.value,
            None => known.push(series),
        }
    }
}

impl fmt::Write for MetricsReader<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive('\n') {
            self.line.push_str(part);
            if part.ends_with('\n') {
                self.take();
                self.line.clear();
            }
        }
        Ok(())
    }
}

impl Metrics {
    /// Reads the series whose names begin with one of these prefixes, of a text that was read at `at`.
    pub fn parse(at: Instant, text: &str, prefixes: &[&str]) -> Self {
        let mut reader = MetricsReader::new(prefixes, None);
        // It takes any text.
        let _ = reader.write_str(text);
        reader.take();
        reader.finish(at)
    }

    /// With other values of labels, such as for a terminal.
    #[must_use]
    pub fn with_labels(mut self, replace: impl Fn(&str) -> String) -> Self {
        let all = self.by_name.values_mut().flatten();
        for (_, value) in all.flat_map(|series| &mut series.labels) {
            *value = replace(value);
        }
        self
    }

    /// The series of this name.
    pub fn series(&self, name: &str) -> &[Series] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    /// The sum of the series of this name whose labels include these.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let series = self.series(name).iter();
        series
            .filter(|series| series.has(labels))
            .map(|series| series.value)
            .sum()
    }

    /// The values of a label, in order.
    pub fn values(&self, name: &str, label: &str) -> Vec<String> {
        let series = self.series(name).iter();
        let mut values: Vec<_> = series.filter_map(|series| series.label(label)).collect();
        values.sort_unstable();
        values.dedup();
        values.into_iter().map(str::to_owned).collect()
    }
}

fn parse_line(line: &str) -> Option<(&str, Series)> {
    let (name, mut rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, value) = rest.trim_start_matches(',').split_once("=\"")?;
            let (value, after) = quoted(value)?;
            labels.push((label.to_owned(), value));
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, Series { labels, value }))
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
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_labels() {
        let text = "# HELP a b\na_total{x=\"1\",y=\"q\\\"\\\\\\n,}\"} 3 17\na_total 2.5\nbroken{x=\"1\nother{} nan\nb 1\n";
        let metrics = Metrics::parse(Instant::now(), text, &["a_", "broken"]);
        assert_eq!(metrics.sum("a_total", &[]), 5.5);
        assert_eq!(metrics.sum("a_total", &[("x", "1")]), 3.0);
        assert_eq!(metrics.sum("a_total", &[("x", "2")]), 0.0);
        assert_eq!(metrics.values("a_total", "y"), ["q\"\\\n,}"]);
        assert!(metrics.series("broken").is_empty() && metrics.series("b").is_empty());
        let mut reader = MetricsReader::new(&["a_"], Some(&["y"]));
        // In any parts.
        for part in [
            "a_t{x=\"1\",y=\"2\"} 3\na_",
            "t{x=\"2\",y=\"2\"} 4\n",
            "a_t{y=\"3\"} 1\n",
        ] {
            reader.write_str(part).unwrap();
        }
        let summed = reader.finish(Instant::now());
        assert_eq!(summed.series("a_t").len(), 2);
        assert_eq!(summed.sum("a_t", &[("y", "2")]), 7.0);
        assert!(summed.values("a_t", "x").is_empty());
        let replaced = metrics.with_labels(|value| value.replace('\n', " "));
        assert_eq!(replaced.values("a_total", "y"), ["q\"\\ ,}"]);
    }
}
