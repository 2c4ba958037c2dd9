//! Plans in the CUDA backend: device copies of several chunks, their runs, and the work lists of the kernel.

use kvtier_device::cuda::kernel::{KernelPlan, Unit};
use kvtier_device::cuda::{AddressRange, DeviceCopies, DeviceCopy, PinnedPieces};
use kvtier_device::{
    BlockTable, ChunkRequest, DeviceError, Direction, Engine, KvAxisOrder, KvLayout, LayoutHints,
    MemorySpec, PlanError, TensorSpec,
};
use kvtier_memory::CopyLoop;
use proptest::prelude::*;

use crate::executors::{copy_runs, launch};
use crate::model::{Random, random_case, row_major};

/// Bytes at an address that is `odd` more than a multiple of 16.
struct Bytes {
    words: Vec<u128>,
    odd: usize,
    len: usize,
}

impl Bytes {
    fn new(content: &[u8], odd: usize) -> Self {
        let words = vec![0; (odd + content.len()).div_ceil(16) + 1];
        let len = content.len();
        let mut bytes = Self { words, odd, len };
        bytes.as_mut().copy_from_slice(content);
        bytes
    }

    fn as_mut(&mut self) -> &mut [u8] {
        let start = self.words.as_mut_ptr().cast::<u8>();
        // SAFETY: `new` made the words long enough for both, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(start.add(self.odd), self.len) }
    }

    fn place(&mut self) -> AddressRange {
        let bytes = self.as_mut();
        AddressRange {
            address: bytes.as_mut_ptr().expose_provenance() as u64,
            bytes: bytes.len() as u64,
        }
    }
}

fn part(place: AddressRange, offset: u64, bytes: u64) -> AddressRange {
    assert!(offset + bytes <= place.bytes);
    AddressRange {
        address: place.address + offset,
        bytes,
    }
}

/// Ways to run copies; the second has borders where nothing is aligned.
fn run(way: usize, copies: &DeviceCopies, host: AddressRange, direction: Direction) {
    match way {
        0 => launch(copies, direction),
        1 => {
            let pieces = PinnedPieces {
                start: host.address + 29,
                bytes: 211,
            };
            copy_runs(copies, pieces, direction);
        }
        _ => copy_runs(copies, PinnedPieces::WHOLE, direction),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// All chunks and object groups of a request in one go, at any alignment.
    #[test]
    fn requests_match_the_model(seed in any::<u64>()) {
        let mut case = random_case(seed, "device_copies");
        let random = &mut Random::new(!seed);
        let layout = case.layout();
        let before: Vec<Vec<u8>> = case.memories.iter().map(|(_, bytes)| bytes.clone()).collect();
        let mut memories: Vec<Bytes> = before
            .iter()
            .map(|bytes| Bytes::new(bytes, random.pick(&[0, 0, 8, 4, 2, 1])))
            .collect();
        let places: Vec<AddressRange> = memories.iter_mut().map(Bytes::place).collect();

        // Extents in an order of their own, some adjoining and some apart.
        let mut extents = Vec::new();
        let mut end = 0;
        for object in layout.object_groups() {
            for chunk in 0..case.chunks {
                end += random.pick(&[0, 0, 1, 16]);
                extents.push((object, chunk, end));
                end += object.object_bytes;
            }
        }
        let filler = random.bytes(end);
        let mut arena = Bytes::new(&filler, random.pick(&[0, 0, 8, 4, 2, 1]));
        let host = arena.place();
        let plan = |case: &crate::model::Case, skip_tokens| {
            let table = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
            let mut copies = DeviceCopies::default();
            let mut bytes = 0;
            for (object, chunk, offset) in &extents {
                let request =
                    ChunkRequest { object_group: object.index, chunk: *chunk, skip_tokens };
                let extent = part(host, *offset, object.object_bytes);
                bytes += copies.push_chunk(&layout, &table, request, &places, extent).unwrap();
            }
            assert_eq!(copies.run_lengths().bytes, bytes);
            copies
        };

        let copies = plan(&case, case.skip_tokens);
        let fresh = arena.as_mut().to_vec();
        let mut expected = before.clone();
        for (object, chunk, offset) in &extents {
            case.each_byte(&object.kernel_groups, *chunk, case.skip_tokens, |memory, engine, at| {
                expected[memory][engine as usize] = fresh[(offset + at) as usize];
            });
        }
        for way in 0..3 {
            run(way, &copies, host, Direction::Retrieve);
            for (memory, expected) in memories.iter_mut().zip(&expected) {
                prop_assert!(memory.as_mut() == expected, "retrieve, way {way}");
            }
            prop_assert!(arena.as_mut() == fresh, "a retrieve changed objects, way {way}");
            for (memory, before) in memories.iter_mut().zip(&before) {
                memory.as_mut().copy_from_slice(before);
            }
        }

        // A window's worth of null blocks in front.
        for group in &mut case.groups {
            let nulls = random.within(0, group.ids.len() as u64) as usize;
            group.ids[..nulls].fill(0);
        }
        let copies = plan(&case, 0);
        let mut expected = filler.clone();
        for (object, chunk, offset) in &extents {
            case.each_byte(&object.kernel_groups, *chunk, 0, |memory, engine, at| {
                expected[(offset + at) as usize] = before[memory][engine as usize];
            });
        }
        for way in 0..3 {
            arena.as_mut().copy_from_slice(&filler);
            run(way, &copies, host, Direction::Store);
            prop_assert!(arena.as_mut() == expected, "store, way {way}");
            for (memory, before) in memories.iter_mut().zip(&before) {
                prop_assert!(memory.as_mut() == before, "a store changed the pages, way {way}");
            }
        }
    }

    /// Long and short runs in any nesting of loops on either side, of many tiles.
    #[test]
    fn any_copy_works_in_both_directions(seed in any::<u64>()) {
        let random = &mut Random::new(seed);
        let unit = random.pick(&[1, 2, 4, 8, 16]);
        let run_units = match random.within(0, 3) {
            0 => random.within(1, 4),
            1 => random.within(1, 40),
            2 => random.within(900, 1100),
            _ => random.within(1, 5000),
        };
        let mut left = (200_000 / (run_units * unit)).max(1);
        let counts = [0; 3].map(|_| {
            let most = left.min(random.pick(&[1, 3, 8, 33, 300]));
            let count = random.within(1, most);
            left /= count;
            count
        });
        let mut side = || {
            let mut strides = [0; 3];
            let mut order = [0, 1, 2];
            for at in 0..3 {
                order.swap(at, random.within(at as u64, 2) as usize);
            }
            let mut reach = run_units * unit;
            for at in order {
                strides[at] = reach + unit * random.pick(&[0, 0, 1, 5]);
                reach += (counts[at] - 1) * strides[at];
            }
            (strides, reach)
        };
        let ((segment, engine_bytes), (arena, host_bytes)) = (side(), side());
        let (odd, engine_content, host_content) =
            (unit as usize % 16, random.bytes(engine_bytes), random.bytes(host_bytes));
        let mut engine = Bytes::new(&engine_content, odd);
        let mut host = Bytes::new(&host_content, 0);
        let copy = DeviceCopy {
            engine: engine.place().address,
            host: host.place().address,
            inner_bytes: run_units * unit,
            loops: std::array::from_fn(|at| CopyLoop {
                count: counts[at],
                segment_stride: segment[at],
                arena_stride: arena[at],
            }),
        };
        prop_assert_eq!(Unit::of(&copy).bytes() % unit, 0);
        let mut copies = DeviceCopies::default();
        copies.push(copy);
        let mut stored = host_content.clone();
        let mut retrieved = engine_content.clone();
        for i in 0..counts[0] {
            for j in 0..counts[1] {
                for k in 0..counts[2] {
                    let at = |s: [u64; 3]| (i * s[0] + j * s[1] + k * s[2]) as usize;
                    let len = (run_units * unit) as usize;
                    let (e, h) = (at(segment)..at(segment) + len, at(arena)..at(arena) + len);
                    stored[h.clone()].copy_from_slice(&engine_content[e.clone()]);
                    retrieved[e].copy_from_slice(&host_content[h]);
                }
            }
        }
        for way in 0..3 {
            let place = host.place();
            run(way, &copies, place, Direction::Store);
            prop_assert!(host.as_mut() == stored, "store, way {}: {:?}", way, copy);
            prop_assert!(engine.as_mut() == engine_content);
            host.as_mut().copy_from_slice(&host_content);
            run(way, &copies, place, Direction::Retrieve);
            prop_assert!(engine.as_mut() == retrieved, "retrieve, way {}: {:?}", way, copy);
            prop_assert!(host.as_mut() == host_content);
            engine.as_mut().copy_from_slice(&engine_content);
        }
    }
}

/// A layout of equal layers in memories of their own, and where these are.
fn model(
    layers: u64,
    shape: &[u64],
    order: KvAxisOrder,
    chunk_tokens: u64,
) -> (KvLayout, Vec<AddressRange>) {
    let bytes = 2 * shape.iter().product::<u64>();
    let tensors: Vec<TensorSpec> = (0..layers)
        .map(|layer| TensorSpec {
            memory: MemorySpec::CpuShm {
                name: format!("/device_copies_{layer}"),
                nbytes: bytes,
            },
            dtype_size: 2,
            dtype_name: "bfloat16".into(),
            shape: shape.to_vec(),
            stride: row_major(shape),
            storage_offset: 0,
        })
        .collect();
    let hints = LayoutHints {
        kv_layout: Some(order),
        ..LayoutHints::default()
    };
    let layout =
        KvLayout::detect(&tensors, Engine::Vllm, &hints, &[], chunk_tokens, false).unwrap();
    let places = (0..layers)
        .map(|layer| AddressRange {
            address: 0x7f00_0000_0000 + layer * bytes.next_multiple_of(2 << 20),
            bytes,
        })
        .collect();
    (layout, places)
}

/// All chunks of a request, their objects one behind the other.
fn plan_all(
    layout: &KvLayout,
    places: &[AddressRange],
    ids: &[i64],
    chunks: usize,
) -> DeviceCopies {
    let table = BlockTable::check(layout, &[ids], chunks).unwrap();
    let object_bytes = layout.object_groups()[0].object_bytes;
    let mut copies = DeviceCopies::default();
    for chunk in 0..chunks {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens: 0,
        };
        let extent = AddressRange {
            address: 0x5500_0000_0000 + chunk as u64 * object_bytes,
            bytes: object_bytes,
        };
        copies
            .push_chunk(layout, &table, request, places, extent)
            .unwrap();
    }
    copies
}

#[test]
fn adjacent_chunks_are_one_run() {
    // One latent layer: an object is the bytes of its blocks.
    let (layout, places) = model(1, &[100, 64, 576], KvAxisOrder::Nhd, 256);
    let ids: Vec<i64> = (5..25).collect();
    let copies = plan_all(&layout, &places, &ids, 5);
    assert_eq!(copies.as_slice().len(), 1);
    assert_eq!(copies.run_lengths().mean(), 20 * 64 * 576 * 2);
    // A gap in the blocks between two chunks.
    let ids: Vec<i64> = (5..13).chain(14..26).collect();
    assert_eq!(plan_all(&layout, &places, &ids, 5).as_slice().len(), 2);
}

/// What a plan weighs, for the models of the design's table: the numbers that the kernel's
/// documentation gives.
#[test]
fn plan_is_small_compared_with_its_bytes() {
    let weigh = |layers, shape: &[u64], order, ids: &[i64]| {
        let (layout, places) = model(layers, shape, order, 256);
        let copies = plan_all(&layout, &places, ids, 1);
        let mut plan = KernelPlan::default();
        plan.push(copies.as_slice(), Direction::Retrieve);
        let launches: Vec<_> = plan.launches().collect();
        let [(Unit::Sixteen, work)] = launches[..] else {
            panic!("several launches, or of small units")
        };
        let bytes = work.item_bytes().len() + work.tile_bytes().len();
        (
            work.items().len(),
            work.tiles().len(),
            bytes as f64 / copies.run_lengths().bytes as f64,
        )
    };
    let scattered: Vec<i64> = (0..16).map(|block| block * 37 % 101).collect();
    let fresh: Vec<i64> = (7..23).collect();
    // 80 layers with 1 head of K and V: pages of 8 KiB.
    let small = [200, 16, 1, 256];
    let (items, tiles, share) = weigh(80, &small, KvAxisOrder::Nhd, &scattered);
    assert_eq!((items, tiles), (1280, 1280));
    assert!(share < 0.014, "{share}");
    // Blocks in a row: a whole plane at a time.
    let (items, tiles, share) = weigh(80, &small, KvAxisOrder::Nhd, &fresh);
    assert_eq!((items, tiles), (80, 640));
    assert!(share < 0.002, "{share}");
    // Heads in front of tokens, 8 of them: a page is an item, not its 128 pieces.
    let (items, tiles, share) = weigh(32, &[200, 8, 16, 256], KvAxisOrder::Hnd, &scattered);
    assert_eq!((items, tiles), (512, 2048));
    assert!(share < 0.003, "{share}");
    let (items, tiles, _) = weigh(32, &[200, 8, 16, 256], KvAxisOrder::Hnd, &fresh);
    assert_eq!((items, tiles), (32, 2048));
}

#[test]
fn copies_beyond_their_memory_are_refused() {
    let (layout, mut places) = model(2, &[10, 16, 2, 8], KvAxisOrder::Nhd, 32);
    let table = BlockTable::check(&layout, &[[3, 9]], 1).unwrap();
    let bytes = layout.object_groups()[0].object_bytes;
    let push = |object_group, chunk, places: &[AddressRange], bytes| {
        let request = ChunkRequest {
            object_group,
            chunk,
            skip_tokens: 0,
        };
        let extent = AddressRange {
            address: 4096,
            bytes,
        };
        DeviceCopies::default().push_chunk(&layout, &table, request, places, extent)
    };
    assert_eq!(push(0, 0, &places, bytes).unwrap(), bytes);
    let error = push(0, 0, &places, bytes - 1).unwrap_err();
    assert!(
        matches!(error, DeviceError::Plan(PlanError::ExtentTooSmall { needed, .. }) if needed == bytes)
    );
    let error = push(0, 1, &places, bytes).unwrap_err();
    assert!(matches!(error, DeviceError::Plan(_)), "{error}");
    let error = push(1, 0, &places, bytes).unwrap_err();
    assert!(matches!(error, DeviceError::Plan(_)), "{error}");
    // The layout has the stated sizes; these are the mapped ones.
    places[1].bytes -= 1;
    let error = push(0, 0, &places, bytes).unwrap_err();
    assert_eq!(
        error.to_string(),
        "copy: 512 bytes at offset 4608 do not fit in the 5119 bytes of the engine's memory"
    );
    assert!(push(0, 0, &places[..1], bytes).is_err());
}
