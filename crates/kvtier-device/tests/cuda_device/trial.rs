//! Every way of copying is tried out before a GPU is used.

use std::time::Duration;

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{DeviceError, Direction};

use crate::lender::Lender;
use crate::log;
use crate::setup::{Pages, Server, content, wait};

/// With a script in force: the executors that are not used, with what is said of them. Transfers are right all the
/// same, and use none of them.
fn without(script: &str) -> Vec<(Executor, String)> {
    let server = Server::with(script, GpuOptions::default(), 1 << 20);
    let mut engine = Lender::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let transfer = pages.store(&server, 8);
    let bytes = pages.content.len() as u64;
    assert_eq!(pages.run(transfer).unwrap(), bytes);
    assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
    let retrieved = pages.retrieve(&server, 8);
    assert_eq!(pages.run(retrieved).unwrap(), bytes);
    assert!(engine.read(pages.number, 0, pages.content.len()) == pages.content);

    let readings = server.readings();
    let obstacles = readings.profile.obstacles.clone();
    for executor in Executor::ALL {
        let usable = !obstacles.iter().any(|(other, _)| *other == executor);
        for direction in [Direction::Store, Direction::Retrieve] {
            let rates = readings.profile.rates[direction as usize][executor as usize];
            assert!(
                rates.iter().all(|rate| rate.is_some() == usable),
                "{executor:?}"
            );
            let moved = readings.moved.iter();
            let used = moved
                .filter(|moved| (moved.0, moved.1) == (direction, executor))
                .count();
            assert!(usable || used == 0, "{executor:?}");
        }
    }
    drop(pages);
    server.ends_clean();
    obstacles
}

#[test]
fn all_are_usable_where_nothing_is_missing() {
    assert_eq!(without(""), []);
}

#[test]
fn a_driver_that_takes_no_kernel_or_no_batches() {
    let obstacles = without("ptx=refused");
    let [(Executor::Staged, why), (Executor::Kernel, same)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert!(why.contains("the script refuses it"), "{why}");
    assert_eq!(why, same);
    for script in ["batch=absent", "driver=12070"] {
        let obstacles = without(script);
        let [(Executor::Batch, why)] = &obstacles[..] else {
            panic!("{script}: {obstacles:?}")
        };
        assert_eq!(why, "the driver is older than CUDA 12.8");
    }
    assert_eq!(without("ptx=refused; batch=absent; driver=12080").len(), 3);
}

/// A call that says it did what it did not.
#[test]
fn who_moves_wrong_bytes_or_fails_is_left_out() {
    let obstacles = without("fail cuMemcpyBatchAsync=0");
    let [(Executor::Batch, why)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert_eq!(
        why,
        "it moved wrong bytes: Store, runs of 256 bytes, byte 0"
    );
    let obstacles = without("fail cuMemcpyBatchAsync=801");
    let [(Executor::Batch, why)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert!(
        why.starts_with("cuMemcpyBatchAsync: ") && why.ends_with("(801)"),
        "{why}"
    );
    let obstacles = without("fail cuLaunchKernel=0");
    let named: Vec<_> = obstacles.iter().map(|(executor, _)| *executor).collect();
    assert_eq!(named, [Executor::Staged, Executor::Kernel]);
}

/// Each of its kernels, also those for what is less aligned than what speed is measured with.
#[test]
fn a_kernel_that_moves_wrong_bytes_is_left_out() {
    for (unit, what) in [
        (16, "runs of 256 bytes"),
        (8, "runs of all alignments"),
        (4, "runs of all alignments"),
        (2, "runs of all alignments"),
        (1, "runs of all alignments"),
    ] {
        let obstacles = without(&format!("fail kvcopy_{unit}=0"));
        let [(Executor::Staged, staged), (Executor::Kernel, kernel)] = &obstacles[..] else {
            panic!("{unit}: {obstacles:?}")
        };
        for why in [staged, kernel] {
            let expected = format!("it moved wrong bytes: Store, {what}, byte ");
            assert!(why.starts_with(&expected), "{unit}: {why}");
        }
    }
}

/// What is measured is what the arena will be: memory of the system that is registered, not what the driver allocates.
#[test]
fn without_registered_memory_there_are_no_batches_and_no_kernel() {
    let obstacles = without("fail cuMemHostRegister_v2=2");
    let [(Executor::Batch, why), (Executor::Kernel, same)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert!(
        why.starts_with("memory of the host cannot be registered: cuMemHostRegister_v2"),
        "{why}"
    );
    assert_eq!(why, same);
    let obstacles = without("fail cuMemHostGetDevicePointer_v2=1");
    let [(Executor::Kernel, why)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert_eq!(
        why,
        "the GPU sees registered memory elsewhere than the host"
    );
}

/// As in earnest, the next piece is with the GPU before the first one is done.
#[test]
fn every_slot_has_a_piece_while_speed_is_measured() {
    let server = Server::with("hold d2h", GpuOptions::default(), 1 << 20);
    let mut engine = Lender::start();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| Pages::on(0, &server, &mut engine, [8, 64, 8]).unwrap());
        wait(|| server.count("cuMemcpyBatchAsync") == 4);
        server.script("release");
        drop(registering.join().unwrap());
    });
    server.ends_clean();
}

/// Engines register when the GPU is nearly full.
#[test]
fn staging_is_tried_with_as_many_buffers_as_there_is_room_for() {
    // Beside the 8 MiB of pages of the trial, one buffer of 16 MiB for each way in turn; and none.
    assert_eq!(without("memory=41943040"), []);
    let obstacles = without("memory=20971520");
    let [(Executor::Staged, why)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert_eq!(why, "the GPU has no memory for its buffers");
    drop(Server::with(
        "memory=8589934592",
        GpuOptions::default(),
        1 << 20,
    ));
}

/// Who demands what does not work hears of it when an engine registers, and not with every transfer.
#[test]
fn what_is_demanded_and_does_not_work_is_refused() {
    for (script, executor, expected) in [
        (
            "ptx=refused",
            Executor::Kernel,
            "the executor kernel cannot be used on this GPU",
        ),
        (
            "ptx=refused",
            Executor::Staged,
            "the executor staged cannot be used on this GPU",
        ),
        (
            "batch=absent",
            Executor::Batch,
            "the driver is older than CUDA 12.8",
        ),
        (
            "fail cuMemcpyAsync=0",
            Executor::Batch,
            "the executor plain cannot be used on this GPU",
        ),
    ] {
        let options = GpuOptions {
            executor: Some(executor),
            ..GpuOptions::default()
        };
        let server = Server::with(script, options, 1 << 20);
        let mut engine = Lender::start();
        let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(expected), "{script}: {error}");
        assert!(server.cuda.status()[0].readings.is_none());
        // Nothing of it is left, and it may work the next time; what a driver has is looked up once.
        server.script("reset");
        let again = Pages::on(0, &server, &mut engine, [8, 64, 8]);
        assert_eq!(again.is_err(), script == "batch=absent");
        drop(again);
        server.ends_clean();
    }
}

/// What says that the GPU is of no use is no matter of an executor.
#[test]
fn a_gpu_that_dies_in_its_trial_is_not_used() {
    for script in [
        "fail cuMemcpyBatchAsync=700@20",
        "fail cuLaunchKernel=719",
        "fail cuMemcpyHtoDAsync_v2=214",
        "fail cuCtxSetCurrent=2",
        "fail cuMemAlloc_v2=2",
        "fail cuMemHostAlloc=2",
        "fail cuStreamCreateWithPriority=2@2",
        "fail cuEventCreate=2@3",
    ] {
        let server = Server::with(script, GpuOptions::default(), 1 << 20);
        let mut engine = Lender::start();
        let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
            .err()
            .unwrap()
            .to_string();
        assert!(error.starts_with("GPU: cu"), "{script}: {error}");
        server.script("reset");
        drop(Pages::on(0, &server, &mut engine, [8, 64, 8]).unwrap());
        server.ends_clean();
    }
}

/// Buffers of a trial that nobody knows the end of are not freed.
#[test]
fn nothing_is_freed_that_may_be_in_use() {
    let server = Server::with(
        "fail cuStreamSynchronize=999@5",
        GpuOptions::default(),
        1 << 20,
    );
    let mut engine = Lender::start();
    let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("(999)"), "{error}");
    assert_eq!(server.violations(), "");
    assert!(server.count("live.memory") > 0 && server.count("live.host") > 0);
}

/// An engine takes all the memory of a GPU, and what would be staged goes straight.
#[test]
fn a_buffer_that_there_is_no_room_for_is_not_needed() {
    log::hear();
    for (staging_pause, asked, then) in [
        (Duration::MAX, 1, Executor::Plain),
        (Duration::ZERO, 4, Executor::Staged),
    ] {
        let options = GpuOptions {
            executor: Some(Executor::Staged),
            staging_pause,
            ..GpuOptions::default()
        };
        let server = Server::with("", options, 1 << 20);
        let mut engine = Lender::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        // The trial's buffers are gone.
        server.script("fail cuMemAlloc_v2=2");
        let bytes = pages.content.len() as u64;
        let moved_by = |executor| {
            let moved = server.readings().moved;
            let of = moved.iter().find(|moved| moved.1 == executor);
            of.map_or(0, |moved| moved.2.pieces)
        };
        let lines = log::lines();
        for _ in 0..3 {
            assert_eq!(pages.run(pages.store(&server, 8)).unwrap(), bytes);
        }
        // Once, however often it was asked.
        assert_eq!(log::lines(), lines + 1);
        assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
        assert_eq!(moved_by(Executor::Plain), 3);
        // There is room again, and whoever may ask for it hears so.
        server.script("reset");
        pages.run(pages.store(&server, 8)).unwrap();
        assert_eq!(moved_by(then), if then == Executor::Plain { 4 } else { 1 });
        assert_eq!(server.count("cuMemAlloc_v2"), asked);
        drop(pages);
        server.ends_clean();
    }
}

/// A GPU that had no memory for staging when it was tried out, and that is tried again at once.
fn without_room() -> (Server, Lender, Pages) {
    let options = GpuOptions {
        staging_pause: Duration::from_millis(1),
        ..GpuOptions::default()
    };
    let server = Server::with("memory=20971520", options, 1 << 20);
    let mut engine = Lender::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    (server, engine, pages)
}

/// Memory that was short when the GPU was tried out, and is there again later.
#[test]
fn staging_is_tried_when_there_is_memory_for_it() {
    let (server, _engine, pages) = without_room();
    let staged = |direction: Direction| {
        let rates = server.readings().profile.rates;
        rates[direction as usize][Executor::Staged as usize]
    };
    let asked = server.count("cuMemAlloc_v2");
    wait(|| server.count("cuMemAlloc_v2") >= asked + 3);
    assert_eq!(server.readings().profile.obstacles.len(), 1);
    // There is always something with the GPU or waiting for it.
    let store = || pages.begin(pages.store(&server, 8));
    let mut stored = [store(), store()];
    server.script("memory=8589934592");
    wait(|| {
        let [first, second] = std::mem::replace(&mut stored, [store(), store()]);
        first.end().unwrap();
        second.end().unwrap();
        server.readings().profile.obstacles.is_empty()
    });
    for ticket in stored {
        ticket.end().unwrap();
    }
    for direction in [Direction::Store, Direction::Retrieve] {
        assert!(staged(direction).iter().all(Option::is_some));
    }
    let bytes = pages.content.len() as u64;
    assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
    // It is not tried any more, and its buffers are gone.
    let asked = server.count("cuMemAlloc_v2");
    pages.run(pages.retrieve(&server, 8)).unwrap();
    assert!(server.count("cuMemAlloc_v2") <= asked + 1);
    drop(pages);
    server.ends_clean();
    drop(Server::with(
        "memory=8589934592",
        GpuOptions::default(),
        1 << 20,
    ));
}

/// A GPU that serves is tried again for one executor that it does without.
#[test]
fn what_fails_when_staging_is_tried_again_costs_nobody_the_gpu() {
    for (function, how) in [
        ("cuMemcpyHtoDAsync_v2", "999"),
        // The memory was there for a moment.
        ("cuLaunchKernel", "2"),
        ("cuStreamSynchronize", "999@1"),
    ] {
        let (server, _engine, pages) = without_room();
        server.script(&format!("fail {function}={how}; memory=8589934592"));
        wait(|| {
            let readings = server.readings();
            assert_eq!(readings.broken, None, "{function}");
            let mut others = readings.profile.obstacles.into_iter();
            let others = others.find(|(_, why)| why != "the GPU has no memory for its buffers");
            assert_eq!(others, None, "{function}");
            server.count(function) >= 2
        });
        let bytes = pages.content.len() as u64;
        let plain = pages.store(&server, 8);
        server.script("reset");
        assert_eq!(pages.run(plain).unwrap(), bytes);
        wait(|| server.readings().profile.obstacles.is_empty());
        // Nothing of the trials before is left.
        drop(pages);
        server.ends_clean();
    }
}

/// Where nobody knows what a trial has left on the lanes, they are no place for a transfer.
#[test]
fn a_trial_of_staging_that_may_not_have_ended_is_the_last() {
    let (server, _engine, pages) = without_room();
    server.script("fail cuStreamSynchronize=999; memory=8589934592");
    wait(|| server.readings().broken.is_some());
    let error = pages.run(pages.store(&server, 1)).unwrap_err();
    assert!(error.to_string().contains("(999)"), "{error}");
    assert_eq!(server.violations(), "");
    assert!(server.count("live.memory") > 0 && server.count("live.host") > 0);
}

/// A driver that does not come back from making a context, or from a trial, costs those who register on that GPU their
/// patience once, and nobody else anything.
#[test]
fn a_driver_that_hangs_while_a_gpu_is_taken_into_use_is_left() {
    for (function, what) in [
        ("cuDevicePrimaryCtxRetain", "making its context"),
        ("cuLaunchKernel", "its trial"),
    ] {
        let options = GpuOptions {
            // Most often enough for a trial that does not hang.
            trial_timeout: Duration::from_secs(4),
            ..GpuOptions::default()
        };
        let server = Server::with(&format!("hold {function}@1"), options, 1 << 20);
        let mut engine = Lender::start();
        let refused = |engine: &mut Lender| {
            let error = Pages::on(0, &server, engine, [8, 64, 8]).err().unwrap();
            let DeviceError::Hangs(why) = error else {
                panic!("{error}")
            };
            assert_eq!(why, format!("{what} has not ended in 4s"));
            why
        };
        let taken = |gpu: u8, engine: &mut Lender| loop {
            match Pages::on(gpu, &server, engine, [8, 64, 8]) {
                Ok(pages) => return pages,
                // The machine is slow, and nothing is held.
                Err(DeviceError::Hangs(_)) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        let why = refused(&mut engine);
        let status = &server.cuda.status()[0];
        assert_eq!(status.error, Some(why));
        assert!(status.readings.is_none());
        // It is not asked again.
        let asked = server.count("cuDevicePrimaryCtxRetain");
        refused(&mut engine);
        assert_eq!(server.count("cuDevicePrimaryCtxRetain"), asked);
        let other = taken(1, &mut engine);
        server.pinned();
        other.run(other.store(&server, 1)).unwrap();
        assert_eq!(server.cuda.status()[1].error, None);
        // It comes back after all.
        server.script("release");
        wait(|| server.cuda.status()[0].error.is_none());
        let pages = taken(0, &mut engine);
        pages.run(pages.store(&server, 1)).unwrap();
        drop((pages, other));
        server.ends_clean();
    }
}

/// Whoever waits for a trial is told when the device is stopped, and nobody waits for the driver.
#[test]
fn a_device_is_stopped_amid_a_trial() {
    let server = Server::with("hold cuLaunchKernel@1", GpuOptions::default(), 1 << 20);
    let mut engine = Lender::start();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| Pages::on(0, &server, &mut engine, [8, 64, 8]).err());
        wait(|| server.count("cuLaunchKernel") == 1);
        assert_eq!(server.cuda.stop(), []);
        let error = registering.join().unwrap().unwrap();
        assert!(matches!(error, DeviceError::Stopped), "{error}");
    });
    assert_eq!(server.cuda.unpin(), Ok(()));
    let rest = server.without_device();
    rest.script("release");
    wait(|| rest.count("live.contexts") == 0);
    rest.is_clean();
}
