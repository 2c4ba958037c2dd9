//! Bookkeeping per extent, counted by the heap. A test of its own: it replaces the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier_common::extent::{Extent, FreeExtents};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything to the system's heap, and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn less_than_60_bytes_an_extent() {
    const COUNT: usize = 200_000;
    let mut extents: Vec<Extent> = Vec::with_capacity(COUNT);
    let before = HELD.load(Ordering::Relaxed);
    let mut allocator = FreeExtents::new(COUNT as u64 * 4096).unwrap();
    for _ in 0..COUNT {
        extents.push(allocator.allocate(4096).unwrap());
    }
    let full = HELD.load(Ordering::Relaxed) - before;
    assert!(full / COUNT < 60, "{} bytes a taken extent", full / COUNT);
    // The worst case: every second one free, none joined.
    for pair in extents.chunks(2) {
        allocator.free(pair[0]).unwrap();
    }
    let stats = allocator.stats();
    assert_eq!(stats.free_extents + stats.used_extents, COUNT);
    let mixed = HELD.load(Ordering::Relaxed) - before;
    assert!(mixed / COUNT < 60, "{} bytes an extent", mixed / COUNT);
    println!(
        "{} bytes a taken extent, {} mixed",
        full / COUNT,
        mixed / COUNT
    );
}
