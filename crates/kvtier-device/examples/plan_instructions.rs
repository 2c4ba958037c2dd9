//! Planning for a GPU, for counting its instructions: `plan_instructions SCENARIO ROUNDS`.
//!
//! As `instructions` of `kvtier-core`. One round is one chunk of 128 pages: 8 layers, 16 blocks that do
//! not adjoin.

use std::hint::black_box;

use kvtier_device::cuda::kernel::KernelPlan;
use kvtier_device::cuda::{AddressRange, DeviceCopies, PieceLimits, PinnedPieces};
use kvtier_device::{
    BlockTable, ChunkRequest, Direction, Engine, KvAxisOrder, KvLayout, LayoutHints, MemorySpec,
    TensorSpec,
};

const LAYERS: u64 = 8;
const BLOCKS: u64 = 1024;
const SLOTS: u64 = 16;
const CHUNK_TOKENS: u64 = 256;
const PIECE: PieceLimits = PieceLimits {
    bytes: 16 << 20,
    runs: 16 << 10,
    copies: 4096,
};

/// A layout with pages of 8 KiB for each head, and where its memories are.
fn layout(heads: u64, order: KvAxisOrder) -> (KvLayout, Vec<AddressRange>) {
    let (inner, strides) = if order.heads_first() {
        ([heads, SLOTS], [SLOTS * 256, 256])
    } else {
        ([SLOTS, heads], [heads * 256, 256])
    };
    let bytes = BLOCKS * SLOTS * heads * 512;
    let tensors: Vec<TensorSpec> = (0..LAYERS)
        .map(|layer| TensorSpec {
            memory: MemorySpec::CpuShm {
                name: format!("/layer{layer}"),
                nbytes: bytes,
            },
            dtype_size: 2,
            dtype_name: "bfloat16".into(),
            shape: vec![BLOCKS, inner[0], inner[1], 256],
            stride: vec![SLOTS * heads * 256, strides[0], strides[1], 1],
            storage_offset: 0,
        })
        .collect();
    let hints = LayoutHints {
        kv_layout: Some(order),
        ..LayoutHints::default()
    };
    let layout = KvLayout::detect(&tensors, Engine::Vllm, &hints, &[], CHUNK_TOKENS, false)
        .expect("a layout");
    let places = (0..LAYERS)
        .map(|layer| AddressRange {
            address: (1 << 45) + layer * bytes,
            bytes,
        })
        .collect();
    (layout, places)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let scenario = args.next().expect("a scenario");
    let rounds: u64 = args
        .next()
        .and_then(|rounds| rounds.parse().ok())
        .expect("rounds");
    let (heads, order) = match scenario.as_str() {
        "plan-kernel-transposed" => (8, KvAxisOrder::Hnd),
        _ => (1, KvAxisOrder::Nhd),
    };
    let (layout, places) = layout(heads, order);
    let ids: Vec<i64> = (0..(CHUNK_TOKENS / SLOTS) as i64)
        .map(|block| block * 37)
        .collect();
    let object_bytes = layout.object_groups()[0].object_bytes;
    let blocks = BlockTable::check(&layout, &[ids], 1).expect("blocks");
    let request = ChunkRequest {
        object_group: 0,
        chunk: 0,
        skip_tokens: 0,
    };
    let mut copies = DeviceCopies::default();
    let mut piece = DeviceCopies::default();
    let mut plan = KernelPlan::default();
    for round in 0..rounds {
        copies.clear();
        piece.clear();
        let extent = AddressRange {
            address: (1 << 44) + round * object_bytes,
            bytes: object_bytes,
        };
        copies
            .push_chunk(&layout, &blocks, request, &places, extent)
            .expect("a plan");
        if scenario == "plan-runs" {
            let pieces = PinnedPieces {
                start: 1 << 44,
                bytes: 1 << 30,
            };
            let visited: Result<(), ()> = copies.visit_runs(pieces, |run| {
                black_box(run);
                Ok(())
            });
            visited.expect("runs");
        } else {
            let planned = match scenario.as_str() {
                // As the thread of a GPU makes a piece.
                "plan-piece" => {
                    piece.fill(&copies, 0, PIECE);
                    black_box(piece.run_lengths());
                    &piece
                }
                _ => &copies,
            };
            plan.clear();
            plan.push(planned.as_slice(), Direction::Retrieve);
            black_box(&plan);
        }
    }
    // Otherwise the first count would be of nothing.
    assert!(rounds == 0 || copies.as_slice().len() == 128);
}
