//! Costs of a transfer: driver calls and allocated memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use std::sync::Arc;

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{
    BlockTable, ChunkCopy, ChunkRequest, Device, DeviceError, Direction, Engine, KvAxisOrder,
    KvLayout, LayoutHints, TensorSpec, Transfer,
};
use kvtier_memory::Extent;

use super::setup::{Pages, Server, Ticket, storage, wait};
use crate::exporter::Exporter;
use crate::model::{Random, row_major};

/// Counts what threads allocate that ask for it.
struct Counting;

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: what it does is the system's allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Functions of the driver that a transfer may call, however often it asks what is done.
const CALLS: [&str; 16] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuStreamQuery",
];

/// Calls of one transfer of 512 pages, none beside another, by one executor; and what its thread allocates for the next
/// ones.
fn costs(executor: Executor, direction: Direction) -> (Vec<(&'static str, u64)>, u64) {
    let options = GpuOptions {
        executor: Some(executor),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [512, 512, 32]);
    let transfer = pages.transfer(&server, direction, &pages.backwards(16));
    // Every slot once.
    for _ in 0..8 {
        pages.run(transfer.clone()).unwrap();
    }
    server.script("clear");
    pages.run(transfer.clone()).unwrap();
    let calls = CALLS.map(|name| (name, server.count(name)));
    let calls = calls.into_iter().filter(|(_, count)| *count > 0).collect();
    // Ends are reported on the thread that does the work.
    let counting = |yes: bool| {
        let (say, hear) = std::sync::mpsc::channel();
        let done = move |_: Result<u64, DeviceError>| {
            COUNTED.set(yes);
            say.send(()).unwrap();
        };
        pages.memory.transfer(transfer.clone(), Box::new(done));
        hear.recv().unwrap();
    };
    counting(true);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..10 {
        pages.run(transfer.clone()).unwrap();
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    counting(false);
    drop(pages);
    server.ends_clean();
    (calls, allocations / 10)
}

/// No call for each page but where there is nothing else, no wait, no memory of the GPU's: one record of an event for
/// each piece, and one more between the two steps of a staged one.
#[test]
fn driver_calls_per_piece_are_bounded() {
    for direction in [Direction::Store, Direction::Retrieve] {
        let calls = |executor| costs(executor, direction).0;
        assert_eq!(
            calls(Executor::Batch),
            [("cuMemcpyBatchAsync", 1), ("cuEventRecord", 1)]
        );
        assert_eq!(
            calls(Executor::Kernel),
            [("cuLaunchKernel", 1), ("cuEventRecord", 1)]
        );
        assert_eq!(
            calls(Executor::Staged),
            [
                ("cuMemcpyAsync", 1),
                ("cuLaunchKernel", 1),
                ("cuEventRecord", 2),
                ("cuStreamWaitEvent", 1)
            ]
        );
        assert_eq!(
            calls(Executor::Plain),
            [("cuMemcpyAsync", 512), ("cuEventRecord", 1)]
        );
    }
}

/// Lists are used again, and asking what is done takes none: what a transfer of 512 pages in 16 chunks takes is a place in
/// the queue and the copies of a chunk.
#[test]
fn host_memory_per_gpu_is_bounded() {
    for executor in Executor::ALL {
        let allocations = costs(executor, Direction::Store).1;
        assert!(
            allocations <= 4,
            "{executor:?}: {allocations} allocations for a transfer"
        );
    }
}

/// Heads before tokens, and heads of one byte: an object has as many runs as bytes. The thread submits a bounded number at
/// a time, and serves others in between.
#[test]
fn runs_per_piece_are_bounded() {
    for executor in [Executor::Batch, Executor::Kernel, Executor::Staged] {
        let options = GpuOptions {
            executor: Some(executor),
            ..GpuOptions::default()
        };
        let server = Server::with("", options, 1 << 20);
        let mut engine = Exporter::start();
        let shape = vec![3, 16, 4096, 1];
        let bytes = shape.iter().product();
        let (number, handle) = engine.export(bytes);
        let content = Random::new(7).bytes(bytes);
        engine.write(number, &content);
        let tensor = TensorSpec {
            memory: storage(0, handle, bytes),
            dtype_size: 1,
            dtype_name: "uint8".into(),
            stride: row_major(&shape),
            shape,
            storage_offset: 0,
        };
        let hints = LayoutHints {
            kv_layout: Some(KvAxisOrder::Hnd),
            ..LayoutHints::default()
        };
        let layout = KvLayout::detect(&[tensor], Engine::Vllm, &hints, &[], 4096, false).unwrap();
        let layout = Arc::new(layout);
        let memory = server.cuda.open(Arc::clone(&layout)).unwrap();
        server.pinned();
        server.script("clear");
        let request = ChunkRequest {
            object_group: 0,
            chunk: 0,
            skip_tokens: 0,
        };
        let transfer = Transfer {
            arena: Arc::clone(&server.arena),
            blocks: BlockTable::check(&layout, &[[2]], 1).unwrap(),
            chunks: vec![ChunkCopy {
                request,
                extent: Extent::new(0, 65536),
            }],
            direction: Direction::Store,
            deadline: None,
            event: Vec::new(),
        };
        assert_eq!(Ticket::of(&*memory, transfer).end().unwrap(), 65536);
        let page = &content[2 * 65536..];
        let expected: Vec<u8> = (0..65536)
            .map(|at| page[at % 16 * 4096 + at / 16])
            .collect();
        assert!(super::setup::content(&server.arena, 65536) == expected);
        let records = match executor {
            Executor::Staged => 2 * 4,
            _ => 4,
        };
        assert_eq!(server.count("cuEventRecord"), records, "{executor:?}");
        if executor == Executor::Batch {
            assert_eq!(server.count("batched"), 65536);
        }
        drop(memory);
        server.ends_clean();
    }
}

/// A thread with nothing to do asks for nothing.
#[test]
fn idle_gpu_is_not_polled() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [8, 64, 8]);
    Ticket::of(&*pages.memory, pages.store(&server, 1))
        .end()
        .unwrap();
    wait(|| server.readings().in_flight == [0, 0]);
    // No piece is in flight since the end was reported, so no query is needed from here on.
    let asked = server.count("cuEventQuery");
    pages.memory.stop();
    let error = pages.run(pages.store(&server, 1)).unwrap_err();
    assert!(matches!(error, DeviceError::Stopped), "{error}");
    assert_eq!(server.count("cuEventQuery"), asked);
    drop(pages);
    server.ends_clean();
}
