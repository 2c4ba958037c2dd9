//! Placed segments on real segments and a real arena: where bytes go, against the naive model; what keys become, against
//! rotations in f64 by the definition of RoPE.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvtier_core::random::SplitMix64;
use kvtier_device::{
    CpuDevice, Device, DeviceError, Engine, EngineMemory, GroupRope, GroupSpec, KvAxisOrder,
    KvFormat, KvLayout, KvListLayout, KvQuant, LayoutHints, MemorySpec, Placement, PlanError,
    PromptBlocks, Rope, RopeTable, SegmentCopy, TensorSpec,
};
use kvtier_memory::{Arena, ArenaKind, Extent, OwnSegment};
use proptest::prelude::*;

use crate::cpu::{content, share};
use crate::model::{Case, Group, Random, place, random_case, row_major};

/// Positions of the cos/sin caches.
const POSITIONS: u64 = 131_072;
/// Elements of a head's key, and those that are rotated.
const HEAD: u64 = 16;
const WIDTH: u64 = 8;

/// A floating-point type by its definition.
#[derive(Debug, Clone, Copy)]
pub struct Float {
    dtype: (&'static str, u64),
    quant: KvQuant,
    mantissa: i32,
    min_exponent: i32,
}

const fn float(
    dtype: (&'static str, u64),
    quant: KvQuant,
    mantissa: i32,
    min_exponent: i32,
) -> Float {
    Float {
        dtype,
        quant,
        mantissa,
        min_exponent,
    }
}

pub const BF16: Float = float(("bfloat16", 2), KvQuant::None, 7, -126);
const F16: Float = float(("float16", 2), KvQuant::None, 10, -14);
const F32: Float = float(("float32", 4), KvQuant::None, 23, -126);
const FLOATS: [Float; 6] = [
    BF16,
    F16,
    F32,
    float(("float8_e4m3fn", 1), KvQuant::Fp8E4m3, 3, -6),
    float(("float8_e5m2", 1), KvQuant::Fp8E5m2, 2, -14),
    // As vLLM names it.
    float(("uint8", 1), KvQuant::Fp8E4m3, 3, -6),
];

impl Float {
    /// Distance of neighbours at a value.
    fn ulp(self, value: f64) -> f64 {
        let exponent = value.abs().log2().floor().max(self.min_exponent.into());
        (exponent - f64::from(self.mantissa)).exp2()
    }

    fn encode(self, value: f64) -> Vec<u8> {
        let ulp = self.ulp(value);
        let exponent = ulp.log2() as i32 + self.mantissa - self.min_exponent;
        let magnitude = (value.abs() / ulp).round_ties_even() as u32;
        let code = ((exponent as u32) << self.mantissa) + magnitude;
        let sign = u32::from(value < 0.0) << (8 * self.dtype.1 - 1);
        (code | sign).to_le_bytes()[..self.dtype.1 as usize].to_vec()
    }

    fn decode(self, bytes: &[u8]) -> f64 {
        let code = bytes
            .iter()
            .rev()
            .fold(0_u64, |code, byte| code << 8 | u64::from(*byte));
        let sign = 1 << (8 * self.dtype.1 - 1);
        let (exponent, mantissa) = (
            (code & (sign - 1)) >> self.mantissa,
            code % (1 << self.mantissa),
        );
        let (hidden, exponent) = match exponent {
            0 => (0, 0),
            _ => (1 << self.mantissa, exponent as i32 - 1),
        };
        let unit = f64::from(exponent + self.min_exponent - self.mantissa).exp2();
        let value = (hidden + mantissa) as f64 * unit;
        if code & sign == 0 { value } else { -value }
    }
}

/// Angle of a pair at a position.
fn angle(pair: u64, position: u64) -> f64 {
    position as f64 * 10_000_f64.powf(-2.0 * pair as f64 / WIDTH as f64)
}

fn rotated([x, y]: [f64; 2], angle: f64) -> [f64; 2] {
    let (sin, cos) = angle.sin_cos();
    [x * cos - y * sin, y * cos + x * sin]
}

/// An engine's cos/sin cache in shared memory.
pub fn cache(float: Float, positions: u64, magnitude: f64) -> (OwnSegment, TensorSpec) {
    let mut bytes = Vec::new();
    for position in 0..positions {
        for value in [f64::cos, f64::sin] {
            for pair in 0..WIDTH / 2 {
                bytes.extend(float.encode(magnitude * value(angle(pair, position))));
            }
        }
    }
    let segment = OwnSegment::create(bytes.len() as u64).unwrap();
    segment.as_segment().write(0, &bytes).unwrap();
    let tensor = TensorSpec {
        memory: MemorySpec::CpuShm {
            name: segment.name().to_owned(),
            nbytes: bytes.len() as u64,
        },
        dtype_size: float.dtype.1,
        dtype_name: float.dtype.0.into(),
        shape: vec![positions, WIDTH],
        stride: vec![WIDTH, 1],
        storage_offset: 0,
    };
    (segment, tensor)
}

fn table(float: Float, positions: u64, magnitude: f64) -> RopeTable {
    let (_segment, tensor) = cache(float, positions, magnitude);
    let table = CpuDevice.read_rope_table(&tensor).unwrap();
    assert_eq!(table.positions(), positions);
    table
}

/// How the keys of a format are rotated: a window inside the head, or at its end.
fn group_rope(format: KvFormat, float: Float, neox: bool) -> GroupRope {
    let offset = match format {
        KvFormat::NL_X_NB_BS_HS => HEAD - WIDTH,
        _ => 4,
    };
    GroupRope {
        table: Some(0),
        window: [offset, WIDTH],
        head_size: HEAD,
        neox,
        quant: float.quant,
    }
}

pub const COPIED: GroupRope = GroupRope {
    table: None,
    window: [0, 0],
    head_size: 0,
    neox: true,
    quant: KvQuant::None,
};

/// Pages of a format, two layers of it, and of one more kernel group where layers have tensors of their own. Two chunks of
/// 24 tokens, in blocks of 4 and 6.
pub fn case(format: KvFormat, float: Float, seed: u64, unique: &str) -> Case {
    use KvFormat as F;
    let mut hints = LayoutHints::default();
    let is_hnd = matches!(
        format,
        F::NL_X_TWO_NB_NH_BS_HS | F::NL_X_NB_TWO_NH_BS_HS | F::NL_X_NB_NH_BS_CS
    );
    let (engine, is_alone) = match format {
        F::NB_NL_TWO_NH_BS_HS => (Engine::Trtllm, true),
        F::TWO_X_NL_X_NB_BS_NH_HS => {
            hints.kv_list_layout = Some(KvListLayout::Separate);
            (Engine::Sglang, true)
        }
        F::NB_NL_TWO_BS_NH_HS => (Engine::Vllm, true),
        _ => (Engine::Vllm, false),
    };
    if engine == Engine::Vllm {
        hints.kv_layout = Some(if is_hnd {
            KvAxisOrder::Hnd
        } else {
            KvAxisOrder::Nhd
        });
    }
    let random = &mut Random::new(seed);
    let mut group = |format: KvFormat, slots: u64, dtype, layers: Vec<usize>| {
        let packed = matches!(format, F::NL_X_NB_NH_BS_CS | F::NL_X_NB_BS_NH_CS);
        let mut ids: Vec<i64> = (1..=48 / slots as i64).collect();
        for at in 1..ids.len() {
            if random.chance(2) {
                ids.swap(at, at - 1);
            }
        }
        Group {
            format,
            slots,
            tokens_per_block: slots,
            heads: if format == F::NL_X_NB_BS_HS { 1 } else { 3 },
            head_size: if packed { 2 * HEAD } else { HEAD },
            dtype,
            layers,
            ids,
        }
    };
    let mut groups = vec![group(format, 4, float.dtype, vec![0, 1])];
    if !is_alone {
        groups.push(group(F::NL_X_NB_BS_HS, 6, ("int8", 1), vec![2]));
    }
    let specs = groups.iter().enumerate().map(|(at, group)| GroupSpec {
        engine_group_id: at as i64,
        ..GroupSpec::full_attention(group.layers.iter().map(|layer| *layer as i64).collect(), 0)
    });
    let mut case = Case {
        engine,
        hints,
        tensors: Vec::new(),
        specs: specs.collect(),
        chunk_tokens: 24,
        chunks: 2,
        skip_tokens: 0,
        separate: false,
        memories: Vec::new(),
        groups,
    };
    let layers = if is_alone { 2 } else { 3 };
    place(&mut case, layers, random, unique);
    case
}

/// Block ids of a prompt that has the case's blocks behind `base` tokens.
fn prompt_blocks(case: &Case, layout: &KvLayout, base: u64) -> PromptBlocks {
    let ids = case.groups.iter().map(|group| {
        let mut ids = vec![0; (base / group.slots) as usize];
        ids.extend(&group.ids);
        ids
    });
    PromptBlocks::check(layout, &ids.collect::<Vec<_>>()).unwrap()
}

/// A byte of a token that was placed.
struct PlacedByte {
    memory: usize,
    engine: u64,
    segment: usize,
    /// Kernel group, and whether it is of a plane of keys.
    group: usize,
    is_key: bool,
    /// Position of the token in the segment, and of the byte in the token's row.
    token: u64,
    in_row: u64,
    /// Position of the byte in the object.
    object: u64,
}

/// Every byte of the tokens of `segments` in the case's blocks, whose first token is at `base`.
fn each_placed(
    case: &Case,
    layout: &KvLayout,
    segments: &[SegmentCopy],
    base: u64,
    mut visit: impl FnMut(PlacedByte),
) {
    for object in layout.object_groups() {
        for chunk in 0..case.chunks {
            case.each_byte(&object.kernel_groups, chunk, 0, |memory, engine, at| {
                let groups = object.kernel_groups.iter().rev();
                let mut groups = groups.map(|group| &layout.kernel_groups()[*group]);
                let group = groups.find(|group| group.object_offset <= at).unwrap();
                let row_bytes = group.row_bytes();
                let (rows, in_row) = (
                    (at - group.object_offset) / row_bytes,
                    (at - group.object_offset) % row_bytes,
                );
                let (plane, row) = (rows / case.chunk_tokens, rows % case.chunk_tokens);
                let position = base + chunk as u64 * case.chunk_tokens + row;
                let within = |segment: &SegmentCopy| {
                    segment.object_group == object.index
                        && (segment.start..segment.start + segment.tokens).contains(&position)
                };
                let Some(segment) = segments.iter().position(within) else {
                    return;
                };
                let token = position - segments[segment].start;
                visit(PlacedByte {
                    memory,
                    engine,
                    segment,
                    group: group.index,
                    is_key: plane < group.layer_indices.len() as u64,
                    token,
                    in_row,
                    object: at - row * row_bytes + token * row_bytes,
                });
            });
        }
    }
}

pub fn run(memory: &dyn EngineMemory, placement: Placement) -> Result<u64, DeviceError> {
    let (sender, receiver) = mpsc::channel();
    memory.place(placement, Box::new(move |end| sender.send(end).unwrap()));
    receiver.recv().unwrap()
}

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

/// Keys that were computed at a position and are placed at another one, and what is expected of them.
pub struct Keys {
    float: Float,
    rope: GroupRope,
    magnitude: f64,
    /// Of both sides, above rounding.
    pub tolerance: f64,
}

impl Keys {
    /// The unrotated value of an element, by its place in the objects.
    fn raw(object: u64) -> f64 {
        SplitMix64::new(object).next() as f64 / u64::MAX as f64 * 2.0 - 1.0
    }

    /// The pair of an element of a head: its number, whether the element is the second of it, and elements between the two.
    /// `None` if the element is not rotated.
    fn pair(&self, element: u64) -> Option<(u64, bool, u64)> {
        let at = element
            .checked_sub(self.rope.window[0])
            .filter(|at| *at < WIDTH)?;
        Some(if self.rope.neox {
            (at % (WIDTH / 2), at >= WIDTH / 2, WIDTH / 2)
        } else {
            (at / 2, at % 2 == 1, 1)
        })
    }

    /// The unrotated pair of an element at `object`.
    fn raw_pair(&self, object: u64, is_second: bool, apart: u64) -> [f64; 2] {
        let apart = apart * self.float.dtype.1;
        let first = if is_second { object - apart } else { object };
        [first, first + apart].map(|at| self.magnitude * Self::raw(at))
    }

    /// Writes the keys of an object whose first token is at `position`.
    fn write(&self, layout: &KvLayout, object: &mut [u8], start: u64, position: u64) {
        let group = &layout.kernel_groups()[0];
        let size = group.dtype_size;
        for row in 0..group.layer_indices.len() as u64 * group.slots_per_chunk {
            for element in 0..group.hidden_size() {
                let Some((pair, second, apart)) = self.pair(element % group.head_size) else {
                    continue;
                };
                let at = group.object_offset + row * group.row_bytes() + element * size;
                let angle = angle(pair, position + row % group.slots_per_chunk);
                let value =
                    rotated(self.raw_pair(start + at, second, apart), angle)[usize::from(second)];
                object[at as usize..][..size as usize].copy_from_slice(&self.float.encode(value));
            }
        }
    }

    /// Whether the byte is of a rotated key; the first byte of one is checked against the objects' bytes.
    fn check(
        &self,
        layout: &KvLayout,
        byte: &PlacedByte,
        segment: &SegmentCopy,
        objects: &[u8],
        pages: &[Vec<u8>],
    ) -> bool {
        let group = &layout.kernel_groups()[0];
        let size = group.dtype_size;
        let pair = self.pair(byte.in_row / size % group.head_size);
        let Some((pair, second, apart)) = pair.filter(|_| byte.group == 0 && byte.is_key) else {
            return false;
        };
        if segment.old_start == segment.start || !byte.in_row.is_multiple_of(size) {
            return segment.old_start != segment.start;
        }
        let float = self.float;
        let got = float.decode(&pages[byte.memory][byte.engine as usize..][..size as usize]);
        let object = segment.extent.offset + byte.object;
        let first = object - if second { apart * size } else { 0 };
        let stored = [first, first + apart * size]
            .map(|at| float.decode(&objects[at as usize..][..size as usize]));
        let norm = stored[0].hypot(stored[1]);
        let delta = angle(pair, segment.start) - angle(pair, segment.old_start);
        let want = rotated(stored, delta)[usize::from(second)];
        let error = (got - want).abs();
        let most = 0.5 * float.ulp(want.abs().max(got.abs())) + self.tolerance * norm;
        assert!(error <= most, "{got} is not {want}: {error:e} > {most:e}");
        // A rounding step away from what the engine would have computed.
        let raw = self.raw_pair(object, second, apart);
        let exact = rotated(raw, angle(pair, segment.start + byte.token))[usize::from(second)];
        let most = 1.25 * float.ulp(norm) + self.tolerance * norm;
        assert!((got - exact).abs() <= most, "{got} instead of {exact}");
        true
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

/// Places two objects, the second at its own position, in pages whose blocks are behind `base` tokens.
pub fn check_placed(
    case: &Case,
    memory: &dyn EngineMemory,
    keys: &Keys,
    table: RopeTable,
    [old, base]: [u64; 2],
    pages: &mut dyn FnMut() -> Vec<Vec<u8>>,
) {
    let layout = memory.layout();
    let len = layout.object_groups()[0].object_bytes;
    let segment = |object: u64, old_start, start, tokens| SegmentCopy {
        object_group: 0,
        extent: Extent::new(object * len, len),
        old_start,
        start,
        tokens,
    };
    let segments = vec![
        segment(1, old, base + 5, 24),
        segment(0, base + 30, base + 30, 7),
    ];
    let mut objects = Random::new(old).bytes(2 * len);
    for segment in &segments {
        let start = segment.extent.offset;
        let object = &mut objects[start as usize..][..len as usize];
        keys.write(layout, object, start, segment.old_start);
    }
    let arena = Arena::create(ArenaKind::Anonymous, 2 * len).unwrap();
    arena.write(Extent::new(0, 2 * len), 0, &objects).unwrap();
    let mut groups = vec![COPIED; case.groups.len()];
    groups[0] = keys.rope;
    let placement = Placement {
        arena: Arc::new(arena),
        blocks: prompt_blocks(case, layout, base),
        segments: segments.clone(),
        rope: Arc::new(Rope::check(layout, vec![table], groups).unwrap()),
        deadline: Some(Instant::now() + Duration::from_secs(600)),
        event: Vec::new(),
    };
    let mut expected = pages();
    run(memory, placement).unwrap();
    let after = pages();
    let mut rotated = 0;
    each_placed(case, layout, &segments, base, |byte| {
        let (segment, engine) = (&segments[byte.segment], byte.engine as usize);
        let is_rotated = keys.check(layout, &byte, segment, &objects, &after);
        rotated += u64::from(is_rotated);
        let object = (segment.extent.offset + byte.object) as usize;
        expected[byte.memory][engine] = if is_rotated {
            after[byte.memory][engine]
        } else {
            objects[object]
        };
    });
    let group = &layout.kernel_groups()[0];
    assert_eq!(group.format, case.groups[0].format);
    assert_eq!(rotated, 2 * 24 * group.heads * WIDTH * group.dtype_size);
    assert!(after == expected, "{}: what is not rotated", group.format);
}

pub const FORMATS: [KvFormat; 10] = [
    KvFormat::NL_X_TWO_NB_BS_NH_HS,
    KvFormat::NL_X_TWO_NB_NH_BS_HS,
    KvFormat::NL_X_NB_TWO_BS_NH_HS,
    KvFormat::NL_X_NB_TWO_NH_BS_HS,
    KvFormat::NB_NL_TWO_BS_NH_HS,
    KvFormat::NB_NL_TWO_NH_BS_HS,
    KvFormat::TWO_X_NL_X_NB_BS_NH_HS,
    KvFormat::NL_X_NB_BS_NH_CS,
    KvFormat::NL_X_NB_NH_BS_CS,
    KvFormat::NL_X_NB_BS_HS,
];

pub fn keys(format: KvFormat, float: Float, neox: bool) -> Keys {
    Keys {
        float,
        rope: group_rope(format, float, neox),
        magnitude: 1.0,
        tolerance: 5e-7,
    }
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
    for neox in [true, false] {
        for places in [[0, last], [POSITIONS - 24, 0], [65_537, last]] {
            let table = table(F32, POSITIONS, 1.0);
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
