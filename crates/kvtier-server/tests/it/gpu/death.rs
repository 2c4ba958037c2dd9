//! Engines that die.

use std::time::Duration;

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;

/// A registered worker of a process whose end is detectable, or not.
fn register(bed: &Bed, engine: &mut Exporter, id: i64, counters: Option<&str>) -> Worker {
    let mut worker = Worker::new(bed, engine, id, "gpu/death");
    worker.counter = counters.map(|name| (name.into(), 0));
    let registered = worker.send_registration();
    worker.done(registered);
    worker
}

/// One rank of several: its store fails at once and its memory is closed, before it could be considered silent. The other
/// ranks go on, also one whose process is unknown; that one stays registered until its silence times out.
// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn dead_engine_is_removed_at_once_and_alone() {
    let bed = Bed::start();
    let [mut one, mut two, mut three] = std::array::from_fn(|_| Exporter::start());
    let (first, second) = (one.counters(), two.counters());
    let mut dying = register(&bed, &mut one, 1, Some(&first.0));
    let mut living = register(&bed, &mut two, 2, Some(&second.0));
    let mut unknown = register(&bed, &mut three, 3, None);
    assert_eq!(bed.open_allocations(), Some(3));
    bed.pass(Duration::ZERO);
    assert_eq!(bed.readings().instances, 3);
    let status = bed.engine().admin().status(true);
    assert_eq!(status.devices.instances_of_known_processes, [1, 2]);

    // A store that waits for its engine.
    one.ask("script hold kernel");
    one.ask("fill 1");
    let event = one.bytes("event");
    let stored = dying.send_store(1, &event);
    wait(|| bed.stores_in_flight() == 1);
    one.kill();
    three.kill();
    bed.pass(Duration::ZERO);
    assert_eq!(bed.readings().instances, 2);
    assert_eq!(bed.engine().metrics().reaped_instances.get(), 1);
    assert!(!dying.has_stored(stored));
    wait(|| {
        bed.pass(Duration::ZERO);
        bed.open_allocations() == Some(2)
    });
    let readings = bed.readings();
    assert_eq!((readings.staged_bytes, readings.objects), (0, 0));

    let stored = living.send_store(2, b"");
    assert!(living.has_stored(stored));
    let stored = unknown.send_store(3, b"");
    assert!(unknown.has_stored(stored));
    // A successor under the same id; then the other one dies, too.
    let mut again = Exporter::start();
    let third = again.counters();
    let mut successor = register(&bed, &mut again, 1, Some(&third.0));
    two.kill();
    bed.pass(Duration::ZERO);
    assert_eq!(bed.readings().instances, 2);
    let stored = successor.send_store(4, b"");
    assert!(successor.has_stored(stored));
    bed.ends_clean();
}

/// The process of the memory is looked up before the memory is opened: an engine that dies between is noticed, too.
#[test]
fn engine_death_during_registration_is_noticed_at_once() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let file = engine.counters();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/death");
    worker.counter = Some((file.0.clone().into(), 0));
    bed.fake_driver
        .script("clear; hold cuMemGetAddressRange_v2@1");
    let registered = worker.send_registration();
    bed.called("cuMemGetAddressRange_v2", 1);
    engine.kill();
    bed.fake_driver.script("release");
    worker.done(registered);
    // The server looks by itself, too.
    bed.pass(Duration::ZERO);
    assert_eq!(bed.readings().instances, 0);
    assert_eq!(bed.engine().metrics().reaped_instances.get(), 1);
    wait(|| bed.open_allocations() == Some(0));
    bed.ends_clean();
}
