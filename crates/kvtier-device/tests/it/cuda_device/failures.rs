//! Driver errors: the end of a transfer is reported only when none of its copies runs any more.

use std::time::{Duration, Instant};

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{DeviceError, PlanError};

use super::log;
use super::setup::{Pages, Server, content, wait};
use super::turns::batches;
use crate::exporter::Exporter;

/// The thread has looked several times at what it has with the GPU.
fn looked(server: &Server, function: &str) {
    let before = server.count(function);
    wait(|| server.count(function) >= before + 3);
}

/// Result code of a lost context.
const DEAD: &str = "fail cuEventQuery=700; fail cuEventRecord=700; fail cuStreamQuery=700; fail cuMemcpyAsync=700; \
                    fail cuMemcpyBatchAsync=700; fail cuLaunchKernel=700; fail cuMemcpyHtoDAsync_v2=700";

// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn failed_copy_fails_its_transfer_after_the_others() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    server.script("hold d2h; fail cuMemcpyBatchAsync=1@3");
    let failing = pages.begin(pages.store(&server, 8));
    let behind = pages.begin(pages.store(&server, 1));
    wait(|| server.count("cuMemcpyBatchAsync") == 4);
    looked(&server, "cuEventQuery");
    assert!(!failing.has_ended());
    server.script("release");
    let error = failing.end().unwrap_err();
    assert!(
        matches!(&error, DeviceError::Cuda(error) if error.code() == Some(1)),
        "{error}"
    );
    // No more of it was submitted, and other transfers are not affected.
    behind.end().unwrap();
    assert_eq!(server.count("cuMemcpyBatchAsync"), 4);
    let bytes = pages.content.len() as u64;
    assert_eq!(pages.run(pages.store(&server, 8)).unwrap(), bytes);
    assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
    assert_eq!(server.readings().broken, None);
    drop(pages);
    server.ends_clean();
}

/// A piece of several calls: one of them fails after others have started.
#[test]
fn partly_submitted_piece_is_waited_for() {
    for (executor, refused, retrieve) in [
        (Executor::Plain, "cuMemcpyAsync=1@3", false),
        (Executor::Staged, "cuMemcpyAsync=1@1", false),
        (Executor::Staged, "cuStreamWaitEvent=1@1", false),
        (Executor::Staged, "cuLaunchKernel=1@1", true),
    ] {
        let mut options = batches();
        options.executor = Some(executor);
        let server = Server::with("", options, 1 << 20);
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        server.script(&format!("hold d2h; hold h2d; hold kernel; fail {refused}"));
        let ticket = pages.begin(if retrieve {
            pages.retrieve(&server, 8)
        } else {
            pages.store(&server, 8)
        });
        // Longer than an event takes that waits for nothing.
        wait(|| server.count("cuEventQuery") >= 500);
        assert!(!ticket.has_ended(), "{executor:?}");
        server.script("release");
        let error = ticket.end().unwrap_err();
        assert!(
            matches!(&error, DeviceError::Cuda(error) if error.code() == Some(1)),
            "{error}"
        );
        pages.run(pages.store(&server, 8)).unwrap();
        drop(pages);
        server.ends_clean();
    }
}

/// Without an event of its own, a piece has ended when the stream has.
#[test]
fn piece_without_event_is_waited_for() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 2);
    server.script("hold d2h; fail cuEventRecord=1@1");
    let ticket = pages.begin(pages.store(&server, 2));
    wait(|| server.count("cuEventRecord") == 1);
    looked(&server, "cuStreamQuery");
    assert!(!ticket.has_ended());
    server.script("release");
    let error = ticket.end().unwrap_err();
    assert!(
        matches!(&error, DeviceError::Cuda(error) if error.code() == Some(1)),
        "{error}"
    );
    pages.run(pages.store(&server, 2)).unwrap();
    drop(pages);
    server.ends_clean();
}

/// An error that leaves the state of the copies unknown: they are polled again, and no piece is submitted any more.
#[test]
fn piece_of_unknown_state_ends_when_known() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    server.script("hold d2h");
    let in_flight = pages.begin(pages.store(&server, 2));
    let long = pages.begin(pages.store(&server, 8));
    wait(|| server.count("cuEventRecord") == 4);
    server.script("fail cuEventQuery=999@1");
    wait(|| server.readings().broken.is_some());
    looked(&server, "cuEventQuery");
    assert!(!in_flight.has_ended() && !long.has_ended());
    let error = pages.run(pages.retrieve(&server, 1)).unwrap_err();
    assert!(matches!(error, DeviceError::Broken(_)), "{error}");
    server.script("release");
    let bytes = 2 * pages.object_bytes();
    assert_eq!(in_flight.end().unwrap(), bytes);
    let error = long.end().unwrap_err();
    assert!(matches!(error, DeviceError::Broken(_)), "{error}");
    let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
        .err()
        .unwrap();
    assert!(
        matches!(&error, DeviceError::Broken(why) if why.contains("999")),
        "{error}"
    );
    drop(pages);
    server.ends_clean();
}

// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn lost_context_fails_all_transfers() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 8);
    let other = Pages::on(1, &server, &mut engine, [8, 64, 8]).unwrap();
    server.script("clear; hold d2h");
    let in_flight = pages.begin(pages.store(&server, 1));
    let long = pages.begin(pages.store(&server, 8));
    wait(|| server.count("cuEventRecord") == 4);
    server.script(DEAD);
    // Neither ends before an engine of the GPU must have finished what it was given.
    for ticket in [in_flight, long] {
        let error = ticket.end().unwrap_err();
        assert!(
            matches!(&error, DeviceError::Cuda(error) if error.ends_context())
                || matches!(&error, DeviceError::Broken(why) if why.ends_with("(700)")),
            "{error}"
        );
    }
    let why = server.readings().broken.unwrap();
    assert!(
        why.starts_with("cuEventQuery: ") && why.ends_with("(700)"),
        "{why}"
    );
    let error = pages.run(pages.store(&server, 1)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("unusable until the server is restarted"),
        "{error}"
    );
    let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
        .err()
        .unwrap();
    assert!(matches!(error, DeviceError::Broken(_)), "{error}");
    // The other GPU's context is another one.
    assert_eq!(
        server.cuda.status()[1].readings.as_ref().unwrap().broken,
        None
    );
    // The fake driver only reports it, and continues.
    server.script("reset");
    server.wait_idle();
    other.run(other.store(&server, 1)).unwrap();
    drop((pages, other));
    server.ends_clean();
}

/// With nothing in flight, the first call that fails shows the loss of the context.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn lost_context_is_found_by_the_next_call() {
    for script in [
        "fail cuMemcpyBatchAsync=719",
        "fail cuEventQuery=719; fail cuMemcpyBatchAsync=719",
    ] {
        let server = Server::with("", batches(), 1 << 20);
        let mut engine = Exporter::start();
        let pages = Pages::pieces(&server, &mut engine, 1);
        server.script(script);
        let mut transfer = pages.store(&server, 1);
        transfer.event = engine.bytes("event");
        let error = pages.run(transfer).unwrap_err();
        assert!(
            matches!(&error, DeviceError::Cuda(error) if error.code() == Some(719)),
            "{error}"
        );
        assert!(server.readings().broken.is_some());
        server.script("reset");
        let error = pages.run(pages.store(&server, 1)).unwrap_err();
        assert!(matches!(error, DeviceError::Broken(_)), "{error}");
        drop(pages);
        server.ends_clean();
    }
}

/// What was to be tried once there is memory for it is not tried any more, and nothing keeps the thread awake.
#[test]
fn unusable_gpu_is_not_polled() {
    let pause = Duration::from_millis(1);
    let options = GpuOptions {
        staging_pause: pause,
        ..GpuOptions::default()
    };
    let server = Server::with("memory=20971520", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 1);
    wait(|| server.count("cuMemAlloc_v2") >= 1);
    server.script(DEAD);
    pages.run(pages.store(&server, 1)).unwrap_err();
    // That time has come.
    let broken = Instant::now();
    wait(|| broken.elapsed() > 2 * pause);
    wait(|| is_asleep("kvtier-gpu-0"));
    server.script("reset");
    drop(pages);
    server.ends_clean();
    drop(Server::with("memory=8589934592", batches(), 1 << 20));
}

/// Whether the thread of this process with such a name waits for something.
fn is_asleep(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let mut stats = threads.filter_map(|thread| {
        let stat = thread.ok()?.path().join("stat");
        std::fs::read_to_string(stat).ok()
    });
    let named = stats.find(|stat| stat.contains(&format!("({name})")));
    named.is_some_and(|stat| stat.contains(") S "))
}

/// A transfer that cannot be planned fails alone, even if part of it was submitted.
#[test]
fn invalid_extents_are_refused() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 4);
    let arena = server.arena.len();
    let object = pages.object_bytes();
    for extent in [
        (arena, object),
        (arena - object + 1, object),
        (u64::MAX, object),
        (0, u64::MAX),
        (0, object - 1),
        (0, 0),
    ] {
        for chunk in [0, 3] {
            let mut transfer = pages.store(&server, 4);
            transfer.chunks[chunk].extent = kvtier_memory::Extent::new(extent.0, extent.1);
            let error = pages.run(transfer).unwrap_err();
            let expected = matches!(
                error,
                DeviceError::Access(_) | DeviceError::Plan(PlanError::ExtentTooSmall { .. })
            );
            assert!(expected, "{extent:?}: {error}");
        }
    }
    let mut transfer = pages.store(&server, 1);
    transfer.chunks[0].request.chunk = 1;
    let error = pages.run(transfer).unwrap_err();
    assert!(matches!(error, DeviceError::Plan(_)), "{error}");
    let mut transfer = pages.store(&server, 1);
    transfer.chunks.clear();
    assert_eq!(pages.run(transfer).unwrap(), 0);
    drop(pages);
    server.ends_clean();
}

/// After a panic in a feeder every transfer is reported, those with submitted pieces once these have ended.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn feeder_panic_fails_all_transfers() {
    let mut options = batches();
    options.executor = Some(Executor::Staged);
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 4);
    server.script("hold d2h");
    let in_flight = pages.begin(pages.store(&server, 1));
    wait(|| server.count("d2h") == 1);
    // The next piece gets no staging buffer, which is logged.
    server.script("fail cuMemAlloc_v2=2");
    log::panic_once();
    // Both are with the thread before the first one is ready.
    engine.ask("script hold kernel");
    engine.ask(&format!("set {} 77", pages.number));
    let [panics, queued] = [0, 1].map(|_| {
        let mut transfer = pages.store(&server, 1);
        transfer.event = engine.bytes("event");
        pages.begin(transfer)
    });
    wait(|| server.count("cuIpcOpenEventHandle") == 2);
    engine.ask("script release");
    let is_meant = |error: &DeviceError| {
        let expected = "unusable until the server is restarted: its thread ended in a panic";
        error.to_string().contains(expected)
    };
    assert!(is_meant(&queued.end().unwrap_err()));
    let late = pages.run(pages.retrieve(&server, 1)).unwrap_err();
    assert!(is_meant(&late), "{late}");
    let error = Pages::on(0, &server, &mut engine, [8, 64, 8]);
    assert!(is_meant(&error.err().unwrap()));
    let status = &server.cuda.status()[0];
    assert_eq!(status.error.as_deref(), Some("its thread ended in a panic"));
    // Its bytes may still move.
    looked(&server, "cuStreamQuery");
    assert!(!in_flight.has_ended() && !panics.has_ended());
    assert_eq!(server.readings().in_flight, [2, 0]);
    server.script("release");
    for ticket in [in_flight, panics] {
        assert!(is_meant(&ticket.end().unwrap_err()));
    }
    assert_eq!(server.readings().in_flight, [0, 0]);
    assert_eq!(server.cuda.stop(), Vec::<i32>::new());
    drop(pages);
    server.ends_clean();
}
