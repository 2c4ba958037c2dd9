//! How long requests ask for their objects to be kept: pins and their share, and objects that are evicted first.

use std::time::Duration;

use kvtier_client::Scope;
use kvtier_proto::key_settings::KeySettings;

use crate::support::{Steps, TestServer, prompt, range};

/// Flags of a small L1; 256 chunks of an engine-driven worker fit, 25 of them pinned.
const SMALL: [&str; 2] = ["--l1-size-gb", "0.001953125"];
const PINNED: u64 = 25;

fn keeping(name: &str, seconds: u32) -> Scope {
    Scope::new(name).with_settings(KeySettings {
        keep_seconds: Some(seconds),
        ..KeySettings::default()
    })
}

/// Stores more than fits, and looks none of it up.
fn flood(server: &TestServer, instance: i64, name: &str) {
    let mut worker = server.engine_driven(instance, &Scope::new(name));
    let fits = server.readings().capacity_bytes / worker.chunk_bytes() as u64;
    for seed in 0..=fits as u32 / 8 {
        worker.stored(&prompt(1_000 + seed, 8), 0..8, 3);
    }
}

/// Chunks of a prompt that are there, for a scheduler that asks for nothing more.
fn resident(server: &TestServer, name: &str, seed: u32, chunks: usize) -> u64 {
    let scope = Scope::new(name);
    let mut connection = server.connect();
    let whole = prompt(seed, chunks);
    let key = scope.scheduler_key(&whole, range(0..chunks as u64), "resident");
    let found = connection.lookup_hits(&key).unwrap();
    connection.end_session("resident").unwrap();
    found
}

#[test]
fn pinned_prompt_survives_until_its_time_is_over() {
    let server = TestServer::start(&SMALL);
    let mut pinning = server.engine_driven(1, &keeping("retention/pool", 60));
    pinning.stored(&prompt(1, 8), 0..8, 1);
    let mut other = server.engine_driven(2, &Scope::new("retention/pool"));
    other.stored(&prompt(2, 8), 0..8, 1);
    let bytes = 8 * pinning.chunk_bytes() as u64;
    assert_eq!(server.readings().pinned_object_bytes, bytes);
    flood(&server, 3, "retention/flood");
    assert_eq!(resident(&server, "retention/pool", 1, 8), 8);
    assert_eq!(resident(&server, "retention/pool", 2, 8), 0);
    server.pass(Duration::from_secs(59));
    assert_eq!(server.readings().pinned_object_bytes, bytes);
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().pinned_object_bytes, 0);
    flood(&server, 4, "retention/flood again");
    assert_eq!(resident(&server, "retention/pool", 1, 8), 0);
    assert_eq!(server.readings().pins_refused, 0);
    server.assert_sound();
}

#[test]
fn pages_that_the_server_copies_are_pinned() {
    let server = TestServer::start(&SMALL);
    let scopes = [keeping("retention/gpu", 60), Scope::new("retention/gpu")];
    let mut workers = [(1, &scopes[0]), (2, &scopes[1])]
        .map(|(instance, scope)| server.lmcache_driven(instance, scope));
    let blocks: Vec<_> = (0..4).collect();
    for (seed, worker) in (1..).zip(&mut workers) {
        let stored = worker.store(&prompt(seed, 1), range(0..1), "store", &blocks);
        assert!(stored.unwrap());
    }
    flood(&server, 3, "retention/flood");
    let left = [1, 2].map(|seed| resident(&server, "retention/gpu", seed, 1));
    assert_eq!(left, [1, 0]);
    server.assert_sound();
}

#[test]
fn lookup_renews_a_pin_and_shortens_none() {
    let server = TestServer::start(&SMALL);
    let mut worker = server.engine_driven(1, &keeping("retention/renewed", 60));
    worker.stored(&prompt(1, 8), 0..8, 1);
    server.pass(Duration::from_secs(50));
    worker.lookup(&prompt(1, 8), "renewed").unwrap();
    worker.connection().end_session("renewed").unwrap();
    for (instance, seconds) in [(5, 1), (6, 0)] {
        let mut less = server.engine_driven(instance, &keeping("retention/renewed", seconds));
        less.lookup(&prompt(1, 8), "less").unwrap();
        less.connection().end_session("less").unwrap();
        // All of it is there: nothing is committed.
        less.stored(&prompt(1, 8), 0..8, 1);
    }
    server.pass(Duration::from_secs(55));
    flood(&server, 3, "retention/flood");
    assert_eq!(resident(&server, "retention/renewed", 1, 8), 8);
    // A store of what is there already renews it too.
    worker.stored(&prompt(1, 8), 0..8, 1);
    server.pass(Duration::from_secs(55));
    flood(&server, 4, "retention/flood again");
    assert_eq!(resident(&server, "retention/renewed", 1, 8), 8);
    server.assert_sound();
}

#[test]
fn zero_seconds_go_first() {
    let server = TestServer::start(&SMALL);
    let fits = server.readings().capacity_bytes / (8 << 10);
    let mut ordinary = server.engine_driven(1, &Scope::new("retention/order"));
    ordinary.stored(&prompt(1, 8), 0..8, 1);
    let mut first = server.engine_driven(2, &keeping("retention/order", 0));
    for seed in [2, 3] {
        first.stored(&prompt(seed, 8), 0..8, 1);
    }
    // A hit shows that it is worth as much as others.
    first.lookup(&prompt(3, 8), "used").unwrap();
    first.connection().end_session("used").unwrap();
    for seed in 0..(fits as u32 - 24) / 8 + 1 {
        ordinary.stored(&prompt(100 + seed, 8), 0..8, 1);
    }
    let left = [1, 2, 3].map(|seed| resident(&server, "retention/order", seed, 8));
    assert_eq!(left, [8, 0, 8]);
    server.assert_sound();
}

// proves: docs/compare.md#retention
#[test]
fn pins_take_no_more_than_their_share() {
    let server = TestServer::start(&SMALL);
    let mut greedy = server.engine_driven(1, &keeping("retention/greedy", 86_400));
    for seed in 0..8 {
        greedy.stored(&prompt(seed, 8), 0..8, 1);
    }
    let bytes = greedy.chunk_bytes() as u64;
    assert_eq!(server.readings().pinned_object_bytes, PINNED * bytes);
    assert_eq!(server.readings().pins_refused, 64 - PINNED);
    flood(&server, 2, "retention/flood");
    // The first chunks of the fourth prompt were pinned.
    let left = [0, 1, 2, 3, 4].map(|seed| resident(&server, "retention/greedy", seed, 8));
    assert_eq!(left, [8, 8, 8, 1, 0]);
    let status = crate::http::json_of(&server, "GET", "/status", "").1;
    let l1 = &status["storage_manager"]["l1_manager"];
    assert_eq!(l1["pinned_object_count"], PINNED);
    assert_eq!(l1["pinned_object_bytes"], PINNED * bytes);
    assert_eq!(l1["pins_refused_count"], 64 - PINNED);
    let (status, _) = crate::http::json_of(&server, "POST", "/cache/clear", "");
    assert_eq!(status, 200);
    assert_eq!(server.readings().pinned_object_bytes, 0);
    server.assert_sound();
}

#[test]
fn tenant_pins_no_more_than_a_share_of_its_quota() {
    let flags = [
        "--eviction-policy",
        "IsolatedLRU",
        "--max-pinned-share",
        "0.5",
    ];
    let server = TestServer::start(&[&SMALL[..], &flags[..]].concat());
    let limit = serde_json::json!({ "limit_gb": 0.0625 / 1024.0 }).to_string();
    let (status, told) = crate::http::json_of(&server, "PUT", "/quota/small", &limit);
    assert_eq!(status, 200, "{told}");
    let scope = keeping("retention/tenant", 60).with_salt("small");
    let mut small = server.engine_driven(1, &scope);
    // Half of eight chunks.
    small.stored(&prompt(1, 8), 0..8, 1);
    let bytes = small.chunk_bytes() as u64;
    assert_eq!(server.readings().pinned_object_bytes, 4 * bytes);
    let mut free = server.engine_driven(2, &keeping("retention/tenant", 60).with_salt("n"));
    free.stored(&prompt(1, 8), 0..8, 1);
    assert_eq!(server.readings().pinned_object_bytes, 12 * bytes);
    server.assert_sound();
}

#[test]
fn share_of_zero_pins_nothing() {
    let server = TestServer::start(&[&SMALL[..], &["--max-pinned-share", "0"]].concat());
    let mut worker = server.engine_driven(1, &keeping("retention/off", 60));
    worker.stored(&prompt(1, 8), 0..8, 1);
    let readings = server.readings();
    assert_eq!(
        (readings.pinned_object_bytes, readings.pins_refused),
        (0, 8)
    );
    server.assert_sound();
}

#[test]
fn stores_are_served_beside_pins() {
    let server = TestServer::start(&[&SMALL[..], &["--max-pinned-share", "1"]].concat());
    let mut pinning = server.engine_driven(1, &keeping("retention/all", 60));
    let fits = server.readings().capacity_bytes / pinning.chunk_bytes() as u64;
    for seed in 0..fits as u32 / 8 {
        pinning.stored(&prompt(seed, 8), 0..8, 1);
    }
    let readings = server.readings();
    assert_eq!(readings.pinned_object_bytes, readings.capacity_bytes);
    // A lookup below needs a worker of its model, and that of the flood leaves.
    let _worker = server.engine_driven(3, &Scope::new("retention/flood"));
    flood(&server, 2, "retention/flood");
    assert_eq!(
        resident(&server, "retention/flood", 1_000 + fits as u32 / 8, 8),
        8
    );
    server.assert_sound();
}

#[test]
fn watermark_is_of_what_is_not_pinned() {
    let share = ["--max-pinned-share", "0.9"];
    let watermark = [
        "--eviction-trigger-watermark",
        "0.8",
        "--eviction-ratio",
        "0.5",
    ];
    let server = TestServer::start(&[&SMALL[..], &share, &watermark].concat());
    let mut pinning = server.engine_driven(1, &keeping("retention/most", 60));
    let fits = server.readings().capacity_bytes / pinning.chunk_bytes() as u64;
    // All but 32 chunks, and the half of these.
    for seed in 0..fits as u32 / 8 - 4 {
        pinning.stored(&prompt(seed, 8), 0..8, 1);
    }
    let mut ordinary = server.engine_driven(2, &Scope::new("retention/rest"));
    for seed in [1, 2] {
        ordinary.stored(&prompt(seed, 8), 0..8, 1);
    }
    server.engine().housekeep();
    let left = [1, 2].map(|seed| resident(&server, "retention/rest", seed, 8));
    assert_eq!(left, [8, 8]);
    ordinary.stored(&prompt(3, 8), 0..8, 1);
    ordinary.stored(&prompt(4, 2), 0..2, 1);
    server.engine().housekeep();
    let readings = server.readings();
    let rest = readings.used_bytes - readings.pinned_object_bytes;
    assert_eq!(rest, 13 * pinning.chunk_bytes() as u64, "a half of 26");
    server.assert_sound();
}
