//! The thread that makes spans of records and sends them.
//!
//! Two tasks share it: one takes records and makes spans, always; the other sends batches of spans, and tries each again for
//! [`RETRY_TIMEOUT`] while the collector is away. Spans that find [`MAX_SPANS`] waiting are dropped.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::metrics::{Metrics, SpanLoss};
use kvtier_common::sync::RateLimited;
use kvtier_config::TracingConfig;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::collector::{Collector, Failure};
use super::otlp;
use super::record::TraceRecord;
use super::sessions::Sessions;
use super::span::Span;

/// Spans that wait to be sent, at most.
const MAX_SPANS: usize = 4096;

/// Spans of a batch, at most. With the longest names they have some 2 MB, and gRPC takes 4 by default.
const BATCH: usize = 512;

/// Records that are received at once.
const MAX_RECEIVED: usize = 256;

/// How long a span waits for its batch to fill.
const INTERVAL: Duration = Duration::from_secs(1);

/// First and longest pause before a batch is sent again.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// How long a batch is tried before the next one is.
const RETRY_TIMEOUT: Duration = Duration::from_secs(300);

const LOG_INTERVAL: Duration = Duration::from_secs(60);

pub struct Exporter {
    collector: Collector,
    /// Encoded.
    resource: Vec<u8>,
    session_ttl: Duration,
    metrics: Arc<Metrics>,
    /// Limits of the lines of calls that failed, and of spans that were rejected.
    failures: RateLimited,
    rejections: RateLimited,
}

/// Spans on their way from one task to the other.
struct Waiting {
    spans: RefCell<VecDeque<Span>>,
    /// Whether those are sent although they fill no batch.
    are_due: Cell<bool>,
    /// Whether there will be no more.
    is_stopping: Cell<bool>,
    changed: Notify,
    /// Spans that were taken and neither sent nor dropped.
    in_flight: Cell<usize>,
}

impl Exporter {
    pub fn new(
        config: &TracingConfig,
        instance_id: &str,
        session_ttl: Duration,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let defaults = [
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", instance_id),
        ];
        let defaults = defaults.map(|(name, value)| (name.to_owned(), value.to_owned()));
        // The operator's attributes replace those of the same name.
        let is_missing = |(name, _): &(String, String)| {
            let mut names = config.resource.iter().map(|(name, _)| name);
            names.all(|configured| configured != name)
        };
        let defaults = defaults.into_iter().filter(is_missing);
        let attributes: Vec<_> = config.resource.iter().cloned().chain(defaults).collect();
        Self {
            collector: Collector::new(config),
            resource: otlp::resource(&attributes),
            session_ttl,
            metrics: Arc::clone(metrics),
            failures: RateLimited::new(LOG_INTERVAL),
            rejections: RateLimited::new(LOG_INTERVAL),
        }
    }

    /// Runs until it is stopped, and up to `flush` longer.
    pub async fn run(
        self,
        records: mpsc::Receiver<TraceRecord>,
        mut stop: watch::Receiver<bool>,
        flush: Duration,
    ) {
        let waiting = Waiting {
            spans: RefCell::default(),
            are_due: Cell::new(false),
            is_stopping: Cell::new(false),
            changed: Notify::new(),
            in_flight: Cell::new(0),
        };
        let metrics = Arc::clone(&self.metrics);
        let collect = collect(
            records,
            stop.clone(),
            Sessions::new(self.session_ttl),
            &waiting,
            &metrics,
        );
        let both = async { tokio::join!(collect, self.send(&waiting)) };
        let too_late = async {
            // Also ends when the other end was dropped.
            let _ = stop.wait_for(|stop| *stop).await;
            sleep(flush).await;
        };
        tokio::select! {
            _ = both => {}
            () = too_late => {}
        }
        let left = waiting.spans.borrow().len() + waiting.in_flight.get();
        if left > 0 {
            metrics.spans_lost(SpanLoss::Stopped, left as u64);
            tracing::warn!(
                spans = left,
                "stopped before the collector had all traces; the last ones are lost"
            );
        }
    }

    async fn send(mut self, waiting: &Waiting) {
        let mut failing_since = None;
        loop {
            let batch = waiting.next_batch().await;
            if batch.is_empty() {
                return;
            }
            let request = otlp::request(&self.resource, batch.iter());
            let count = batch.len() as u64;
            let until = tokio::time::Instant::now() + RETRY_TIMEOUT;
            let mut pause = PAUSES[0];
            let is_answered = loop {
                let error = match self.collector.export(&request).await {
                    Ok((rejected, reason)) => {
                        let rejected = rejected.min(count);
                        self.metrics.spans_exported(count - rejected);
                        match rejected {
                            0 => batch.iter().for_each(|span| self.observe(span)),
                            // Which ones is not known.
                            rejected => self.reject(rejected, &reason),
                        }
                        break true;
                    }
                    Err(Failure::Rejected(reason)) => {
                        self.reject(count, &reason);
                        break true;
                    }
                    Err(Failure::Disconnected(error) | Failure::Unavailable(error)) => error,
                };
                if waiting.is_stopping.get() {
                    return;
                }
                failing_since.get_or_insert_with(Instant::now);
                if let Some(suppressed_lines) = self.failures.permit(Instant::now()) {
                    tracing::warn!(
                        error,
                        suppressed_lines,
                        "traces could not be sent; trying again, and dropping those that do not fit"
                    );
                }
                if tokio::time::Instant::now() >= until {
                    self.metrics.spans_lost(SpanLoss::TimedOut, count);
                    break false;
                }
                // A stop is worth another try.
                let _ = timeout(pause, waiting.stopping()).await;
                pause = PAUSES[1].min(2 * pause);
            };
            waiting.in_flight.set(0);
            if is_answered && let Some(since) = failing_since.take() {
                let seconds = since.elapsed().as_secs();
                tracing::info!(seconds, "the collector of traces answers again");
            }
        }
    }

    /// Counts the duration of a span, with its trace as an exemplar.
    fn observe(&self, span: &Span) {
        let took = Duration::from_nanos(span.end.saturating_sub(span.start));
        let ended = SystemTime::UNIX_EPOCH + Duration::from_nanos(span.end);
        let trace_id = format!("{:032x}", u128::from_be_bytes(span.trace));
        self.metrics.span(span.name, took, ended, trace_id);
    }

    fn reject(&self, spans: u64, reason: &str) {
        self.metrics.spans_lost(SpanLoss::Rejected, spans);
        if let Some(suppressed_lines) = self.rejections.permit(Instant::now()) {
            tracing::warn!(
                spans,
                reason,
                suppressed_lines,
                "the collector rejected traces; they are dropped"
            );
        }
    }
}

/// Takes records and makes spans, until it is stopped.
async fn collect(
    mut records: mpsc::Receiver<TraceRecord>,
    mut stop: watch::Receiver<bool>,
    mut sessions: Sessions,
    waiting: &Waiting,
    metrics: &Metrics,
) {
    let mut tick = interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut received, mut spans) = (Vec::with_capacity(MAX_RECEIVED), Vec::new());
    let mut is_stopped = false;
    while !is_stopped {
        let mut is_due = false;
        tokio::select! {
            _ = records.recv_many(&mut received, MAX_RECEIVED) => {}
            _ = tick.tick() => {
                sessions.sweep(Instant::now(), &mut spans);
                is_due = true;
            }
            _ = stop.wait_for(|stop| *stop) => {
                records.close();
                while let Ok(record) = records.try_recv() {
                    received.push(record);
                }
                is_stopped = true;
            }
        }
        for record in received.drain(..) {
            sessions.add(record, Instant::now(), &mut spans);
        }
        if is_stopped {
            sessions.finish(Instant::now(), &mut spans);
        }
        waiting.push(&mut spans, is_due, metrics);
    }
    waiting.is_stopping.set(true);
    waiting.changed.notify_one();
}

impl Waiting {
    fn push(&self, spans: &mut Vec<Span>, is_due: bool, metrics: &Metrics) {
        let mut waiting = self.spans.borrow_mut();
        let lost = spans.len().saturating_sub(MAX_SPANS - waiting.len());
        spans.truncate(spans.len() - lost);
        waiting.extend(spans.drain(..));
        if lost > 0 {
            metrics.spans_lost(SpanLoss::BufferFull, lost as u64);
        }
        if is_due && !waiting.is_empty() {
            self.are_due.set(true);
        }
        if self.are_due.get() || waiting.len() >= BATCH {
            self.changed.notify_one();
        }
    }

    /// The spans that are sent next; none once there will be no more.
    async fn next_batch(&self) -> Vec<Span> {
        loop {
            if let Some(batch) = self.take_batch() {
                return batch;
            }
            self.changed.notified().await;
        }
    }

    /// The spans that are sent now, if any are.
    fn take_batch(&self) -> Option<Vec<Span>> {
        let mut spans = self.spans.borrow_mut();
        let is_stopping = self.is_stopping.get();
        if spans.len() < BATCH && !self.are_due.get() && !is_stopping {
            return None;
        }
        let len = spans.len().min(BATCH);
        let batch: Vec<_> = spans.drain(..len).collect();
        if spans.is_empty() {
            self.are_due.set(false);
        }
        self.in_flight.set(batch.len());
        (is_stopping || !batch.is_empty()).then_some(batch)
    }

    async fn stopping(&self) {
        while !self.is_stopping.get() {
            self.changed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests;
