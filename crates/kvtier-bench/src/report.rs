//! The report: a table, or JSON for programs.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::{Deserialize, Serialize};

use super::record::Row;

/// Results of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Version of this program.
    pub(crate) version: String,
    /// The server's name.
    pub(crate) label: String,
    pub(crate) url: String,
    /// Tokens per chunk.
    pub(crate) chunk_tokens: usize,
    /// Seed of tokens and bytes.
    pub(crate) seed: u64,
    /// CPUs available to this program.
    pub(crate) cpus: usize,
    /// The rows, in the order they were measured.
    pub(crate) rows: Vec<Row>,
    /// Why the run ended early.
    pub(crate) aborted: Option<String>,
}

impl Report {
    pub(crate) fn new(label: String, url: &str, chunk_tokens: usize, seed: u64) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            label,
            url: url.to_owned(),
            chunk_tokens,
            seed,
            cpus: std::thread::available_parallelism().map_or(0, Into::into),
            rows: Vec::new(),
            aborted: None,
        }
    }

    /// Adds a row; on a terminal it is also printed at once.
    pub(crate) fn add(&mut self, row: Row) {
        if std::io::stderr().is_terminal() {
            let p50 = row
                .latency_us
                .map_or_else(String::new, |latency| format!("p50 {}", time(latency.p50)));
            eprintln!("{:32} {p50}", row.name);
        }
        self.rows.push(row);
    }

    pub(crate) fn abort(&mut self, why: String) {
        self.aborted = Some(why);
    }

    /// Whether all requests succeeded with the correct bytes.
    pub(crate) fn is_good(&self) -> bool {
        self.aborted.is_none()
            && self
                .rows
                .iter()
                .all(|row| row.failed == 0 && row.mismatched == 0)
    }

    /// The exit code of a command with this report.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(u8::from(!self.is_good()))
    }

    /// Prints the table, or with `-` the JSON, to stdout; with a path both.
    pub(crate) fn print(&self, json: Option<&Path>) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        let mut stdout = crate::cli::out::stdout();
        match json {
            Some(path) if path == Path::new("-") => writeln!(stdout, "{text}")?,
            json => {
                if let Some(path) = json {
                    std::fs::write(path, text + "\n")
                        .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
                }
                writeln!(stdout, "{}", self.table())?;
                for line in self.remarks() {
                    writeln!(stdout, "{line}")?;
                }
            }
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let mut table = new_table(&[
            "scenario", "count", "p50", "p99", "p99.9", "max", "per s", "GB/s",
        ]);
        let has_requests = |row: &&Row| row.count + row.failed + row.mismatched > 0;
        for row in self.rows.iter().filter(has_requests) {
            let latency = |pick: fn(&super::record::Latency) -> f64| {
                row.latency_us
                    .as_ref()
                    .map_or_else(String::new, |latency| time(pick(latency)))
            };
            let at_least = |least, text| {
                if row.count < least {
                    String::new()
                } else {
                    text
                }
            };
            let optional = |value: Option<f64>| value.map_or_else(String::new, number);
            table.add_row([
                row.name.clone(),
                at_least(1, row.count.to_string()),
                latency(|l| l.p50),
                // With too few requests a high percentile is only their maximum.
                at_least(100, latency(|l| l.p99)),
                at_least(1000, latency(|l| l.p999)),
                latency(|l| l.max),
                optional(row.per_second),
                optional(row.gb_per_second),
            ]);
        }
        table
    }

    /// The facts of the rows, and the failures.
    fn remarks(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for row in self.rows.iter().filter(|row| !row.facts.is_empty()) {
            let facts: Vec<_> = row
                .facts
                .iter()
                .map(|(name, value)| format!("{name} {}", number(*value)))
                .collect();
            lines.push(format!("{}: {}", row.name, facts.join(", ")));
        }
        for row in &self.rows {
            if row.failed + row.mismatched == 0 {
                continue;
            }
            lines.push(format!(
                "FAILED {}: {} requests failed, {} chunks had wrong bytes; first: {}",
                row.name,
                row.failed,
                row.mismatched,
                row.first_failure.as_deref().unwrap_or("unknown")
            ));
        }
        if let Some(why) = &self.aborted {
            lines.push(format!("ENDED EARLY: {why}"));
        }
        lines
    }
}

/// Columns of the narrowest terminal that tables are fitted to.
const MIN_WIDTH: u16 = 40;

/// An empty table. All columns except the first hold numbers; a last one without a name holds remarks.
pub(crate) fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(header.iter().copied());
    // A terminal with a wrong width would get one letter per line.
    if table.width().is_some_and(|width| width < MIN_WIDTH) {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    for (column, name) in table.column_iter_mut().zip(header).skip(1) {
        if !name.is_empty() {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Microseconds with a fitting unit.
pub(crate) fn time(micros: f64) -> String {
    match micros {
        m if m < 1000.0 => format!("{m:.1} us"),
        m if m < 1_000_000.0 => format!("{:.2} ms", m / 1e3),
        m => format!("{:.2} s", m / 1e6),
    }
}

/// A whole number, or one with about three digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v.fract() == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
