//! Workers that come, leave and are copied meanwhile.

use std::sync::Barrier;

use kvtier_device::{DeviceError, Done, KvLayout, Transfer};
use kvtier_memory::SegmentError;
use kvtier_proto::request::Request;

use super::super::{Answer, Engine};
use super::rest::MAX_WAITING;
use super::*;
use kvtier_config::ServerConfig;
use kvtier_metrics::Metrics;

/// Pages that no test reads. When they are closed, they report how many transfers are counted.
#[derive(Default)]
struct NoPages {
    counted: Arc<OnceLock<usize>>,
    rest: OnceLock<Arc<Rest>>,
}

impl Drop for NoPages {
    fn drop(&mut self) {
        if let Some(rest) = self.rest.get() {
            let _ = self.counted.set(rest.pages.lock().copying);
        }
    }
}

impl EngineMemory for NoPages {
    fn layout(&self) -> &Arc<KvLayout> {
        unreachable!()
    }

    fn is_current(&self) -> bool {
        unreachable!()
    }

    fn remove_orphans(&self) -> Vec<Result<String, SegmentError>> {
        Vec::new()
    }

    fn device(&self) -> &'static str {
        "cpu"
    }

    fn transfer(&self, _: Transfer, _: Done) {
        unreachable!()
    }

    fn answer_event<'a>(&self, _: &'a [u8]) -> &'a [u8] {
        unreachable!()
    }

    fn read_blocks(
        &self,
        _: usize,
        _: &[i64],
        _: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        unreachable!()
    }
}

fn instance() -> Instance {
    instance_with(Arc::new(NoPages::default()))
}

fn instance_with(memory: Arc<dyn EngineMemory>) -> Instance {
    let mode = Mode::LmcacheDriven {
        memory,
        tensors: Vec::new(),
        hints: LayoutHints::default(),
        groups: Vec::new(),
    };
    let layout = ModelLayout {
        groups: Vec::new(),
        fingerprint: 0,
        page_bound: false,
    };
    Instance::new(ID, "model", 1, mode, layout, Duration::ZERO)
}

#[test]
fn pages_are_closed_before_the_transfer_that_kept_them_counts_as_ended() {
    let pages = Arc::new(NoPages::default());
    let counted = Arc::clone(&pages.counted);
    let instance = Arc::new(instance_with(Arc::clone(&pages) as _));
    assert!(pages.rest.set(Arc::clone(&instance.rest)).is_ok());
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
fn an_instance_has_left_when_its_last_copy_has_ended_and_no_other_begins() {
    let (instances, instance) = instances();
    let has_copied = AtomicBool::new(false);
    let begun = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let copying = instance.copying().unwrap();
            begun.wait();
            while instance.rest.pages.lock().stay {
                std::thread::yield_now();
            }
            has_copied.store(true, Ordering::Relaxed);
            drop(copying);
        });
        begun.wait();
        instances.remove(ID).unwrap();
        instances.wait_for_left(ID).unwrap();
        assert!(has_copied.load(Ordering::Relaxed));
        // Of a request that found the instance before.
        assert!(instance.copying().is_err());
    });
    assert!(instances.tables.read().leaving.is_empty());
}

#[test]
fn every_wait_for_a_departed_instance_lasts_until_drained() {
    let gone: [fn(&Instances); 3] = [
        |instances| drop(instances.remove(ID)),
        |instances| drop(instances.insert(instance()).unwrap()),
        |instances| {
            let limit = Duration::from_secs(1);
            let reaped = instances.reap(Duration::from_secs(9), limit, limit);
            assert_eq!(reaped.len(), 1);
        },
    ];
    for goes in gone {
        let (instances, instance) = instances();
        let copying = instance.copying().unwrap();
        goes(&instances);
        assert!(instances.forget_left().is_empty());
        let at_once = Instant::now();
        assert!(instances.wait_until_left(ID, at_once).is_err());
        assert!(instances.wait_until_left(ID, at_once).is_err());
        drop(copying);
        assert_eq!(instances.wait_until_left(ID, at_once), Ok(()));
        assert!(instances.tables.read().leaving.is_empty());
    }
}

#[test]
fn an_unregistration_that_cannot_promise_free_pages_is_refused_with_a_text() {
    let flags = ["--shm-name", "", "--l1-size-gb", "0.01"];
    let config = Arc::new(ServerConfig::from_flags(&flags).unwrap());
    let engine = Arc::new(Engine::new(config, Arc::new(Metrics::new())).unwrap());
    assert!(engine.instances.insert(instance()).unwrap().is_none());
    let instance = engine.instances.get(ID).unwrap();
    let unregister = || {
        let request = Request::UnregisterKvCache { instance: ID };
        let (reply, answer) = super::super::testing::reply();
        engine.handle(super::super::testing::CALLER, &request, reply);
        // It is in host memory, so the answer is there.
        answer.try_recv().unwrap()
    };
    let copying = instance.copying().unwrap();
    std::thread::scope(|scope| {
        let wait: Vec<_> = (0..MAX_WAITING).map(|_| scope.spawn(unregister)).collect();
        while instance.rest.pages.lock().waiting < MAX_WAITING {
            std::thread::yield_now();
        }
        let refused = unregister();
        let text = refused.error.unwrap();
        assert!(text.contains("1 transfers of instance 7"), "{text}");
        drop(copying);
        for waits in wait {
            assert_eq!(waits.join().unwrap(), Answer::nothing());
        }
    });
    assert_eq!(unregister(), Answer::nothing());
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
        let found = instances.of_workers(&"model".into(), 1, worker..worker + 1)?;
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

#[test]
fn silence_during_a_stop_of_the_process_is_forgiven() {
    let flags = ["--shm-name", "", "--l1-size-gb", "0.01"];
    let config = Arc::new(ServerConfig::from_flags(&flags).unwrap());
    let engine = Arc::new(Engine::new(config, Arc::new(Metrics::new())).unwrap());
    assert!(engine.instances.insert(instance()).unwrap().is_none());
    engine.clock().skip(Duration::from_secs(36_000));
    engine.forgive_silence();
    engine.housekeep();
    assert!(engine.instances.get(ID).is_some());
    engine.clock().skip(Duration::from_secs(36_000));
    engine.housekeep();
    assert!(engine.instances.get(ID).is_none());
}
