//! Keys by the definition of RoPE, in f64: an engine's pages and cos/sin cache, objects whose keys were computed at a position,
//! and what is expected of them at another one.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvtier_core::random::SplitMix64;
use kvtier_device::{
    CpuDevice, Device, DeviceError, Engine, EngineMemory, GroupRope, GroupSpec, KvAxisOrder,
    KvFormat, KvLayout, KvListLayout, KvQuant, LayoutHints, MemorySpec, Placement, PromptBlocks,
    Rope, RopeTable, SegmentCopy, TensorSpec,
};
use kvtier_memory::{Arena, ArenaKind, Extent, OwnSegment};

use crate::model::{Case, Group, Random, place};

/// Positions of the cos/sin caches.
pub const POSITIONS: u64 = 131_072;
/// Elements of a head's key, and those that are rotated.
const HEAD: u64 = 16;
pub const WIDTH: u64 = 8;

/// A floating-point type by its definition.
#[derive(Debug, Clone, Copy)]
pub struct Float {
    dtype: (&'static str, u64),
    quant: KvQuant,
    mantissa: i32,
    min_exponent: i32,
}

pub const fn float(
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
pub const F16: Float = float(("float16", 2), KvQuant::None, 10, -14);
pub const F32: Float = float(("float32", 4), KvQuant::None, 23, -126);
pub const FLOATS: [Float; 6] = [
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

pub fn table(float: Float, positions: u64, magnitude: f64) -> RopeTable {
    let (_segment, tensor) = cache(float, positions, magnitude);
    let table = CpuDevice.read_rope_table(&tensor).unwrap();
    assert_eq!(table.positions(), positions);
    table
}

/// How the keys of a format are rotated: a window inside the head, or at its end.
pub fn group_rope(format: KvFormat, float: Float, neox: bool) -> GroupRope {
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
pub fn prompt_blocks(case: &Case, layout: &KvLayout, base: u64) -> PromptBlocks {
    let ids = case.groups.iter().map(|group| {
        let mut ids = vec![0; (base / group.slots) as usize];
        ids.extend(&group.ids);
        ids
    });
    PromptBlocks::check(layout, &ids.collect::<Vec<_>>()).unwrap()
}

/// A byte of a token that was placed.
pub struct PlacedByte {
    pub memory: usize,
    pub engine: u64,
    pub segment: usize,
    /// Kernel group, and whether it is of a plane of keys.
    group: usize,
    is_key: bool,
    /// Position of the token in the segment, and of the byte in the token's row.
    token: u64,
    in_row: u64,
    /// Position of the byte in the object.
    pub object: u64,
}

/// Every byte of the tokens of `segments` in the case's blocks, whose first token is at `base`.
pub fn each_placed(
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

/// Keys that were computed at a position and are placed at another one, and what is expected of them.
pub struct Keys {
    pub float: Float,
    pub rope: GroupRope,
    pub magnitude: f64,
    /// Largest difference of the two sides beside rounding.
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
