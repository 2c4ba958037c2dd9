use super::*;
use crate::trace::TraceParent;

const TTL: Duration = Duration::from_secs(600);

/// Sessions at a time that tests set, in milliseconds.
struct Bench {
    sessions: Sessions,
    start: Instant,
    spans: Vec<Span>,
}

fn session(request: &str, salt: &str) -> Arc<TracedSession> {
    Arc::new(TracedSession {
        request_id: request.into(),
        model_name: "m".into(),
        cache_salt: salt.into(),
        parent: None,
    })
}

fn store(chunks: u64) -> RecordedWork {
    RecordedWork::Transfer(Transfer {
        kind: TransferKind::Store,
        device: "cpu",
        engine_id: 7,
        chunks,
        tokens: 256 * chunks,
        bytes: 1024 * chunks,
        failure: None,
    })
}

fn lookup(id: u8) -> RecordedWork {
    let outcome = LookupResult {
        requested_tokens: 1024,
        found_chunks: 3,
        l1_hit_tokens: 512,
        l2_hit_tokens: 256,
        l1_hit_keys: 2,
        l2_hit_keys: 1,
        early_exit_reason: "",
    };
    RecordedWork::Lookup([id; 8], outcome)
}

impl Bench {
    fn new() -> Self {
        Self {
            sessions: Sessions::new(TTL),
            start: Instant::now(),
            spans: Vec::new(),
        }
    }

    fn at(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    /// Adds work that took a millisecond up to `end`.
    fn add(&mut self, session: &Arc<TracedSession>, end: u64, work: RecordedWork) {
        self.add_after(session, end, 1, work);
    }

    /// Adds `work` that took `took` milliseconds.
    fn add_after(&mut self, session: &Arc<TracedSession>, end: u64, took: u64, work: RecordedWork) {
        let record = TraceRecord {
            session: Arc::clone(session),
            took: Duration::from_millis(took),
            ended: UNIX_EPOCH + Duration::from_millis(end),
            work,
        };
        self.sessions.add(record, self.at(end), &mut self.spans);
    }

    /// The spans so far and those of a sweep.
    fn sweep(&mut self, millis: u64) -> Vec<Span> {
        let now = self.at(millis);
        self.sessions.sweep(now, &mut self.spans);
        std::mem::take(&mut self.spans)
    }
}

fn names(spans: &[Span]) -> Vec<&'static str> {
    spans.iter().map(|span| span.name).collect()
}

fn attribute<'a>(span: &'a Span, name: &str) -> &'a Value {
    let mut found = span.attributes.iter().filter(|(known, _)| *known == name);
    &found.next().unwrap().1
}

// proves: docs/metrics.md#spans
#[test]
fn spans_of_a_session_are_below_one_root() {
    let (mut bench, session) = (Bench::new(), session("r", "s"));
    let load = TierSpan {
        work: TierWork::Load,
        tier: "fs-0".into(),
        objects: 2,
        succeeded: Some(1),
        bytes: 9,
    };
    bench.add(&session, 10, RecordedWork::TierCall([1; 8], load));
    bench.add(&session, 11, lookup(1));
    bench.add(&session, 15, RecordedWork::End);
    // It ends after its session.
    bench.add(&session, 20, store(4));
    let spans = bench.sweep(1020);
    assert_eq!(
        names(&spans),
        ["l2.load", "mp.lookup_prefetch", "mp.store", "request"]
    );
    let [load, lookup, store, root] = &spans[..] else {
        panic!("{spans:?}");
    };
    assert!(spans.iter().all(|span| span.trace == root.trace));
    assert_eq!(load.parent, Some(lookup.id));
    assert_eq!([lookup.parent, store.parent], [Some(root.id); 2]);
    assert_eq!((root.parent, root.is_parent_remote), (None, false));
    assert_eq!((root.start, root.end), (9_000_000, 20_000_000));
    assert_eq!(attribute(root, "hit_tokens"), &Value::Int(768));
    assert_eq!(attribute(root, "hit_rate"), &Value::Double(0.75));
    assert_eq!(attribute(lookup, "found_count"), &Value::as_text(3));
    assert_eq!(attribute(store, "transfer_key"), &"r#0".into());
    assert_eq!(attribute(load, "succeeded_objects"), &Value::Int(1));
    // The root is sent once.
    assert_eq!(bench.sweep(2020), []);
}

/// A session ends while its lookup waits for a tier, whether something was recorded before or not.
// proves: docs/metrics.md#spans
#[test]
fn aborted_lookup_ends_before_its_root() {
    for has_call in [true, false] {
        let (mut bench, session) = (Bench::new(), session("r", ""));
        bench.add(&session, 10, RecordedWork::Wait([1; 8]));
        if has_call {
            let call = TierSpan {
                work: TierWork::Lookup,
                tier: "fs-0".into(),
                objects: 1,
                succeeded: Some(1),
                bytes: 0,
            };
            bench.add(&session, 11, RecordedWork::TierCall([1; 8], call));
        }
        bench.add(&session, 20, RecordedWork::End);
        bench.sweep(60_000);
        bench.add_after(&session, 61_000, 60_990, lookup(1));
        let spans = bench.sweep(62_000);
        assert_eq!(names(&spans), ["mp.lookup_prefetch", "request"]);
        assert_eq!(spans[0].trace, spans[1].trace);
        assert_eq!(spans[0].end, spans[1].end);
    }
}

// proves: docs/metrics.md#spans
#[test]
fn preempted_request_goes_on_in_its_trace() {
    let (mut bench, session) = (Bench::new(), session("r", ""));
    bench.add(&session, 10, lookup(1));
    bench.add(&session, 20, RecordedWork::End);
    bench.add(&session, 500, RecordedWork::Wait([2; 8]));
    bench.add_after(&session, 3000, 2501, lookup(2));
    assert_eq!(
        names(&bench.sweep(9000)),
        ["mp.lookup_prefetch", "mp.lookup_prefetch"]
    );
    bench.add(&session, 9500, RecordedWork::End);
    assert_eq!(names(&bench.sweep(10_500)), ["request"]);
}

// proves: docs/metrics.md#spans
#[test]
fn late_span_finds_its_finished_trace() {
    let (mut bench, session) = (Bench::new(), session("r", ""));
    bench.add(&session, 10, lookup(1));
    bench.add(&session, 5000, RecordedWork::End);
    let root = bench.sweep(6000).pop().unwrap();
    bench.add(&session, 4500, store(1));
    let spans = bench.sweep(7000);
    assert_eq!(names(&spans), ["mp.store"]);
    assert_eq!(
        (spans[0].trace, spans[0].parent),
        (root.trace, Some(root.id))
    );
}

#[test]
fn request_id_used_again_has_another_trace() {
    let (mut bench, session) = (Bench::new(), session("r", ""));
    bench.add(&session, 10, lookup(1));
    bench.add(&session, 20, RecordedWork::End);
    let first = bench.sweep(1020).pop().unwrap();
    bench.add(&session, 1030, lookup(2));
    bench.add(&session, 1040, RecordedWork::End);
    let second = bench.sweep(2040).pop().unwrap();
    assert_eq!([first.name, second.name], ["request"; 2]);
    assert_ne!(first.trace, second.trace);
}

// proves: docs/metrics.md#traces
#[test]
fn tenants_never_share_a_trace() {
    let mut bench = Bench::new();
    bench.add(&session("r", "a"), 10, lookup(1));
    bench.add(&session("r", "b"), 10, lookup(2));
    bench.add(&session("r", "a"), 11, RecordedWork::End);
    let spans = bench.sweep(1011);
    // Only the first has ended.
    assert_eq!(
        names(&spans),
        ["mp.lookup_prefetch", "mp.lookup_prefetch", "request"]
    );
    assert_ne!(spans[0].trace, spans[1].trace);
    assert_eq!(spans[2].trace, spans[0].trace);
}

// proves: docs/metrics.md#spans
#[test]
fn session_without_end_ends_after_its_last_record() {
    let (mut bench, session) = (Bench::new(), session("r", ""));
    let limit = TTL.as_millis() as u64;
    bench.add(&session, 10, lookup(1));
    bench.sweep(limit);
    // A long request is still one.
    bench.add(&session, limit, store(1));
    assert_eq!(names(&bench.sweep(2 * limit - 1)), ["mp.store"]);
    assert_eq!(names(&bench.sweep(2 * limit)), ["request"]);
    bench.sweep(2 * limit + 40_000);
    assert_eq!(
        (bench.sessions.open.len(), bench.sessions.ages.len()),
        (0, 0)
    );
}

// proves: docs/metrics.md#the-engines-trace
#[test]
fn parent_of_the_engine_decides_trace_and_sampling() {
    let mut bench = Bench::new();
    for (request, flags) in [("kept", "01"), ("left_out", "00")] {
        let parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
        let session = Arc::new(TracedSession {
            request_id: request.into(),
            model_name: "m".into(),
            cache_salt: "".into(),
            parent: TraceParent::parse(&parent),
        });
        bench.add(&session, 10, lookup(1));
        bench.add(&session, 11, RecordedWork::End);
    }
    let spans = bench.sweep(1011);
    assert_eq!(names(&spans), ["mp.lookup_prefetch", "request"]);
    assert_eq!(attribute(&spans[1], "session_id"), &"kept".into());
    assert_eq!(spans[1].trace[..2], [0x4b, 0xf9]);
    assert_eq!(
        spans[1].parent,
        Some([0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7])
    );
    assert!(spans[1].is_parent_remote);
}

// proves: docs/metrics.md#when-the-collector-fails
#[test]
fn sessions_are_bounded_and_the_oldest_finishes_first() {
    let mut bench = Bench::new();
    for number in 0..=MAX_SESSIONS {
        bench.add(&session(&number.to_string(), ""), 10, store(1));
    }
    assert_eq!(bench.sessions.open.len(), MAX_SESSIONS);
    let roots: Vec<_> = bench
        .spans
        .iter()
        .filter(|span| span.name == "request")
        .collect();
    assert_eq!(roots.len(), 1);
    assert_eq!(attribute(roots[0], "session_id"), &"0".into());
}

#[test]
fn all_sessions_finish_at_the_stop() {
    let mut bench = Bench::new();
    bench.add(&session("open", ""), 10, lookup(1));
    bench.spans.clear();
    bench.sessions.finish(bench.start, &mut bench.spans);
    assert_eq!(names(&bench.spans), ["request"]);
}
