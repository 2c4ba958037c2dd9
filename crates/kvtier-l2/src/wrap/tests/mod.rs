//! Tests of the guards around a scripted adapter, with paused time.

use serde_json::json;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::guarded::back_off;
use super::*;
use crate::conformance::{self, Memory, object, poll_once};
use crate::error::{ErrorKind, L2Error};
use crate::mock::{MemoryStore, Mock};
use crate::object::LoadItem;
use crate::testing::{Operation, Step, TestAdapter};

fn memory() -> Memory {
    Memory::new(1 << 20)
}

/// Loads of objects 1, 2, ... `count`.
fn loads(memory: &Memory, count: u64) -> Vec<LoadItem> {
    let item = |number| LoadItem {
        object: object(number, number),
        to: memory.buffer(number),
    };
    (1..=count).map(item).collect()
}

fn kinds<T>(results: &[Result<T, L2Error>]) -> Vec<Option<ErrorKind>> {
    let kind = |result: &Result<T, L2Error>| result.as_ref().err().map(L2Error::kind);
    results.iter().map(kind).collect()
}

/// The kind of a load of one object.
async fn load_one(adapter: &dyn Adapter, memory: &Memory) -> Option<ErrorKind> {
    kinds(&adapter.load(loads(memory, 1)).await)[0]
}

/// Only what a test asks for.
fn bare() -> Guards {
    Guards {
        retries: 0,
        breaker_failures: 0,
        ..Guards::default()
    }
}

const DEADLINE: Option<ErrorKind> = Some(ErrorKind::Deadline);
const UNAVAILABLE: Option<ErrorKind> = Some(ErrorKind::Unavailable);

#[tokio::test(start_paused = true)]
async fn each_class_of_calls_has_its_own_deadline() {
    let (memory, began) = (memory(), Instant::now());
    let script =
        TestAdapter::scripted([Step::Wait, Step::Wait, Step::Wait, Step::Wait, Step::Wait]);
    let adapter = guard(script, &bare());
    let error = adapter.lookup(vec![object(1, 1)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Deadline);
    assert_eq!(began.elapsed().as_secs(), 1);
    assert_eq!(
        error.to_string(),
        "test: lookup of 1 object: no answer within 1000 ms"
    );
    assert_eq!(
        adapter.list(None, 1).await.unwrap_err().kind(),
        ErrorKind::Deadline
    );
    assert_eq!(began.elapsed().as_secs(), 2);
    let free = adapter.free_bytes().await;
    assert_eq!(kinds(&[free]), [DEADLINE]);
    assert_eq!(began.elapsed().as_secs(), 3);
    let loaded = adapter.load(loads(&memory, 3)).await;
    assert_eq!(kinds(&loaded), [DEADLINE; 3]);
    assert_eq!(began.elapsed().as_secs(), 13);
    let deleted = adapter.delete(vec![object(1, 1).key]).await;
    assert_eq!(kinds(&deleted), [DEADLINE]);
    assert_eq!(began.elapsed().as_secs(), 73);
    assert_eq!(
        adapter.status()["late_calls"],
        json!({"lookup": 3, "load": 1, "store": 1})
    );
}

#[tokio::test(start_paused = true)]
async fn timed_out_call_keeps_its_buffers() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Wait]);
    let adapter = guard(script.clone(), &bare());
    assert_eq!(load_one(&*adapter, &memory).await, DEADLINE);
    assert!(memory.is_used());
    script.gate.add_permits(1);
    memory.until_unused().await;
    assert_eq!(load_one(&*adapter, &memory).await, None);
}

#[tokio::test(start_paused = true)]
async fn only_transient_errors_are_retried() {
    let memory = memory();
    let script = TestAdapter::scripted([
        Step::Items(vec![None, UNAVAILABLE, Some(ErrorKind::NotFound), DEADLINE]),
        Step::Items(vec![UNAVAILABLE, Some(ErrorKind::Corrupt)]),
    ]);
    let guards = Guards {
        retries: 5,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    let loaded = adapter.load(loads(&memory, 4)).await;
    assert_eq!(
        kinds(&loaded),
        [
            None,
            None,
            Some(ErrorKind::NotFound),
            Some(ErrorKind::Corrupt)
        ]
    );
    assert_eq!(script.take_log(), ["load 1 2 3 4", "load 2 4", "load 2"]);
    assert_eq!(adapter.status()["retried_items"]["load"], 3);
}

#[tokio::test(start_paused = true)]
async fn retries_are_bounded_and_paused_between() {
    let memory = memory();
    let script = TestAdapter::scripted((0..10).map(|_| Step::Fail(ErrorKind::Unavailable)));
    let guards = Guards {
        retries: 3,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    let began = Instant::now();
    assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    assert_eq!(script.take_log().len(), 4);
    // 50, 100 and 200 ms, of each at least half.
    let took = began.elapsed().as_millis();
    assert!((175..=353).contains(&took), "{took} ms");
    let error = adapter
        .lookup(vec![object(7, 7), object(8, 8)])
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(script.take_log(), ["lookup 7 8"; 4]);
}

#[tokio::test(start_paused = true)]
async fn panicking_retry_fails_only_its_items() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Items(vec![None, UNAVAILABLE]), Step::Panic]);
    let guards = Guards {
        retries: 1,
        ..bare()
    };
    let loaded = guard(script, &guards).load(loads(&memory, 2)).await;
    assert_eq!(kinds(&loaded), [None, Some(ErrorKind::Refused)]);
    let error = loaded[1].as_ref().unwrap_err().to_string();
    assert_eq!(error, "test: load of 1 object: it panicked");
}

#[tokio::test(start_paused = true)]
async fn deadline_of_a_retry_fails_all_items() {
    let (memory, began) = (memory(), Instant::now());
    let script = TestAdapter::scripted([Step::Items(vec![None, UNAVAILABLE]), Step::Wait]);
    let guards = Guards {
        retries: 1,
        ..bare()
    };
    let loaded = guard(script, &guards).load(loads(&memory, 2)).await;
    assert_eq!(kinds(&loaded), [DEADLINE; 2]);
    assert_eq!(began.elapsed().as_secs(), 10);
    let error = loaded[0].as_ref().unwrap_err().to_string();
    assert_eq!(error, "test: load of 2 objects: no answer within 10000 ms");
}

#[tokio::test(start_paused = true)]
async fn lookup_of_a_busy_backend_is_sent_again_and_items_of_a_batch_are_not() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Fail(ErrorKind::Busy)]);
    let guards = Guards {
        retries: 1,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    assert!(adapter.lookup(vec![object(1, 1)]).await.is_ok());
    assert_eq!(script.take_log().len(), 2);
    let script = TestAdapter::scripted([Step::Items(vec![Some(ErrorKind::Busy), None])]);
    let loaded = guard(script.clone(), &guards).load(loads(&memory, 2)).await;
    assert_eq!(kinds(&loaded), [Some(ErrorKind::Busy), None]);
    assert_eq!(script.take_log().len(), 1);
}

#[test]
fn back_off_doubles_within_its_bounds() {
    let first = Duration::from_millis(50);
    for (retry, most) in [(0, 50), (1, 100), (4, 800), (5, 1000), (40, 1000)] {
        let most = Duration::from_millis(most);
        assert_eq!(back_off(first, retry, u64::MAX), most);
        assert_eq!(back_off(first, retry, 0), most / 2);
    }
    let long = Duration::from_secs(3);
    assert_eq!(back_off(long, 9, u64::MAX), long);
    assert_eq!(back_off(Duration::MAX, 16, 0), Duration::MAX / 2);
}

#[tokio::test(start_paused = true)]
async fn breaker_pauses_calls_until_probe_succeeds() {
    let memory = memory();
    let script = TestAdapter::scripted((0..5).map(|_| Step::Fail(ErrorKind::Unavailable)));
    let guards = Guards {
        breaker_failures: 5,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    for _ in 0..5 {
        assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    }
    assert_eq!(script.take_log().len(), 5);
    let began = Instant::now();
    let refused = adapter.load(loads(&memory, 2)).await;
    assert_eq!(kinds(&refused), [UNAVAILABLE; 2]);
    assert_eq!(
        refused[0].as_ref().unwrap_err().to_string(),
        "test: load of 2 objects: not sent, as earlier calls failed (unavailable); the next try is in 1000 ms"
    );
    assert_eq!(
        (script.take_log().len(), began.elapsed()),
        (0, Duration::ZERO)
    );
    let status = adapter.status();
    assert_eq!(status["is_healthy"], false);
    assert_eq!(
        status["breaker"]["load"],
        json!({"state": "open", "failures": 0, "opened": 1, "refused": 1})
    );

    // Other classes, and calls for nothing, are not concerned.
    assert!(adapter.lookup(vec![object(1, 1)]).await.is_ok());
    assert!(adapter.load(Vec::new()).await.is_empty());
    assert_eq!(script.take_log(), ["lookup 1", "load "]);

    // The first probe fails, so the pause doubles.
    script.script(Operation::Load, [Step::Fail(ErrorKind::Unavailable)]);
    tokio::time::advance(Duration::from_millis(1000)).await;
    assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    assert_eq!(script.take_log(), ["load 1"]);
    tokio::time::advance(Duration::from_millis(1999)).await;
    assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    assert!(script.take_log().is_empty());
    tokio::time::advance(Duration::from_millis(1)).await;
    script.clear_script();
    assert_eq!(load_one(&*adapter, &memory).await, None);
    assert_eq!(adapter.status()["breaker"]["load"]["state"], "closed");
    assert_eq!(adapter.status()["is_healthy"], true);
}

#[tokio::test(start_paused = true)]
async fn refusal_names_last_failure() {
    let memory = memory();
    let both = Step::Items(vec![DEADLINE, UNAVAILABLE]);
    let script = TestAdapter::scripted([both, Step::Fail(ErrorKind::Unavailable)]);
    let guards = Guards {
        breaker_failures: 1,
        ..bare()
    };
    let adapter = guard(script, &guards);
    let load = async || adapter.load(loads(&memory, 2)).await[0].clone();
    for cause in ["deadline", "unavailable"] {
        assert_eq!(load().await.unwrap_err().to_string(), cause);
        let refused = load().await.unwrap_err().to_string();
        let named = format!("not sent, as earlier calls failed ({cause}); the next try");
        assert!(refused.contains(&named), "{refused}");
        tokio::time::advance(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_errors_do_not_open_the_breaker() {
    let memory = memory();
    let answers = [
        ErrorKind::NotFound,
        ErrorKind::Corrupt,
        ErrorKind::Full,
        ErrorKind::Refused,
    ];
    let partly = || Step::Items(vec![UNAVAILABLE, None]);
    let steps = answers
        .map(Step::Fail)
        .into_iter()
        .chain([partly(), partly()]);
    let script = TestAdapter::scripted(steps);
    let guards = Guards {
        breaker_failures: 1,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    for _ in 0..6 {
        adapter.load(loads(&memory, 2)).await;
    }
    assert_eq!(script.take_log().len(), 6);
    assert_eq!(adapter.status()["breaker"]["load"]["state"], "closed");
}

#[tokio::test(start_paused = true)]
async fn dropped_probe_is_repeated() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Fail(ErrorKind::Unavailable), Step::Wait]);
    let guards = Guards {
        breaker_failures: 1,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(poll_once(adapter.load(loads(&memory, 1))).await.is_none());
    assert_eq!(load_one(&*adapter, &memory).await, None);
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_limited_per_class() {
    let memory = memory();
    let script = TestAdapter::scripted((0..8).map(|_| Step::Wait));
    let guards = Guards {
        max_in_flight: 2,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    let mut calls = Vec::new();
    for number in 1..=6 {
        let (adapter, item) = (
            adapter.clone(),
            LoadItem {
                object: object(number, number),
                to: memory.buffer(number),
            },
        );
        calls.push(tokio::spawn(async move { adapter.load(vec![item]).await }));
        yield_now().await;
    }
    for _ in 0..20 {
        yield_now().await;
    }
    assert_eq!(script.take_log(), ["load 1", "load 2"]);
    assert_eq!(
        adapter.status()["calls"]["load"],
        json!({"in_flight": 2, "waiting": 4})
    );
    // A lookup does not wait for loads.
    let lookup = tokio::spawn({
        let adapter = adapter.clone();
        async move { adapter.lookup(vec![object(9, 9)]).await }
    });
    for _ in 0..20 {
        yield_now().await;
    }
    assert_eq!(script.take_log(), ["lookup 9"]);
    assert_eq!(script.max_in_flight(), 3);
    // The third one times out in the queue, so it is not sent.
    calls[2].abort();
    script.gate.add_permits(10);
    for (at, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.is_ok(), at != 2);
    }
    assert!(lookup.await.unwrap().is_ok());
    assert_eq!(script.take_log(), ["load 4", "load 5", "load 6"]);
    assert_eq!(script.max_in_flight(), 3);
    assert_eq!(
        adapter.status()["calls"]["load"],
        json!({"in_flight": 0, "waiting": 0})
    );
    memory.until_unused().await;
}

#[tokio::test(start_paused = true)]
async fn dropped_call_keeps_its_permit() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Wait]);
    let guards = Guards {
        max_in_flight: 1,
        ..bare()
    };
    let adapter = guard(script.clone(), &guards);
    assert!(poll_once(adapter.load(loads(&memory, 1))).await.is_none());
    yield_now().await;
    assert_eq!(script.take_log(), ["load 1"]);
    // There is no place, so this one is never made.
    assert_eq!(kinds(&adapter.load(loads(&memory, 2)).await), [DEADLINE; 2]);
    assert!(script.take_log().is_empty());
    script.gate.add_permits(1);
    memory.until_unused().await;
    assert_eq!(load_one(&*adapter, &memory).await, None);
}

#[tokio::test(start_paused = true)]
async fn panic_or_surplus_answer_fails_one_call() {
    let memory = memory();
    let guards = Guards {
        max_in_flight: 1,
        ..bare()
    };
    let adapter = guard(
        TestAdapter::scripted([Step::Panic, Step::Surplus, Step::Surplus]),
        &guards,
    );
    let refused = Some(ErrorKind::Refused);
    assert_eq!(kinds(&adapter.load(loads(&memory, 2)).await), [refused; 2]);
    assert_eq!(kinds(&adapter.load(loads(&memory, 2)).await), [refused; 2]);
    let lookup = adapter.lookup(vec![object(1, 1)]).await;
    assert_eq!(
        lookup.unwrap_err().to_string(),
        "test: lookup of 1 object: it answered for another number of them"
    );
    assert_eq!(load_one(&*adapter, &memory).await, None);
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_calls_in_flight() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Wait]);
    let adapter = guard(script.clone(), &bare());
    let call = tokio::spawn({
        let (adapter, items) = (adapter.clone(), loads(&memory, 1));
        async move { adapter.load(items).await }
    });
    yield_now().await;
    yield_now().await;
    let closing = tokio::spawn({
        let adapter = adapter.clone();
        async move { adapter.close().await }
    });
    for _ in 0..10 {
        yield_now().await;
    }
    assert_eq!(script.take_log(), ["load 1"]);
    script.gate.add_permits(1);
    closing.await.unwrap();
    assert_eq!(script.take_log(), ["close"]);
    assert_eq!(kinds(&call.await.unwrap()), [None]);
    assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    assert!(script.take_log().is_empty());
}

#[tokio::test(start_paused = true)]
async fn closing_a_stalled_adapter_ends() {
    let memory = memory();
    let script = TestAdapter::scripted([Step::Wait]);
    let adapter = guard(script.clone(), &bare());
    assert_eq!(load_one(&*adapter, &memory).await, DEADLINE);
    let began = Instant::now();
    let day = Duration::from_secs(24 * 60 * 60);
    let closed = tokio::time::timeout(day, adapter.close()).await;
    assert!(closed.is_ok());
    assert_eq!(began.elapsed().as_secs(), 60);
}

#[tokio::test(start_paused = true)]
async fn queued_call_is_busy_not_late() {
    let memory = memory();
    let script = TestAdapter::scripted((0..100).map(|_| Step::Wait));
    let guards = Guards {
        max_in_flight: 1,
        breaker_failures: 1,
        ..Guards::default()
    };
    let adapter = guard(script.clone(), &guards);
    let began = Instant::now();
    let calls: Vec<_> = (1..=4)
        .map(|number| {
            let adapter = adapter.clone();
            let item = LoadItem {
                object: object(number, number),
                to: memory.buffer(number),
            };
            tokio::spawn(async move {
                let kind = kinds(&adapter.load(vec![item]).await)[0];
                (kind, began.elapsed().as_secs())
            })
        })
        .collect();
    // Each takes 6 s of the 10 it may take.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(6)).await;
        script.gate.add_permits(1);
    }
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.unwrap());
    }
    let busy = Some(ErrorKind::Busy);
    assert_eq!(answers, [(None, 6), (None, 12), (busy, 10), (busy, 10)]);
    let status = adapter.status();
    assert_eq!(status["late_calls"]["load"], 0);
    assert_eq!(status["crowded_calls"]["load"], 2);
    assert_eq!(status["breaker"]["load"]["state"], "closed");
    // Once it has a place, it may be late.
    script.gate.forget_permits(10);
    assert_eq!(load_one(&*adapter, &memory).await, DEADLINE);
    assert_eq!(adapter.status()["breaker"]["load"]["state"], "open");
}

/// With an adapter that stalls, calls are answered by the deadline, then at once, and few buffers are held.
#[tokio::test(start_paused = true)]
async fn stalled_adapter_holds_bounded_time_and_memory() {
    let memory = memory();
    let script = TestAdapter::scripted((0..1000).map(|_| Step::Wait));
    let guards = Guards {
        max_in_flight: 2,
        ..Guards::default()
    };
    let adapter = guard(script.clone(), &guards);
    let began = Instant::now();
    for _ in 0..5 {
        assert_eq!(load_one(&*adapter, &memory).await, DEADLINE);
    }
    assert_eq!(began.elapsed().as_secs(), 50);
    for _ in 0..100 {
        assert_eq!(load_one(&*adapter, &memory).await, UNAVAILABLE);
    }
    assert_eq!(began.elapsed().as_secs(), 50);
    assert_eq!(script.take_log().len(), 2);
    script.clear_script();
    script.gate.add_permits(2);
    memory.until_unused().await;
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(load_one(&*adapter, &memory).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guarded_adapter_conforms() {
    for max_in_flight in [1, 32] {
        conformance::run(|| {
            let store = Arc::new(MemoryStore::new(1 << 30));
            move || {
                let mock = Mock::new(store.clone(), 1e11);
                let guards = Guards {
                    max_in_flight,
                    ..Guards::default()
                };
                async move { guard(Arc::new(mock), &guards) }
            }
        })
        .await;
    }
}
