//! Registrations that the driver takes long for.

use std::time::Duration;

use kvtier_client::Scope;

use super::setup::{Bed, Worker, wait};
use crate::exporter::Exporter;
use crate::support::{prompt, range};

/// While the driver opens or closes one worker's memory, a worker in host memory comes, stores and goes on the one thread
/// there is, and no caller that only reads waits.
fn others_go_on(bed: &Bed, seed: u32) {
    let mut host = bed.lmcache_driven(2, &Scope::new("gpu/host"));
    let stored = host.store(&prompt(seed, 1), range(0..1), "r", &[1, 2, 3, 4]);
    assert!(stored.unwrap());
    host.close().unwrap();
    bed.engine().housekeep();
    bed.engine().admin().scrape();
}

#[test]
fn registration_delays_only_later_requests_of_connection() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/order");
    // The context, which is made for the first one; then the memory.
    for (number, function) in ["cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2"]
        .into_iter()
        .enumerate()
    {
        let seed = 10 * number as u32;
        bed.fake_driver.script(&format!("clear; hold {function}@1"));
        let registered = worker.send_registration();
        let stored = worker.send_store(seed, b"");
        bed.called(function, 1);
        others_go_on(&bed, seed + 1);
        let before = bed.readings().objects;
        bed.fake_driver.script("release");
        worker.done(registered);
        assert!(worker.has_stored(stored));
        assert_eq!(bed.readings().objects, before + 1);
        let unregistered = worker.send_unregistration();
        worker.done(unregistered);
        assert_eq!(bed.open_allocations(), Some(0));
    }

    let registered = worker.send_registration();
    worker.done(registered);
    bed.fake_driver.script("clear; hold cuIpcCloseMemHandle@1");
    let unregistered = worker.send_unregistration();
    let registered = worker.send_registration();
    let stored = worker.send_store(30, b"");
    bed.called("cuIpcCloseMemHandle", 1);
    others_go_on(&bed, 31);
    assert_eq!(bed.open_allocations(), Some(1));
    bed.fake_driver.script("release");
    worker.done(unregistered);
    worker.done(registered);
    assert!(worker.has_stored(stored));
    bed.ends_clean();
}

/// Memory of a worker whose place another took is free when that one is answered. A worker that fell silent leaves the
/// driver as much to do.
#[test]
fn memory_of_abandoned_workers_is_closed_separately() {
    let bed = Bed::start();
    let (mut engine, mut second) = (Exporter::start(), Exporter::start());
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/silent");
    let registered = worker.send_registration();
    worker.done(registered);
    bed.fake_driver.script("clear; hold cuIpcCloseMemHandle@1");
    let mut successor = Worker::new(&bed, &mut second, 1, "gpu/silent");
    let registered = successor.send_registration();
    bed.called("cuIpcCloseMemHandle", 1);
    std::thread::scope(|scope| {
        let answered = scope.spawn(|| successor.done(registered));
        others_go_on(&bed, 2);
        assert!(!answered.is_finished());
        bed.fake_driver.script("release");
    });
    assert_eq!(bed.open_allocations(), Some(1));
    bed.fake_driver.script("hold cuIpcCloseMemHandle@1");
    bed.pass(bed.engine().config().registration_grace * 2);
    assert_eq!(bed.readings().instances, 0);
    bed.called("cuIpcCloseMemHandle", 2);
    others_go_on(&bed, 1);
    assert_eq!(bed.open_allocations(), Some(1));
    bed.fake_driver.script("release");
    bed.ends_clean();
}

#[test]
fn engine_death_during_registration_leaves_nothing() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/dies");
    bed.fake_driver
        .script("clear; hold cuIpcOpenMemHandle_v2@1");
    let registered = worker.send_registration();
    let stored = worker.send_store(1, b"");
    bed.called("cuIpcOpenMemHandle_v2", 1);
    engine.kill();
    bed.fake_driver.script("release");
    worker.refused(registered);
    assert!(!worker.has_stored(stored));
    assert_eq!(bed.open_allocations(), Some(0));
    let readings = bed.readings();
    assert_eq!((readings.instances, readings.staged_bytes), (0, 0));
    bed.ends_clean();
}

/// The one thread for transfers waits for no driver, whatever a worker on a GPU sends.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn hanging_event_delays_no_other_worker() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/event");
    let registered = worker.send_registration();
    worker.done(registered);
    let event = engine.bytes("event");
    bed.fake_driver.script("clear; hold cuIpcOpenEventHandle@1");
    let stored = worker.send_store(1, &event);
    bed.called("cuIpcOpenEventHandle", 1);
    others_go_on(&bed, 2);
    bed.fake_driver.script("release");
    assert!(worker.has_stored(stored));
    bed.ends_clean();
}

/// A driver that hangs in the trial of a GPU blocks no stop: the worker that waits for it receives an answer.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn a_server_ends_during_a_trial() {
    let bed = Bed::start();
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/trial");
    bed.fake_driver.script("clear; hold cuLaunchKernel@1");
    let registered = worker.send_registration();
    bed.called("cuLaunchKernel", 1);
    bed.ends_with_a_hang();
    worker.refused(registered);
}

/// The metric of a GPU that cannot be taken into use says so as long as that is so, and no longer.
#[test]
fn gpu_is_healthy_again_after_driver_recovers() {
    let bed = Bed::with(|gpu| gpu.trial_timeout = Duration::from_millis(20));
    let healthy = |value: u8| {
        let line = format!("kvtier_gpu_healthy{{gpu=\"0\"}} {value}\n");
        bed.engine().admin().scrape().contains(&line)
    };
    assert!(healthy(1));
    let mut engine = Exporter::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/back");
    bed.fake_driver.script("hold cuDevicePrimaryCtxRetain@1");
    let refused = worker.send_registration();
    worker.refused(refused);
    assert!(healthy(0));
    bed.fake_driver.script("release");
    wait(|| healthy(1));
    // It is not in use.
    assert_eq!(bed.open_allocations(), None);
    wait(|| bed.fake_driver.count("live.contexts") == 0);
    bed.ends_clean();
}
