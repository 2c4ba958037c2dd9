//! The generation of a connection, recognised by its requests.

use kvtier_proto::frames::{OperationId, RequestFrames};
use kvtier_proto::generation::{Candidates, Field, Generation, Release, Resolved, Unresolved};
use kvtier_proto::key::{CacheKey, KeyForm};
use kvtier_proto::operation::Operation;
use kvtier_proto::response::ResponseKind;

use Generation::{G1, G2, G3, G4, G5, G6};

fn ask(
    candidates: &mut Candidates,
    uid: u8,
    number: i64,
    payloads: &[&[u8]],
    preferred: &[Generation],
) -> Result<Resolved, Unresolved> {
    let op = OperationId::Number(number).encode();
    let request = RequestFrames {
        uid: &[uid],
        op: &op,
        payloads: payloads.to_vec(),
    };
    candidates.resolve(&request, preferred)
}

fn left(candidates: Candidates) -> Vec<Generation> {
    candidates.iter().collect()
}

fn key(form: KeyForm) -> Vec<u8> {
    key_of(form, None)
}

fn key_of(form: KeyForm, worker_id: Option<u32>) -> Vec<u8> {
    let key = CacheKey {
        model_name: "m",
        world_size: 1,
        worker_id,
        tokens: vec![1, 2],
        start: 0,
        end: 0,
        chunk_tokens: None,
        request_id: "r",
        cache_salt: "",
        request_configs: None,
        num_kv_readers: Some(1),
    };
    let mut out = Vec::new();
    key.write(form, &mut out);
    out
}

// proves: docs/clients.md#releases
#[test]
fn the_first_request_of_a_fresh_adapter_decides() {
    for (generation, number) in [(G1, 10), (G2, 11), (G3, 16), (G4, 17), (G5, 18), (G6, 21)] {
        let mut candidates = Candidates::all();
        let resolved = ask(&mut candidates, 0, number, &[], &[]).unwrap();
        assert_eq!(resolved.generation, generation);
        assert_eq!(resolved.spec.operation, Operation::GetChunkSize);
        assert!(resolved.certain);
        assert_eq!(candidates.decided(), Some(generation));
    }
}

#[test]
fn first_request_of_a_release_too_old_is_known() {
    for (number, released) in [(7, "0.3.10 to 0.3.13"), (8, "0.3.14 or 0.3.15")] {
        let mut candidates = Candidates::all();
        assert_eq!(
            ask(&mut candidates, 0, number, &[], &[G6]),
            Err(Unresolved::TooOld { releases: released })
        );
        assert_eq!(candidates, Candidates::all());
        // Later on it is a request of another release, or none.
        assert!(!matches!(
            ask(&mut candidates, 1, number, &[], &[G6]),
            Err(Unresolved::TooOld { .. })
        ));
    }
}

#[test]
fn served_releases_are_those_of_all_generations() {
    let served = kvtier_proto::generation::served_releases();
    let (first, last) = served.split_once(" to ").unwrap();
    assert_eq!(first, G1.releases());
    assert!(
        G6.releases().ends_with(last) && !last.is_empty(),
        "{served}"
    );
}

/// get_chunk_size is an adapter's request 0 and no other: an int in answer to a ping ends the receiving of 0.4.2 and 0.4.6.
// proves: docs/clients.md#after-a-reconnect
#[test]
fn pings_after_a_reconnect_are_no_chunk_size() {
    for (number, generation) in [(11, G1), (12, G2), (17, G3), (18, G4)] {
        let mut candidates = Candidates::all();
        let resolved = ask(&mut candidates, 9, number, &[], &[G6]).unwrap();
        assert_eq!(resolved.spec.operation, Operation::Ping, "{number}");
        assert!(resolved.certain, "{number}");
        assert_eq!(candidates.decided(), Some(generation));
        assert!(!candidates.knows_chunk_size());
    }
    // No adapter sends these: what they are stays open, unless a client of our own asks again.
    for (number, generations) in [(10, [G1, G2]), (16, [G3, G4])] {
        let mut candidates = Candidates::all();
        let resolved = ask(&mut candidates, 9, number, &[], &[G6]).unwrap();
        assert!(!resolved.certain, "{number}");
        assert_eq!(left(candidates), generations, "{number}");
        assert!(!candidates.knows_chunk_size());
    }
    let mut candidates = Candidates::all();
    let resolved = ask(&mut candidates, 9, 21, &[], &[]).unwrap();
    assert_eq!(resolved.spec.operation, Operation::GetChunkSize);
    assert!(candidates.knows_chunk_size() && resolved.certain);
}

#[test]
fn repeated_text_is_a_query() {
    // 9 with a text ends a session in G2 to G4 and queries in the newest.
    let mut candidates = Candidates::all();
    for (request, decided) in [(b"\xa1r", None), (b"\xa1s", None), (b"\xa1s", Some(G6))] {
        ask(&mut candidates, 9, 9, &[request], &[G6]).unwrap();
        assert_eq!(candidates.decided(), decided);
    }
}

#[test]
fn new_connections_know_the_chunk_size() {
    // The first request of every adapter; then of another client, which begins with a lookup.
    for (number, payloads) in [(21, vec![]), (8, vec![key(KeyForm::Full), vec![1]])] {
        let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        for (uid, knows) in [(0, true), (9, number == 21)] {
            let mut candidates = Candidates::all();
            let resolved = ask(&mut candidates, uid, number, &payloads, &[]).unwrap();
            assert_eq!(resolved.knows_chunk_size, knows, "{number} {uid}");
        }
    }
}

#[test]
fn a_ping_with_a_payload_is_unambiguous() {
    for (number, generation) in [(19, G5), (22, G6)] {
        for payload in [&[0xc0][..], &[0xcd, 1, 2]] {
            let mut candidates = Candidates::all();
            let resolved = ask(&mut candidates, 9, number, &[payload], &[]).unwrap();
            assert_eq!(resolved.spec.operation, Operation::Ping);
            assert_eq!(candidates.decided(), Some(generation));
        }
    }
}

// proves: docs/clients.md#releases
#[test]
fn payloads_narrow_ambiguous_numbers() {
    // 8 with a key and an int frees locks in three generations and looks up in the newest.
    let mut candidates = Candidates::all();
    let resolved = ask(&mut candidates, 9, 8, &[&key(KeyForm::Salted), &[1]], &[]).unwrap();
    assert_eq!(left(candidates), [G2, G3, G4, G6]);
    assert!(!resolved.certain);
    assert_eq!(resolved.generation, G6);
    // A full key is the newest's alone.
    let mut full = Candidates::all();
    ask(&mut full, 9, 8, &[&key(KeyForm::Full), &[1]], &[]).unwrap();
    assert_eq!(full.decided(), Some(G6));
    // One without a salt is not.
    let mut unsalted = Candidates::all();
    ask(&mut unsalted, 9, 8, &[&key(KeyForm::Unsalted), &[1]], &[]).unwrap();
    assert_eq!(unsalted.decided(), Some(G2));
    // The same number with a text ends a session or asks for hits.
    let mut session = Candidates::all();
    ask(&mut session, 9, 8, &[b"\xa1r"], &[]).unwrap();
    assert_eq!(left(session), [G1, G5]);

    // Flat block ids, then a ping of that generation.
    let mut store = Candidates::all();
    let key = key(KeyForm::Salted);
    ask(&mut store, 9, 3, &[&key, &[7], &[0x91, 5], &[0xc4, 0]], &[]).unwrap();
    assert_eq!(left(store), [G2, G3]);
    ask(&mut store, 10, 17, &[], &[]).unwrap();
    assert_eq!(store.decided(), Some(G3));

    // Grouped ones are newer.
    let mut grouped = Candidates::all();
    ask(
        &mut grouped,
        9,
        3,
        &[&key, &[7], &[0x91, 0x91, 5], &[0xc4, 0]],
        &[],
    )
    .unwrap();
    assert_eq!(left(grouped), [G4, G5]);
}

#[test]
fn names_are_the_newest_generations() {
    let mut candidates = Candidates::all();
    let op = OperationId::Name("get_chunk_size").encode();
    let request = RequestFrames {
        uid: &[3],
        op: &op,
        payloads: vec![],
    };
    let resolved = candidates.resolve(&request, &[G1]).unwrap();
    assert_eq!(resolved.generation, G6);
    assert_eq!(candidates.decided(), Some(G6));
}

#[test]
fn requests_matching_no_generation_change_nothing() {
    for mut candidates in [Candidates::all(), Candidates::only(G3)] {
        let before = candidates;
        assert!(matches!(
            ask(&mut candidates, 9, 99, &[], &[]),
            Err(Unresolved::UnknownOperation { .. })
        ));
        assert!(matches!(
            ask(&mut candidates, 9, 16, &[&[1], &[1], &[1], &[1], &[1]], &[]),
            Err(Unresolved::PayloadCount { found: 5, .. })
        ));
        let bad = RequestFrames {
            uid: &[1],
            op: &[0xc0],
            payloads: vec![],
        };
        assert!(matches!(
            candidates.resolve(&bad, &[]),
            Err(Unresolved::BadOperation(_))
        ));
        assert_eq!(candidates, before);
    }
}

#[test]
fn known_generation_selects_forms_of_its_releases() {
    let lookup = |form| {
        let mut known = Candidates::only(G2);
        ask(&mut known, 9, 5, &[&key(form), &[1]], &[])
            .unwrap()
            .spec
            .response
    };
    // 0.4.3 waits for a job number, 0.4.4 for nothing.
    assert_eq!(lookup(KeyForm::Unsalted), ResponseKind::Int);
    assert_eq!(lookup(KeyForm::Salted), ResponseKind::Nothing);

    let query = |payload: &[u8]| {
        let mut known = Candidates::only(G2);
        ask(&mut known, 9, 6, &[payload], &[])
            .unwrap()
            .spec
            .payloads[0]
    };
    assert_eq!(query(&[4]), Field::JobId);
    assert_eq!(query(b"\xa1r"), Field::RequestId);

    // get_experimental had another number in 0.5.3 and 0.5.4.
    for number in [32, 40] {
        let mut known = Candidates::only(G6);
        let resolved = ask(&mut known, 9, number, &[], &[]).unwrap();
        assert_eq!(resolved.spec.operation, Operation::GetExperimental);
    }
    // The number retired in 0.5.6 is still served.
    let mut known = Candidates::only(G6);
    let resolved = ask(&mut known, 9, 11, &[b"\xa1r"], &[]).unwrap();
    assert_eq!(resolved.spec.operation, Operation::QueryPrefetchLookupHits);
}

#[test]
fn tables_are_sound() {
    for generation in Generation::ALL {
        let specs = generation.specs();
        for spec in specs {
            // A number means one operation.
            for other in specs.iter().filter(|other| other.number == spec.number) {
                if spec.number.is_some() {
                    assert_eq!(other.operation, spec.operation, "{generation:?}");
                }
            }
            // Every row is found by its id, and among the rows of its operation.
            assert!(
                generation.rows(spec.id()).any(|row| row == spec),
                "{generation:?} {}",
                spec.operation
            );
        }
        // What an adapter cannot do without.
        for operation in [
            Operation::RegisterKvCache,
            Operation::UnregisterKvCache,
            Operation::Store,
            Operation::Retrieve,
            Operation::Lookup,
            Operation::QueryPrefetchStatus,
            Operation::FreeLookupLocks,
            Operation::EndSession,
            Operation::Clear,
            Operation::GetChunkSize,
            Operation::Ping,
            Operation::Noop,
        ] {
            assert!(
                generation.spec(operation).is_some(),
                "{generation:?} {operation}"
            );
        }
    }
}

/// 12 prepares a store in 0.4.7, whose worker ends at an answer without a payload, and frees locks in the newest.
// proves: docs/clients.md#releases
#[test]
fn keys_of_workers_and_schedulers_narrow_numbers() {
    for (worker_id, operation, expected) in [
        (Some(0), Operation::PrepareStore, G4),
        (None, Operation::FreeLookupLocks, G6),
    ] {
        let mut candidates = Candidates::all();
        let payloads: [&[u8]; 2] = [&key_of(KeyForm::Salted, worker_id), &[7]];
        let resolved = ask(&mut candidates, 9, 12, &payloads, &[]).unwrap();
        assert_eq!(resolved.spec.operation, operation);
        assert_eq!(candidates.decided(), Some(expected));
        assert!(resolved.certain && !resolved.needs_decision);
    }
    // 13 prepares a retrieve in 0.4.6 and a store in 0.5.0 to 0.5.2.
    let mut candidates = Candidates::all();
    let payloads: [&[u8]; 2] = [&key_of(KeyForm::Salted, Some(0)), &[7]];
    let resolved = ask(&mut candidates, 9, 13, &payloads, &[]).unwrap();
    assert!(!resolved.certain && resolved.needs_decision && !resolved.is_decided);
    assert_eq!(resolved.releases(), "unknown");
}

/// 10 registers an engine-driven worker in 0.4.6, which expects nothing, and in 0.4.7, which expects a pool.
#[test]
fn equal_operations_with_unlike_answers_are_uncertain() {
    let context: Vec<u8> = [&[0x81][..], b"\xabinstance_id\x07"].concat();
    let mut candidates = Candidates::all();
    let resolved = ask(&mut candidates, 9, 10, &[&context], &[]).unwrap();
    assert_eq!(left(candidates), [G3, G4]);
    assert_eq!(resolved.spec.operation, Operation::RegisterEngineDriven);
    assert!(!resolved.certain);
    ask(&mut candidates, 10, 17, &[], &[]).unwrap();
    let resolved = ask(&mut candidates, 11, 10, &[&context], &[]).unwrap();
    assert!(resolved.certain);
    assert_eq!(resolved.releases(), "0.4.6");
}

// proves: docs/clients.md#releases
#[test]
fn requests_prove_the_release() {
    use Release::{Before0_5_5, Since0_5_5, Unproven};
    // A worker's start: 0.5.3 asks get_experimental as 40, 0.5.5 and later as 32.
    for (number, release) in [(40, Before0_5_5), (32, Since0_5_5)] {
        let mut worker = Candidates::all();
        ask(&mut worker, 0, 21, &[], &[]).unwrap();
        assert_eq!(worker.release(), Unproven);
        let resolved = ask(&mut worker, 1, number, &[], &[]).unwrap();
        assert_eq!((resolved.release, worker.release()), (release, release));
    }
    // A scheduler shows it with its first key.
    for (form, release) in [(KeyForm::Salted, Before0_5_5), (KeyForm::Full, Since0_5_5)] {
        let mut scheduler = Candidates::only(G6);
        ask(&mut scheduler, 1, 8, &[&key(form), &[1]], &[]).unwrap();
        assert_eq!(scheduler.release(), release);
        // Once shown, it stays.
        ask(&mut scheduler, 2, 22, &[&[0xc0]], &[]).unwrap();
        assert_eq!(scheduler.release(), release);
    }
    // An old one shows that it is old before its generation is decided.
    let mut store = Candidates::all();
    let salted = key(KeyForm::Salted);
    let payloads: [&[u8]; 4] = [&salted, &[7], &[0x91, 5], &[0xc4, 0]];
    let resolved = ask(&mut store, 9, 3, &payloads, &[]).unwrap();
    assert_eq!((store.decided(), resolved.release), (None, Before0_5_5));
    let mut clears = Candidates::only(G6);
    ask(&mut clears, 1, 20, &[], &[]).unwrap();
    assert_eq!(clears.release(), Unproven);
    ask(&mut clears, 2, 20, &[&[0xc2]], &[]).unwrap();
    assert_eq!(clears.release(), Since0_5_5);
    // A worker that reconnected shows it with its registration: by its groups, or by what its tensors are.
    let group = |fields: u8| {
        [
            &[0x91, 0x80 | fields][..],
            &[0xa1, b'f', 0].repeat(fields.into()),
        ]
        .concat()
    };
    let pickled = [0x91, 0xc7, 2, 1, 0x80, 4].as_slice();
    let described = [0x91, 0xc7, 2, 1, 0x81, 4].as_slice();
    for (tensors, groups, release) in [
        (pickled, vec![0x90], Unproven),
        (pickled, group(4), Before0_5_5),
        (pickled, group(6), Since0_5_5),
        (described, vec![0x90], Since0_5_5),
    ] {
        let mut worker = Candidates::only(G6);
        let payloads: [&[u8]; 7] = [&[1], tensors, b"\xa1m", &[1], b"\xa4vllm", &[0x80], &groups];
        ask(&mut worker, 9, 1, &payloads, &[]).unwrap();
        assert_eq!(worker.release(), release, "{groups:02x?}");
    }
    // Older generations are older.
    let mut old = Candidates::only(G2);
    ask(&mut old, 1, 5, &[&key(KeyForm::Full), &[1]], &[]).unwrap();
    assert_eq!(old.release(), Before0_5_5);
    for release in [Unproven, Before0_5_5, Since0_5_5] {
        let is_new = release == Since0_5_5;
        assert_eq!(release.takes_text_op(), is_new);
        assert_eq!(release.takes_empty_event(), is_new);
        assert_eq!(release.notices_failed_retrieves(), is_new);
    }
}

/// 0.5.7 has the numbers of 0.5.6: its rows are chosen by the form of its keys and the number of its payloads.
#[test]
fn packed_keys_choose_their_rows() {
    for (operation, worker_id) in [
        (Operation::Lookup, None),
        (Operation::PrepareRetrieve, Some(0)),
    ] {
        let number = G6.spec(operation).unwrap().number.unwrap();
        for form in [KeyForm::Full, KeyForm::Packed] {
            let key = key_of(form, worker_id);
            for mut candidates in [Candidates::all(), Candidates::only(G6)] {
                let resolved = ask(&mut candidates, 9, number.into(), &[&key, &[1]], &[]).unwrap();
                assert_eq!(resolved.spec.operation, operation);
                assert_eq!(resolved.spec.payloads[0], Field::Key(form));
                assert_eq!(candidates.decided(), Some(G6));
                assert_eq!(candidates.release(), Release::Since0_5_5);
            }
        }
    }
}

/// A vLLM adapter of 0.5.7 begins with it, and repeats it when the server was away.
#[test]
fn negotiation_decides_and_makes_the_chunk_size_known() {
    for uid in [0, 9] {
        let mut candidates = Candidates::all();
        let op = OperationId::Name("negotiate_chunk_size").encode();
        let request = RequestFrames {
            uid: &[uid],
            op: &op,
            payloads: vec![&[16]],
        };
        let resolved = candidates.resolve(&request, &[]).unwrap();
        assert_eq!(resolved.spec.operation, Operation::NegotiateChunkSize);
        assert_eq!(candidates.decided(), Some(G6));
        assert!(candidates.knows_chunk_size() && resolved.certain);
    }
}
