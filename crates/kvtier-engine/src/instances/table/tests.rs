//! Workers that register and leave while copies run.

use std::sync::atomic::AtomicBool;
use std::sync::{Barrier, OnceLock};

use kvtier_proto::request::Request;

use super::super::super::testing::{CALLER, TestPages, engine, reply};
use super::super::super::{Engine, EngineAnswer};
use super::super::gate::{Gate, MAX_WAITING};
use super::*;

fn pages() -> TestPages {
    TestPages {
        device: "cpu",
        ..TestPages::new(16)
    }
}

fn instance() -> Instance {
    Arc::new(pages()).instance(ID.0, Duration::ZERO)
}

/// An engine with one worker, and that worker.
fn engine_and_instance() -> (Engine, Arc<Instance>) {
    let engine = engine(&[]);
    pages().register(&engine, ID.0);
    let instance = engine.context.instances.get(ID).unwrap();
    (engine, instance)
}

/// Notes the number of counted transfers when it is dropped.
struct CountAtClose {
    counted: Arc<OnceLock<usize>>,
    gate: Arc<Gate>,
}

impl Drop for CountAtClose {
    fn drop(&mut self) {
        let in_flight = self.gate.state.lock().in_flight;
        self.counted.set(in_flight).unwrap();
    }
}

#[test]
fn pages_are_closed_before_the_transfer_that_kept_them_counts_as_ended() {
    let pages = Arc::new(pages());
    let instance = Arc::new(pages.instance(ID.0, Duration::ZERO));
    let counted = Arc::new(OnceLock::new());
    let count = CountAtClose {
        counted: Arc::clone(&counted),
        gate: Arc::clone(&instance.gate),
    };
    *pages.closed.lock() = Some(Box::new(count));
    drop(pages);
    let copying = instance.copying().unwrap();
    drop(instance);
    assert_eq!(counted.get(), None);
    drop(copying);
    assert_eq!(counted.get(), Some(&1));
}

/// Instances with one, and that one.
fn instances() -> (Instances, Arc<Instance>) {
    let instances = Instances::default();
    assert!(instances.insert(instance()).unwrap().is_none());
    let instance = instances.get(ID).unwrap();
    (instances, instance)
}

const ID: InstanceId = InstanceId(7);

#[test]
fn groups_are_those_of_all_layouts_of_a_model() {
    let (instances, first) = instances();
    let groups = |instances: &Instances| instances.groups("model", 1);
    assert_eq!(groups(&instances), 1);
    // The same layout again, and another one with three groups.
    for (id, fingerprint, count) in [(8, first.layout.fingerprint, 1), (9, 1, 3)] {
        let mut other = Arc::new(pages()).instance(id, Duration::ZERO);
        other.layout.fingerprint = fingerprint;
        let group = other.layout.groups[0].clone();
        other.layout.groups = vec![group; count];
        instances.insert(other).unwrap();
    }
    assert_eq!(groups(&instances), 4);
    assert_eq!(instances.groups("model", 2), 0);
    instances.remove(InstanceId(8)).unwrap();
    assert_eq!(groups(&instances), 4);
    instances.remove(InstanceId(9)).unwrap();
    assert_eq!(groups(&instances), 1);
}

#[test]
fn an_instance_has_left_when_its_last_copy_has_ended_and_no_other_begins() {
    let (instances, instance) = instances();
    let has_copied = AtomicBool::new(false);
    let begun = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let copying = instance.copying().unwrap();
            begun.wait();
            while !instance.gate.state.lock().is_closed {
                std::thread::yield_now();
            }
            has_copied.store(true, Ordering::Relaxed);
            drop(copying);
        });
        begun.wait();
        instances.remove(ID).unwrap();
        instances.drain(ID).unwrap();
        assert!(has_copied.load(Ordering::Relaxed));
        // Of a request that found the instance before.
        assert!(instance.copying().is_err());
    });
    assert!(instances.tables.read().draining.is_empty());
}

#[test]
fn every_wait_for_a_departed_instance_lasts_until_drained() {
    let leave: [fn(&Instances); 3] = [
        |instances| drop(instances.remove(ID)),
        |instances| drop(instances.insert(instance()).unwrap()),
        |instances| {
            let limit = Duration::from_secs(1);
            let reaped = instances.take_silent(Duration::from_secs(9), limit, limit);
            assert_eq!(reaped.len(), 1);
        },
    ];
    for leave in leave {
        let (instances, instance) = instances();
        let copying = instance.copying().unwrap();
        leave(&instances);
        assert!(instances.take_drained().is_empty());
        let at_once = Instant::now();
        assert!(instances.drain_until(ID, at_once).is_err());
        assert!(instances.drain_until(ID, at_once).is_err());
        drop(copying);
        assert_eq!(instances.drain_until(ID, at_once), Ok(()));
        assert!(instances.tables.read().draining.is_empty());
    }
}

#[test]
fn copy_that_hangs_does_not_keep_its_client_from_registering_again() {
    for (since, is_known) in [(Duration::ZERO, true), (DRAIN_TIMEOUT, false)] {
        let (instances, instance) = instances();
        let _copying = instance.copying().unwrap();
        let left = Instant::now().checked_sub(since).unwrap();
        instance.left.set(left).unwrap();
        instances.remove(ID).unwrap();
        assert_eq!(instances.ping(ID, Duration::ZERO), is_known, "{since:?}");
    }
}

#[test]
fn an_unregistration_that_cannot_promise_free_pages_is_refused_with_a_text() {
    let (engine, instance) = engine_and_instance();
    let unregister = || {
        let request = Request::UnregisterKvCache { instance: ID };
        let (reply, answer) = reply();
        engine.handle(CALLER, &request, reply);
        // It is in host memory, so the answer is there.
        answer.try_recv().unwrap()
    };
    let copying = instance.copying().unwrap();
    std::thread::scope(|scope| {
        let wait: Vec<_> = (0..MAX_WAITING).map(|_| scope.spawn(unregister)).collect();
        while instance.gate.state.lock().waiting < MAX_WAITING {
            std::thread::yield_now();
        }
        let refused = unregister();
        let text = refused.error.unwrap();
        assert!(text.contains("1 transfers of instance 7"), "{text}");
        drop(copying);
        for waits in wait {
            assert_eq!(waits.join().unwrap(), EngineAnswer::nothing());
        }
    });
    assert_eq!(unregister(), EngineAnswer::nothing());
}

#[test]
fn lookups_are_for_one_registration_per_layout() {
    let instances = Instances::default();
    let register = |id, fingerprint| {
        let mut instance = instance();
        (instance.id, instance.layout.fingerprint) = (InstanceId(id), fingerprint);
        assert!(instances.insert(instance).unwrap().is_none());
    };
    let found = |worker| {
        let found =
            instances.of_workers(&"model".into(), 1, worker..worker + 1, NonZeroUsize::MIN)?;
        let ids = found[0].iter().map(|instance| instance.id.0);
        Some(ids.collect::<Vec<_>>())
    };
    assert_eq!(found(0), None);
    register(1, 10);
    register(2, 20);
    register(3, 10);
    // Replicas have one layout; of each the newest.
    assert_eq!(found(0), Some(vec![3, 2]));
    // One that has named its number is no other worker's.
    instances.learn(&instances.get(InstanceId(2)).unwrap(), 0);
    assert_eq!((found(0), found(1)), (Some(vec![3, 2]), Some(vec![3])));
    for id in 4..4 + MAX_LAYOUTS as i64 - 2 {
        register(id, 100 + id as u64);
    }
    assert_eq!(found(0).map(|found| found.len()), Some(MAX_LAYOUTS));
    register(99, 99);
    assert_eq!(found(0), None);
}

// proves: docs/clients.md#too-many-connections
#[test]
fn silence_during_a_stop_of_the_process_is_forgiven() {
    let (engine, _) = engine_and_instance();
    engine.clock().skip(Duration::from_secs(36_000));
    engine.forgive_silence();
    engine.housekeep();
    assert!(engine.context.instances.get(ID).is_some());
    engine.clock().skip(Duration::from_secs(36_000));
    engine.housekeep();
    assert!(engine.context.instances.get(ID).is_none());
}
