//! `kvtier bench compare`: two servers side by side, medians over several reports of each.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use super::args::CompareArgs;
use super::record::{self, Row};
use super::report::{Report, new_table, number, time};

/// A number of a row to compare: its name, where it is, how it is shown, and whether less is better.
type Figure = (
    &'static str,
    fn(&Row) -> Option<f64>,
    fn(f64) -> String,
    bool,
);

const FIGURES: [Figure; 9] = [
    ("p50", |row| row.latency_us.map(|us| us.p50), time, true),
    ("p99", |row| row.latency_us.map(|us| us.p99), time, true),
    ("p99.9", |row| row.latency_us.map(|us| us.p999), time, true),
    ("per s", |row| row.per_second, number, false),
    ("GB/s", |row| row.gb_per_second, number, false),
    ("of memcpy", |row| row.get("of memcpy"), number, false),
    (
        "of memcpy in runs",
        |row| row.get("of memcpy in runs"),
        number,
        false,
    ),
    ("private MiB", |row| row.get("private MiB"), number, true),
    ("B an object", |row| row.get("B an object"), number, true),
];

pub(crate) fn run(args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let base = read(&args.base)?;
    let ours = read(&args.ours)?;
    let label = |reports: &[Report]| {
        reports
            .first()
            .map_or_else(String::new, |r| r.label.clone())
    };
    let mut table = new_table(&[
        "scenario",
        "figure",
        &label(&base),
        &label(&ours),
        "better by",
    ]);
    for name in names(&base, &ours) {
        for (figure, pick, show, less_is_better) in FIGURES {
            let base = median(&base, &name, pick);
            let ours = median(&ours, &name, pick);
            if base.is_none() && ours.is_none() {
                continue;
            }
            let ratio = match (base, ours) {
                (Some(base), Some(ours)) if base > 0.0 && ours > 0.0 => {
                    let ratio = if less_is_better {
                        base / ours
                    } else {
                        ours / base
                    };
                    format!("{} x", number(ratio))
                }
                _ => String::new(),
            };
            let shown = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), show);
            table.add_row([
                name.clone(),
                figure.to_owned(),
                shown(base),
                shown(ours),
                ratio,
            ]);
        }
    }
    let mut out = crate::cli::out::stdout();
    writeln!(out, "{table}")?;
    let bad: Vec<_> = base
        .iter()
        .chain(&ours)
        .filter(|report| !report.is_good())
        .collect();
    for report in &bad {
        writeln!(
            out,
            "not all requests succeeded in a run of {}",
            report.label
        )?;
    }
    Ok(if bad.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Report>> {
    let one = |path: &Path| -> anyhow::Result<Report> {
        let text = std::fs::read_to_string(path)?;
        Ok(serde_json::from_str(&text)?)
    };
    paths
        .iter()
        .map(|path| one(path).with_context(|| format!("reading {}", path.display())))
        .collect()
}

/// All rows, in the order of their first appearance.
fn names(base: &[Report], ours: &[Report]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in ours.iter().chain(base).flat_map(|report| &report.rows) {
        if !names.contains(&row.name) {
            names.push(row.name.clone());
        }
    }
    names
}

/// The median of a figure over all reports that have the row.
fn median(reports: &[Report], name: &str, pick: fn(&Row) -> Option<f64>) -> Option<f64> {
    let rows = reports.iter().flat_map(|report| &report.rows);
    record::median(
        rows.filter(|row| row.name == name)
            .filter_map(pick)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_skip_reports_without_row() {
        let report = |value: Option<f64>| {
            let mut report = Report::new("x".to_owned(), "tcp://x:1", 256, 1);
            if let Some(value) = value {
                report
                    .rows
                    .push(Row::of_facts("a").fact("B an object", value));
            }
            report
        };
        let pick = |row: &Row| row.get("B an object");
        let reports = [
            report(Some(4.0)),
            report(None),
            report(Some(1.0)),
            report(Some(9.0)),
        ];
        assert_eq!(median(&reports, "a", pick), Some(4.0));
        assert_eq!(median(&reports[..3], "a", pick), Some(2.5));
        assert_eq!(median(&reports, "b", pick), None);
    }
}
