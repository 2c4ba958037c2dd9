//! What comes with PyTorch's storages: the event that they are ready, and the counter that they are in use.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use kvtier_device::cuda::storages::Storages;
use kvtier_device::{CudaAllocation, MemorySpec};

use super::memory::refused;
use super::setup::Bench;
use crate::exporter::{EXPORTED_BYTES, Exporter, spec, torch};

/// A storage with all that PyTorch adds.
fn storage(handle: &[u8; 64], counter: Option<(&str, u64)>, event: Option<&[u8]>) -> MemorySpec {
    let mut storage = torch(handle, 0, EXPORTED_BYTES);
    let CudaAllocation::Torch {
        ref_counter: the_counter,
        event: the_event,
        ..
    } = &mut storage.allocation
    else {
        panic!("not of PyTorch");
    };
    *the_counter = counter.map(|(name, index)| (name.as_bytes().to_vec(), index));
    *the_event = event.map(<[u8]>::to_vec);
    spec(storage)
}

/// A file of counters as PyTorch makes it; all are 2, as if another process used all storages, too.
struct Counters {
    name: String,
    path: PathBuf,
    file: File,
}

impl Counters {
    fn new() -> Self {
        let name = format!("/torch_{}_5_1", std::process::id());
        let path = PathBuf::from(format!("/dev/shm{name}"));
        let _ = std::fs::remove_file(&path);
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        let twos = 2i64.to_ne_bytes().repeat(10_000);
        file.write_all_at(&twos, 64).unwrap();
        Self { name, path, file }
    }

    fn get(&self, index: u64) -> i64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, 64 + index * 8).unwrap();
        i64::from_ne_bytes(bytes)
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn closing_a_storage_decrements_its_counter_once() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let counters = Counters::new();
    // Three layers of one storage; two of them came in the same wrapper.
    let of = |index| storage(&handle, Some((&counters.name, index)), None);
    let layers = [of(4), of(5), of(5)];
    let values = || [3, 4, 5, 6].map(|index| counters.get(index));
    let storages = Storages::open(&bench.allocations, &layers).unwrap();
    assert_eq!(values(), [2, 2, 2, 2]);
    drop(storages);
    assert_eq!(values(), [2, 1, 1, 2]);
    bench.is_clean();
}

#[test]
fn refused_registration_decrements_its_counters() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let counters = Counters::new();
    let bad = [
        ("/etc/passwd", 0, "handle[4] is"),
        ("/torch_1/../../x", 0, "handle[4] is"),
        ("torch_1_2_3", 0, "handle[4] is"),
        (&counters.name, 10_000, "handle[5] is 10000"),
    ];
    for (at, (name, index, text)) in bad.into_iter().enumerate() {
        let good = storage(&handle, Some((&counters.name, at as u64)), None);
        let bad = storage(&handle, Some((name, index)), None);
        refused(&bench, &[good, bad], &["kv_caches[1].", text]);
        assert_eq!(counters.get(at as u64), 1);
    }
    bench.is_clean();
}

#[test]
fn missing_counter_file_is_ignored() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let memory = [storage(&handle, Some(("/torch_999999999_1_1", 0)), None)];
    drop(Storages::open(&bench.allocations, &memory).unwrap());
    assert!(!PathBuf::from("/dev/shm/torch_999999999_1_1").exists());
    bench.is_clean();
}

#[test]
fn storages_are_ready_after_their_events() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let past = exporter.bytes("event");
    // The engine's next work begins and does not get on.
    exporter.ask("script hold kernel");
    exporter.ask("fill 3");
    let pending = exporter.bytes("event");
    let of = |event: &[u8]| storage(&handle, None, Some(event));
    let memory = [
        of(&past),
        of(&pending),
        of(&pending),
        storage(&handle, None, None),
    ];
    let mut storages = Storages::open(&bench.allocations, &memory).unwrap();
    assert_eq!(bench.count("cuIpcOpenEventHandle"), 2);
    assert!(!storages.are_ready().unwrap());
    assert!(!storages.wait_until_ready(Instant::now()).unwrap());
    exporter.ask("script release");
    exporter.ask("sync");
    assert!(storages.are_ready().unwrap());
    // They are not queried again.
    assert_eq!(bench.count("live.events"), 0);
    assert!(storages.wait_until_ready(Instant::now()).unwrap());
    assert_eq!(bench.read(storages.all()[0].start(), 2), [3, 3]);
    // Never on a stream of ours, and never waited for.
    for function in [
        "cuStreamWaitEvent",
        "cuEventSynchronize",
        "cuCtxSynchronize",
    ] {
        assert_eq!(bench.count(function), 0, "{function}");
    }
    drop(storages);
    bench.is_clean();
}

#[test]
fn death_before_the_event_blocks_nothing() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    exporter.ask("script hold kernel");
    exporter.ask("fill 3");
    let pending = exporter.bytes("event");
    let memory = [storage(&handle, None, Some(&pending))];
    let mut storages = Storages::open(&bench.allocations, &memory).unwrap();
    exporter.kill();
    assert!(!storages.wait_until_ready(Instant::now()).unwrap());
    drop(storages);
    assert_eq!(bench.count("cuIpcCloseMemHandle"), 1);
    bench.is_clean();
}

#[test]
fn unopenable_events_are_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let good = storage(&handle, None, None);
    let cut = storage(&handle, None, Some(&[0; 63]));
    refused(
        &bench,
        &[good.clone(), cut],
        &["kv_caches[1].handle[6] is 63 bytes"],
    );
    bench.is_clean();
    let unknown = storage(&handle, None, Some(&[7; 64]));
    let texts = ["kv_caches[1].handle[6]", "cuIpcOpenEventHandle"];
    refused(&bench, &[good, unknown], &texts);
}
