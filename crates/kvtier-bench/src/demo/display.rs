//! Progress of the demo: a bar on a terminal, elsewhere a line every two seconds.

use std::cell::Cell;
use std::io::IsTerminal as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::engine::Kind;
use super::workload::{Progress, TENANTS};

const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// The progress display, on stderr, so that stdout has the result only.
pub(super) struct Display {
    bar: Option<ProgressBar>,
    began: Instant,
    last_line: Cell<Instant>,
}

impl Display {
    pub(super) fn new(seconds: f64, kinds: impl Iterator<Item = Kind>) -> Self {
        let names: Vec<_> = kinds.map(Kind::name).collect();
        eprintln!(
            "kvtier demo: {} tenants, each with {} engines ({}), one server",
            TENANTS.len(),
            names.len(),
            names.join("; ")
        );
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((seconds * 1000.0) as u64);
            let style = ProgressStyle::with_template("[{bar:30}] {msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let now = Instant::now();
        Self {
            bar,
            began: now,
            last_line: Cell::new(now),
        }
    }

    pub(super) fn show(&self, progress: &Progress) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.began.elapsed().as_millis() as u64);
                bar.set_message(text(progress));
            }
            None if self.last_line.get().elapsed() >= LINE_INTERVAL => {
                self.last_line.set(Instant::now());
                eprintln!(
                    "{:5.1} s  {}",
                    self.began.elapsed().as_secs_f64(),
                    text(progress)
                );
            }
            None => {}
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn text(progress: &Progress) -> String {
    let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let faults = match get(&progress.faults) {
        0 => "all bytes correct".to_owned(),
        faults => format!("{faults} FAULTS"),
    };
    format!(
        "{} requests, {:.0} % of the tokens hit, {} stored, {faults}",
        get(&progress.requests),
        100.0 * get(&progress.hit_tokens) as f64 / get(&progress.asked_tokens).max(1) as f64,
        HumanBytes(get(&progress.stored_bytes)),
    )
}
