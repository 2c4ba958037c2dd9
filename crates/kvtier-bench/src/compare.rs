//! `kvtier bench compare`: two servers side by side, medians over several reports of each.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use super::args::CompareArgs;
use super::record::Row;
use super::report::{Report, new_table, number, time};

/// A number of a row to compare.
struct Figure {
    name: &'static str,
    pick: fn(&Row) -> Option<f64>,
    show: fn(f64) -> String,
    /// Whether less is better.
    less_is_better: bool,
}

const FIGURES: [Figure; 9] = [
    Figure {
        name: "p50",
        pick: |row| row.latency_us.map(|latency| latency.p50),
        show: time,
        less_is_better: true,
    },
    Figure {
        name: "p99",
        pick: |row| row.latency_us.map(|latency| latency.p99),
        show: time,
        less_is_better: true,
    },
    Figure {
        name: "p99.9",
        pick: |row| row.latency_us.map(|latency| latency.p999),
        show: time,
        less_is_better: true,
    },
    Figure {
        name: "per s",
        pick: |row| row.per_second,
        show: number,
        less_is_better: false,
    },
    Figure {
        name: "GB/s",
        pick: |row| row.gb_per_second,
        show: number,
        less_is_better: false,
    },
    Figure {
        name: "of memcpy",
        pick: |row| row.facts.get("of memcpy").copied(),
        show: number,
        less_is_better: false,
    },
    Figure {
        name: "of memcpy in runs",
        pick: |row| row.facts.get("of memcpy in runs").copied(),
        show: number,
        less_is_better: false,
    },
    Figure {
        name: "private MiB",
        pick: |row| row.facts.get("private MiB").copied(),
        show: number,
        less_is_better: true,
    },
    Figure {
        name: "B an object",
        pick: |row| row.facts.get("B an object").copied(),
        show: number,
        less_is_better: true,
    },
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
        for figure in &FIGURES {
            let base = median(&base, &name, figure.pick);
            let ours = median(&ours, &name, figure.pick);
            if base.is_none() && ours.is_none() {
                continue;
            }
            let ratio = match (base, ours) {
                (Some(base), Some(ours)) if base > 0.0 && ours > 0.0 => {
                    let ratio = if figure.less_is_better {
                        base / ours
                    } else {
                        ours / base
                    };
                    format!("{} x", number(ratio))
                }
                _ => String::new(),
            };
            let show = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure.show);
            table.add_row([
                name.clone(),
                figure.name.to_owned(),
                show(base),
                show(ours),
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
    let mut values: Vec<f64> = reports
        .iter()
        .flat_map(|report| &report.rows)
        .filter(|row| row.name == name)
        .filter_map(pick)
        .collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 0 => Some(f64::midpoint(values[middle - 1], values[middle])),
        _ => Some(values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_skip_reports_without_row() {
        let report = |value: Option<f64>| {
            let mut report = Report::bare("x".to_owned(), "tcp://x:1", 256, 1);
            if let Some(value) = value {
                report
                    .rows
                    .push(Row::of_facts("a").fact("B an object", value));
            }
            report
        };
        let pick = |row: &Row| row.facts.get("B an object").copied();
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
