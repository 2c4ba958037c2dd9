//! The CPU backend on real segments and a real arena, against the naive model.

use std::sync::Arc;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvtier_device::{
    Axis, BlockTable, ChunkCopy, ChunkRequest, CpuDevice, Device, DeviceError, Direction,
    EngineMemory, KvLayout, MemorySpec, PlanError, Transfer,
};
use kvtier_memory::{Arena, ArenaKind, Extent, OwnSegment};
use proptest::prelude::*;

use crate::model::{Case, random_case};

/// Puts a case's memory into segments and names them in its tensors.
pub fn share(case: &mut Case) -> Vec<OwnSegment> {
    let mut segments = Vec::new();
    for (name, bytes) in &mut case.memories {
        let segment = OwnSegment::create(bytes.len() as u64).unwrap();
        segment.as_segment().write(0, bytes).unwrap();
        for tensor in &mut case.tensors {
            if let MemorySpec::CpuShm { name: own, .. } = &mut tensor.memory
                && own == name
            {
                *own = segment.name().to_owned();
            }
        }
        *name = segment.name().to_owned();
        segments.push(segment);
    }
    segments
}

pub fn content(segments: &[OwnSegment]) -> Vec<Vec<u8>> {
    segments
        .iter()
        .map(|segment| {
            let mut bytes = Vec::new();
            segment
                .as_segment()
                .read_into(0, segment.as_segment().len(), &mut bytes)
                .unwrap();
            bytes
        })
        .collect()
}

fn open(case: &Case) -> (Arc<KvLayout>, Box<dyn EngineMemory>) {
    let layout = Arc::new(case.layout());
    let memory = CpuDevice.open(Arc::clone(&layout)).unwrap();
    (layout, memory)
}

/// Moves one chunk, and gives what it ended with.
fn copy(
    memory: &dyn EngineMemory,
    blocks: &BlockTable,
    request: ChunkRequest,
    arena: &Arc<Arena>,
    extent: Extent,
    direction: Direction,
) -> Result<u64, DeviceError> {
    let (sender, receiver) = mpsc::channel();
    let transfer = Transfer {
        arena: Arc::clone(arena),
        blocks: blocks.clone(),
        chunks: vec![ChunkCopy { request, extent }],
        direction,
        deadline: None,
        event: Vec::new(),
    };
    memory.transfer(
        transfer,
        Box::new(move |result| sender.send(result).unwrap()),
    );
    receiver.try_recv().expect("host memory is copied at once")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn copies_match_the_model(seed in any::<u64>()) {
        let mut case = random_case(seed, "cpu");
        let segments = share(&mut case);
        let (layout, memory) = open(&case);
        let blocks = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
        let before = content(&segments);
        for object in layout.object_groups() {
            let len = object.object_bytes;
            // The bytes around the extent must stay.
            let arena = Arc::new(Arena::create(ArenaKind::Anonymous, len + 128).unwrap());
            let all = Extent::new(0, len + 128);
            let extent = Extent::new(64, len);
            for chunk in 0..case.chunks {
                arena.write(all, 0, &vec![0xee; len as usize + 128]).unwrap();
                let mut request = ChunkRequest { object_group: object.index, chunk, skip_tokens: 0 };
                let moved = copy(&*memory, &blocks, request, &arena, extent, Direction::Store).unwrap();
                prop_assert_eq!(moved, len);
                let mut bytes = Vec::new();
                arena.read_into(all, 0, len + 128, &mut bytes).unwrap();
                let mut expected = vec![0xee; len as usize + 128];
                case.each_byte(&object.kernel_groups, chunk, 0, |from, engine, at| {
                    expected[64 + at as usize] = before[from][engine as usize];
                });
                prop_assert!(bytes == expected, "store of object {} chunk {chunk}", object.index);
                prop_assert!(content(&segments) == before, "a store changed the pages");

                let fresh: Vec<u8> = bytes[64..64 + len as usize].iter().map(|byte| !byte).collect();
                arena.write(extent, 0, &fresh).unwrap();
                request.skip_tokens = case.skip_tokens;
                let moved =
                    copy(&*memory, &blocks, request, &arena, extent, Direction::Retrieve).unwrap();
                let mut expected = before.clone();
                let mut addressed = 0;
                case.each_byte(&object.kernel_groups, chunk, case.skip_tokens, |to, engine, at| {
                    expected[to][engine as usize] = fresh[at as usize];
                    addressed += 1;
                });
                prop_assert_eq!(moved, addressed);
                prop_assert!(content(&segments) == expected, "retrieve of chunk {chunk}");
                for (segment, bytes) in segments.iter().zip(&before) {
                    segment.as_segment().write(0, bytes).unwrap();
                }
            }
        }
    }

    #[test]
    fn blocks_are_read_in_tensor_order(seed in any::<u64>()) {
        let mut case = random_case(seed, "cpu");
        let segments = share(&mut case);
        let (layout, memory) = open(&case);
        let bytes = content(&segments);
        for layer in layout.grouped_layers() {
            let group = layout.group_of_layer(layer).unwrap();
            let ids = &case.groups[group.index].ids;
            let mut read = Vec::new();
            memory.read_blocks(layer, ids, &mut |piece| read.extend_from_slice(piece)).unwrap();
            prop_assert!(read == selected(&case, &layout, layer, ids, &bytes), "layer {layer}");
        }
    }
}

/// What `tensor.index_select(block dimension, ids).contiguous()` holds, element by element.
fn selected(
    case: &Case,
    layout: &KvLayout,
    layer: usize,
    ids: &[i64],
    memories: &[Vec<u8>],
) -> Vec<u8> {
    let group = layout.group_of_layer(layer).unwrap();
    let format = group.format;
    let one_tensor = format.axes().contains(&Axis::Layer);
    let tensors: Vec<usize> = if one_tensor {
        vec![0]
    } else if format.separate_k_and_v() {
        vec![layer, layer + case.tensors.len() / 2]
    } else {
        vec![layer]
    };
    let mut out = Vec::new();
    for tensor in tensors.into_iter().map(|tensor| &case.tensors[tensor]) {
        let MemorySpec::CpuShm { name, .. } = &tensor.memory else {
            panic!("not shared")
        };
        let memory = case
            .memories
            .iter()
            .position(|(other, _)| other == name)
            .unwrap();
        // Blocks and their slots may share a dimension; then a block is `rows` rows of it.
        let rows = if format.separate_k_and_v() {
            group.slots_per_block
        } else {
            1
        };
        let block_at = usize::from(matches!(format.axes()[0], Axis::Plane));
        let mut ranges: Vec<Vec<u64>> = tensor
            .shape
            .iter()
            .map(|size| (0..*size).collect())
            .collect();
        ranges[block_at] = ids
            .iter()
            .flat_map(|id| (0..rows).map(move |row| *id as u64 * rows + row))
            .collect();
        if one_tensor {
            ranges[1] = vec![layer as u64];
        }
        let mut index = vec![0; ranges.len()];
        'elements: loop {
            let element: u64 = tensor.storage_offset
                + (0..ranges.len())
                    .filter(|at| tensor.shape[*at] > 1)
                    .map(|at| ranges[at][index[at]] * tensor.stride[at])
                    .sum::<u64>();
            let start = (element * tensor.dtype_size) as usize;
            out.extend(&memories[memory][start..start + tensor.dtype_size as usize]);
            for at in (0..ranges.len()).rev() {
                index[at] += 1;
                if index[at] < ranges[at].len() {
                    continue 'elements;
                }
                index[at] = 0;
            }
            break;
        }
    }
    out
}

#[test]
fn invalid_memories_and_copies_are_refused() {
    let mut case = random_case(7, "cpu");
    let segments = share(&mut case);
    let (layout, memory) = open(&case);
    let blocks = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap());
    let request = ChunkRequest {
        object_group: 0,
        chunk: 0,
        skip_tokens: 0,
    };
    let needed = layout.object_groups()[0].object_bytes;

    let small = Extent::new(0, needed - 1);
    let error = copy(&*memory, &blocks, request, &arena, small, Direction::Store).unwrap_err();
    assert!(
        matches!(error, DeviceError::Plan(PlanError::ExtentTooSmall { .. })),
        "{error}"
    );
    let outside = Extent::new(arena.len() - needed + 1, needed);
    let error = copy(
        &*memory,
        &blocks,
        request,
        &arena,
        outside,
        Direction::Store,
    )
    .unwrap_err();
    assert!(matches!(error, DeviceError::Access(_)), "{error}");
    let extent = Extent::new(0, needed);
    let late = ChunkRequest {
        chunk: case.chunks,
        ..request
    };
    let error = copy(&*memory, &blocks, late, &arena, extent, Direction::Retrieve).unwrap_err();
    assert!(
        matches!(error, DeviceError::Plan(PlanError::NoSuchChunk { .. })),
        "{error}"
    );
    let error = memory.read_blocks(0, &[0, -1], &mut |_| ()).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::Plan(PlanError::BlockOutOfRange { position: 1, .. })
        ),
        "{error}"
    );
    let error = memory.read_blocks(9999, &[0], &mut |_| ()).unwrap_err();
    assert!(
        matches!(error, DeviceError::Plan(PlanError::NoSuchLayer { .. })),
        "{error}"
    );

    // The engine states more bytes than its segment has.
    for tensor in &mut case.tensors {
        if let MemorySpec::CpuShm { nbytes, .. } = &mut tensor.memory {
            *nbytes += 1 << 20;
        }
    }
    let error = CpuDevice.open(Arc::new(case.layout())).err().unwrap();
    assert!(matches!(error, DeviceError::Open { .. }), "{error}");
    // Segments that were removed, and memory of another kind.
    drop(segments);
    assert!(CpuDevice.open(layout).is_err());
    for tensor in &mut case.tensors {
        tensor.memory = MemorySpec::Unsupported {
            kind: "cuda".into(),
        };
    }
    case.hints
        .kv_layout
        .get_or_insert(kvtier_device::KvAxisOrder::Hnd);
    let error = CpuDevice
        .open(Arc::new(case.layout()))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("cuda") && error.contains("cpu_shm"),
        "{error}"
    );
}

#[test]
fn engine_of_many_segments_costs_one_descriptor() {
    let mut case = (0..)
        .map(|seed| random_case(seed, "cpu"))
        .find(|case| case.memories.len() > 1)
        .unwrap();
    let segments = share(&mut case);
    let (_, memory) = open(&case);
    let open_files: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .collect();
    let is_open = |segment: &&OwnSegment| {
        let path = format!("/dev/shm{}", segment.name());
        open_files.iter().any(|file| file.as_os_str() == &*path)
    };
    assert_eq!(segments.iter().filter(is_open).count(), 1);
    assert!(memory.is_current() && !memory.has_ended());
}

#[test]
fn transfer_past_its_deadline_moves_nothing() {
    let mut case = random_case(7, "cpu");
    let segments = share(&mut case);
    let (layout, memory) = open(&case);
    let blocks = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap());
    let before = content(&segments);
    let end_with = |deadline| {
        let (sender, receiver) = mpsc::channel();
        let transfer = Transfer {
            arena: Arc::clone(&arena),
            blocks: blocks.clone(),
            chunks: vec![ChunkCopy {
                request: ChunkRequest {
                    object_group: 0,
                    chunk: 0,
                    skip_tokens: 0,
                },
                extent: Extent::new(0, layout.object_groups()[0].object_bytes),
            }],
            direction: Direction::Retrieve,
            deadline: Some(deadline),
            event: Vec::new(),
        };
        memory.transfer(transfer, Box::new(move |end| sender.send(end).unwrap()));
        receiver.try_recv().unwrap()
    };
    let now = Instant::now();
    let late = end_with(now.checked_sub(Duration::from_secs(1)).unwrap());
    assert!(matches!(late, Err(DeviceError::DeadlinePassed)), "{late:?}");
    assert_eq!(content(&segments), before);
    assert!(end_with(now + Duration::from_secs(3600)).is_ok());
    assert_ne!(content(&segments), before);
}
