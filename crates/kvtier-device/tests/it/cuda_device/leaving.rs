//! Deadlines, and the stop of workers and of the device, with copies in flight.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvtier_device::DeviceError;

use super::setup::{PIECE, Pages, Server, past, wait};
use super::turns::batches;
use crate::exporter::{Exporter, FakeDriver};

/// Every slot is in use, and the engine that copies from the GPU does not get on.
fn hold(server: &Server) {
    server.script("hold d2h");
}

fn slots_are_full(server: &Server) {
    wait(|| server.count("cuEventRecord") == 4);
}

#[test]
fn stopped_worker_starts_no_copies() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::register(&server, &mut engine, [8, 64, 8]);
    hold(&server);
    let long = pages.begin(pages.store(&server, 8));
    let queued = pages.begin(pages.store(&server, 1));
    let others = other.begin(other.store(&server, 1));
    slots_are_full(&server);
    pages.memory.stop();
    // No piece of this one was submitted.
    let error = queued.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    let late = pages.run(pages.store(&server, 1)).unwrap_err();
    assert!(matches!(late, DeviceError::Stopped), "{late}");
    assert!(!long.has_ended() && !others.has_ended());
    server.script("release");
    let error = long.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    others.end().unwrap();
    // Four pieces, and the other worker's if it was not among them.
    assert!(server.count("cuMemcpyBatchAsync") <= 5);
    drop((pages, other));
    server.ends_clean();
}

/// Everything was handed to the GPU when its worker stopped: it ends as it would.
#[test]
fn stopped_worker_finishes_submitted_pieces() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 3);
    hold(&server);
    let ticket = pages.begin(pages.store(&server, 3));
    wait(|| server.count("cuEventRecord") == 3);
    pages.memory.stop();
    server.script("release");
    ticket.end().unwrap();
    drop(pages);
    server.ends_clean();
}

/// Dropped pages stay open until their last copy has ended, and are closed when the end is reported.
#[test]
fn pages_close_between_last_copy_and_its_report() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    hold(&server);
    let (say, hear) = mpsc::channel();
    let done = move |result: Result<u64, DeviceError>| {
        let closed = FakeDriver::load().count("cuIpcCloseMemHandle");
        say.send((result, closed)).unwrap();
    };
    pages
        .memory
        .transfer(pages.store(&server, 8), Box::new(done));
    slots_are_full(&server);
    let object = pages.object_bytes();
    drop(pages);
    assert_eq!(server.count("cuIpcCloseMemHandle"), 0);
    assert_eq!(server.readings().open_allocations, 1);
    server.script("release");
    let (result, closed) = hear.recv().unwrap();
    assert_eq!((result.unwrap(), closed), (8 * object, 1));
    assert_eq!(server.readings().open_allocations, 0);
    server.ends_clean();
}

/// When an engine dies with copies in flight, they end and its pages are closed, without effect on others.
#[test]
fn death_of_the_engine_blocks_nothing() {
    let server = Server::with("", batches(), 1 << 20);
    let (mut engine, mut living) = (Exporter::start(), Exporter::start());
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::register(&server, &mut living, [8, 64, 8]);
    hold(&server);
    let ticket = pages.begin(pages.store(&server, 8));
    slots_are_full(&server);
    engine.kill();
    other.run(other.retrieve(&server, 1)).unwrap();
    pages.memory.stop();
    drop(pages);
    server.script("release");
    let error = ticket.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    assert_eq!(server.readings().open_allocations, 1);
    drop(other);
    server.ends_clean();
}

#[test]
fn deadline_before_the_first_piece_fails() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::register(&server, &mut engine, [8, 64, 8]);
    let mut transfer = other.store(&server, 1);
    transfer.deadline = Some(past());
    let error = other.run(transfer).unwrap_err();
    assert!(matches!(error, DeviceError::DeadlinePassed), "{error}");
    assert_eq!(server.count("cuMemcpyBatchAsync"), 0);
    // With all slots in use, the failure does not wait for one.
    hold(&server);
    let long = pages.begin(pages.store(&server, 8));
    slots_are_full(&server);
    let mut transfer = other.store(&server, 1);
    transfer.deadline = Some(Instant::now() + Duration::from_millis(20));
    let error = other.run(transfer).unwrap_err();
    assert!(matches!(error, DeviceError::DeadlinePassed), "{error}");
    assert!(!long.has_ended());
    server.script("release");
    long.end().unwrap();
    drop((pages, other));
    server.ends_clean();
}

/// A transfer that ends after its deadline has failed, even if it was submitted before.
#[test]
fn deadline_during_the_copies_fails() {
    for (pieces, begun) in [(3, 3), (8, 4)] {
        let server = Server::with("", batches(), 1 << 20);
        let mut engine = Exporter::start();
        let pages = Pages::pieces(&server, &mut engine, pieces);
        // A machine that is busy with others may need longer to begin.
        let mut time = Duration::from_millis(100);
        loop {
            server.script("clear");
            hold(&server);
            let deadline = Instant::now() + time;
            let mut transfer = pages.store(&server, pieces);
            transfer.deadline = Some(deadline);
            let ticket = pages.begin(transfer);
            wait(|| Instant::now() > deadline);
            let in_time = server.count("cuEventRecord") == begun;
            assert!(!in_time || !ticket.has_ended());
            server.script("release");
            let error = ticket.end().unwrap_err();
            assert!(matches!(error, DeviceError::DeadlinePassed), "{error}");
            assert!(server.count("cuMemcpyBatchAsync") <= begun);
            if in_time {
                break;
            }
            time *= 2;
        }
        drop(pages);
        server.ends_clean();
    }
}

/// The device is dropped: what is with the GPU ends as it would, the rest is refused.
#[test]
fn dropped_device_waits_for_submitted_pieces() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::register(&server, &mut engine, [8, 64, 8]);
    hold(&server);
    let all = pages.begin(pages.store(&server, 3));
    let part = pages.begin(pages.store(&server, 8));
    slots_are_full(&server);
    let none = other.begin(other.store(&server, 1));
    drop((pages, other));
    let Server { cuda, rest, .. } = server;
    let dropping = std::thread::spawn(move || drop(cuda));
    let error = none.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    assert!(!all.has_ended() && !part.has_ended() && !dropping.is_finished());
    rest.script("release");
    dropping.join().unwrap();
    all.end().unwrap();
    let error = part.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    rest.is_clean();
}

/// A GPU that hangs is abandoned, and transfers of unknown state are not reported.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn hanging_gpu_is_abandoned() {
    let mut options = batches();
    options.leave_timeout = Duration::from_millis(1);
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    hold(&server);
    let ticket = pages.begin(pages.store(&server, 8));
    slots_are_full(&server);
    drop(pages);
    let rest = server.without_device();
    assert!(!ticket.has_ended());
    // Two for each direction.
    // Those of the thread for other memory go.
    wait(|| rest.count("live.streams") == 4);
    assert_eq!(rest.count("cuMemHostUnregister"), 0);
    // It gets on after all, and everything is released.
    rest.script("release");
    let error = ticket.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    wait(|| rest.count("live.contexts") == 0);
    rest.is_clean();
}

/// All GPUs are stopped before one is waited for: what hangs on one holds up no other.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn stopped_device_reports_all_and_names_hanging_gpus() {
    let mut options = batches();
    options.leave_timeout = Duration::from_millis(50);
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let [blocks, page] = PIECE;
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::on(1, &server, &mut engine, [blocks, page, blocks]).unwrap();
    server.pinned();
    server.script("clear");
    hold(&server);
    let part = pages.begin(pages.store(&server, 8));
    slots_are_full(&server);
    let none = pages.begin(pages.store(&server, 1));
    // The other one may need longer than that to end, on a busy machine.
    wait(|| server.cuda.stop() == [0]);
    for late in [none, other.begin(other.retrieve(&server, 1))] {
        let error = late.end().unwrap_err();
        assert!(matches!(error, DeviceError::Stopped), "{error}");
    }
    assert!(!part.has_ended());
    server.script("release");
    let error = part.end().unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    wait(|| server.cuda.stop().is_empty());
    drop((pages, other));
    server.ends_clean();
}

/// If a transfer holds the last reference to the GPU, the GPU's own thread releases it.
#[test]
fn transfer_may_be_the_last_owner() {
    let mut options = batches();
    options.leave_timeout = Duration::MAX;
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 2);
    hold(&server);
    let transfer = pages.store(&server, 2);
    let (say, hear) = mpsc::channel();
    let held = Arc::clone(&pages.memory);
    let done = move |result: Result<u64, DeviceError>| {
        drop(held);
        say.send(result).unwrap();
    };
    pages.memory.transfer(transfer, Box::new(done));
    wait(|| server.count("cuEventRecord") == 2);
    let bytes = pages.content.len() as u64;
    drop(pages);
    let rest = server.without_device();
    rest.script("release");
    assert_eq!(hear.recv().unwrap().unwrap(), bytes);
    wait(|| rest.count("live.contexts") == 0);
    rest.is_clean();
}

/// The callback of a transfer may start the next one, or panic.
#[test]
fn callbacks_may_start_transfers_and_panic() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [8, 64, 8]);
    let (say, hear) = mpsc::channel();
    let next = pages.retrieve(&server, 1);
    let memory = Arc::clone(&pages.memory);
    let done = move |_: Result<u64, DeviceError>| {
        let then = move |result| say.send(result).unwrap();
        memory.transfer(next, Box::new(then));
        drop(memory);
        panic!("expected");
    };
    pages
        .memory
        .transfer(pages.store(&server, 1), Box::new(done));
    assert_eq!(hear.recv().unwrap().unwrap(), 512);
    assert_eq!(pages.run(pages.store(&server, 1)).unwrap(), 512);
    assert_eq!(server.readings().in_flight, [0, 0]);
    drop(pages);
    server.ends_clean();
}
