//! Virtual memory management: expandable segments and fabric handles.

use std::os::fd::AsRawFd;

use kvtier_device::cuda::driver::DevicePtr;
use kvtier_device::cuda::storages::Storages;
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec};

use super::memory::refused;
use super::setup::Bench;
use crate::exporter::{Exporter, GRANULE, UUID, spec, torch};

/// As PyTorch 2.13 writes it; `kind` is 1 for descriptors, 2 for fabric handles.
fn expandable(pid: i32, size: u64, count: usize, kind: i32, handles: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x03e".to_vec();
    bytes.extend(pid.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(size.to_le_bytes());
    bytes.extend((count as u64).to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(handles);
    bytes
}

fn descriptors(pid: i32, size: u64, fds: &[i32]) -> Vec<u8> {
    let raw: Vec<u8> = fds.iter().flat_map(|fd| fd.to_le_bytes()).collect();
    expandable(pid, size, fds.len(), 1, &raw)
}

/// Pieces of the exporter: bytes of each, and the numbers of their descriptors.
fn pieces(exporter: &mut Exporter, count: usize) -> (u64, Vec<i32>) {
    let answer = exporter.ask(&format!("segments {count}"));
    let mut numbers = answer.split(' ');
    let size = numbers.next().unwrap().parse().unwrap();
    (size, numbers.map(|fd| fd.parse().unwrap()).collect())
}

fn vmm(fabric: Option<Vec<u8>>, bytes: u64, offset: u64, used: u64) -> MemorySpec {
    spec(CudaStorage {
        device_uuid: UUID.into(),
        allocation: CudaAllocation::Vmm { fabric, bytes },
        offset,
        bytes: used,
    })
}

#[test]
fn expandable_segments_are_mapped_in_order() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let (size, fds) = pieces(&mut exporter, 3);
    let handle = descriptors(exporter.pid(), size, &fds);
    let storage = |offset, bytes| spec(torch(&handle, offset, bytes));
    let layers = [storage(0, 3 * size), storage(size - 4, size)];
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open_files();
    let storages = Storages::open(&bench.allocations, &layers).unwrap();
    let base = storages.all()[0].start();
    assert_eq!(storages.all()[1].start(), DevicePtr(base.0 + size - 4));
    assert_eq!(
        bench.read(storages.all()[1].start(), 8),
        [1, 1, 1, 1, 2, 2, 2, 2]
    );
    assert_eq!(bench.read(DevicePtr(base.0 + 3 * size - 2), 2), [3, 3]);
    // Both layers are in the same three pieces, which are one allocation.
    assert_eq!(bench.allocations.open_count(), 1);
    assert_eq!(bench.count("cuMemImportFromShareableHandle"), 3);
    assert_eq!(bench.count("cuMemMap"), 3);
    assert_eq!(bench.count("live.physical"), 0);
    // What is mapped needs no descriptor: the fetched ones are closed.
    assert_eq!(open_files(), before);
    drop(storages);
    assert_eq!(bench.count("cuMemUnmap"), 3);
    assert_eq!(bench.count("cuMemAddressFree"), 1);
    assert_eq!(open_files(), before);
    bench.is_clean();
}

/// Numbers of descriptors and processes are used again for other memory: what an earlier registration has mapped by
/// the same bytes must not be taken for it.
#[test]
fn each_registration_maps_its_own_segments() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let (size, fds) = pieces(&mut exporter, 1);
    let memory = [spec(torch(
        &descriptors(exporter.pid(), size, &fds),
        0,
        size,
    ))];
    let first = Storages::open(&bench.allocations, &memory).unwrap();
    let second = Storages::open(&bench.allocations, &memory).unwrap();
    assert_ne!(first.all()[0].start(), second.all()[0].start());
    drop(first);
    assert_eq!(bench.read(second.all()[0].start(), 2), [1, 1]);
    drop(second);
    bench.is_clean();
}

#[test]
fn mapped_segments_outlive_their_process() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let (size, fds) = pieces(&mut exporter, 2);
    let memory = [spec(torch(
        &descriptors(exporter.pid(), size, &fds),
        0,
        2 * size,
    ))];
    let storages = Storages::open(&bench.allocations, &memory).unwrap();
    exporter.kill();
    let last = DevicePtr(storages.all()[0].start().0 + 2 * size - 1);
    assert_eq!(bench.read(last, 1), [2]);
    drop(storages);
    refused(
        &bench,
        &memory,
        &["kv_caches[0].finding memory of process", "PID namespace"],
    );
    bench.is_clean();
}

#[test]
fn invalid_descriptors_are_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let (size, fds) = pieces(&mut exporter, 1);
    let pid = exporter.pid();
    let open = |pid, size, fds: &[i32]| [spec(torch(&descriptors(pid, size, fds), 0, size))];
    // One that does not exist, behind one that does.
    let texts = ["taking a descriptor of process", "Bad file descriptor"];
    refused(&bench, &open(pid, size, &[fds[0], 9999]), &texts);
    // One of something else: the exporter's standard input.
    refused(
        &bench,
        &open(pid, size, &[fds[0], 0]),
        &["a segment by its descriptor", "cuMemImport"],
    );
    // Pieces that are said to be larger than they are.
    refused(
        &bench,
        &open(pid, 2 * size, &[fds[0]]),
        &["mapping memory", "cuMemMap"],
    );
    // Our own.
    let ours = std::io::stdin().as_raw_fd();
    let own = std::process::id() as i32;
    let texts = ["handle[1] process id is", "a process other than this one"];
    refused(&bench, &open(own, size, &[ours]), &texts);
    // More than the GPU has, before anything is fetched.
    let many = vec![fds[0]; 64];
    let texts = ["handle[1] segments is 34359738368 bytes", "1 to 8589934592"];
    refused(&bench, &open(pid, 1 << 29, &many), &texts);
}

#[test]
fn storages_beyond_their_segments_are_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let (size, fds) = pieces(&mut exporter, 2);
    let handle = descriptors(exporter.pid(), size, &fds);
    for (offset, bytes) in [(0, 2 * size + 1), (size, size + 1), (u64::MAX, 2)] {
        let memory = [spec(torch(&handle, offset, bytes))];
        refused(&bench, &memory, &["kv_caches[0].storage is"]);
    }
    bench.is_clean();
}

#[test]
fn fabric_handles_need_no_living_process() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let handles = exporter.bytes("fabric 2");
    let size = GRANULE;
    // A process that does not exist: fabric handles do not need it.
    let segments = expandable(i32::MAX, size, 2, 2, &handles);
    let one = handles[64..].to_vec();
    let memory = [
        spec(torch(&segments, size - 1, 2)),
        vmm(Some(one.clone()), size, 4, size - 4),
        vmm(Some(one.clone()), size, 8, 8),
    ];
    let storages = Storages::open(&bench.allocations, &memory).unwrap();
    assert_eq!(bench.read(storages.all()[0].start(), 2), [1, 2]);
    assert_eq!(bench.read(storages.all()[1].start(), 4), [2; 4]);
    let [_, second, third] = storages.all() else {
        panic!("not three")
    };
    assert_eq!(third.start().0 - second.start().0, 4);
    assert_eq!(bench.count("cuMemImportFromShareableHandle"), 3);
    drop(storages);
    bench.is_clean();

    refused(
        &bench,
        &[vmm(Some(one.clone()), size, 0, size + 1)],
        &["kv_caches[0].storage is"],
    );
    refused(
        &bench,
        &[vmm(Some(one.clone()), 16 << 30, 0, 1)],
        &["alloc_size is 17179869184 bytes"],
    );
    refused(
        &bench,
        &[vmm(Some(one.clone()), 0, 0, 0)],
        &["alloc_size is 0 bytes"],
    );
    refused(
        &bench,
        &[vmm(Some(vec![0; 63]), size, 0, 1)],
        &["fabric_blob is 63 bytes"],
    );
    refused(
        &bench,
        &[vmm(None, size, 0, 1)],
        &["kind is posix_fd", "allowed: fabric"],
    );
    assert_eq!(bench.violations(), "");

    bench.script("fail cuMemImportFromShareableHandle=800");
    let texts = ["memory by its fabric handle", "an IMEX channel"];
    refused(&bench, &[vmm(Some(one), size, 0, 1)], &texts);
}
