//! Placed segments on real segments and a real arena: where bytes go, against the naive model; what keys become, against
//! rotations in f64; and what is refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_device::{
    CpuDevice, Device, EngineMemory, GroupRope, KvFormat, KvLayout, KvQuant, MemorySpec, Placement,
    PlanError, PromptBlocks, Rope, RopeTable, SegmentCopy, TensorSpec,
};
use kvtier_memory::{Arena, ArenaKind, Extent, OwnSegment};
use proptest::prelude::*;

use crate::cpu::{content, share};
use crate::keys::{
    BF16, COPIED, F16, F32, FLOATS, FORMATS, Float, Keys, POSITIONS, cache, case, check_placed,
    each_placed, float, group_rope, keys, prompt_blocks, run, table,
};
use crate::model::{Case, Random, random_case, row_major};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Any format, any start, segments in any order: without a cos/sin cache, bytes are copied.
    #[test]
    fn segments_match_the_model(seed in any::<u64>()) {
        let mut case = random_case(seed, "placement");
        prop_assume!(case.groups.iter().all(|group| group.tokens_per_block == group.slots));
        for spec in &mut case.specs {
            spec.recurrent_state = false;
        }
        let pages = share(&mut case);
        let layout = Arc::new(case.layout());
        let memory = CpuDevice.open(Arc::clone(&layout)).unwrap();
        let random = &mut Random::new(!seed);

        let mut segments = Vec::new();
        let mut end = 0;
        for object in layout.object_groups() {
            let mut start = random.within(0, 7);
            while start < case.chunks as u64 * case.chunk_tokens {
                let most = (case.chunks as u64 * case.chunk_tokens - start).min(case.chunk_tokens);
                let tokens = random.within(0, most);
                segments.push(SegmentCopy {
                    object_group: object.index,
                    extent: Extent::new(end, object.object_bytes),
                    old_start: random.within(0, 1000),
                    start,
                    tokens,
                });
                end += object.object_bytes + random.within(0, 9);
                start += tokens + random.pick(&[0, 1, 5]);
            }
        }
        prop_assume!(!segments.is_empty());
        if random.chance(2) {
            segments.reverse();
        }
        let bytes = random.bytes(end);
        let arena = Arena::create(ArenaKind::Anonymous, end).unwrap();
        arena.write(Extent::new(0, end), 0, &bytes).unwrap();
        let groups = vec![COPIED; case.groups.len()];
        let placement = Placement {
            arena: Arc::new(arena),
            blocks: prompt_blocks(&case, &layout, 0),
            segments: segments.clone(),
            rope: Arc::new(Rope::check(&layout, Vec::new(), groups).unwrap()),
            deadline: None,
            event: Vec::new(),
        };
        let (mut expected, mut moved) = (content(&pages), 0);
        each_placed(&case, &layout, &segments, 0, |byte| {
            let object = segments[byte.segment].extent.offset + byte.object;
            expected[byte.memory][byte.engine as usize] = bytes[object as usize];
            moved += 1;
        });
        prop_assert_eq!(run(&*memory, placement).unwrap(), moved);
        prop_assert!(content(&pages) == expected);
    }
}

/// Pages on the CPU whose keys are checked.
fn check_keys(format: KvFormat, keys: &Keys, table: RopeTable, [old, base]: [u64; 2]) {
    let mut case = case(format, keys.float, old ^ base, "placement");
    let segments = share(&mut case);
    let memory = CpuDevice.open(Arc::new(case.layout())).unwrap();
    let mut pages = || content(&segments);
    check_placed(&case, &*memory, keys, table, [old, base], &mut pages);
}

#[test]
fn placed_keys_equal_keys_computed_there() {
    for format in FORMATS {
        for (at, float) in FLOATS.into_iter().enumerate() {
            let table = table(F32, 200, 1.0);
            check_keys(format, &keys(format, float, at % 2 == 0), table, [91, 12]);
        }
    }
}

#[test]
fn far_positions_are_as_exact_as_near_ones() {
    let format = KvFormat::NL_X_TWO_NB_NH_BS_HS;
    // Blocks of 4 and 6 tokens begin at multiples of 12.
    let last = (POSITIONS - 48) / 12 * 12;
    let (_segment, tensor) = cache(F32, POSITIONS, 1.0);
    for neox in [true, false] {
        for places in [[0, last], [POSITIONS - 24, 0], [65_537, last]] {
            let table = CpuDevice.read_rope_table(&tensor).unwrap();
            check_keys(format, &keys(format, BF16, neox), table, places);
        }
    }
}

#[test]
fn magnitude_of_the_cache_is_divided_out() {
    let format = KvFormat::NL_X_NB_BS_NH_CS;
    let keys = Keys {
        magnitude: 1.2,
        ..keys(format, F32, true)
    };
    check_keys(format, &keys, table(F32, 200, 1.2), [91, 12]);
}

#[test]
fn caches_of_16_bits_are_read() {
    let format = KvFormat::NL_X_TWO_NB_BS_NH_HS;
    for (float, tolerance) in [(BF16, 0.02), (F16, 0.0025)] {
        let keys = Keys {
            tolerance,
            ..keys(format, BF16, true)
        };
        check_keys(format, &keys, table(float, 200, 1.0), [91, 12]);
    }
}

/// A registration on the CPU with an arena of one object.
struct Fixture {
    case: Case,
    pages: Vec<OwnSegment>,
    layout: Arc<KvLayout>,
    memory: Box<dyn EngineMemory>,
    placement: Placement,
}

fn fixture(table: RopeTable) -> Fixture {
    let format = KvFormat::NL_X_TWO_NB_BS_NH_HS;
    let mut case = case(format, BF16, 1, "placement");
    let pages = share(&mut case);
    let layout = Arc::new(case.layout());
    let len = layout.object_groups()[0].object_bytes;
    let groups = vec![group_rope(format, BF16, true), COPIED];
    let placement = Placement {
        arena: Arc::new(Arena::create(ArenaKind::Anonymous, len).unwrap()),
        blocks: prompt_blocks(&case, &layout, 0),
        segments: vec![SegmentCopy {
            object_group: 0,
            extent: Extent::new(0, len),
            old_start: 50,
            start: 24,
            tokens: 24,
        }],
        rope: Arc::new(Rope::check(&layout, vec![table], groups).unwrap()),
        deadline: None,
        event: Vec::new(),
    };
    Fixture {
        memory: CpuDevice.open(Arc::clone(&layout)).unwrap(),
        case,
        pages,
        layout,
        placement,
    }
}

#[test]
fn invalid_placements_write_nothing() {
    let other = fixture(table(F32, 74, 1.0));
    let own = fixture(table(F32, 74, 1.0));
    let before = content(&own.pages);
    let end = |change: &dyn Fn(&mut Placement)| {
        let mut placement = own.placement.clone();
        // What is valid comes first.
        placement.segments.insert(0, placement.segments[0]);
        change(&mut placement);
        let end = run(&*own.memory, placement);
        if end.is_err() {
            assert!(content(&own.pages) == before);
        }
        end.map_err(|error| error.to_string())
    };
    let refused = |change: &dyn Fn(&mut SegmentCopy)| {
        end(&|placement| change(&mut placement.segments[1])).unwrap_err()
    };
    let too_late = "end in the blocks of segment 1 is 49; allowed: at most 48";
    assert_eq!(refused(&|segment| segment.start = 25), too_late);
    assert!(refused(&|segment| segment.start = u64::MAX).contains("end in the blocks"));
    let too_long = "tokens of segment 1 is 25; allowed: at most 24";
    assert_eq!(refused(&|segment| segment.tokens = 25), too_long);
    let behind = "old end in the cos/sin cache of segment 1 is 75; allowed: at most 74";
    assert_eq!(refused(&|segment| segment.old_start = 51), behind);
    assert!(refused(&|segment| segment.old_start = u64::MAX).contains("old end"));
    assert!(refused(&|segment| segment.object_group = 1).contains("object group is 1"));
    assert!(refused(&|segment| segment.extent.len -= 1).contains("extent of"));
    // A short extent whose length is stated wrong is found where it is read.
    let outside = end(&|placement| placement.segments[0].extent.offset = 1 << 40).unwrap_err();
    assert!(outside.contains("copy: "), "{outside}");
    let foreign = end(&|placement| placement.blocks = other.placement.blocks.clone());
    assert!(foreign.unwrap_err().contains("another layout"));
    let foreign = end(&|placement| placement.rope = Arc::clone(&other.placement.rope));
    assert!(foreign.unwrap_err().contains("another layout"));
    let past = Instant::now().checked_sub(Duration::from_secs(1));
    let late = end(&|placement| placement.deadline = past);
    assert!(late.unwrap_err().contains("deadline"));

    let mut ids = own.case.block_ids();
    for id in [-1, 1 << 33] {
        ids[1][3] = id;
        let error = PromptBlocks::check(&own.layout, &ids).unwrap_err();
        assert!(
            matches!(
                error,
                PlanError::BlockOutOfRange {
                    group: 1,
                    position: 3,
                    ..
                }
            ),
            "{error}"
        );
    }
    assert!(PromptBlocks::check(&own.layout, &ids[..1]).is_err());
    assert_eq!(own.placement.blocks.tokens(), 48);

    let short = fixture(table(F32, 47, 1.0));
    let error = run(&*short.memory, short.placement.clone())
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "end in the cos/sin cache of segment 0 is 48; allowed: at most 47"
    );
    let zeros = fixture(table(F32, 74, 0.0));
    let error = run(&*zeros.memory, zeros.placement.clone())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("positions 50 and 24 is of magnitude 0"),
        "{error}"
    );
    // Unmoved keys need no cache.
    let mut unmoved = zeros.placement.clone();
    unmoved.segments[0].old_start = unmoved.segments[0].start;
    assert!(run(&*zeros.memory, unmoved).is_ok());

    own.memory.stop();
    assert!(end(&|_| ()).unwrap_err().contains("being closed"));
}

#[test]
fn ropes_that_do_not_fit_the_pages_are_refused() {
    let refusal = |format: KvFormat, float: Float, change: &dyn Fn(&mut GroupRope)| {
        let mut groups = vec![group_rope(format, float, true), COPIED];
        change(&mut groups[0]);
        let layout = case(format, float, 1, "placement").layout();
        let checked = Rope::check(&layout, vec![table(F32, 1, 1.0)], groups);
        checked.map(|_| ()).map_err(|error| error.to_string())
    };
    let [e4m3, e5m2, uint8] = [FLOATS[3], FLOATS[4], FLOATS[5]];
    let format = KvFormat::NL_X_TWO_NB_BS_NH_HS;
    let mla = KvFormat::NL_X_NB_BS_HS;
    type Change<'a> = &'a dyn Fn(&mut GroupRope);
    let cases: [(KvFormat, Float, Change<'_>, &str); 15] = [
        (
            format,
            BF16,
            &|rope| rope.table = Some(1),
            "cos/sin cache is 1; allowed: below 1",
        ),
        (
            format,
            BF16,
            &|rope| rope.head_size = 8,
            "head size is 8; allowed: 16",
        ),
        (
            KvFormat::NL_X_NB_BS_NH_CS,
            BF16,
            &|rope| rope.head_size = 32,
            "allowed: 16",
        ),
        (
            format,
            BF16,
            &|rope| rope.window = [0, 7],
            "width of the rotated window is 7; allowed: 8",
        ),
        (
            format,
            BF16,
            &|rope| rope.window[0] = 9,
            "is 8 elements from 9 on; allowed: inside the 16",
        ),
        (
            format,
            BF16,
            &|rope| rope.window[0] = u64::MAX,
            "allowed: inside",
        ),
        (
            mla,
            BF16,
            &|rope| rope.window[0] = 7,
            "allowed: at the end of the 16",
        ),
        (
            format,
            BF16,
            &|rope| rope.quant = KvQuant::Fp8E4m3,
            "bfloat16 with kv_quant Fp8E4m3",
        ),
        (
            format,
            e4m3,
            &|rope| rope.quant = KvQuant::None,
            "dtype is float8_e4m3fn",
        ),
        (
            format,
            e4m3,
            &|rope| rope.quant = KvQuant::Fp8E5m2,
            "dtype is float8_e4m3fn",
        ),
        (
            format,
            e5m2,
            &|rope| rope.quant = KvQuant::Fp8E4m3,
            "dtype is float8_e5m2",
        ),
        (
            format,
            uint8,
            &|rope| rope.quant = KvQuant::None,
            "dtype is uint8",
        ),
        (
            format,
            float(("float8_e4m3fnuz", 1), KvQuant::Fp8E4m3, 3, -6),
            &|_| (),
            "e4m3fnuz",
        ),
        (
            format,
            float(("float64", 8), KvQuant::None, 7, -6),
            &|_| (),
            "dtype is float64",
        ),
        (
            format,
            float(("int16", 2), KvQuant::Fp8E4m3, 7, -6),
            &|_| (),
            "dtype is int16",
        ),
    ];
    for (format, float, change, why) in cases {
        let error = refusal(format, float, change).unwrap_err();
        assert!(
            error.starts_with("kernel group 0: ") && error.contains(why),
            "{error}"
        );
    }
    refusal(mla, BF16, &|_| ()).unwrap();
    refusal(format, uint8, &|rope| rope.table = None).unwrap();

    // Pages whose tokens are not in one slot each.
    let grouped = |change: &dyn Fn(&mut Case)| {
        let mut case = case(format, BF16, 1, "placement");
        change(&mut case);
        let layout = case.layout();
        let groups = vec![COPIED; layout.kernel_groups().len()];
        Rope::check(&layout, Vec::new(), groups)
            .unwrap_err()
            .to_string()
    };
    let recurrent = grouped(&|case| case.specs[1].recurrent_state = true);
    assert!(recurrent.contains("kernel group 1: block and object is a recurrent state"));
    let compressed = grouped(&|case| case.specs[1].tokens_per_block = 12);
    assert!(
        compressed.contains(
            "is 6 and 12 slots; allowed: keys and values in one slot per token: 12 and 24"
        )
    );
    let windowed = grouped(&|case| {
        case.specs[1].sliding_window_tokens = 6;
        case.hints.held_blocks = true;
    });
    assert!(windowed.contains("is 6 and 6 slots"), "{windowed}");
    let layout = case(format, BF16, 1, "placement").layout();
    let error = Rope::check(&layout, Vec::new(), vec![COPIED]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rope groups is 1; allowed: 2, one per kernel group"
    );
}

#[test]
fn unlike_caches_are_refused() {
    let (_segment, tensor) = cache(BF16, 10, 1.0);
    let refusal = |change: &dyn Fn(&mut TensorSpec)| {
        let mut tensor = tensor.clone();
        change(&mut tensor);
        CpuDevice.read_rope_table(&tensor).unwrap_err().to_string()
    };
    for shape in [
        vec![10, 7],
        vec![10, 8, 1],
        vec![80],
        vec![],
        vec![0, 8],
        vec![10, 0],
    ] {
        let error = refusal(&|tensor| tensor.shape.clone_from(&shape));
        assert!(error.starts_with("cos_sin_cache.shape is ["), "{error}");
    }
    for shape in [vec![1 << 25, 10], vec![u64::MAX, u64::MAX - 1]] {
        let error = refusal(&|tensor| tensor.shape.clone_from(&shape));
        assert!(error.contains("at most 1 GiB"), "{error}");
    }
    let error = refusal(&|tensor| tensor.dtype_name = "int16".into());
    assert!(error.contains("dtype is int16 of 2 bytes"), "{error}");
    let error = refusal(&|tensor| tensor.dtype_size = 4);
    assert!(error.contains("bfloat16 of 4 bytes"), "{error}");
    let error = refusal(&|tensor| tensor.stride = vec![1, 10]);
    assert!(error.contains("cos_sin_cache.stride"), "{error}");
    let error = refusal(&|tensor| tensor.stride = row_major(&[8]));
    assert!(error.contains("cos_sin_cache.stride"), "{error}");
    let error = refusal(&|tensor| tensor.storage_offset = 1);
    assert!(error.contains("cos_sin_cache.byte span"), "{error}");
    let error = refusal(&|tensor| {
        if let MemorySpec::CpuShm { name, .. } = &mut tensor.memory {
            *name = "/kvtier_device_none".into();
        }
    });
    assert!(error.contains("/kvtier_device_none"), "{error}");
}
