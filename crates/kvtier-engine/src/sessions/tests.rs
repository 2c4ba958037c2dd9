use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use std::sync::Arc;

use kvtier_core::ChunkHash;
use kvtier_core::object_key::KeyScope;

use super::table::{AgentSessions, COMPARISONS, MAX_CHUNKS, MAX_SESSIONS};
use super::*;
use crate::testing::{engine, key};

/// A prompt of these parts, whose chunks chain.
fn chained(parts: &[u8]) -> Arc<[ChunkHash]> {
    let mut parent = 0_u64;
    let hashes = parts.iter().map(|part| {
        parent = parent.wrapping_mul(1_000_003) + u64::from(*part) + 1;
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&parent.to_be_bytes());
        ChunkHash(hash)
    });
    hashes.collect()
}

fn scope(tenant: u8, model: u8) -> KeyScope {
    KeyScope::new(&format!("model {model}"), &format!("t{tenant}"), 1, None).unwrap()
}

fn settings(name: &str) -> Vec<u8> {
    let settings = kvtier_proto::key_settings::KeySettings {
        session: Some(name),
        ..Default::default()
    };
    settings.encode().unwrap()
}

fn begin(sessions: &AgentSessions, name: &str, scope: &KeyScope, hashes: &Arc<[ChunkHash]>) {
    let settings = settings(name);
    let mut key = key(0..1);
    key.request_configs = Some(&settings);
    assert!(sessions.begin(&key, scope, hashes).is_none());
}

fn extend(sessions: &AgentSessions, name: &str, scope: &KeyScope, hashes: &[ChunkHash]) {
    let settings = settings(name);
    let mut key = key(0..1);
    key.request_configs = Some(&settings);
    key.tokens.hashes = hashes.to_vec();
    sessions.extend(&key, scope, hashes.len());
}

/// A tenant, a session, a model and a prompt; whether a store says it.
type Turn = (u8, u8, u8, Vec<u8>, bool);

fn turn() -> impl Strategy<Value = Turn> {
    let prompt = vec(0..2_u8, 1..6);
    (0..2_u8, 0..4_u8, 0..2_u8, prompt, any::<bool>())
}

proptest! {
    #[test]
    fn tails_are_of_no_other_session(turns in vec(turn(), 1..30)) {
        let sessions = AgentSessions::default();
        let mut model: BTreeMap<(u8, u8), (u8, Vec<u8>)> = BTreeMap::new();
        for (tenant, name, model_number, prompt, is_store) in turns {
            let (scope, hashes) = (scope(tenant, model_number), chained(&prompt));
            let named = format!("s{name}");
            if is_store {
                extend(&sessions, &named, &scope, &hashes);
            } else {
                begin(&sessions, &named, &scope, &hashes);
            }
            let known = model.entry((tenant, name)).or_default();
            let is_known = known.0 == model_number && known.1.starts_with(&prompt);
            if !is_store || !is_known {
                *known = (model_number, prompt);
            }
        }
        for ((tenant, name), (number, prompt)) in &model {
            let others = model.iter().filter(|(other, _)| other.0 == *tenant && other.1 != *name);
            let others = others.filter(|(_, (other, _))| other == number);
            let shared = others.map(|(_, (_, other))| {
                prompt.iter().zip(other).take_while(|(one, other)| one == other).count()
            });
            let action = SessionAction::Release;
            let mut table = sessions.0.lock();
            let salt = format!("t{tenant}");
            let turn = table.begin(&salt, &format!("s{name}"), action).unwrap();
            let (found, _) = table.action(&salt, turn).unwrap();
            prop_assert_eq!(&found.hashes, &chained(prompt));
            prop_assert_eq!(found.tail, shared.max().unwrap_or(0));
        }
        let chunks = model.values().map(|(_, prompt)| prompt.len()).sum();
        prop_assert_eq!(sessions.counts(), (model.len(), chunks));
    }
}

#[test]
fn oldest_sessions_of_the_tenant_are_forgotten() {
    let sessions = AgentSessions::default();
    let (flooding, other) = (scope(1, 0), scope(2, 0));
    let prompt = chained(&[1, 2]);
    begin(&sessions, "quiet", &other, &prompt);
    for number in 0..MAX_SESSIONS.tenant + 10 {
        begin(&sessions, &format!("s{number}"), &flooding, &prompt);
    }
    assert_eq!(
        sessions.counts(),
        (MAX_SESSIONS.tenant + 1, 2 * MAX_SESSIONS.tenant + 2)
    );
    assert!(sessions.recall("t2", "quiet").is_some());
    assert!(sessions.recall("t1", "s9").is_none());
    assert!(sessions.recall("t1", "s10").is_some());
    // A name that no session may have is ignored, and so is a prompt that is longer than all may be.
    let long = chained(&vec![1; MAX_CHUNKS.tenant + 1]);
    begin(&sessions, "s10", &flooding, &long);
    assert!(sessions.recall("t1", "s10").is_none());
    let half = chained(&vec![1; MAX_CHUNKS.tenant / 2 + 1]);
    begin(&sessions, "a", &flooding, &half);
    begin(&sessions, "b", &flooding, &half);
    assert!(sessions.recall("t1", "a").is_none() && sessions.recall("t1", "b").is_some());
    for tenant in 10..20 {
        begin(&sessions, "long", &scope(tenant, 0), &half);
    }
    let (_, chunks) = sessions.counts();
    assert!(chunks <= MAX_CHUNKS.all, "{chunks}");
    assert!(sessions.recall("t2", "quiet").is_none() && sessions.recall("t19", "long").is_some());
}

#[test]
fn keys_of_objects_are_of_no_session() {
    let sessions = AgentSessions::default();
    let settings = settings("s");
    let mut key = key(0..3);
    key.request_configs = Some(&settings);
    key.tokens.is_object_keys = true;
    let hashes = key.tokens.hashes.as_slice().into();
    assert!(sessions.begin(&key, &scope(1, 0), &hashes).is_none());
    sessions.extend(&key, &scope(1, 0), 3);
    assert_eq!(sessions.counts(), (0, 0));
    key.tokens.is_object_keys = false;
    sessions.extend(&key, &scope(1, 0), 3);
    assert_eq!(sessions.counts(), (1, 3));
}

#[test]
fn actions_are_repeated_until_the_next_turn() {
    let engine = engine(&[]);
    let sessions = &engine.context.sessions;
    let (scope, prompt) = (scope(1, 0), chained(&[1, 2, 3]));
    begin(sessions, "s", &scope, &prompt);
    let release = SessionAction::Release;
    let done = act(&engine.context, "t1", "s", release).unwrap();
    assert_eq!((done.chunks, done.own_chunks, done.objects), (3, 3, 0));
    assert_eq!(act(&engine.context, "t1", "other", release), None);
    assert_eq!(act(&engine.context, "t2", "s", release), None);
    assert_eq!(sessions.0.lock().due().len(), 1);
    // Nothing was leased.
    repeat(&engine.context);
    assert_eq!(sessions.0.lock().due().len(), 0);
    // A store that comes late is of the same turn, and a lookup begins another.
    extend(sessions, "s", &scope, &chained(&[1, 2, 3, 4]));
    let mut table = sessions.0.lock();
    let [(salt, turn)] = &table.due()[..] else {
        panic!("it is not due");
    };
    assert_eq!(table.action(salt, *turn).unwrap().0.hashes.len(), 4);
    drop(table);
    begin(sessions, "s", &scope, &prompt);
    assert_eq!(sessions.0.lock().due().len(), 0);
}

#[test]
fn tenants_take_turns_within_the_comparisons_of_a_round() {
    let sessions = AgentSessions::default();
    let prompt = chained(&[1]);
    let all = (0..MAX_SESSIONS.tenant).map(|number| (1, format!("s{number}")));
    for (tenant, name) in all.chain((2..10).map(|tenant| (tenant, "quiet".into()))) {
        begin(&sessions, &name, &scope(tenant, 0), &prompt);
        let mut table = sessions.0.lock();
        table.begin(&format!("t{tenant}"), &name, SessionAction::Release);
    }
    let per_round = (COMPARISONS - 8) / MAX_SESSIONS.tenant;
    let mut done = BTreeMap::new();
    for round in 1..=10 {
        let due = sessions.0.lock().due();
        let of_others = due.iter().filter(|(salt, _)| &**salt != "t1").count();
        assert_eq!((due.len(), of_others), (per_round + 8, 8), "round {round}");
        for turn in due {
            *done.entry(turn).or_insert(0) += 1;
        }
    }
    // What was not its turn yet has lost no round.
    let counts = done.iter().filter(|((salt, _), _)| &**salt == "t1");
    assert!(counts.clone().all(|(_, count)| *count == 1));
    assert_eq!(counts.count(), 10 * per_round);
}
