//! Everything that can run a plan, over plain byte vectors.

use crate::model::apply;
use kvtier_device::cuda::kernel::{KernelPlan, KernelWork, THREADS, Unit};
use kvtier_device::cuda::{AddressRange, DeviceCopies, DeviceCopy, PinnedPieces};
// What has the kernel, compiled for this processor.
use kvtier_cuda_fake as _;
use kvtier_device::{Direction, PlannedCopy};

/// Runs copies between memories and an object, one way; a copy outside them panics.
pub type Executor = fn(&[PlannedCopy], &mut [Vec<u8>], &mut [u8], Direction);

/// By name: the reference, and what the CUDA backend makes of a plan.
pub const EXECUTORS: [(&str, Executor); 3] = [
    ("reference", apply),
    ("runs", by_runs),
    ("kernel", by_kernel),
];

/// With the addresses that the vectors have.
fn placed(copies: &[PlannedCopy], memories: &mut [Vec<u8>], object: &mut [u8]) -> DeviceCopies {
    let place = |bytes: &mut [u8]| AddressRange {
        address: bytes.as_mut_ptr().expose_provenance() as u64,
        bytes: bytes.len() as u64,
    };
    let memories: Vec<AddressRange> = memories.iter_mut().map(|memory| place(memory)).collect();
    let extent = place(object);
    let mut placed = DeviceCopies::default();
    for copy in copies {
        placed.push(DeviceCopy::new(copy, &memories, extent).unwrap());
    }
    placed
}

fn by_runs(
    copies: &[PlannedCopy],
    memories: &mut [Vec<u8>],
    object: &mut [u8],
    direction: Direction,
) {
    let copies = placed(copies, memories, object);
    // Borders at places that nothing else is aligned to.
    let pieces = PinnedPieces {
        start: object.as_ptr().addr() as u64 + 17,
        bytes: 101,
    };
    copy_runs(&copies, pieces, direction);
}

fn by_kernel(
    copies: &[PlannedCopy],
    memories: &mut [Vec<u8>],
    object: &mut [u8],
    direction: Direction,
) {
    launch(&placed(copies, memories, object), direction);
}

/// Runs copies as the driver would, run by run.
pub fn copy_runs(copies: &DeviceCopies, pieces: PinnedPieces, direction: Direction) {
    let visited: Result<(), ()> = copies.visit_runs(pieces, |run| {
        assert!(run.bytes > 0);
        if pieces.bytes > 0 && run.host >= pieces.start {
            let piece = |address: u64| (address - pieces.start) / pieces.bytes;
            assert_eq!(piece(run.host), piece(run.host + run.bytes - 1));
        }
        let (source, target) = run.source_and_target(direction);
        let source = std::ptr::with_exposed_provenance::<u8>(source as usize);
        let target = std::ptr::with_exposed_provenance_mut::<u8>(target as usize);
        // SAFETY: the copies were made of places that are exclusively borrowed vectors, which lie
        // apart from each other.
        unsafe { std::ptr::copy_nonoverlapping(source, target, run.bytes as usize) };
        Ok(())
    });
    visited.unwrap();
}

/// Runs copies with the kernel, compiled for this processor.
pub fn launch(copies: &DeviceCopies, direction: Direction) {
    let mut plan = KernelPlan::default();
    plan.push(copies.as_slice(), direction);
    let moved: u64 = plan
        .launches()
        .map(|(unit, work)| run_kernel(unit, work))
        .sum();
    // Every unit once.
    assert_eq!(moved, copies.run_lengths().bytes);
}

fn run_kernel(unit: Unit, work: &KernelWork) -> u64 {
    // SAFETY: as declared in `kernel/kvcopy_host.cpp`.
    unsafe extern "C" {
        fn kvcopy_launch_host(
            unit: i32,
            blocks: u32,
            threads: u32,
            items: *const u8,
            tiles: *const u8,
            n_tiles: u32,
        ) -> i64;
    }
    // SAFETY: items and tiles are of this plan, whose copies were made of places that are
    // exclusively borrowed vectors, which lie apart from each other.
    let moved = unsafe {
        kvcopy_launch_host(
            unit.bytes() as i32,
            work.blocks(3),
            THREADS,
            work.item_bytes().as_ptr(),
            work.tile_bytes().as_ptr(),
            work.tiles().len() as u32,
        )
    };
    assert!(moved >= 0, "no kernel of this unit");
    moved as u64
}
