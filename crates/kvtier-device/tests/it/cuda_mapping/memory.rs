//! Allocations by IPC handle.

use std::sync::Barrier;

use kvtier_device::cuda::driver::{DeviceBuffer, DevicePtr, IpcHandle};
use kvtier_device::cuda::storages::Storages;
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec};

use super::setup::Bench;
use crate::exporter::{EXPORTED_BYTES, Exporter, UUID, spec, torch};

/// Asserts that opening fails with all of `texts` in the error and leaves nothing behind.
pub fn refused(bench: &Bench, memories: &[MemorySpec], texts: &[&str]) {
    let error = Storages::open(&bench.allocations, memories)
        .unwrap_err()
        .to_string();
    for text in texts {
        assert!(error.contains(text), "{error} has no {text}");
    }
    bench.nothing_is_left();
}

fn raw(handle: [u8; 64], offset: u64, bytes: u64) -> CudaStorage {
    CudaStorage {
        device_uuid: UUID.into(),
        allocation: CudaAllocation::Raw { handle },
        offset,
        bytes,
    }
}

#[test]
fn shared_allocation_is_opened_and_closed_once() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    exporter.ask("fill 7");
    exporter.ask("sync");
    let handle = exporter.handle();
    let counts = || {
        let opened = bench.count("cuIpcOpenMemHandle_v2");
        (opened, bench.count("cuIpcCloseMemHandle"))
    };
    // The same allocation by every spelling of its handle.
    let mut older = torch(&handle, 8192, 4096);
    older.allocation = CudaAllocation::Torch {
        handle: Some([b"\x02c", handle.as_slice()].concat()),
        ref_counter: None,
        event: None,
    };
    let layers = [
        spec(torch(&handle, 0, 4096)),
        spec(older),
        spec(raw(handle, EXPORTED_BYTES - 512, 512)),
        spec(torch(&handle, 0, EXPORTED_BYTES)),
    ];
    let first = Storages::open(&bench.allocations, &layers).unwrap();
    assert_eq!(counts(), (1, 0));
    let base = first.all()[0].start();
    let at = |offset| DevicePtr(base.0 + offset);
    let starts: Vec<_> = first.all().iter().map(|storage| storage.start()).collect();
    assert_eq!(starts, [at(0), at(8192), at(EXPORTED_BYTES - 512), at(0)]);
    assert_eq!(first.all()[2].bytes(), 512);
    assert_eq!(first.all()[2].allocation().bytes(), EXPORTED_BYTES);
    assert_eq!(bench.read(at(EXPORTED_BYTES - 512), 512), [7; 512]);

    // Another registration of the same memory, as of an engine that registers again.
    let second = Storages::open(&bench.allocations, &layers[..1]).unwrap();
    assert_eq!(second.all()[0].start(), base);
    drop(first);
    assert_eq!(counts(), (1, 0));
    assert_eq!(bench.read(base, 4096), [7; 4096]);
    drop(second);
    assert_eq!(counts(), (1, 1));
    let again = Storages::open(&bench.allocations, &layers[..1]).unwrap();
    assert_eq!(counts(), (2, 1));
    drop(again);
    assert_eq!(counts(), (2, 2));
    bench.is_clean();
}

#[test]
fn concurrent_opens_never_see_closed_memory() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let memory = [spec(torch(&exporter.handle(), 0, EXPORTED_BYTES))];
    let start = Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                for _ in 0..50 {
                    let storages = Storages::open(&bench.allocations, &memory).unwrap();
                    let at = storages.all()[0].start();
                    let range = bench.context().address_range(at).unwrap();
                    assert_eq!(range, (at, EXPORTED_BYTES));
                }
            });
        }
    });
    let opened = bench.count("cuIpcOpenMemHandle_v2");
    assert_eq!(opened, bench.count("cuIpcCloseMemHandle"));
    bench.is_clean();
}

/// While the driver opens or closes one allocation, only users of the same one wait.
#[test]
fn slow_open_delays_only_its_allocation() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let slow = [spec(torch(&exporter.handle(), 0, EXPORTED_BYTES))];
    let other = [spec(torch(&exporter.bytes("small"), 0, 4096))];
    let open = |memory: &[MemorySpec]| Storages::open(&bench.allocations, memory).unwrap();
    let called = |function, times| {
        while bench.count(function) < times {
            std::thread::yield_now();
        }
    };
    bench.script("hold cuIpcOpenMemHandle_v2@1");
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| open(&slow));
        called("cuIpcOpenMemHandle_v2", 1);
        let second = scope.spawn(|| open(&slow));
        let others = open(&other);
        assert_eq!(bench.allocations.open_count(), 1);
        drop(others);
        assert_eq!(bench.allocations.open_count(), 0);
        assert!(!first.is_finished() && !second.is_finished());
        bench.script("release");
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!(first.all()[0].start(), second.all()[0].start());
    assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), 2);
    drop(second);

    bench.script("clear; hold cuIpcCloseMemHandle@1");
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| drop(first));
        called("cuIpcCloseMemHandle", 1);
        let again = scope.spawn(|| open(&slow));
        drop(open(&other));
        // An allocation being closed is still counted, and opened again only afterwards.
        assert_eq!(bench.allocations.open_count(), 1);
        assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), 1);
        bench.script("release");
        closing.join().unwrap();
        drop(again.join().unwrap());
    });
    assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), 2);
    bench.is_clean();
}

#[test]
fn gpu_is_found_by_uuid_for_all_tensors() {
    let bench = Bench::new();
    let on = |uuid: &str| {
        let mut storage = raw([0; 64], 0, 1);
        storage.device_uuid = uuid.into();
        spec(storage)
    };
    let found = bench
        .gpus
        .of(&[on(UUID), on(&format!("GPU-{}", UUID.to_uppercase()))]);
    assert_eq!(found.unwrap().uuid, UUID);
    let second = &bench.gpus.all()[1].uuid;
    assert_eq!(bench.gpus.of(&[on(second)]).unwrap().device.ordinal(), 1);
    let other = UUID.replace("5ca1", "5ca2");
    let refused = |memories: &[MemorySpec]| bench.gpus.of(memories).unwrap_err().to_string();
    let error = refused(&[on(UUID), on(&other)]);
    let expected = format!(
        "kv_caches[1].device_uuid is {other:?}; allowed: one of the 2 GPUs this server sees: {UUID}, {second}"
    );
    assert_eq!(error, expected);
    let error = refused(&[on(UUID), on(second)]);
    let expected =
        format!("kv_caches[1].device_uuid is {second}; allowed: {UUID}, as of the tensors");
    assert!(error.starts_with(&expected), "{error}");
    assert!(refused(&[on("cpu")]).contains("kv_caches[0].device_uuid is \"cpu\""));
    let host = MemorySpec::CpuShm {
        name: "/lmcache_kv_1_0".into(),
        nbytes: 1,
    };
    let error = refused(&[on(UUID), host.clone()]);
    assert!(error.contains("kv_caches[1].type is cpu_shm"), "{error}");
    let error = Storages::open(&bench.allocations, &[host]).unwrap_err();
    assert!(error.to_string().contains("type is cpu_shm"), "{error}");
    assert!(refused(&[]).contains("memory is missing"));
}

#[test]
fn truncated_and_missing_handles_are_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let whole = spec(torch(&handle, 0, EXPORTED_BYTES));
    let cut = torch(&[b"\x03c", &handle[..63]].concat(), 0, EXPORTED_BYTES);
    let texts = [
        "kv_caches[1].handle[1] is 65 bytes of kind c",
        "allowed: 66 bytes",
    ];
    refused(&bench, &[whole.clone(), spec(cut)], &texts);
    let mut none = torch(&handle, 0, EXPORTED_BYTES);
    none.allocation = CudaAllocation::Torch {
        handle: None,
        ref_counter: None,
        event: None,
    };
    refused(
        &bench,
        &[whole, spec(none)],
        &["kv_caches[1].handle[1] is nil"],
    );
    assert_eq!(bench.violations(), "");
}

#[test]
fn storages_beyond_their_allocation_are_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handle = exporter.handle();
    let inside = spec(torch(&handle, 512, EXPORTED_BYTES - 512));
    drop(Storages::open(&bench.allocations, std::slice::from_ref(&inside)).unwrap());
    for (offset, bytes) in [
        (0, EXPORTED_BYTES + 1),
        (1, EXPORTED_BYTES),
        (EXPORTED_BYTES, 1),
        (EXPORTED_BYTES + 1, 0),
        (u64::MAX, 2),
        (2, u64::MAX),
    ] {
        let named = format!("kv_caches[1].storage is {bytes} bytes from {offset} on");
        let allowed = format!("allowed: inside the {EXPORTED_BYTES} bytes of its allocation");
        for storage in [torch(&handle, offset, bytes), raw(handle, offset, bytes)] {
            let memories = [inside.clone(), spec(storage)];
            refused(&bench, &memories, &[&named, &allowed]);
        }
    }
    bench.is_clean();
}

#[test]
fn memory_of_unknown_size_is_closed_again() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let memory = [spec(torch(&exporter.handle(), 0, EXPORTED_BYTES))];
    bench.script("fail cuMemGetAddressRange_v2=500@1");
    let texts = ["kv_caches[0].", "cuMemGetAddressRange_v2", "(500)"];
    refused(&bench, &memory, &texts);
    assert_eq!(bench.count("cuIpcCloseMemHandle"), 1);
    drop(Storages::open(&bench.allocations, &memory).unwrap());
    bench.is_clean();
}

#[test]
fn memory_of_a_dead_process_is_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let memory = [spec(torch(&exporter.handle(), 0, EXPORTED_BYTES))];
    exporter.kill();
    let texts = [
        "kv_caches[0].memory by its IPC handle",
        "cuIpcOpenMemHandle_v2",
        "a living process",
    ];
    refused(&bench, &memory, &texts);
    bench.is_clean();
}

#[test]
fn memory_of_this_process_is_refused() {
    let bench = Bench::new();
    let own = DeviceBuffer::new(bench.context(), EXPORTED_BYTES).unwrap();
    let IpcHandle(handle) = own.ipc_handle().unwrap();
    let error = Storages::open(
        &bench.allocations,
        &[spec(torch(&handle, 0, EXPORTED_BYTES))],
    )
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a living process other than this one"),
        "{error}"
    );
    drop(own);
    bench.nothing_is_left();
}

#[test]
fn mappings_outlive_their_process() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    exporter.ask("fill 9");
    exporter.ask("sync");
    let memory = [spec(torch(&exporter.handle(), 0, EXPORTED_BYTES))];
    let storages = Storages::open(&bench.allocations, &memory).unwrap();
    exporter.kill();
    assert_eq!(bench.read(storages.all()[0].start(), 8), [9; 8]);
    drop(storages);
    assert_eq!(bench.count("cuIpcCloseMemHandle"), 1);
    bench.is_clean();
}
