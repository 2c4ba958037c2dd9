use super::*;
use crate::trace::record::{TracedSession, Transfer, TransferKind};
use crate::trace::span::Ids;
use crate::trace::testing::config;
use crate::trace::{LookupResult, Tracer};
use std::net::{SocketAddr, TcpListener};

fn spans(count: usize) -> Vec<Span> {
    let ids = Ids::new();
    let span = |_| Span {
        trace: ids.trace(),
        id: ids.span(),
        parent: None,
        is_parent_remote: false,
        name: "request",
        start: 0,
        end: 0,
        attributes: Vec::new(),
        failure: None,
    };
    (0..count).map(span).collect()
}

fn waiting() -> Waiting {
    Waiting {
        spans: RefCell::default(),
        are_due: Cell::new(false),
        is_stopping: Cell::new(false),
        changed: Notify::new(),
        in_flight: Cell::new(0),
    }
}

/// The series of lost spans with this reason.
fn lost(metrics: &Metrics, reason: &str) -> u64 {
    let text = metrics.encode(&Default::default());
    let series = format!("kvtier_trace_lost_spans_total{{reason=\"{reason}\"}} ");
    let found = text.lines().find_map(|line| line.strip_prefix(&series));
    found.map_or(0, |count| count.parse().unwrap())
}

// proves: docs/metrics.md#when-the-collector-fails
#[test]
fn waiting_spans_are_bounded_and_the_rest_is_counted() {
    let (waiting, metrics) = (waiting(), Metrics::new());
    waiting.push(&mut spans(MAX_SPANS - 1), false, &metrics);
    assert_eq!(lost(&metrics, "buffer_full"), 0);
    let mut more = spans(3);
    waiting.push(&mut more, false, &metrics);
    assert_eq!(lost(&metrics, "buffer_full"), 2);
    assert_eq!(waiting.spans.borrow().len(), MAX_SPANS);
    assert!(more.is_empty());
}

#[tokio::test]
async fn batch_is_full_or_due() {
    let (waiting, metrics) = (waiting(), Metrics::new());
    waiting.push(&mut spans(BATCH + 1), false, &metrics);
    assert_eq!(waiting.next_batch().await.len(), BATCH);
    let (last, ()) = tokio::join!(waiting.next_batch(), async {
        tokio::task::yield_now().await;
        assert_eq!(waiting.spans.borrow().len(), 1);
        waiting.push(&mut Vec::new(), true, &metrics);
    });
    assert_eq!(last.len(), 1);
    waiting.is_stopping.set(true);
    assert_eq!(waiting.next_batch().await, []);
}

/// A collector that is away, or fails with each answer; the clock is the test's.
// proves: docs/metrics.md#when-the-collector-fails
#[tokio::test(start_paused = true)]
async fn batch_that_is_never_taken_is_dropped_in_time() {
    let (waiting, metrics) = (waiting(), Arc::new(Metrics::new()));
    let config = config(unused_address());
    let exporter = Exporter::new(&config, "i", Duration::ZERO, &metrics);
    waiting.push(&mut spans(BATCH + 3), true, &metrics);
    tokio::select! {
        () = exporter.send(&waiting) => unreachable!(),
        () = sleep(RETRY_TIMEOUT + 2 * PAUSES[1]) => {}
    }
    assert_eq!(lost(&metrics, "timed_out"), BATCH as u64);
    // The next one is tried.
    assert_eq!(waiting.in_flight.get(), 3);
}

/// Nothing listens there.
fn unused_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

fn tracer(address: SocketAddr, metrics: &Arc<Metrics>) -> Tracer {
    let ttl = Duration::from_secs(600);
    Tracer::start(Some(&config(address)), "i", ttl, metrics).unwrap()
}

fn session() -> TracedSession {
    TracedSession {
        request_id: "r".into(),
        model_name: "m".into(),
        cache_salt: "".into(),
        parent: None,
    }
}

/// Records a lookup and a store, whose session has a root.
fn record(tracer: &Tracer) {
    let lookup = tracer.lookup(session).unwrap();
    lookup.end(LookupResult::default());
    let store = Transfer {
        kind: TransferKind::Store,
        device: "cpu",
        engine_id: 1,
        chunks: 1,
        tokens: 1,
        bytes: 1,
        failure: None,
    };
    tracer.transfer(session(), Duration::ZERO, store);
}

#[test]
fn stop_without_a_collector_counts_what_is_lost() {
    let metrics = Arc::new(Metrics::new());
    let tracer = tracer(unused_address(), &metrics);
    record(&tracer);
    tracer.stop();
    assert_eq!(lost(&metrics, "stopped"), 3);
    // Its thread has ended.
    record(&tracer);
    assert_eq!(lost(&metrics, "stopped"), 5);
    assert_eq!(lost(&metrics, "queue_full"), 0);
}

#[test]
fn stop_waits_for_no_silent_collector() {
    // Connections are accepted by the system, and never answered.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = Arc::new(Metrics::new());
    let tracer = tracer(listener.local_addr().unwrap(), &metrics);
    record(&tracer);
    tracer.stop();
    assert_eq!(lost(&metrics, "stopped"), 3);
}

#[test]
fn tracer_that_is_off_records_nothing() {
    let metrics = Arc::new(Metrics::new());
    let tracer = Tracer::start(None, "i", Duration::ZERO, &metrics).unwrap();
    assert!(!tracer.is_on() && tracer.lookup(|| unreachable!()).is_none());
    tracer.end(|| unreachable!());
    tracer.stop();
}
