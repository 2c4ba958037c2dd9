//! Hand-overs between two L2 of one process, over the same L1.

use tokio::sync::OwnedRwLockWriteGuard;

use super::*;
use crate::hand_over::{TiersHandOver, adopt_tiers};

/// The end of a wait for nothing.
fn at_once() -> Instant {
    Instant::now()
}

/// The end of a wait for something.
fn at_last() -> Instant {
    Instant::now() + WAIT_TIMEOUT
}

/// The next L2, over these adapters and the same L1.
fn next(
    bed: &Bed,
    adapters: &[Arc<TestAdapter>],
    handed: TiersHandOver,
) -> kvtier_error::Result<Bed> {
    let tiers = tiers(adapters);
    let stores = handed.state.stores.clone();
    adopt_tiers(&tiers, handed)?;
    let config = (*bed.l2.config()).clone();
    let (l2, queues) = L2::over(
        &config,
        crate::runtime()?,
        tiers,
        bed.cache.clone(),
        Arc::clone(&bed.arena),
        Arc::new(Clock::start(Duration::ZERO)),
        Arc::default(),
    );
    l2.resume(queues, &stores)?;
    Ok(Bed {
        l2,
        arena: Arc::clone(&bed.arena),
        cache: bed.cache.clone(),
        request: Arc::clone(&bed.request),
    })
}

/// Takes the tiers, and their indexes.
fn take(before: &Bed, next: &Bed) {
    let senders = next.l2.take();
    for (sender, index) in senders.into_iter().zip(before.l2.indexes()) {
        sender.send(index).expect("it is waited for");
    }
}

/// Keeps work in this tier from beginning.
fn hold(bed: &Bed, tier: usize) -> OwnedRwLockWriteGuard<()> {
    let lock = bed.l2.tiers()[tier].work();
    let mut held = None;
    // A store ends shortly after its bytes are no longer queued.
    wait_until("a tier in which nothing runs", || {
        held = Arc::clone(lock).try_write_owned().ok();
        held.is_some()
    });
    held.expect("it was waited for")
}

#[test]
fn waiting_stores_are_written_by_the_next_process() {
    let (before, after) = (prompt(0), prompt(0));
    let bed = bed(&[Arc::clone(&before)], Duration::from_secs(60));
    let paused = bed.l2.pause(at_last()).expect("nothing runs");
    bed.store(1..=9);
    assert_eq!(bed.delete([3, 7], true), [Deleted::Absent; 2]);
    assert_eq!(bed.l2.busy(), None);
    let handed = bed.l2.hand_over().expect("it can be");
    let next = next(&bed, &[Arc::clone(&after)], handed).expect("it fits");
    assert_eq!(next.l2.store_counts().queued_objects, 7);
    // Nothing begins before the process before has released all.
    assert!(after.store_keys().is_empty());
    take(&bed, &next);
    next.settle();
    let expected: HashSet<_> = [1, 2, 4, 5, 6, 8, 9].map(|number| bed.key(number)).into();
    assert_eq!(after.keys(), expected);
    assert_eq!(after.store_keys().len(), expected.len());
    assert!(before.store_keys().is_empty());
    // A refusal: the one before goes on.
    drop(paused);
    bed.settle();
    assert_eq!(before.keys(), expected);
}

#[test]
fn store_waits_only_for_tiers_that_lack_it() {
    let adapters = [prompt(0), prompt(0)];
    let policy = StorePolicy::SkipL1;
    let bed = bed_with(&adapters, Duration::from_secs(60), policy);
    let _second = hold(&bed, 1);
    bed.store([1]);
    wait_until("the end of the store", || {
        bed.l2.stores.of_tier(0).queued_bytes == 0
    });
    let _first = hold(&bed, 0);
    let handed = bed.l2.hand_over().expect("it can be");
    let state = serde_json::to_value(&handed.state).expect("JSON");
    // So that it leaves L1 once the other tier has it.
    assert_eq!(state["stores"][0]["complete"], 1);
    let after = [prompt(0), prompt(0)];
    let next = next(&bed, &after, handed).expect("it fits");
    take(&bed, &next);
    next.settle();
    let stores = after.each_ref().map(|tier| tier.store_keys().len());
    assert_eq!(stores, [0, 1]);
}

#[test]
fn running_store_delays_pause_and_refuses_it_in_time() {
    let gated = gated(0);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_secs(60));
    bed.store([1]);
    wait_until("a store", || !gated.store_keys().is_empty());
    let refused = bed.l2.pause(at_once()).err().expect("it runs");
    let told = "tier scripted: it does not answer a call";
    assert!(refused.to_string().contains(told), "{refused}");
    gated.gate.add_permits(2);
    let paused = bed.l2.pause(at_last()).expect("it ends");
    assert_eq!(bed.l2.busy(), None);
    // What comes meanwhile waits.
    bed.store([2]);
    assert_eq!(bed.l2.store_counts().queued_objects, 1);
    drop(paused);
    bed.settle();
    assert_eq!(gated.keys().len(), 2);
}

#[test]
fn late_store_and_late_load_are_waited_for() {
    let late = late(66);
    let bed = bed(&[Arc::clone(&late)], Duration::from_secs(60));
    bed.store([9]);
    wait_until("a late store", || !late.kept.lock().is_empty());
    let _paused = bed.l2.pause(at_last()).expect("its call was answered");
    let told = Some("tier scripted still reads what it stores".to_owned());
    assert_eq!(bed.l2.busy(), told);
    late.kept.lock().clear();
    assert_eq!(bed.l2.busy(), None);
    bed.prefetch();
    assert_eq!(bed.l2.busy(), Some("a tier still loads objects".to_owned()));
    late.kept.lock().clear();
    assert_eq!(bed.l2.busy(), None);
}

#[test]
fn object_removed_from_l1_keeps_its_store_here() {
    let bed = bed(&[prompt(0)], Duration::from_secs(60));
    let paused = bed.l2.pause(at_last()).expect("nothing runs");
    bed.store([1, 2]);
    let namespace = &bed.request.rows[0].namespace;
    bed.cache.remove(namespace, &[ChunkHash([1; 32])], true);
    let refused = bed.l2.hand_over().err().expect("it is lost otherwise");
    assert!(refused.to_string().contains("removed from L1"), "{refused}");
    drop(paused);
    bed.settle();
    bed.l2.pause(at_last()).expect("nothing runs");
    assert!(bed.l2.hand_over().is_ok());
}

#[test]
fn state_that_does_not_fit_is_refused() {
    let bed = bed(&[prompt(0)], Duration::from_secs(60));
    let _paused = bed.l2.pause(at_last()).expect("nothing runs");
    bed.store([1]);
    let handed = || bed.l2.hand_over().expect("it can be");
    let refused = |handed, tiers: &[Arc<TestAdapter>]| {
        let refused = next(&bed, tiers, handed).err().expect("it does not fit");
        refused.to_string()
    };
    let two = [prompt(0), prompt(0)];
    assert!(refused(handed(), &two).contains("it has 1 tiers; this server has 2"));
    let change = |change: fn(&mut serde_json::Value)| {
        let mut all = handed();
        let mut state = serde_json::to_value(&all.state).expect("JSON");
        change(&mut state);
        all.state = serde_json::from_value(state).expect("as before");
        refused(all, &two[..1])
    };
    for (changed, told) in [
        (
            change(|state| state["stores"][0]["hashes"][0] = "00".repeat(32).into()),
            "an object that is not in L1",
        ),
        (
            change(|state| state["stores"][0]["waiting"][0][0] = 7.into()),
            "an unknown tier",
        ),
        (
            change(|state| {
                let waiting = state["stores"][0]["waiting"].as_array_mut();
                let waiting = waiting.expect("a list");
                waiting.push(waiting[0].clone());
            }),
            "waits twice for a tier",
        ),
        (
            change(|state| state["stores"][0]["complete"] = 1.into()),
            "for one that has its objects",
        ),
        (
            change(|state| state["stores"][0]["object_bytes"] = (LEN - 1).into()),
            "objects of 4095 bytes; one in L1 has 4096",
        ),
        (
            change(|state| state["tiers"][0]["name"] = "other".into()),
            r#"its tier is "other"; this server has "scripted""#,
        ),
        (
            change(|state| state["tiers"][0]["adapter"] = 1.into()),
            "takes no state from another process",
        ),
    ] {
        assert!(changed.contains(told), "{changed}");
    }
}
