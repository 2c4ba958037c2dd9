//! Traces of requests, sent to an OpenTelemetry collector by OTLP over gRPC.
//!
//! | step | where | bound |
//! | --- | --- | --- |
//! | a thread that has served a request hands over a [`TraceRecord`](record::TraceRecord) | [`Tracer`] | the queue; what it has no space for is counted and dropped |
//! | records become spans of their session's trace | `sessions` | sessions, and their age |
//! | spans are sent in batches | `exporter`, `otlp`, `collector` | spans that wait; deadlines of a call and of the stop |
//!
//! Only the first step runs on threads that serve requests, and it waits for nothing. All others run on one thread.
//!
//! This module must never know how a request is served, and never sees token ids or bytes of KV.

mod collector;
mod exporter;
mod otlp;
mod record;
mod sessions;
mod span;
#[cfg(test)]
mod testing;
mod traceparent;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::metrics::{Metrics, SpanLoss};
use crossbeam_channel::{Receiver, bounded};
use kvtier_common::error::{Error, Result};
use kvtier_config::TracingConfig;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

pub use record::{LookupResult, TierSpan, TierWork, TracedSession, Transfer, TransferKind};
pub use traceparent::TraceParent;

use record::{RecordedWork, TraceRecord};
use span::{Ids, SpanId};

/// Records that wait to become spans. The thread that takes them only pauses to encode a batch.
const QUEUE: usize = 8192;

/// How long a stop waits for the last spans to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// What that thread may take to notice that its time is over.
const END_MARGIN: Duration = Duration::from_millis(500);

/// Recorder of finished work; off, it records nothing. Cheap to clone.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<RecordQueue>>);

/// The way to the thread that makes and sends spans.
struct RecordQueue {
    records: mpsc::Sender<TraceRecord>,
    ids: Ids,
    metrics: Arc<Metrics>,
    stop: watch::Sender<bool>,
    /// Closed when that thread has ended.
    end: Receiver<()>,
}

/// A lookup in flight that is recorded.
#[derive(Clone)]
pub struct LookupSpan {
    queue: Arc<RecordQueue>,
    session: Arc<TracedSession>,
    id: SpanId,
    started: Instant,
}

impl Tracer {
    /// Starts the thread that makes and sends spans, if there is a collector. It may be unreachable. A session that does not
    /// end is over after `session_ttl` without work.
    ///
    /// # Errors
    /// The system is out of threads.
    pub fn start(
        config: Option<&TracingConfig>,
        instance_id: &str,
        session_ttl: Duration,
        metrics: &Arc<Metrics>,
    ) -> Result<Self> {
        let Some(config) = config else {
            return Ok(Self::default());
        };
        let (records, received) = mpsc::channel(QUEUE);
        let (stop, stopped) = watch::channel(false);
        let (ending, end) = bounded(0);
        let exporter = exporter::Exporter::new(config, instance_id, session_ttl, metrics);
        let no_thread = |error| Error::io("no thread for traces", error);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("kvtier-trace-dns")
            .build()
            .map_err(no_thread)?;
        std::thread::Builder::new()
            .name("kvtier-trace".into())
            .spawn(move || {
                runtime.block_on(exporter.run(received, stopped, FLUSH_TIMEOUT));
                // A name that is still being resolved would be waited for.
                runtime.shutdown_background();
                drop(ending);
            })
            .map_err(no_thread)?;
        tracing::info!(endpoint = %config.endpoint, "traces are sent to a collector");
        Ok(Self(Some(Arc::new(RecordQueue {
            records,
            ids: Ids::new(),
            metrics: Arc::clone(metrics),
            stop,
            end,
        }))))
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Begins a lookup, if it is recorded.
    pub fn lookup(&self, session: impl FnOnce() -> TracedSession) -> Option<LookupSpan> {
        let queue = Arc::clone(self.0.as_ref()?);
        Some(LookupSpan {
            id: queue.ids.span(),
            session: Arc::new(session()),
            started: Instant::now(),
            queue,
        })
    }

    /// Records a transfer that has ended just now.
    pub fn transfer(&self, session: TracedSession, took: Duration, transfer: Transfer) {
        if let Some(queue) = &self.0 {
            queue.push(Arc::new(session), took, RecordedWork::Transfer(transfer));
        }
    }

    /// Records the end of a session.
    pub fn end(&self, session: impl FnOnce() -> TracedSession) {
        if let Some(queue) = &self.0 {
            queue.push(Arc::new(session()), Duration::ZERO, RecordedWork::End);
        }
    }

    /// Sends what was recorded, within some seconds. What is recorded from here on is dropped.
    pub fn stop(&self) {
        if let Some(queue) = &self.0 {
            queue.stop.send_replace(true);
            // Nothing is ever sent.
            let _ = queue.end.recv_timeout(FLUSH_TIMEOUT + END_MARGIN);
        }
    }
}

impl RecordQueue {
    fn push(&self, session: Arc<TracedSession>, took: Duration, work: RecordedWork) {
        let record = TraceRecord {
            session,
            took,
            ended: SystemTime::now(),
            work,
        };
        let reason = match self.records.try_send(record) {
            Ok(()) => return,
            Err(TrySendError::Full(_)) => SpanLoss::QueueFull,
            Err(TrySendError::Closed(_)) => SpanLoss::Stopped,
        };
        self.metrics.spans_lost(reason, 1);
    }
}

impl LookupSpan {
    /// Notes that it waits for the tiers: its session is not over before it.
    pub fn wait(&self) {
        let (session, took) = (Arc::clone(&self.session), self.started.elapsed());
        self.queue.push(session, took, RecordedWork::Wait(self.id));
    }

    /// Records a call of a tier for it that has ended just now.
    pub fn tier_call(&self, call: TierSpan, took: Duration) {
        let (session, work) = (
            Arc::clone(&self.session),
            RecordedWork::TierCall(self.id, call),
        );
        self.queue.push(session, took, work);
    }

    /// Records its end.
    pub fn end(self, outcome: LookupResult) {
        let took = self.started.elapsed();
        let work = RecordedWork::Lookup(self.id, outcome);
        self.queue.push(self.session, took, work);
    }
}

impl std::fmt::Debug for LookupSpan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LookupSpan").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracer_that_is_off_asks_for_no_session() {
        let tracer = Tracer::default();
        assert!(!tracer.is_on());
        assert!(
            tracer
                .lookup(|| unreachable!("a lookup's session"))
                .is_none()
        );
        tracer.end(|| unreachable!("an ended session"));
        tracer.stop();
    }
}
