//! Which generation a connection speaks, told from its requests.

use kvtier_proto::frames::{OperationId, RequestFrames};
use kvtier_proto::generation::{Candidates, Field, Generation, Resolved, Unresolved};
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
    let key = CacheKey {
        model_name: "m",
        world_size: 1,
        worker_id: None,
        tokens: vec![1, 2],
        start: 0,
        end: 0,
        request_id: "r",
        cache_salt: "",
        request_configs: None,
        num_kv_readers: Some(1),
    };
    let mut out = Vec::new();
    key.write(form, &mut out);
    out
}

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
fn numbers_without_payload_stay_ambiguous_on_a_connection_that_came_back() {
    use Operation::{Clear, GetChunkSize, Noop, Ping};
    let cases: [(i64, &[(Generation, Operation)]); 6] = [
        (10, &[(G1, GetChunkSize), (G2, Clear)]),
        (11, &[(G1, Ping), (G2, GetChunkSize)]),
        (16, &[(G3, GetChunkSize), (G4, Clear)]),
        (17, &[(G3, Ping), (G4, GetChunkSize), (G5, Clear)]),
        (18, &[(G4, Ping), (G5, GetChunkSize)]),
        (21, &[(G5, Noop), (G6, GetChunkSize)]),
    ];
    for (number, readings) in cases {
        let generations: Vec<_> = readings.iter().map(|(generation, _)| *generation).collect();

        // Without a word from the server the reading as get_chunk_size wins: a wrong answer to that one
        // would be the worst.
        let mut candidates = Candidates::all();
        let resolved = ask(&mut candidates, 9, number, &[], &[]).unwrap();
        assert_eq!(resolved.spec.operation, GetChunkSize, "{number}");
        assert!(!resolved.certain, "{number}");
        assert_eq!(left(candidates), generations, "{number}");

        // What the server spoke before it went comes first.
        for (generation, operation) in readings {
            let mut candidates = Candidates::all();
            let resolved = ask(&mut candidates, 9, number, &[], &[*generation]).unwrap();
            assert_eq!(
                (resolved.generation, resolved.spec.operation),
                (*generation, *operation)
            );
            assert_eq!(left(candidates), generations, "{number}");
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

#[test]
fn payloads_narrow_what_numbers_leave_open() {
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
fn requests_that_fit_nothing_change_nothing() {
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
fn a_known_generation_picks_among_the_forms_of_its_releases() {
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

#[test]
fn only_releases_that_survive_a_text_op_are_said_to() {
    // A worker's start: 0.5.3 asks get_experimental as 40, 0.5.5 and later as 32.
    for (number, survives) in [(40, false), (32, true)] {
        let mut worker = Candidates::all();
        ask(&mut worker, 0, 21, &[], &[]).unwrap();
        assert!(!worker.takes_text_op());
        let resolved = ask(&mut worker, 1, number, &[], &[]).unwrap();
        assert_eq!(resolved.takes_text_op, survives);
        assert_eq!(worker.takes_text_op(), survives);
    }
    // A scheduler shows it with its first key.
    for (form, survives) in [(KeyForm::Salted, false), (KeyForm::Full, true)] {
        let mut scheduler = Candidates::only(G6);
        ask(&mut scheduler, 1, 8, &[&key(form), &[1]], &[]).unwrap();
        assert_eq!(scheduler.takes_text_op(), survives);
        // Once shown, it stays.
        ask(&mut scheduler, 2, 22, &[&[0xc0]], &[]).unwrap();
        assert_eq!(scheduler.takes_text_op(), survives);
    }
    let mut clears = Candidates::only(G6);
    ask(&mut clears, 1, 20, &[], &[]).unwrap();
    assert!(!clears.takes_text_op());
    ask(&mut clears, 2, 20, &[&[0xc2]], &[]).unwrap();
    assert!(clears.takes_text_op());
    // Older generations never do.
    let mut old = Candidates::only(G2);
    ask(&mut old, 1, 5, &[&key(KeyForm::Full), &[1]], &[]).unwrap();
    assert!(!old.takes_text_op());
}
