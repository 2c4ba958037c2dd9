//! Every way of copying is tried out before a GPU is used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_device::Direction;
use kvtier_device::cuda::{Executor, GpuOptions};

use crate::lender::Lender;
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

/// Counts lines of the log.
struct Lines;

static LINES: AtomicU64 = AtomicU64::new(0);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("kvtier_device")
    }
    fn event(&self, _: &tracing::Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// An engine takes all the memory of a GPU, and what would be staged goes straight.
#[test]
fn a_buffer_that_there_is_no_room_for_is_not_needed() {
    tracing::subscriber::set_global_default(Lines).unwrap();
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
        let lines = LINES.load(Ordering::Relaxed);
        for _ in 0..3 {
            assert_eq!(pages.run(pages.store(&server, 8)).unwrap(), bytes);
        }
        // Once, however often it was asked.
        assert_eq!(LINES.load(Ordering::Relaxed), lines + 1);
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
