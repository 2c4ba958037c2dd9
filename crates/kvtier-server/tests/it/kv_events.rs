//! Streams of KV events, beside what LMCache 0.5.6's server sent in the same situations, frame by frame.

use std::collections::BTreeSet;
use std::sync::mpsc;

use kvtier_client::proto::frames::OperationId;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{InstanceId, Request, Subscription};
use kvtier_client::proto::response::{EventBatch, Response, ResponseKind};
use kvtier_client::{Client, EngineDrivenSpec, EngineDrivenWorker, KvEventUpdate, Prompt, Scope};
use serde_json::Value;

use crate::http::{json_of, request as http};
use crate::l2::{fs, hits, settle, small_tier, with_tiers};
use crate::support::{Frames, Raw, Steps as _, TestServer, engine_driven, prompt, wait_until};

const MODEL: &str = "test-model";

/// Frames of LMCache's server, by what they answer; the incarnation in them is 0.
struct Recorded(Value);

impl Recorded {
    fn load() -> Self {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/vectors/kv_event_stream.json"
        );
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    /// The `number`th answer of a kind.
    fn answer(&self, list: &str, what: &str, number: usize) -> Frames {
        let rows = self.0[list].as_array().unwrap().iter();
        let row = rows.filter(|row| row["what"] == what).nth(number).unwrap();
        let frames = row["frames"].as_array().unwrap().iter();
        let frames = frames.map(|frame| hex::decode(frame.as_str().unwrap()).unwrap());
        without_incarnation(frames.collect())
    }
}

/// The frames with 0 in place of the server's start.
fn without_incarnation(mut frames: Frames) -> Frames {
    const NAME: &[u8] = b"\xabincarnation\xcf";
    for frame in &mut frames {
        if let Some(at) = frame.windows(NAME.len()).position(|part| part == NAME) {
            frame[at + NAME.len()..][..8].fill(0);
        }
    }
    frames
}

fn subscribe(client: &Raw, uid: u8, instance: i64, model: &str, cursor: i64, max: i64) {
    let spec = Generation::G6.spec(Operation::SubscribeKvEvents).unwrap();
    let request = Request::<Vec<u32>>::SubscribeKvEvents(Subscription {
        instance: InstanceId(instance),
        model_name: model,
        cursor,
        max_events: max,
    });
    let mut frames = vec![vec![uid], spec.id().encode()];
    frames.extend(request.encode(spec).unwrap());
    client.send(&frames);
}

fn say(client: &Raw, uid: u8, word: &str) {
    client.send(&[&[uid][..], b"", word.as_bytes()]);
}

fn next(client: &Raw) -> Frames {
    without_incarnation(client.receive())
}

fn batch(frames: &Frames) -> EventBatch<'_> {
    match Response::decode(ResponseKind::EventBatch, frames.get(2).map(Vec::as_slice)) {
        Ok(Response::EventBatch(batch)) => batch,
        other => panic!("{other:?}"),
    }
}

/// Stores a prompt of eight chunks, as `lmcache bench server` makes them.
fn store_long(worker: &mut EngineDrivenWorker, number: u32) {
    let tokens: Vec<_> = [number].into_iter().chain([9906; 511]).collect();
    let len = worker.chunk_bytes();
    let stored = worker.store(&Prompt::new(&tokens), 0..512, "s", |_| vec![1; len]);
    assert_eq!(stored.unwrap().chunks.len(), 8);
}

/// What a client that has subscribed knows by now, each chunk behind its medium; it goes on with its acknowledgement.
fn catch_up(
    client: &Raw,
    uid: u8,
    known: &mut BTreeSet<Vec<u8>>,
    until: impl Fn(&BTreeSet<Vec<u8>>) -> bool,
) {
    while !until(known) {
        let frames = client.receive();
        let batch = batch(&frames);
        if batch.lost {
            known.clear();
        }
        for event in &batch.events {
            for hash in &event.block_hashes {
                let chunk = [event.medium.as_bytes(), hash].concat();
                let is_news = match &*event.kind {
                    "stored" => known.insert(chunk),
                    _ => known.remove(&chunk),
                };
                assert!(is_news, "{event:?}");
            }
        }
        say(client, uid, "ack");
    }
}

// proves: docs/vllm.md#kv-events
#[test]
fn streams_are_those_of_lmcaches_server_byte_for_byte() {
    let recorded = Recorded::load();
    let theirs = |what, number| recorded.answer("frames_server_to_client", what, number);
    let server = TestServer::start(&["--chunk-size", "64", "--kv-event-log-size", "4"]);
    let mut spec = EngineDrivenSpec::new(InstanceId(1), Scope::new(MODEL), 2, 64);
    spec.block_tokens = 16;
    let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    let (mut first, second) = (server.raw(), server.raw());
    subscribe(&first, 1, 7, MODEL, 0, 1024);
    assert_eq!(next(&first), theirs("first, cursor 0, empty log", 0));
    store_long(&mut worker, 1);
    assert!(first.settle().is_empty(), "there was no acknowledgement");
    say(&first, 1, "ack");
    assert_eq!(next(&first), theirs("after ack", 0));
    assert!(first.settle().is_empty());

    subscribe(&second, 0, 8, MODEL, 0, 2);
    assert_eq!(next(&second), theirs("second instance, cursor 0, max 2", 0));
    say(&second, 0, "ack");
    assert_eq!(next(&second), theirs("its next page", 0));
    subscribe(&second, 1, 7, MODEL, 99, 1024);
    let what = "same instance 7 from other client, cursor beyond end";
    assert_eq!(next(&second), theirs(what, 0));
    assert_eq!(next(&first), theirs("old stream of 7 ends", 0));
    // A stream that has ended answers nothing.
    say(&first, 1, "ack");
    assert!(first.settle().is_empty());

    (2..=7).for_each(|number| store_long(&mut worker, number));
    say(&second, 0, "ack");
    assert_eq!(next(&second), theirs("after overrun (log 4)", 0));
    say(&second, 1, "ack");
    assert_eq!(next(&second), theirs("after overrun (log 4)", 1));
    say(&second, 0, "cancel");
    assert_eq!(next(&second), theirs("cancelled", 0));
    subscribe(&second, 2, 9, "no-such-model", 0, 1024);
    assert_eq!(next(&second), theirs("unknown model", 0));
    subscribe(&first, 3, 10, MODEL, 0, 0);
    subscribe(&first, 4, 10, MODEL, 0, 1025);
    subscribe(&first, 5, 10, MODEL, -1, 1);
    assert!(first.settle().is_empty());

    say(&second, 1, "ack");
    assert_eq!(http(&server, "POST", "/cache/clear", "").0, 200);
    let (ours, theirs) = (next(&second), theirs("after clear", 0));
    assert_eq!(ours[..2], theirs[..2]);
    let (mut ours, mut theirs) = (batch(&ours), batch(&theirs));
    // Another order of the chunks.
    ours.events[0].block_hashes.sort();
    theirs.events[0].block_hashes.sort();
    assert_eq!(ours, theirs);
    server.assert_sound();
}

#[test]
fn without_a_log_clients_learn_so_as_from_lmcaches_server() {
    let recorded = Recorded::load();
    let server = TestServer::start(&["--kv-event-log-size", "0"]);
    let mut client = server.raw();
    client.send(&[vec![0], OperationId::Name("get_experimental").encode()]);
    assert!(
        !client.receive()[2]
            .windows(15)
            .any(|it| it == b"kv_event_stream")
    );
    subscribe(&client, 1, 7, MODEL, 0, 1024);
    assert_eq!(
        next(&client),
        recorded.answer("off", "first, log size 0", 0)
    );
    assert!(client.settle().is_empty());
    say(&client, 1, "ack");
    assert_eq!(next(&client), recorded.answer("off", "after ack", 0));
    let mut worker = server.engine_driven(1, &Scope::new(MODEL));
    worker.stored(&prompt(1, 2), 0..2, 1);
    let events = &json_of(&server, "GET", "/status", "").1["kv_events"];
    assert_eq!(
        (&events["enabled"], &events["log_depth"]),
        (&false.into(), &0.into())
    );
}

#[test]
fn a_chunk_is_announced_when_all_ranks_have_it_and_ends_with_the_first_of_its_objects() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new(MODEL);
    scope.world_size = 2;
    let rank = |rank: u32| {
        let mut spec = engine_driven(1 + i64::from(rank), &scope);
        spec.worker_id = rank;
        EngineDrivenWorker::register(server.connect(), spec).unwrap()
    };
    let mut ranks = [rank(0), rank(1)];
    let mut client = server.raw();
    subscribe(&client, 1, 1, MODEL, 0, 1024);
    say(&client, 1, "ack");
    assert!(batch(&client.receive()).events.is_empty());
    ranks[0].stored(&prompt(1, 4), 0..4, 1);
    assert!(client.settle().is_empty());
    ranks[1].stored(&prompt(1, 4), 0..2, 1);
    let mut known = BTreeSet::new();
    catch_up(&client, 1, &mut known, |known| known.len() == 2);
    // Chunks of tenants are announced to no client.
    let salted = Scope::new(MODEL).with_salt("tenant");
    server
        .engine_driven(3, &salted)
        .stored(&prompt(1, 2), 0..2, 1);
    assert!(client.settle().is_empty());
    // Both ranks' objects are removed, and one event tells of each chunk.
    assert_eq!(http(&server, "POST", "/cache/clear", "").0, 200);
    catch_up(&client, 1, &mut known, BTreeSet::is_empty);
    assert!(client.settle().is_empty());
    let events = &json_of(&server, "GET", "/status", "").1["kv_events"];
    assert_eq!(events["subscribers"], 1);
    assert_eq!(
        (&events["log_depth"], &events["next_seq"]),
        (&3.into(), &4.into())
    );
    drop(client);
    wait_until("the end of the stream", || {
        json_of(&server, "GET", "/status", "").1["kv_events"]["subscribers"] == 0
    });
}

#[test]
fn chunks_that_come_back_from_a_tier_are_announced_again() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let scope = Scope::new(MODEL);
    let mut worker = server.engine_driven(1, &scope);
    worker.stored(&prompt(1, 4), 0..4, 1);
    settle(&server);
    let mut client = server.raw();
    subscribe(&client, 1, 1, MODEL, 0, 1024);
    let mut known = BTreeSet::new();
    catch_up(&client, 1, &mut known, |known| known.len() == 4);
    let before = known.clone();
    server.engine().admin().clear(true);
    catch_up(&client, 1, &mut known, BTreeSet::is_empty);
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 4), "r"), 4);
    catch_up(&client, 1, &mut known, |known| known.len() == 4);
    assert_eq!(known, before);
    assert!(client.settle().is_empty());
}

// proves: docs/python.md#kv-events
#[test]
fn clients_of_kvtier_know_what_tiers_have_and_others_hear_nothing_of_it() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (small, large) = (small_tier(directories[0].path()), fs(directories[1].path()));
    let server = with_tiers(&[&small, &large], &[]);
    let (mut ours, mut theirs) = (server.raw(), server.raw());
    let is_tier = |chunk: &Vec<u8>| chunk.starts_with(b"STORAGE");
    subscribe(&ours, 1, 1, MODEL, i64::MAX - 1, 1024);
    subscribe(&theirs, 2, 2, MODEL, i64::MAX, 1024);
    let (mut our_known, mut their_known) = (BTreeSet::new(), BTreeSet::new());
    for (client, uid) in [(&ours, 1), (&theirs, 2)] {
        assert!(batch(&client.receive()).events.is_empty());
        say(client, uid, "ack");
    }
    let mut worker = server.engine_driven(1, &Scope::new(MODEL));
    worker.stored(&prompt(1, 4), 0..4, 1);
    settle(&server);
    catch_up(&ours, 1, &mut our_known, |known| known.len() == 4);
    assert!(!our_known.iter().any(is_tier));
    let listed = json_of(&server, "GET", "/cache/objects", "").1;
    let keys = listed["entries"].as_array().unwrap().iter();
    let keys: Vec<_> = keys.map(|entry| entry["key"].clone()).collect();
    let delete = |keys: &[Value]| {
        let body = serde_json::json!({ "keys": keys, "tier": "l2", "force": true });
        json_of(&server, "DELETE", "/cache/objects", &body.to_string());
    };
    // One is in no tier when L1 loses it.
    delete(&keys[..1]);
    assert!(ours.settle().is_empty());
    server.engine().admin().clear(true);
    let is_moved = |known: &BTreeSet<_>| known.len() == 3 && known.iter().all(is_tier);
    catch_up(&ours, 1, &mut our_known, is_moved);
    // A chunk is there as long as one tier has it.
    for number in 2..=5 {
        worker.stored(&prompt(number, 20), 0..20, 1);
        settle(&server);
    }
    assert!(server.readings().tiers[0].evicted_objects >= 20);
    catch_up(&ours, 1, &mut our_known, |known| known.len() == 3 + 80);
    assert_eq!(our_known.iter().filter(|it| is_tier(it)).count(), 3);
    delete(&keys[1..]);
    catch_up(&ours, 1, &mut our_known, |known| known.len() == 80);
    assert!(!our_known.iter().any(is_tier));
    assert!(ours.settle().is_empty());
    catch_up(&theirs, 2, &mut their_known, |known| known.len() == 80);
    assert!(theirs.settle().is_empty());
    server.assert_sound();
}

#[test]
fn removals_without_news_are_read_on_without_another_event() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let client = server.raw();
    subscribe(&client, 1, 1, MODEL, i64::MAX - 1, 1024);
    let mut worker = server.engine_driven(1, &Scope::new(MODEL));
    let mut known = BTreeSet::new();
    let list = || {
        let listed = json_of(&server, "GET", "/cache/objects?page_size=5000", "").1;
        let keys = listed["entries"].as_array().unwrap().iter();
        keys.map(|entry| entry["key"].clone()).collect::<Vec<_>>()
    };
    worker.stored(&prompt(1, 1), 0..1, 1);
    settle(&server);
    let last = list();
    server.engine().admin().clear(true);
    let is_moved = |known: &BTreeSet<Vec<u8>>| {
        known.len() == 1 && known.iter().all(|it| it.starts_with(b"STORAGE"))
    };
    catch_up(&client, 1, &mut known, is_moved);
    worker.stored(&prompt(2, 1100), 0..1100, 2);
    settle(&server);
    catch_up(&client, 1, &mut known, |known| known.len() == 1101);
    // A batch that is not acknowledged: the removals are read together.
    worker.stored(&prompt(3, 1), 0..1, 3);
    assert_eq!(batch(&client.receive()).events.len(), 1);
    let mut keys = list();
    keys.retain(|key| !last.contains(key));
    for keys in [keys, last] {
        let body = serde_json::json!({ "keys": keys, "tier": "l2", "force": true });
        json_of(&server, "DELETE", "/cache/objects", &body.to_string());
    }
    say(&client, 1, "ack");
    let frames = client.receive();
    let [event] = &batch(&frames).events[..] else {
        panic!("not one event");
    };
    assert_eq!((&*event.kind, &*event.medium), ("removed", "STORAGE"));
    server.assert_sound();
}

#[test]
fn chunks_of_the_server_before_are_announced_when_they_are_stored_again() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().to_str().unwrap();
    let pool = format!("kvtier_test_{}_events", std::process::id());
    let start = |restore| {
        let kept = ["--shm-name", &pool, "--l1-restore", restore];
        TestServer::start(
            &[
                &["--state-dir", state, "--instance-id", "events"][..],
                &kept,
            ]
            .concat(),
        )
    };
    let scope = Scope::new(MODEL);
    let server = start("on");
    server
        .engine_driven(1, &scope)
        .stored(&prompt(1, 4), 0..4, 1);
    drop(server);
    let server = start("on");
    let mut worker = server.engine_driven(1, &scope);
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 4), "r"), 4);
    let client = server.raw();
    subscribe(&client, 1, 1, MODEL, 0, 1024);
    assert!(batch(&client.receive()).events.is_empty());
    say(&client, 1, "ack");
    // There is nothing to write.
    assert_eq!(worker.stored(&prompt(1, 2), 0..2, 1), [0; 0]);
    let mut known = BTreeSet::new();
    catch_up(&client, 1, &mut known, |known| known.len() == 2);
    server.engine().end_l1();
}

#[test]
fn client_follows_what_is_resident_from_its_subscription_on() {
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &Scope::new(MODEL));
    worker.stored(&prompt(1, 4), 0..4, 1);
    let client = Client::connect(server.endpoint()).unwrap();
    let (sender, updates) = mpsc::channel();
    let callback = move |update: KvEventUpdate<'_>| {
        let KvEventUpdate::Batch(batch) = update else {
            return;
        };
        let kinds = batch
            .events
            .iter()
            .map(|it| (it.kind.to_string(), it.block_hashes.len()));
        sender.send(kinds.collect::<Vec<_>>()).unwrap();
    };
    client.on_kv_events(MODEL, Box::new(callback)).unwrap();
    assert_eq!(updates.recv().unwrap(), []);
    worker.stored(&prompt(2, 2), 0..2, 1);
    assert_eq!(
        updates.iter().flatten().take(2).collect::<Vec<_>>(),
        [("stored".to_owned(), 1), ("stored".to_owned(), 1)]
    );
    assert_eq!(http(&server, "POST", "/cache/clear", "").0, 200);
    let removed = updates.iter().flatten().map(|(kind, chunks)| {
        assert_eq!(kind, "removed");
        chunks
    });
    let mut left = 6;
    assert!(removed.into_iter().any(|chunks| {
        left -= chunks;
        left == 0
    }));
}
