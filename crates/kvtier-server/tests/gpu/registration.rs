//! Registrations that the driver takes long for.

use kvtier_client::Scope;

use crate::lender::Lender;
use crate::setup::{Bed, Worker};
use crate::support::{prompt, range};

/// While the driver opens or closes one worker's memory, a worker in host memory comes, stores and goes on the one thread
/// there is, and nobody who only looks waits.
fn others_go_on(bed: &Bed, seed: u32) {
    let mut host = bed.lmcache_driven(2, &Scope::new("gpu/host"));
    let stored = host.store(&prompt(seed, 1), range(0..1), "r", &[1, 2, 3, 4]);
    assert!(stored.unwrap());
    host.close().unwrap();
    bed.engine().housekeep();
    bed.engine().scrape();
}

#[test]
fn a_registration_holds_up_only_what_its_connection_sent_behind_it() {
    let bed = Bed::start();
    let mut engine = Lender::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/order");
    // The context, which is made for the first one; then the memory.
    for (number, function) in ["cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2"]
        .into_iter()
        .enumerate()
    {
        let seed = 10 * number as u32;
        bed.standin.script(&format!("clear; hold {function}@1"));
        let registered = worker.send_registration();
        let stored = worker.send_store(seed, b"");
        bed.called(function, 1);
        others_go_on(&bed, seed + 1);
        let before = bed.readings().objects;
        bed.standin.script("release");
        worker.done(registered);
        assert!(worker.has_stored(stored));
        assert_eq!(bed.readings().objects, before + 1);
        let unregistered = worker.send_unregistration();
        worker.done(unregistered);
        assert_eq!(bed.open_allocations(), Some(0));
    }

    let registered = worker.send_registration();
    worker.done(registered);
    bed.standin.script("clear; hold cuIpcCloseMemHandle@1");
    let unregistered = worker.send_unregistration();
    let registered = worker.send_registration();
    let stored = worker.send_store(30, b"");
    bed.called("cuIpcCloseMemHandle", 1);
    others_go_on(&bed, 31);
    assert_eq!(bed.open_allocations(), Some(1));
    bed.standin.script("release");
    worker.done(unregistered);
    worker.done(registered);
    assert!(worker.has_stored(stored));
    bed.ends_clean();
}

/// A worker that fell silent, and one whose place another took, leave the driver as much to do.
#[test]
fn memory_of_workers_that_are_given_up_is_closed_apart() {
    let bed = Bed::start();
    let (mut engine, mut second) = (Lender::start(), Lender::start());
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/silent");
    let registered = worker.send_registration();
    worker.done(registered);
    bed.standin.script("clear; hold cuIpcCloseMemHandle@1+");
    let mut successor = Worker::new(&bed, &mut second, 1, "gpu/silent");
    let registered = successor.send_registration();
    successor.done(registered);
    bed.called("cuIpcCloseMemHandle", 1);
    bed.pass(bed.engine().config().registration_grace * 2);
    assert_eq!(bed.readings().instances, 0);
    bed.called("cuIpcCloseMemHandle", 2);
    others_go_on(&bed, 1);
    assert_eq!(bed.open_allocations(), Some(2));
    bed.standin.script("release");
    bed.ends_clean();
}

#[test]
fn an_engine_that_dies_while_it_registers_leaves_nothing() {
    let bed = Bed::start();
    let mut engine = Lender::start();
    let mut worker = Worker::new(&bed, &mut engine, 1, "gpu/dies");
    bed.standin.script("clear; hold cuIpcOpenMemHandle_v2@1");
    let registered = worker.send_registration();
    let stored = worker.send_store(1, b"");
    bed.called("cuIpcOpenMemHandle_v2", 1);
    engine.kill();
    bed.standin.script("release");
    worker.done(registered);
    assert!(!worker.has_stored(stored));
    assert_eq!(bed.open_allocations(), Some(0));
    let readings = bed.readings();
    assert_eq!((readings.instances, readings.staged_bytes), (0, 0));
    bed.ends_clean();
}
