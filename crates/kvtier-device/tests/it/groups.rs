//! Kernel groups, object groups, windows, skips and null chunks.

use kvtier_device::{
    BlockTable, ChunkRequest, CudaAllocation, CudaStorage, Engine, GroupSpec, KvAxisOrder,
    KvFormat, KvLayout, LayoutError, LayoutHints, MemorySpec, PlanError, TensorSpec,
};

use kvtier_memory::AffineCopy;

use crate::model::row_major;

pub fn tensor(index: usize, dtype: (&str, u64), shape: &[u64]) -> TensorSpec {
    TensorSpec {
        memory: MemorySpec::CpuShm {
            name: format!("/lmcache_kv_1_{index}"),
            nbytes: shape.iter().product::<u64>() * dtype.1,
        },
        dtype_size: dtype.1,
        dtype_name: dtype.0.into(),
        shape: shape.to_vec(),
        stride: row_major(shape),
        storage_offset: 0,
    }
}

pub fn nhd() -> LayoutHints {
    LayoutHints {
        kv_layout: Some(KvAxisOrder::Nhd),
        ..LayoutHints::default()
    }
}

fn layers(count: usize, shape: &[u64]) -> Vec<TensorSpec> {
    (0..count)
        .map(|index| tensor(index, ("float16", 2), shape))
        .collect()
}

fn detect(
    tensors: &[TensorSpec],
    groups: &[GroupSpec],
    separate: bool,
) -> Result<KvLayout, LayoutError> {
    KvLayout::detect(tensors, Engine::Vllm, &nhd(), groups, 256, separate)
}

#[test]
fn default_axis_order_depends_on_the_memory() {
    let shape = [2, 8, 4, 2, 3];
    let none = LayoutHints::default();
    let mut tensors = layers(1, &shape);
    let format = |tensors: &[TensorSpec]| {
        let layout = KvLayout::detect(tensors, Engine::Vllm, &none, &[], 4, false).unwrap();
        layout.kernel_groups()[0].format
    };
    tensors[0].shape.swap(2, 3);
    tensors[0].stride = row_major(&tensors[0].shape);
    assert_eq!(format(&tensors), KvFormat::NL_X_TWO_NB_NH_BS_HS);
    let mut tensors = layers(1, &shape);
    tensors[0].memory = MemorySpec::Unsupported {
        kind: "cuda".into(),
    };
    assert_eq!(format(&tensors), KvFormat::NL_X_TWO_NB_BS_NH_HS);
}

/// Handles may be equal, or storages may overlap, which is known only when they are opened. Until then each tensor has its
/// own memory of the stated size.
#[test]
fn each_gpu_tensor_has_its_own_memory() {
    let mut tensors = layers(2, &[2, 8, 16, 2, 4]);
    let span = 2 * 8 * 16 * 2 * 4 * 2;
    for tensor in &mut tensors {
        tensor.memory = MemorySpec::Cuda(Box::new(CudaStorage {
            device_uuid: "uuid".into(),
            allocation: CudaAllocation::Raw { handle: [7; 64] },
            offset: 512,
            bytes: span,
        }));
    }
    let detect =
        |tensors: &[TensorSpec]| KvLayout::detect(tensors, Engine::Vllm, &nhd(), &[], 16, false);
    let layout = detect(&tensors).unwrap();
    assert_eq!(layout.memories().len(), 2);
    assert_eq!(layout.memories()[0].kind(), "cuda_raw");
    // Offsets count from the start of the storage, wherever in its allocation that is.
    assert_eq!(layout.kernel_groups()[0].planes[0].base, 0);

    tensors[1].storage_offset = 1;
    let error = detect(&tensors).unwrap_err().to_string();
    let expected = format!(
        "kv_caches[1].byte span is {}; allowed: at most {span}",
        span + 2
    );
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn segment_with_different_sizes_is_one_memory() {
    let mut tensors = layers(3, &[2, 8, 16, 2, 4]);
    for (tensor, size) in tensors.iter_mut().zip([8192, 65536, 4096 * 4]) {
        tensor.memory = MemorySpec::CpuShm {
            name: "/lmcache_kv_1_0".into(),
            nbytes: size,
        };
    }
    tensors[0].shape[1] = 1;
    let layout = KvLayout::detect(&tensors, Engine::Vllm, &nhd(), &[], 16, false);
    let layout = layout.unwrap();
    assert_eq!(
        layout.memories(),
        [MemorySpec::CpuShm {
            name: "/lmcache_kv_1_0".into(),
            nbytes: 65536
        }]
    );
    // Layers of a group share their ids, so the smallest layer decides.
    assert_eq!(layout.num_blocks(), 1);
}

fn windowed() -> Vec<GroupSpec> {
    let group = |id, layers: &[i64], window| GroupSpec {
        engine_group_id: id,
        sliding_window_tokens: window,
        ..GroupSpec::full_attention(layers.to_vec(), 16)
    };
    vec![
        group(0, &[0, 4], -1),
        group(1, &[1], 300),
        group(2, &[2], 128),
        group(3, &[3], 512),
    ]
}

#[test]
fn object_groups_follow_windows_only_when_separated() {
    let tensors = layers(5, &[2, 64, 16, 2, 4]);
    let layer = 2 * 256 * 8 * 2;

    let together = detect(&tensors, &windowed(), false).unwrap();
    let [only] = together.object_groups() else {
        panic!("one object group")
    };
    assert_eq!(only.kernel_groups, [0, 1, 2, 3]);
    assert_eq!(only.window_chunks, None);
    assert_eq!(only.object_bytes, 5 * layer);

    let mut specs = windowed();
    specs[0].extra_object_group_tag = 7;
    specs[2].recurrent_state = true;
    let apart = detect(&tensors, &specs, true).unwrap();
    let groups: Vec<_> = apart
        .object_groups()
        .iter()
        .map(|g| {
            (
                g.index,
                g.kernel_groups.clone(),
                g.window_chunks,
                g.object_bytes,
            )
        })
        .collect();
    // 300 and 512 tokens are both two chunks; the tagged group comes last. A window of half a
    // chunk would still take the whole chunk.
    assert_eq!(
        groups,
        [
            (0, vec![1, 3], Some(2), 2 * layer),
            (1, vec![2], Some(1), layer),
            (2, vec![0], None, 2 * layer)
        ]
    );
    assert_eq!(apart.kernel_groups()[3].object_offset, layer);
    assert_eq!(apart.kernel_groups()[0].object_group, 2);
    assert_eq!(apart.bytes_per_token(), together.bytes_per_token());
}

#[test]
fn groups_that_do_not_match_are_refused() {
    let mut tensors = layers(3, &[2, 64, 16, 2, 4]);
    tensors.push(tensor(3, ("float16", 2), &[2, 64, 16, 4, 4]));
    let refused = |groups: &[GroupSpec], text: &str| {
        let error = detect(&tensors, groups, false).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("allowed"), "{error}");
    };
    let group = |layers: &[i64]| GroupSpec::full_attention(layers.to_vec(), 16);
    refused(&[], "unlike layers: 0 and 3");
    refused(&[group(&[0, 1, 2, 3])], "unlike layers");
    refused(
        &[group(&[0, 1]), group(&[2])],
        "a second group like group 0",
    );
    refused(&[group(&[3]), group(&[0, 1, 2])], "layers start later");
    refused(&[group(&[0, 1, 4])], "layer_indices is 4");
    refused(&[group(&[-1])], "layer_indices is -1");
    refused(&[group(&[0, 1, 1])], "layer_indices is 1");
    refused(&[group(&[])], "empty");
    refused(&vec![group(&[0]); 2000], "2000 groups");
    let tokens = |tokens_per_block| {
        vec![GroupSpec {
            tokens_per_block,
            ..GroupSpec::full_attention(vec![0], 0)
        }]
    };
    for wrong in [-1, 8, 24, i64::MIN, i64::MAX] {
        refused(&tokens(wrong), &format!("tokens_per_block is {wrong}"));
    }
    refused(&tokens(48), "a divisor of 256");
    refused(&tokens(512), "a divisor of 256");
    for window in [0, -2, 24, i64::MIN] {
        let mut spec = group(&[0]);
        spec.sliding_window_tokens = window;
        refused(&[spec], &format!("sw_size_tokens is {window}"));
    }
    // Layers in no group are skipped.
    let layout = detect(&tensors, &[group(&[1, 2])], false).unwrap();
    assert_eq!(layout.num_layers(), 2);
    assert_eq!(
        layout.group_of_layer(4).unwrap_err().to_string(),
        "layer is 4; allowed: 0 to below 4, and part of a group"
    );
    assert_eq!(layout.grouped_layers().collect::<Vec<_>>(), [1, 2]);
    assert!(layout.group_of_layer(0).is_err());
    // One token of the tensors may stand for several of the model.
    let layout = detect(&tensors, &tokens(64), false).unwrap();
    assert_eq!(layout.kernel_groups()[0].blocks_per_chunk, 4);
    assert_eq!(layout.kernel_groups()[0].object_shape(), [2, 1, 64, 8]);
}

#[test]
fn plans_have_the_fewest_runs() {
    let runs = |shape: &[u64], hints: LayoutHints, ids: &[i64]| {
        let tensors = layers(3, shape);
        let layout = KvLayout::detect(&tensors, Engine::Vllm, &hints, &[], 64, false).unwrap();
        let blocks = BlockTable::check(&layout, &[ids], 1).unwrap();
        let mut copies = Vec::new();
        let request = ChunkRequest {
            object_group: 0,
            chunk: 0,
            skip_tokens: 0,
        };
        request.plan(&layout, &blocks, &mut copies).unwrap();
        copies
    };
    let k_first = [2, 64, 16, 2, 4];
    let block = 16 * 2 * 4 * 2;
    let merged = runs(&k_first, nhd(), &[5, 6, 7, 8]);
    assert_eq!(merged.len(), 6);
    assert!(
        merged
            .iter()
            .all(|copy| copy.is_one_run() && copy.bytes() == 4 * block)
    );
    let split = runs(&k_first, nhd(), &[5, 6, 9, 8]);
    assert_eq!(split.len(), 6 * 3);
    assert!(split.iter().all(|copy| copy.is_one_run()));
    // K and V inside the block: consecutive blocks are one copy with a loop over them.
    let strided = runs(&[64, 2, 16, 2, 4], nhd(), &[5, 6, 7, 8]);
    assert_eq!(strided.len(), 6);
    assert!(
        strided
            .iter()
            .all(|copy| copy.copy.inner_bytes == block && copy.bytes() == 4 * block)
    );
    // Head-major: blocks, slots and heads in one copy.
    let hnd = LayoutHints {
        kv_layout: Some(KvAxisOrder::Hnd),
        ..LayoutHints::default()
    };
    let transposed = runs(&[2, 64, 2, 16, 4], hnd, &[5, 6, 7, 8]);
    assert_eq!(transposed.len(), 6);
    assert!(transposed.iter().all(|copy| copy.copy.inner_bytes == 8));
    // One head only: head-major and token-major are the same bytes.
    assert!(
        runs(&[2, 64, 1, 16, 4], hnd, &[5, 6, 7, 8])
            .iter()
            .all(|copy| copy.is_one_run())
    );
}

#[test]
fn runs_merge_across_adjacent_planes() {
    // All layers of a block side by side, one block a chunk: a whole object is one run.
    let (blocks, slots, heads, content, count) = (8, 16, 2, 4, 3);
    let row = slots * heads * content;
    let tensors: Vec<TensorSpec> = (0..count)
        .map(|layer| TensorSpec {
            memory: MemorySpec::CpuShm {
                name: "/lmcache_kv_1_0".into(),
                nbytes: blocks * count * row * 2,
            },
            stride: vec![count * row, heads * content, content, 1],
            storage_offset: layer * row,
            ..tensor(0, ("float16", 2), &[blocks, slots, heads, content])
        })
        .collect();
    let layout = KvLayout::detect(&tensors, Engine::Vllm, &nhd(), &[], slots, false).unwrap();
    assert_eq!(layout.memories().len(), 1);
    let table = BlockTable::check(&layout, &[[3]], 1).unwrap();
    let mut copies = Vec::new();
    let request = ChunkRequest {
        object_group: 0,
        chunk: 0,
        skip_tokens: 0,
    };
    request.plan(&layout, &table, &mut copies).unwrap();
    assert_eq!(copies.len(), 1);
    assert!(copies[0].is_one_run());
    assert_eq!(copies[0].bytes(), layout.object_groups()[0].object_bytes);
}

#[test]
fn skip_rounds_down_to_whole_blocks() {
    let tensors = layers(1, &[2, 64, 16, 2, 4]);
    let layout = KvLayout::detect(&tensors, Engine::Vllm, &nhd(), &[], 64, false).unwrap();
    let ids: Vec<i64> = (0..8).collect();
    let table = BlockTable::check(&layout, &[ids], 2).unwrap();
    let mut copies = Vec::new();
    let mut moved = |chunk, skip_tokens| {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens,
        };
        request.plan(&layout, &table, &mut copies).unwrap();
        let bytes: u64 = copies.iter().map(|copy| copy.bytes()).sum();
        bytes / (2 * 16 * 2 * 4 * 2)
    };
    let mut blocks = |skip| (moved(0, skip), moved(1, skip));
    assert_eq!(blocks(0), (4, 4));
    assert_eq!(blocks(15), (4, 4));
    assert_eq!(blocks(16), (3, 4));
    assert_eq!(blocks(63), (1, 4));
    assert_eq!(blocks(64), (0, 4));
    assert_eq!(blocks(100), (0, 2));
    assert_eq!(blocks(128), (0, 0));
    assert_eq!(blocks(u64::MAX), (0, 0));
}

#[test]
fn chunk_with_null_blocks_has_no_data() {
    let tensors = layers(5, &[2, 64, 16, 2, 4]);
    let infos = windowed();
    let layout = detect(&tensors, &infos, true).unwrap();
    let windows: Vec<_> = layout
        .kernel_groups()
        .iter()
        .map(|group| group.window_tokens.is_some())
        .collect();
    // Which object groups of each of two chunks have data when the first `nulls` blocks of one kernel group are null.
    let data = |layout: &KvLayout, group: usize, nulls: usize, null_block| -> [Vec<bool>; 2] {
        let mut ids = vec![(1..33).collect::<Vec<i64>>(); 4];
        ids[group][..nulls].fill(0);
        let table = BlockTable::check(layout, &ids, 2).unwrap();
        let groups = 0..layout.object_groups().len();
        [0, 1].map(|chunk| {
            let has_data = |group| table.has_data(layout, group, chunk, null_block);
            groups.clone().map(has_data).collect()
        })
    };
    let all = vec![true; layout.object_groups().len()];
    let together = detect(&tensors, &infos, false).unwrap();
    for (group, windowed) in windows.iter().enumerate() {
        let mut without = all.clone();
        without[layout.kernel_groups()[group].object_group] = false;
        assert_eq!(data(&layout, group, 16, 0), [without.clone(), all.clone()]);
        // Part of a chunk: a hole where an engine keeps a window, else a block that has that number.
        let partly = if *windowed { &without } else { &all };
        assert_eq!(data(&layout, group, 1, 0)[0], *partly);
        assert_eq!(data(&layout, group, 16, -1)[0], all);
        assert_eq!(data(&together, group, 16, 0), [vec![false], vec![true]]);
    }
    assert!(windows.contains(&true) && windows.contains(&false));
}

/// Two groups of 5 layers with blocks of 16 tokens in chunks of 256: full attention, and a window or a state.
fn held(window: i64, recurrent_state: bool) -> KvLayout {
    let groups = [
        GroupSpec::full_attention(vec![0, 1], 16),
        GroupSpec {
            engine_group_id: 1,
            sliding_window_tokens: window,
            recurrent_state,
            ..GroupSpec::full_attention(vec![2, 3, 4], 16)
        },
    ];
    let hints = LayoutHints {
        held_blocks: true,
        ..nhd()
    };
    let tensors = layers(5, &[2, 64, 16, 2, 4]);
    KvLayout::detect(&tensors, Engine::Vllm, &hints, &groups, 256, false).unwrap()
}

#[test]
fn held_windows_store_what_a_hit_needs() {
    let block = 16 * 2 * 4 * 2;
    let object = |window, state| {
        let layout = held(window, state);
        let [full, windowed] = layout.object_groups() else {
            panic!("an object group per window")
        };
        assert_eq!(
            (full.window_chunks, full.object_bytes),
            (None, 2 * 2 * 16 * block)
        );
        assert_eq!(layout.kernel_groups()[1].blocks_per_chunk, 16);
        (
            windowed.window_chunks.unwrap(),
            windowed.object_bytes / (2 * 3 * block),
        )
    };
    // Chunks, and blocks of each in an object.
    assert_eq!(object(16, false), (1, 1));
    assert_eq!(object(48, false), (1, 3));
    assert_eq!(object(256, false), (1, 16));
    assert_eq!(object(272, false), (2, 16));
    assert_eq!(object(-1, true), (1, 1));
}

#[test]
fn held_windows_leave_out_missing_blocks() {
    let layout = held(48, false);
    let mut ids = vec![(1..33).collect::<Vec<i64>>(); 2];
    ids[1][..13].fill(-1);
    ids[1][30] = -1;
    let table = BlockTable::check(&layout, &ids, 2).unwrap();
    // Only the last three blocks of a chunk are needed.
    for null_block in [0, -1] {
        let has_data = |group, chunk| table.has_data(&layout, group, chunk, null_block);
        assert_eq!([has_data(1, 0), has_data(1, 1)], [true, false]);
        assert_eq!([has_data(0, 0), has_data(0, 1)], [true, true]);
    }
    // Of each plane: first block and number of blocks on the engine's side, and the first block in the object.
    let block = 16 * 2 * 4 * 2;
    let runs = |chunk, skip_tokens| {
        let request = ChunkRequest {
            object_group: 1,
            chunk,
            skip_tokens,
        };
        let mut copies = Vec::new();
        request.plan(&layout, &table, &mut copies).unwrap();
        let run = |copy: &kvtier_device::PlannedCopy| {
            let AffineCopy {
                segment_offset,
                arena_offset,
                ..
            } = copy.copy;
            (
                segment_offset / block % 64,
                copy.bytes() / block,
                arena_offset / block,
            )
        };
        copies.iter().map(run).collect::<Vec<_>>()
    };
    let planes = 0..6;
    let whole: Vec<_> = planes.clone().map(|plane| (14, 3, 3 * plane)).collect();
    assert_eq!(runs(0, 0), whole);
    let around: Vec<_> = planes
        .clone()
        .flat_map(|plane| [(30, 1, 3 * plane), (32, 1, 3 * plane + 2)])
        .collect();
    assert_eq!(runs(1, 0), around);
    let behind_skip: Vec<_> = planes.map(|plane| (32, 1, 3 * plane + 2)).collect();
    assert_eq!(runs(1, 256 + 15 * 16), behind_skip);
    // Layers with full attention have all blocks, and so have engines that do not hold theirs.
    let mut lacking = ids.clone();
    lacking[0][3] = -1;
    let refused = |layout: &KvLayout, ids: &[Vec<i64>]| {
        matches!(
            BlockTable::check(layout, ids, 2),
            Err(PlanError::BlockOutOfRange { id: -1, .. })
        )
    };
    assert!(refused(&layout, &lacking));
    let not_held = detect(&layers(5, &[2, 64, 16, 2, 4]), &windowed(), true).unwrap();
    let lacking = vec![vec![-1; 32]; not_held.kernel_groups().len()];
    assert!(refused(&not_held, &lacking));
}

#[test]
fn recurrent_state_needs_only_the_last_block() {
    let tensors = layers(5, &[2, 64, 16, 2, 4]);
    let mut infos = windowed();
    infos[2].recurrent_state = true;
    let mut ids = vec![(1..33).collect::<Vec<i64>>(); 4];
    ids[2][..15].fill(0);
    ids[2][31] = 0;
    for separate in [true, false] {
        let layout = detect(&tensors, &infos, separate).unwrap();
        let object = layout.kernel_groups()[2].object_group;
        let table = BlockTable::check(&layout, &ids, 2).unwrap();
        assert!(table.has_data(&layout, object, 0, 0));
        assert!(!table.has_data(&layout, object, 1, 0));
    }
}

#[test]
fn block_ids_are_checked_by_count_and_by_value() {
    let layout = detect(&layers(5, &[2, 64, 16, 2, 4]), &windowed(), false).unwrap();
    let good = vec![(0..32).collect::<Vec<i64>>(); 4];
    let check = |ids: &[Vec<i64>], chunks| BlockTable::check(&layout, ids, chunks);
    assert_eq!(check(&good, 2).unwrap().chunks(), 2);
    // A longer list of whole chunks is fine, and what is too much is not even looked at.
    let mut long = good.clone();
    long[1][20] = i64::MAX;
    assert!(check(&long, 1).is_ok());
    assert_eq!(
        check(&long, 2).unwrap_err(),
        PlanError::BlockOutOfRange {
            group: 1,
            position: 20,
            id: i64::MAX,
            num_blocks: 64
        }
    );
    assert_eq!(
        check(&good[..3], 2).unwrap_err(),
        PlanError::GroupCount {
            given: 3,
            expected: 4
        }
    );
    assert_eq!(
        check(&good, 3).unwrap_err(),
        PlanError::TooFewBlocks {
            group: 0,
            given: 32,
            needed: 48
        }
    );
    let mut odd = good.clone();
    odd[3].push(0);
    assert_eq!(
        check(&odd, 2).unwrap_err(),
        PlanError::NotWholeChunks {
            group: 3,
            given: 33,
            blocks_per_chunk: 16
        }
    );
    for id in [-1, 64, i64::MIN, i64::MAX, 1 << 32] {
        let mut bad = good.clone();
        bad[2][7] = id;
        let error = check(&bad, 2).unwrap_err();
        assert_eq!(
            error,
            PlanError::BlockOutOfRange {
                group: 2,
                position: 7,
                id,
                num_blocks: 64
            }
        );
        let text = error.to_string();
        assert_eq!(text, format!("block_ids[2][7] is {id}; allowed: 0 to 63"));
    }
    assert!(matches!(
        check(&good, usize::MAX),
        Err(PlanError::TooManyChunks { .. })
    ));

    let other = layout_of_one();
    let table = check(&good, 2).unwrap();
    let request = ChunkRequest {
        object_group: 0,
        chunk: 0,
        skip_tokens: 0,
    };
    let plan =
        |layout: &KvLayout, request: ChunkRequest| request.plan(layout, &table, &mut Vec::new());
    assert_eq!(plan(&other, request), Err(PlanError::ForeignBlockTable));
    let missing = ChunkRequest {
        object_group: 1,
        ..request
    };
    assert_eq!(
        plan(&layout, missing),
        Err(PlanError::NoSuchObjectGroup {
            group: 1,
            groups: 1
        })
    );
    let late = ChunkRequest {
        chunk: 2,
        ..request
    };
    assert_eq!(
        plan(&layout, late),
        Err(PlanError::NoSuchChunk {
            chunk: 2,
            chunks: 2
        })
    );
}

fn layout_of_one() -> KvLayout {
    detect(&layers(1, &[2, 64, 16, 2, 4]), &[], false).unwrap()
}
