//! The client that works.

use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_client::{EngineDrivenWorker, InstanceId, LmcacheDrivenWorker, Scope};

use crate::support::{TestServer, bytes, prompt, range};

/// Ids that no vector names and no flipped byte makes of one that a vector names.
pub const GOOD: [i64; 2] = [0x5a5a_5a5a_1111_1111, 0x5a5a_5a5a_2222_2222];

/// Stores, looks up and retrieves until `stop` is set; returns the number of rounds.
pub fn work(server: &TestServer, stop: &AtomicBool) -> usize {
    let mut copies = worker(server, GOOD[0]);
    let mut pages = pages(server, GOOD[1]);
    let mut rounds = 0;
    while !stop.load(Ordering::Acquire) {
        round(&mut copies, &mut pages, rounds);
        rounds += 1;
    }
    rounds
}

pub fn worker(server: &TestServer, instance: i64) -> EngineDrivenWorker {
    server.engine_driven(
        instance,
        &Scope::new(format!("good/{instance}")).with_salt("good"),
    )
}

pub fn pages(server: &TestServer, instance: i64) -> LmcacheDrivenWorker {
    server.lmcache_driven(instance, &Scope::new(format!("good/{instance}")))
}

/// One round: every answer must come, and be the right one.
pub fn round(copies: &mut EngineDrivenWorker, pages: &mut LmcacheDrivenWorker, number: usize) {
    // 100 prompts by turns, so that rounds store and find again, in bounded memory.
    let seed = u32::try_from(number % 100).unwrap();
    let (prompt, request) = (prompt(seed + 1, 3), format!("good {number}"));
    let len = copies.chunk_bytes();
    let written = |chunk| bytes(u64::from(seed), chunk, len);
    copies
        .store(&prompt, range(0..3), &request, written)
        .unwrap();
    assert_eq!(copies.lookup(&prompt, &request).unwrap(), 3);
    let check = |chunk, got: &[u8]| assert_eq!(got, written(chunk), "round {number}");
    assert!(
        copies
            .retrieve(&prompt, range(0..3), &request, check)
            .unwrap()
            .is_some()
    );
    copies.connection().end_session(&request).unwrap();

    let chunk = bytes(u64::from(seed), 9, pages.chunk_bytes());
    pages.write_chunk(&[1, 2, 3, 4], &chunk).unwrap();
    assert!(
        pages
            .store(&prompt, range(0..1), &request, &[1, 2, 3, 4])
            .unwrap()
    );
    assert_eq!(pages.lookup(&prompt, &request).unwrap(), 1);
    assert!(
        pages
            .retrieve(&prompt, range(0..1), &request, &[8, 7, 6, 5], 0)
            .unwrap()
    );
    let mut got = Vec::new();
    pages.read_chunk(&[8, 7, 6, 5], &mut got).unwrap();
    assert_eq!(got, chunk, "round {number}");
    pages.connection().end_session(&request).unwrap();
    assert!(pages.connection().ping(Some(InstanceId(GOOD[1]))).unwrap());
}
