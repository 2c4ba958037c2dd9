//! The trial of all executors before a GPU is used.

use std::time::Duration;

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{DeviceError, Direction};

use super::log;
use super::setup::{Pages, Server, content, wait};
use crate::exporter::Exporter;

/// With a script in force: the executors that are not used, with what is said of them. Transfers are right all the
/// same, and use none of them.
fn without(script: &str) -> Vec<(Executor, String)> {
    let server = Server::with(script, GpuOptions::default(), 1 << 20);
    let mut engine = Exporter::start();
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
fn all_executors_are_available_on_a_full_driver() {
    assert_eq!(without(""), []);
}

#[test]
fn driver_without_kernel_or_batches_still_serves() {
    let obstacles = without("fail cuModuleLoadDataEx=218");
    let [(Executor::Staged, why), (Executor::Kernel, same)] = &obstacles[..] else {
        panic!("{obstacles:?}")
    };
    assert!(why.contains("cuModuleLoadDataEx"), "{why}");
    assert_eq!(why, same);
    for script in ["fail cuGetProcAddress_v2=500", "driver=12070"] {
        let obstacles = without(script);
        let [(Executor::Batch, why)] = &obstacles[..] else {
            panic!("{script}: {obstacles:?}")
        };
        assert_eq!(why, "the driver is older than CUDA 12.8");
    }
    assert_eq!(
        without("fail cuModuleLoadDataEx=218; fail cuGetProcAddress_v2=500; driver=12080").len(),
        3
    );
}

/// A call that succeeds without doing its work.
#[test]
fn failing_or_wrong_executor_is_excluded() {
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
fn wrong_kernel_is_excluded() {
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
fn batch_and_kernel_need_registered_memory() {
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

/// As in real transfers, the GPU has the next piece before the first one is done.
#[test]
fn rates_are_measured_with_all_slots_in_flight() {
    let server = Server::with("hold d2h", GpuOptions::default(), 1 << 20);
    let mut engine = Exporter::start();
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
fn staging_trial_uses_the_buffers_that_fit() {
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

/// If a configured executor does not work, the registration of an engine reports it, and not every transfer.
#[test]
fn configured_executor_that_fails_is_refused() {
    for (script, executor, expected) in [
        (
            "fail cuModuleLoadDataEx=218",
            Executor::Kernel,
            "the executor kernel cannot be used on this GPU",
        ),
        (
            "fail cuModuleLoadDataEx=218",
            Executor::Staged,
            "the executor staged cannot be used on this GPU",
        ),
        (
            "fail cuGetProcAddress_v2=500",
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
        let mut engine = Exporter::start();
        let error = Pages::on(0, &server, &mut engine, [8, 64, 8])
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(expected), "{script}: {error}");
        assert!(server.cuda.status()[0].readings.is_none());
        // Nothing of it is left, and it may work the next time; what a driver has is looked up once.
        server.script("reset");
        let again = Pages::on(0, &server, &mut engine, [8, 64, 8]);
        assert_eq!(again.is_err(), script == "fail cuGetProcAddress_v2=500");
        drop(again);
        server.ends_clean();
    }
}

/// Errors of a lost context concern the GPU, not an executor.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn gpu_failing_its_trial_is_not_used() {
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
        let mut engine = Exporter::start();
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

/// Buffers of a trial of unknown state are not freed.
#[test]
fn memory_possibly_in_use_is_not_freed() {
    let server = Server::with(
        "fail cuStreamSynchronize=999@5",
        GpuOptions::default(),
        1 << 20,
    );
    let mut engine = Exporter::start();
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
fn missing_staging_buffer_is_no_error() {
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
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        // The trial's buffers are freed.
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
        // Logged once, for any number of attempts.
        assert_eq!(log::lines(), lines + 1);
        assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
        assert_eq!(moved_by(Executor::Plain), 3);
        // There is memory again, and the next attempt succeeds.
        server.script("reset");
        pages.run(pages.store(&server, 8)).unwrap();
        assert_eq!(moved_by(then), if then == Executor::Plain { 4 } else { 1 });
        assert_eq!(server.count("cuMemAlloc_v2"), asked);
        drop(pages);
        server.ends_clean();
    }
}

/// A GPU that had no memory for staging when it was tried out, and that is tried again at once.
fn without_staging_memory() -> (Server, Exporter, Pages) {
    let options = GpuOptions {
        staging_pause: Duration::from_millis(1),
        ..GpuOptions::default()
    };
    let server = Server::with("memory=20971520", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    (server, engine, pages)
}

/// Memory that was short when the GPU was tried out, and is there again later.
#[test]
fn staging_trial_repeats_when_memory_is_free() {
    let (server, _engine, pages) = without_staging_memory();
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
    // It is not tried any more, and its buffers are freed.
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
fn failed_staging_trial_keeps_the_gpu() {
    for (function, how) in [
        ("cuMemcpyHtoDAsync_v2", "999"),
        // The memory was there for a moment.
        ("cuLaunchKernel", "2"),
        ("cuStreamSynchronize", "999@1"),
    ] {
        let (server, _engine, pages) = without_staging_memory();
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

/// Lanes on which copies of a trial may still run are not used for transfers.
#[test]
fn staging_trial_of_unknown_state_is_the_last() {
    let (server, _engine, pages) = without_staging_memory();
    server.script("fail cuStreamSynchronize=999; memory=8589934592");
    wait(|| server.readings().broken.is_some());
    let error = pages.run(pages.store(&server, 1)).unwrap_err();
    assert!(error.to_string().contains("(999)"), "{error}");
    assert_eq!(server.violations(), "");
    assert!(server.count("live.memory") > 0 && server.count("live.host") > 0);
}

/// A driver call that hangs in context creation or in the trial delays registrations on that GPU by one timeout, and
/// nothing else.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn driver_hanging_in_activation_is_abandoned() {
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
        let mut engine = Exporter::start();
        let refused = |engine: &mut Exporter| {
            let error = Pages::on(0, &server, engine, [8, 64, 8]).err().unwrap();
            let DeviceError::DriverHangs(why) = error else {
                panic!("{error}")
            };
            assert_eq!(why, format!("{what} has not ended in 4s"));
            why
        };
        let taken = |gpu: u8, engine: &mut Exporter| loop {
            match Pages::on(gpu, &server, engine, [8, 64, 8]) {
                Ok(pages) => return pages,
                // The machine is slow, and nothing is held.
                Err(DeviceError::DriverHangs(_)) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        let why = refused(&mut engine);
        let status = &server.cuda.status()[0];
        assert_eq!(status.error, Some(why));
        assert!(status.readings.is_none());
        // It is not called again.
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

/// A stop ends the wait for a trial at once, without waiting for the driver.
#[test]
fn device_stops_during_a_trial() {
    let server = Server::with("hold cuLaunchKernel@1", GpuOptions::default(), 1 << 20);
    let mut engine = Exporter::start();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| Pages::on(0, &server, &mut engine, [8, 64, 8]).err());
        wait(|| server.count("cuLaunchKernel") == 1);
        assert_eq!(server.cuda.stop(), Vec::<i32>::new());
        let error = registering.join().unwrap().unwrap();
        assert!(matches!(error, DeviceError::Stopped), "{error}");
    });
    assert_eq!(server.cuda.unpin(), Ok(()));
    let rest = server.without_device();
    rest.script("release");
    wait(|| rest.count("live.contexts") == 0);
    rest.is_clean();
}
