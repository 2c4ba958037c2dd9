//! Tiers that fail in every way: no wrong byte, nothing that hangs, and each error of its own kind.

use std::sync::Arc;

use kvtier_common::sync::Mutex;
use serde_json::{Value, json};

use super::fake::{Asked, Fake, Good, Then, number};
use super::*;
use kvtier_l2::conformance::{Memory, object, poll_once};
use kvtier_l2::redact::Literals;

struct Bed {
    fake: Fake,
    adapter: ProcessAdapter,
    memory: Memory,
}

/// An adapter of a tier that is right until its script is replaced.
async fn bed(change: impl FnOnce(&mut ProcessOptions)) -> Bed {
    let fake = Fake::new(|good, asked| good.then(&asked));
    let mut options = options(&fake.path);
    change(&mut options);
    let adapter = ProcessAdapter::open(&options);
    until_connected(&adapter).await;
    Bed {
        fake,
        adapter,
        memory: Memory::new(16 << 20),
    }
}

impl Bed {
    async fn stores(&self, objects: &[ObjectSpec]) {
        let stored = kinds(store(&self.adapter, &self.memory, objects).await);
        assert!(stored.iter().all(Option::is_none), "{stored:?}");
    }

    async fn loads(&self, objects: &[ObjectSpec]) {
        for (object, loaded) in objects
            .iter()
            .zip(load(&self.adapter, &self.memory, objects).await)
        {
            assert!(loaded.unwrap() == content(object));
        }
    }

    /// Stores objects, again if the connection ends meanwhile: a fault is answered before the connection is closed for it.
    async fn stores_at_last(&self, objects: &[ObjectSpec]) {
        while kinds(store(&self.adapter, &self.memory, objects).await)
            .iter()
            .any(Option::is_some)
        {
            until_connected(&self.adapter).await;
        }
    }

    /// Kinds of the errors of a load of two stored objects while loads are answered by `reply`. After it the tier is used
    /// again.
    async fn load_errors(
        &self,
        reply: impl Fn(&Asked<'_>, Value) -> Vec<Then> + Send + 'static,
    ) -> Vec<Option<ErrorKind>> {
        let two = [object(1, 10_000), object(2, 70_000)];
        self.stores_at_last(&two).await;
        self.fake.does(move |good, asked| match asked.op() {
            "load" => {
                let answer = good.answer(&asked);
                reply(&asked, answer)
            }
            _ => good.then(&asked),
        });
        let kinds = kinds(load(&self.adapter, &self.memory, &two).await);
        self.memory.until_unused().await;
        self.fake.does(|good, asked| good.then(&asked));
        self.stores_at_last(&two).await;
        kinds
    }
}

const UNAVAILABLE: [Option<ErrorKind>; 2] = [Some(ErrorKind::Unavailable); 2];

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_break_the_protocol_fail_and_the_tier_is_used_again() {
    let bed = bed(|_| {}).await;
    let send = |bytes: Vec<u8>| move |_: &Asked<'_>, _| vec![Then::Send(bytes.clone())];
    let frame = |id: u64, body: &str| frame::encode(id, body.as_bytes());
    for bytes in [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        frame(u64::MAX, "{}"),
        [&frame::MAGIC[..], &[0xff; 12]].concat(),
    ] {
        assert_eq!(bed.load_errors(send(bytes)).await, UNAVAILABLE);
    }
    let bodies: [fn(Value) -> String; 7] = [
        |_| "{".into(),
        |_| "[]".into(),
        |_| "{}".into(),
        |answer| json!({"results": [answer["results"][0]]}).to_string(),
        |answer| {
            let first = &answer["results"][0];
            json!({"results": [first, first, first]}).to_string()
        },
        |_| json!({"results": "none"}).to_string(),
        // Longer than any answer to it.
        |answer| format!("{answer}{}", " ".repeat(100_000)),
    ];
    for body in bodies {
        let reply = move |asked: &Asked<'_>, answer| {
            let body = body(answer);
            vec![Then::Send(frame::encode(asked.id, body.as_bytes()))]
        };
        assert_eq!(bed.load_errors(reply).await, UNAVAILABLE);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_answer_to_a_request_ends_the_connection() {
    let bed = bed(|_| {}).await;
    let connections = Arc::new(Mutex::new(0));
    bed.fake.does({
        let connections = Arc::clone(&connections);
        move |good, asked| {
            *connections.lock() = asked.connection + 1;
            let answers = [good.answer(&asked), json!({"results": []})];
            let is_bad = asked.connection == 0;
            let answers = answers.into_iter().take(1 + usize::from(is_bad));
            answers
                .map(|answer| Then::Answer(asked.id, answer))
                .collect()
        }
    });
    let _ = bed.adapter.lookup(vec![object(1, 100)]).await;
    while *connections.lock() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bed.stores_at_last(&[object(1, 100)]).await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_inside_a_load_fails_that_load_only() {
    let bed = bed(|_| {}).await;
    assert_eq!(bed.load_errors(|_, _| vec![Then::Close]).await, UNAVAILABLE);
    let half = |asked: &Asked<'_>, answer: Value| {
        let frame = frame::encode(asked.id, answer.to_string().as_bytes());
        vec![Then::Send(frame[..frame.len() / 2].to_vec()), Then::Close]
    };
    assert_eq!(bed.load_errors(half).await, UNAVAILABLE);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_in_any_request_fails_it_and_the_tier_is_used_again() {
    for op in ["store", "lookup", "load", "delete", "ping"] {
        let bed = bed(|_| {}).await;
        let (one, other) = ([object(1, 10_000)], [object(2, 70_000)]);
        bed.stores(&one).await;
        bed.fake.does(move |good, asked| {
            let is_last = asked.connection == 0 && asked.op() == op;
            if is_last {
                vec![Then::Close]
            } else {
                good.then(&asked)
            }
        });
        let failed = match op {
            "store" => kinds(store(&bed.adapter, &bed.memory, &other).await),
            "load" => kinds(load(&bed.adapter, &bed.memory, &one).await),
            "lookup" => kinds(vec![bed.adapter.lookup(one.to_vec()).await]),
            "delete" => kinds(bed.adapter.delete(vec![other[0].key.clone()]).await),
            _ => {
                bed.adapter.check().await;
                while bed.adapter.status()["is_healthy"] == true {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                vec![Some(ErrorKind::Unavailable)]
            }
        };
        assert_eq!(failed, [Some(ErrorKind::Unavailable)], "{op}");
        bed.memory.until_unused().await;
        until_connected(&bed.adapter).await;
        bed.loads(&one).await;
        bed.stores(&other).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_wrong_bytes_length_or_metadata_are_no_hits() {
    let bed = bed(|_| {}).await;
    let corrupt = Some(ErrorKind::Corrupt);
    let (miss, down) = (Some(ErrorKind::NotFound), Some(ErrorKind::Unavailable));
    // The first result is changed, the second is right.
    let cases: [(fn(&mut Value), _); 9] = [
        (|one| one["len"] = json!(9_999), miss),
        (|one| one["meta"] = json!(null), miss),
        (|one| one["meta"] = json!("00"), corrupt),
        (|one| one["meta"] = json!("x".repeat(300)), miss),
        (|one| *one = json!(null), miss),
        (|one| *one = json!({}), down),
        (
            |one| *one = json!({"error": "unreadable"}),
            Some(ErrorKind::Unreadable),
        ),
        (
            |one| *one = json!({"error": "memory", "message": "x"}),
            down,
        ),
        (|one| *one = json!({"error": "full"}), Some(ErrorKind::Full)),
    ];
    for (change, expected) in cases {
        let reply = move |asked: &Asked<'_>, mut answer: Value| {
            change(&mut answer["results"][0]);
            vec![Then::Answer(asked.id, answer)]
        };
        assert_eq!(bed.load_errors(reply).await, [expected, None]);
    }
    // The other one's metadata.
    let swapped = |asked: &Asked<'_>, mut answer: Value| {
        let other = answer["results"][1]["meta"].clone();
        answer["results"][0]["meta"] = other;
        vec![Then::Answer(asked.id, answer)]
    };
    assert_eq!(bed.load_errors(swapped).await, [miss, None]);
    // Nothing was written: what lies there is from before.
    let flipped = |asked: &Asked<'_>, answer| {
        let at = number(&asked.body["objects"][0]["at"]);
        rustix::io::pwrite(asked.segment, b"other bytes", at + 5_000).unwrap();
        vec![Then::Answer(asked.id, answer)]
    };
    assert_eq!(bed.load_errors(flipped).await, [corrupt, None]);
    assert!(bed.adapter.status()["corrupt_objects"].as_u64() > Some(0));
}

/// A tier that goes on writing after its answer: each load is right or fails.
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_after_the_answer_give_no_wrong_bytes() {
    let bed = bed(|_| {}).await;
    let one = [object(1, 1 << 20)];
    bed.stores(&one).await;
    bed.fake.does(|good, asked| {
        if asked.op() == "load" {
            let segment = asked.segment.try_clone().unwrap();
            let at = number(&asked.body["objects"][0]["at"]);
            std::thread::spawn(move || {
                for part in 0..256 {
                    rustix::io::pwrite(&segment, b"late", at + part * 4096).unwrap();
                }
            });
        }
        good.then(&asked)
    });
    for _ in 0..100 {
        match &load(&bed.adapter, &bed.memory, &one).await[0] {
            Ok(bytes) => assert!(*bytes == content(&one[0])),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }
}

/// The part of the segment of a load that its caller abandoned is not used until the tier has answered.
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_answers_touch_no_memory_of_later_loads() {
    let bed = bed(|_| {}).await;
    let (late, next) = (object(1, 3 << 20), object(2, 3 << 20));
    bed.stores(&[late.clone(), next.clone()]).await;
    let parked = Arc::new(Mutex::new(None));
    bed.fake.does({
        let parked = Arc::clone(&parked);
        move |good, asked| {
            if asked.op() != "load" {
                return good.then(&asked);
            }
            let mut parked = parked.lock();
            let at = number(&asked.body["objects"][0]["at"]);
            match parked.take() {
                None => {
                    *parked = Some((asked.id, at));
                    Vec::new()
                }
                // The first load is written and answered inside of the second.
                Some((id, first)) => {
                    assert!(first + (3 << 20) <= at || at + (3 << 20) <= first);
                    let answer = good.then(&asked);
                    rustix::io::pwrite(asked.segment, &[7; 3 << 20], first).unwrap();
                    let late = json!({"results": [{"len": 3 << 20, "meta": ""}]});
                    answer.into_iter().chain([Then::Answer(id, late)]).collect()
                }
            }
        }
    });
    let item = LoadItem {
        object: late.clone(),
        to: bed.memory.buffer(late.len),
    };
    let mut abandoned = bed.adapter.load(vec![item]);
    while parked.lock().is_none() {
        assert!(poll_once(&mut abandoned).await.is_none());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(abandoned);
    // L1's memory is free at once.
    bed.memory.until_unused().await;
    assert_eq!(bed.adapter.status()["shared_memory_used_bytes"], 3 << 20);
    bed.loads(std::slice::from_ref(&next)).await;
    while bed.adapter.status()["shared_memory_used_bytes"] != 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// More loads than fit the shared memory and the requests in flight wait for their turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_beyond_the_shared_memory_wait() {
    let bed = bed(|options| options.shared_memory_bytes = 1 << 20).await;
    let objects: Vec<_> = (0..10)
        .map(|number| object(number, (1 << 20) - 100))
        .collect();
    bed.stores(&objects).await;
    bed.loads(&objects).await;
    let larger = [object(20, (1 << 20) + 1)];
    let refused = store(&bed.adapter, &bed.memory, &larger).await;
    let error = refused[0].as_ref().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(
        error.to_string().contains("raise shared_memory_mb"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_tier_is_left_and_connected_to_again() {
    let bed = bed(|options| options.request_timeout = Duration::from_millis(200)).await;
    bed.fake.does(|good, asked| match asked.op() {
        "load" | "lookup" | "ping" if asked.connection == 0 => Vec::new(),
        _ => good.then(&asked),
    });
    let one = [object(1, 1000)];
    bed.stores(&one).await;
    let loaded = load(&bed.adapter, &bed.memory, &one).await;
    let error = loaded[0].as_ref().unwrap_err();
    assert!(
        error.to_string().contains("answered nothing for 200ms"),
        "{error}"
    );
    until_connected(&bed.adapter).await;
    bed.loads(&one).await;
}

/// Signs of life are no reason to wait for one request for ever, whose memory and permit others need.
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_left_unanswered_by_a_live_tier_ends_the_connection() {
    let bed = bed(|options| options.request_timeout = Duration::from_millis(100)).await;
    bed.fake.does(|good, asked| match asked.op() {
        "load" if asked.connection == 0 => Vec::new(),
        _ => good.then(&asked),
    });
    let one = [object(1, 1000)];
    bed.stores(&one).await;
    let loading = async { load(&bed.adapter, &bed.memory, &one).await };
    let pinging = async {
        loop {
            bed.adapter.check().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let loaded = tokio::select! {
        loaded = loading => loaded,
        () = pinging => unreachable!("it has no end"),
    };
    let error = loaded[0].as_ref().unwrap_err();
    assert!(
        error.to_string().contains("without an answer for 400ms"),
        "{error}"
    );
    until_connected(&bed.adapter).await;
    bed.loads(&one).await;
}

/// A sign of life that is not given ends the connection too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_idle_tier_is_noticed() {
    let bed = bed(|options| options.request_timeout = Duration::from_millis(100)).await;
    bed.fake.does(|good, asked| match asked.op() {
        "ping" => Vec::new(),
        _ => good.then(&asked),
    });
    assert_eq!(bed.adapter.status()["is_healthy"], true);
    bed.adapter.check().await;
    while bed.adapter.status()["is_healthy"] == true {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_does_not_wait_for_a_frozen_tier() {
    let bed = Arc::new(bed(|_| {}).await);
    bed.fake.does(|_, _| Vec::new());
    let lookup = tokio::spawn({
        let bed = Arc::clone(&bed);
        async move { bed.adapter.lookup(vec![object(1, 100)]).await }
    });
    while bed.adapter.status()["requests_in_flight"] == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bed.adapter.close().await;
    let error = lookup.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let error = bed.adapter.lookup(vec![object(1, 100)]).await.unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_and_broken_hellos_are_explained() {
    type Hello = fn(u64) -> Vec<Then>;
    let cases: [(Hello, _, _); 6] = [
        (
            |_| vec![Then::Close],
            ErrorKind::Unavailable,
            "closed the connection",
        ),
        (
            |id| vec![Then::Answer(id, json!({"version": 2}))],
            ErrorKind::Refused,
            "version Some(2) instead of 1",
        ),
        (
            |id| {
                vec![Then::Answer(
                    id,
                    json!({"error": "unsupported", "message": "version 9 only"}),
                )]
            },
            ErrorKind::Refused,
            "version 9 only",
        ),
        (
            |id| vec![Then::Answer(id + 1, json!({"version": 1}))],
            ErrorKind::Refused,
            "answered by something else",
        ),
        (
            |_| vec![Then::Send(vec![0xff; 64])],
            ErrorKind::Refused,
            "does not begin with KVT1",
        ),
        (
            |id| vec![Then::Answer(id, json!({"version": 1}))],
            ErrorKind::Refused,
            "give trust_missing_layout true",
        ),
    ];
    for (answer, kind, what) in cases {
        let fake = Fake::new(move |_, asked| answer(asked.id));
        let adapter = ProcessAdapter::open(&options(&fake.path));
        let error = adapter.connected().await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(adapter.status()["is_healthy"], false);
        adapter.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_that_a_tier_repeats_are_not_shown() {
    let secrets = Literals::of(&json!({"inner": {"password": "hunter2"}}));
    let refusals: [fn() -> Value; 2] = [
        || json!({"error": "refused", "message": "login of svc with hunter2 failed"}),
        // Not of its form, which is shown.
        || json!({"version": "hunter2"}),
    ];
    for refusal in refusals {
        let fake = Fake::new(move |_, asked| vec![Then::Answer(asked.id, refusal())]);
        let mut options = options(&fake.path);
        options.secrets = secrets.clone();
        let adapter = ProcessAdapter::open(&options);
        let error = adapter.connected().await.unwrap_err().to_string();
        assert!(error.contains("***"), "{error}");
        let shown = adapter.status().to_string();
        assert!(
            !shown.contains("hunter2") && shown.contains("***"),
            "{shown}"
        );
    }
    let named = Fake::new(|good: &mut Good, asked| {
        let mut answer = good.answer(&asked);
        answer["tier"] = "of hunter2".into();
        vec![Then::Answer(asked.id, answer)]
    });
    let mut options = options(&named.path);
    options.secrets = secrets.clone();
    let adapter = ProcessAdapter::open(&options);
    until_connected(&adapter).await;
    let shown = adapter.status().to_string();
    assert!(
        !shown.contains("hunter2") && shown.contains("of ***"),
        "{shown}"
    );
    let bed = bed(|options| options.secrets = secrets).await;
    let failures: [fn(&Asked<'_>) -> Value; 3] = [
        |_| json!({"error": "full", "message": "hunter2 has no space"}),
        |_| json!({"results": [{"error": "refused", "message": "not by hunter2"}]}),
        |_| json!({"results": [{"new": "hunter2"}]}),
    ];
    for failure in failures {
        bed.fake.does(move |good, asked| match asked.op() {
            "store" => vec![Then::Answer(asked.id, failure(&asked))],
            _ => good.then(&asked),
        });
        let stored = store(&bed.adapter, &bed.memory, &[object(1, 100)]).await;
        let error = stored[0].as_ref().unwrap_err().to_string();
        assert!(
            !error.contains("hunter2") && error.contains("***"),
            "{error}"
        );
    }
    // The last answer ended the connection.
    let shown = bed.adapter.status().to_string();
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tier_that_is_not_there_is_used_once_it_is() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("socket");
    let adapter = ProcessAdapter::open(&options(&path));
    let error = adapter.lookup(vec![object(1, 100)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let fake = Fake::new(|good: &mut Good, asked| good.then(&asked));
    std::fs::rename(&fake.path, &path).unwrap();
    until_connected(&adapter).await;
    assert_eq!(adapter.lookup(vec![object(1, 100)]).await, Ok(vec![None]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_without_metadata_are_loaded_only_if_trusted() {
    for is_trusted in [false, true] {
        let bed = bed(|options| options.trust_missing_layout = is_trusted).await;
        let one = [object(1, 5000)];
        bed.fake.does(|good, asked| {
            let then = good.then(&asked);
            for (_, meta) in good.objects.values_mut() {
                meta.clear();
            }
            then
        });
        bed.stores(&one).await;
        let found = bed.adapter.lookup(one.to_vec()).await.unwrap();
        assert_eq!(found, [is_trusted.then_some(5000)]);
        let loaded = kinds(load(&bed.adapter, &bed.memory, &one).await);
        let expected = (!is_trusted).then_some(ErrorKind::NotFound);
        assert_eq!(loaded, [expected]);
        assert_eq!(bed.adapter.capabilities().verifies, !is_trusted);
    }
}

/// 512 keys are one request, and keys that are too long for the tier are misses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_of_many_keys_is_one_request() {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let fake = Fake::new({
        let requests = Arc::clone(&requests);
        move |good, asked| {
            if asked.op() == "lookup" {
                requests
                    .lock()
                    .push(asked.body["keys"].as_array().unwrap().len());
            }
            let mut answer = good.answer(&asked);
            if asked.op() == "hello" {
                answer["max_key_bytes"] = json!(200);
            }
            vec![Then::Answer(asked.id, answer)]
        }
    });
    let adapter = ProcessAdapter::open(&options(&fake.path));
    let mut objects: Vec<_> = (0..512).map(|number| object(number, 100)).collect();
    assert_eq!(
        adapter.lookup(objects.clone()).await.unwrap(),
        vec![None; 512]
    );
    objects.push(kvtier_l2::conformance::object_with(
        1,
        100,
        &"m".repeat(300),
        "",
    ));
    assert_eq!(adapter.lookup(objects).await.unwrap(), vec![None; 513]);
    assert_eq!(*requests.lock(), [512, 512]);
}
