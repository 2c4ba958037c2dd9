//! The report: tables, or JSON for programs.

use std::io::Write as _;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanBytes;
use kvtier_server::{Server, ServerConfig};
use serde_json::{Value, json};

use super::tally::{Counts, Faults, KindLatencies};
use super::tier::Recall;
use super::workload::{EngineGroup, TENANTS};
use crate::latencies::Latencies;

/// One of the two phases.
pub(super) struct Phase {
    name: &'static str,
    pub(super) began: Instant,
    took: Duration,
    pub(super) rounds: u64,
    counts: Counts,
    pub(super) evicted_objects: u64,
}

impl Phase {
    pub(super) fn begin(name: &'static str, server: &Server) -> Self {
        Self {
            name,
            began: Instant::now(),
            took: Duration::ZERO,
            rounds: 0,
            counts: Counts::default(),
            evicted_objects: server.engine().readings().evicted_objects,
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Takes the counts of the groups since its start.
    pub(super) fn end(&mut self, server: &Server, groups: &mut [EngineGroup]) {
        self.took = self.began.elapsed();
        for group in groups {
            self.counts.add(&std::mem::take(&mut group.counts));
        }
        self.evicted_objects = server.engine().readings().evicted_objects - self.evicted_objects;
    }

    fn json(&self) -> Value {
        let mut value = counts_json(&self.counts);
        value["name"] = self.name.into();
        value["seconds"] = self.took.as_secs_f64().into();
        value["rounds"] = self.rounds.into();
        value["evicted_objects"] = self.evicted_objects.into();
        value
    }
}

fn counts_json(counts: &Counts) -> Value {
    json!({
        "requests": counts.requests,
        "asked_tokens": counts.asked_tokens,
        "hit_tokens": counts.hit_tokens,
        "hit_rate": counts.hit_rate(),
        "stored_bytes": counts.stored_bytes,
        "retrieved_bytes": counts.retrieved_bytes,
        "verified_chunks": counts.verified_chunks,
        "foreign_lookups": counts.foreign_lookups,
        "foreign_loads": counts.foreign_loads,
    })
}

/// Results of the demo.
pub(super) struct Report {
    seed: u64,
    chunk_tokens: u32,
    chunk_bytes: u64,
    l1_bytes: u64,
    pub(super) took: Duration,
    pub(super) phases: Vec<Phase>,
    pub(super) latencies: Vec<KindLatencies>,
    pub(super) faults: Faults,
    /// What was retrieved from a second tier, if there was one.
    pub(super) recall: Option<Recall>,
    pub(super) interrupted: bool,
    pub(super) ok: bool,
}

impl Report {
    pub(super) fn new(seed: u64, config: &ServerConfig, chunk_bytes: u64) -> Self {
        Self {
            seed,
            chunk_tokens: config.chunk_size,
            chunk_bytes,
            l1_bytes: config.l1_bytes,
            took: Duration::ZERO,
            phases: Vec::new(),
            latencies: Vec::new(),
            faults: Faults::default(),
            recall: None,
            interrupted: false,
            ok: false,
        }
    }

    /// Completes the report.
    pub(super) fn close(&mut self, took: Duration, interrupted: bool) {
        self.took = took;
        self.latencies = KindLatencies::merged(&self.latencies);
        self.interrupted = interrupted;
        self.ok = self.faults.count == 0 && !interrupted;
    }

    fn total(&self) -> Counts {
        let mut total = Counts::default();
        for phase in &self.phases {
            total.add(&phase.counts);
        }
        total
    }

    /// Prints it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        let mut out = crate::cli::out::stdout();
        if json {
            writeln!(out, "{}", serde_json::to_string_pretty(&self.json())?)?;
            return Ok(());
        }
        writeln!(out, "{}\n\n{}\n", self.phase_table(), self.latency_table())?;
        let total = self.total();
        writeln!(
            out,
            "{} chunks of {} were retrieved and compared; tenants looked up each other's prompts {} times and tried {} times \
             to retrieve from them.",
            total.verified_chunks,
            HumanBytes(self.chunk_bytes),
            total.foreign_lookups,
            total.foreign_loads,
        )?;
        if let Some(recall) = &self.recall {
            writeln!(
                out,
                "With L1 emptied, {} chunks ({}) were retrieved from the second tier and compared.",
                recall.chunks,
                HumanBytes(recall.bytes)
            )?;
        }
        for fault in &self.faults.described {
            writeln!(out, "WRONG: {fault}")?;
        }
        let verdict = match (self.faults.count, self.interrupted) {
            (0, false) => "All answers were correct.".to_owned(),
            (0, true) => "Interrupted; until then all answers were correct.".to_owned(),
            (faults, _) => format!("{faults} faults."),
        };
        writeln!(
            out,
            "{verdict} ({:.1} s, seed {})",
            self.took.as_secs_f64(),
            self.seed
        )?;
        Ok(())
    }

    fn json(&self) -> Value {
        let phases: Vec<_> = self.phases.iter().map(Phase::json).collect();
        let latencies: Vec<_> = self
            .latencies
            .iter()
            .map(|kind| {
                json!({
                    "engine": kind.kind.name(),
                    "lookup": latency_json(&kind.lookup),
                    "store": latency_json(&kind.store),
                    "retrieve": latency_json(&kind.retrieve),
                })
            })
            .collect();
        let mut value = json!({
            "ok": self.ok,
            "interrupted": self.interrupted,
            "version": env!("CARGO_PKG_VERSION"),
            "seed": self.seed,
            "seconds": self.took.as_secs_f64(),
            "tenants": TENANTS.len(),
            "chunk_tokens": self.chunk_tokens,
            "chunk_bytes": self.chunk_bytes,
            "l1_bytes": self.l1_bytes,
            "total": counts_json(&self.total()),
            "phases": phases,
            "latency_us": latencies,
            "faults": { "count": self.faults.count, "first": self.faults.described },
        });
        if let Some(recall) = &self.recall {
            value["l2"] =
                json!({ "verified_chunks": recall.chunks, "retrieved_bytes": recall.bytes });
        }
        value
    }

    fn phase_table(&self) -> Table {
        let mut table = table(&[
            "phase",
            "requests",
            "tokens asked",
            "hit rate",
            "stored",
            "retrieved",
            "evicted",
        ]);
        for phase in &self.phases {
            let counts = &phase.counts;
            table.add_row([
                phase.name.to_owned(),
                counts.requests.to_string(),
                counts.asked_tokens.to_string(),
                format!("{:.1} %", 100.0 * counts.hit_rate()),
                HumanBytes(counts.stored_bytes).to_string(),
                HumanBytes(counts.retrieved_bytes).to_string(),
                HumanBytes(phase.evicted_objects * self.chunk_bytes).to_string(),
            ]);
        }
        table
    }

    fn latency_table(&self) -> Table {
        let mut table = table(&["engines", "request", "count", "p50", "p99", "max"]);
        for kind in &self.latencies {
            for (operation, latencies) in [
                ("lookup", &kind.lookup),
                ("store", &kind.store),
                ("retrieve", &kind.retrieve),
            ] {
                let name = if operation == "lookup" {
                    kind.kind.name()
                } else {
                    ""
                };
                table.add_row([
                    name.to_owned(),
                    operation.to_owned(),
                    latencies.count().to_string(),
                    time(latencies.micros_at(0.5)),
                    time(latencies.micros_at(0.99)),
                    time(latencies.max_micros()),
                ]);
            }
        }
        table
    }
}

fn latency_json(latencies: &Latencies) -> Value {
    json!({
        "count": latencies.count(),
        "p50": latencies.micros_at(0.5),
        "p99": latencies.micros_at(0.99),
        "max": latencies.max_micros(),
    })
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_BORDERS_ONLY)
        .set_header(header.iter().copied());
    for (column, name) in table.column_iter_mut().zip(header) {
        if !matches!(*name, "phase" | "engines" | "request") {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Microseconds with a fitting unit.
fn time(micros: f64) -> String {
    match micros {
        m if m < 1000.0 => format!("{m:.0} us"),
        m if m < 1_000_000.0 => format!("{:.2} ms", m / 1e3),
        m => format!("{:.2} s", m / 1e6),
    }
}
