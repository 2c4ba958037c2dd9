//! Registrations that lie. Each ends in an error that names a field, or in a layout whose every
//! address was checked; nothing panics.

use kvtier_device::{
    BlockTable, ChunkRequest, CudaAllocation, CudaStorage, Engine, GroupSpec, KvAxisOrder,
    KvLayout, KvListLayout, LayoutHints, MemorySpec, TensorSpec,
};
use proptest::prelude::*;

use crate::groups::{nhd, tensor};

fn refused(tensor: TensorSpec, text: &str) {
    let error = KvLayout::detect(&[tensor], Engine::Vllm, &nhd(), &[], 16, false).unwrap_err();
    let shown = error.to_string();
    assert!(shown.contains(text) && !error.allowed.is_empty(), "{shown}");
}

#[test]
fn inconsistent_tensors_are_refused() {
    let good = || tensor(0, ("float16", 2), &[2, 8, 16, 2, 4]);
    let with = |change: fn(&mut TensorSpec)| {
        let mut tensor = good();
        change(&mut tensor);
        tensor
    };
    assert!(KvLayout::detect(&[good()], Engine::Vllm, &nhd(), &[], 16, false).is_ok());
    refused(with(|t| t.shape[1] = 0), "no dimension of size 0");
    refused(
        with(|t| t.shape[1] = u64::MAX),
        "byte span is more than 2^64",
    );
    refused(with(|t| t.shape[1] = 9), "byte span");
    refused(
        with(|t| t.stride[1] = u64::MAX),
        "byte span is more than 2^64",
    );
    refused(with(|t| t.stride[1] = 0), "at least 1");
    refused(with(|t| t.stride[4] = 2), "byte span");
    refused(
        with(|t| (t.stride[3], t.stride[4]) = (1, 2)),
        "contiguous last dimension",
    );
    refused(with(|t| t.storage_offset = 1), "byte span");
    refused(
        with(|t| t.storage_offset = u64::MAX),
        "byte span is more than 2^64",
    );
    refused(with(|t| t.dtype_size = 0), "dtype size is 0");
    refused(with(|t| t.dtype_size = u64::MAX), "dtype size");
    refused(with(|t| t.stride.truncate(4)), "stride");
    refused(with(|t| t.stride.push(1)), "stride");
    refused(
        with(|t| (t.shape, t.stride) = (vec![], vec![])),
        "1 to 6 dimensions",
    );
    refused(
        with(|t| (t.shape, t.stride) = (vec![1; 9], vec![1; 9])),
        "1 to 6 dimensions",
    );
    refused(
        with(|t| (t.shape, t.stride) = (vec![4, 4], vec![4, 1])),
        "engine vllm",
    );
    refused(
        with(|t| (t.shape[0], t.shape[1]) = (1, 1)),
        "[1, 1, 16, 2, 4]",
    );
    refused(
        with(|t| {
            t.memory = MemorySpec::CpuShm {
                name: String::new(),
                nbytes: 0,
            }
        }),
        "byte span",
    );
    // More blocks than an id can name, in memory that was never there.
    refused(
        TensorSpec {
            memory: MemorySpec::Unsupported {
                kind: "cuda".into(),
            },
            dtype_size: 1,
            dtype_name: "uint8".into(),
            shape: vec![1 << 33, 1, 1],
            stride: vec![1, 1, 1],
            storage_offset: 0,
        },
        "blocks",
    );
    // As many layers as fit into a huge statement about memory.
    refused(
        TensorSpec {
            memory: MemorySpec::CpuShm {
                name: "/lmcache_kv_1_0".into(),
                nbytes: 1 << 62,
            },
            dtype_size: 1,
            dtype_name: "uint8".into(),
            shape: vec![4, 1 << 40, 2, 1, 1, 1],
            stride: vec![1 << 41, 2, 1, 1, 1, 1],
            storage_offset: 0,
        },
        "layers",
    );
    // Indexer pages with gaps.
    let mut indexer = tensor(0, ("uint8", 1), &[8, 16, 132]);
    indexer.stride = vec![16 * 132, 132, 1];
    indexer.shape[1] = 8;
    assert!(KvLayout::detect(&[indexer.clone()], Engine::Vllm, &nhd(), &[], 16, false).is_ok());
    indexer.stride[1] = 264;
    refused(indexer, "contiguous pages");
}

#[test]
fn engines_without_a_known_layout_are_named() {
    let detect = |engine, hints: LayoutHints, tensors: &[TensorSpec]| {
        KvLayout::detect(tensors, engine, &hints, &[], 16, false)
            .unwrap_err()
            .to_string()
    };
    let five = tensor(0, ("float16", 2), &[2, 8, 16, 2, 4]);
    let three = tensor(0, ("float16", 2), &[128, 2, 4]);
    let none = LayoutHints::default();
    for engine in [Engine::Atom, Engine::Sglang, Engine::Trtllm, Engine::Mock] {
        let hints = LayoutHints {
            num_kv_heads: Some(2),
            tokens_per_block: Some(16),
            head_dim: Some(4),
            kv_list_layout: Some(KvListLayout::Unified),
            ..none
        };
        let error = detect(engine, hints, std::slice::from_ref(&five));
        assert!(
            error.contains(engine.name()) && error.contains("[2, 8, 16, 2, 4]"),
            "{error}"
        );
    }
    assert!(detect(Engine::Sglang, none, std::slice::from_ref(&three)).contains("kv_list_layout"));
    let mut hints = LayoutHints {
        kv_list_layout: Some(KvListLayout::Separate),
        ..none
    };
    let pair = [three.clone(), three.clone()];
    assert!(detect(Engine::Sglang, hints, &pair).contains("tokens_per_block is absent"));
    hints.tokens_per_block = Some(0);
    assert!(detect(Engine::Sglang, hints, &pair).contains("tokens_per_block is 0"));
    hints.tokens_per_block = Some(48);
    assert!(detect(Engine::Sglang, hints, &pair).contains("NB*BS"));
    hints.tokens_per_block = Some(u64::MAX);
    assert!(detect(Engine::Sglang, hints, &pair).contains("NB*BS"));
    hints.tokens_per_block = Some(16);
    assert!(detect(Engine::Sglang, hints, &pair[..1]).contains("an even number"));
    let unlike = [three, tensor(1, ("float16", 2), &[64, 2, 4])];
    assert!(detect(Engine::Sglang, hints, &unlike).contains("as its K tensor 0"));
    let huge = LayoutHints {
        num_kv_heads: Some(u64::MAX),
        tokens_per_block: Some(u64::MAX),
        head_dim: Some(2),
        ..none
    };
    assert!(detect(Engine::Trtllm, huge, &[five]).contains("one tensor"));
    assert!(detect(Engine::Vllm, none, &[]).contains("0 tensors"));
}

#[test]
fn chunk_sizes_are_checked() {
    let tensor = tensor(0, ("float16", 2), &[2, 8, 16, 2, 4]);
    for chunk in [0, 8, 24, u64::MAX] {
        let detected = KvLayout::detect(
            std::slice::from_ref(&tensor),
            Engine::Vllm,
            &nhd(),
            &[],
            chunk,
            false,
        );
        assert!(detected.is_err(), "chunk of {chunk}");
    }
}

/// Small numbers, sizes around limits, and anything.
fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0u64..9,
        2 => prop::sample::select(vec![16, 128, 132, 1 << 31, 1 << 32, 1 << 62, u64::MAX]),
        1 => any::<u64>(),
    ]
}

fn signed() -> impl Strategy<Value = i64> {
    prop_oneof![8 => -1i64..9, 1 => any::<i64>()]
}

prop_compose! {
    fn any_tensor()(
        shape in prop::collection::vec(size(), 0..8),
        stride in prop::collection::vec(size(), 0..8),
        same_rank in prop::bool::weighted(0.9),
        tight in prop::bool::weighted(0.6),
        storage_offset in prop_oneof![4 => Just(0), 1 => size()],
        dtype_size in prop_oneof![8 => 1u64..9, 1 => size()],
        nbytes in prop_oneof![2 => Just(1u64 << 62), 2 => 0u64..100_000, 1 => any::<u64>()],
        memory in 0..3,
    ) -> TensorSpec {
        let mut stride = stride;
        if tight {
            stride = vec![1; shape.len()];
            for at in (0..shape.len().saturating_sub(1)).rev() {
                stride[at] = stride[at + 1].wrapping_mul(shape[at + 1]);
            }
        } else if same_rank {
            stride.resize(shape.len(), 1);
        }
        TensorSpec {
            memory: match memory {
                0 => MemorySpec::CpuShm { name: "/lmcache_kv_1_0".into(), nbytes },
                1 => MemorySpec::Cuda(Box::new(CudaStorage {
                    device_uuid: String::new(),
                    allocation: CudaAllocation::Raw { handle: [0; 64] },
                    offset: 0,
                    bytes: nbytes,
                })),
                _ => MemorySpec::Unsupported { kind: "npu".into() },
            },
            dtype_size,
            dtype_name: if dtype_size == 1 { "uint8" } else { "other" }.into(),
            shape,
            stride,
            storage_offset,
        }
    }
}

prop_compose! {
    fn any_group()(
        engine_group_id in signed(),
        layer_indices in prop::collection::vec(signed(), 0..4),
        tokens_per_block in signed(),
        sliding_window_tokens in signed(),
        extra_object_group_tag in signed(),
        recurrent_state in any::<bool>(),
    ) -> GroupSpec {
        GroupSpec {
            engine_group_id,
            layer_indices,
            tokens_per_block,
            sliding_window_tokens,
            extra_object_group_tag,
            recurrent_state,
        }
    }
}

prop_compose! {
    fn any_hints()(
        kv_layout in prop::option::of(prop::sample::select(vec![
            KvAxisOrder::Nhd,
            KvAxisOrder::Hnd,
        ])),
        kv_list_layout in prop::option::of(prop::sample::select(vec![
            KvListLayout::Separate,
            KvListLayout::Unified,
        ])),
        numbers in prop::array::uniform3(prop::option::of(size())),
        held_blocks in any::<bool>(),
    ) -> LayoutHints {
        let [num_kv_heads, tokens_per_block, head_dim] = numbers;
        LayoutHints {
            kv_layout, num_kv_heads, tokens_per_block, kv_list_layout, head_dim, held_blocks,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn random_input_never_panics_or_escapes(
        tensors in prop::collection::vec(any_tensor(), 0..4),
        groups in prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec(any_group(), 0..4)],
        hints in any_hints(),
        engine in prop::sample::select(vec![
            Engine::Vllm, Engine::Vllm, Engine::Vllm,
            Engine::Atom, Engine::Sglang, Engine::Trtllm, Engine::Mock,
        ]),
        chunk in prop_oneof![Just(840u64), size()],
        separate in any::<bool>(),
        ids in prop::collection::vec(signed(), 0..2000),
    ) {
        let detected = KvLayout::detect(&tensors, engine, &hints, &groups, chunk, separate);
        let Ok(layout) = detected else { return Ok(()) };
        let mut rows: Vec<Vec<i64>> = Vec::new();
        for group in layout.kernel_groups() {
            let per_chunk = group.blocks_per_chunk.min(4096);
            let last = group.num_blocks as i64 - 1;
            // Two chunks: the highest block there is, and whatever came, made to fit.
            let first = if group.may_lack_blocks { -1 } else { 0 };
            let wild = ids.iter().chain(std::iter::repeat(&last));
            let wild = wild.map(|id| (*id).clamp(first, last));
            rows.push(std::iter::repeat_n(last, per_chunk).chain(wild.take(per_chunk)).collect());
        }
        let Ok(table) = BlockTable::check(&layout, &rows, 2) else { return Ok(()) };
        for object in layout.object_groups() {
            for chunk in 0..2 {
                let request = ChunkRequest { object_group: object.index, chunk, skip_tokens: 0 };
                let mut copies = Vec::new();
                request.plan(&layout, &table, &mut copies).unwrap();
                let mut total = 0;
                for planned in &copies {
                    let copy = &planned.copy;
                    let (mut segment_end, mut arena_end) = (copy.inner_bytes, copy.inner_bytes);
                    for step in &copy.loops {
                        prop_assert!(step.count > 0);
                        segment_end += (step.count - 1) * step.segment_stride;
                        arena_end += (step.count - 1) * step.arena_stride;
                    }
                    let limit = match &layout.memories()[planned.memory] {
                        MemorySpec::CpuShm { nbytes, .. } => *nbytes,
                        MemorySpec::Cuda(storage) => storage.bytes,
                        MemorySpec::Unsupported { .. } => i64::MAX as u64,
                    };
                    prop_assert!(copy.segment_offset + segment_end <= limit);
                    prop_assert!(copy.arena_offset + arena_end <= object.object_bytes);
                    total += planned.bytes();
                }
                prop_assert_eq!(total, object.object_bytes);
            }
        }
    }
}
