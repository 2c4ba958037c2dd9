//! RoPE of an engine's keys: what it has registered, checked against its pages, and the rotation from one position to another.

use crate::error::LayoutError;
use crate::format::TokenContent;
use crate::geometry::truncated;
use crate::groups::KernelGroup;
use crate::layout::{KvLayout, is_untyped};
use crate::spec::{Engine, LayoutHints, TensorSpec};
use kvtier_common::floats::{E4M3, E5M2, F16, Float, Minifloat, decode_bf16, encode_bf16};

/// Largest cos/sin cache, as `f32`: one million positions of 128 elements are half of it.
const MAX_TABLE_BYTES: u64 = 1 << 30;

/// A copy of an engine's cos/sin cache: per position the cosines, then the sines.
#[derive(Debug)]
pub struct RopeTable {
    float: Float,
    /// Elements of a position, an even number.
    width: u64,
    rows: Vec<f32>,
}

impl RopeTable {
    /// Checks the tensor of a cache; returns an empty copy, and the layout of the tensor's memory, in which the cache is one
    /// block of a layer of latent vectors.
    pub(crate) fn new(tensor: &TensorSpec) -> Result<(Self, KvLayout), LayoutError> {
        let refuse = |name: &str, value: String, allowed: &str| {
            LayoutError::new(format!("cos_sin_cache.{name}"), value, allowed)
        };
        let (positions, width) = match tensor.shape[..] {
            [positions, width] if width.is_multiple_of(2) => (positions, width),
            _ => (0, 0),
        };
        let mut rows = Vec::new();
        let elements = positions.saturating_mul(width);
        let fits = (1..=MAX_TABLE_BYTES / 4).contains(&elements);
        if !fits || rows.try_reserve_exact(elements as usize).is_err() {
            let value = format!("{:?}", truncated(&tensor.shape));
            let allowed = "[positions, an even width], at most 1 GiB as float32";
            return Err(refuse("shape", value, allowed));
        }
        let float = Float::from_name(&tensor.dtype_name);
        let Some(float) = float.filter(|float| float.bytes() == tensor.dtype_size) else {
            let value = format!("{} of {} bytes", tensor.dtype_name, tensor.dtype_size);
            return Err(refuse("dtype", value, "float32, bfloat16 or float16"));
        };
        let mut block = tensor.clone();
        block.shape.insert(0, 1);
        block.stride.insert(0, 1);
        let hints = LayoutHints::default();
        let layout = KvLayout::detect(&[block], Engine::Atom, &hints, &[], positions, false);
        let layout = layout.map_err(|error| LayoutError {
            field: error.field.replace("kv_caches[0]", "cos_sin_cache"),
            ..error
        })?;
        Ok((Self { float, width, rows }, layout))
    }

    /// Appends elements of the tensor.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
            bytes.as_chunks().0.iter().copied()
        }
        match self.float {
            Float::F32 => self.rows.extend(elements(bytes).map(f32::from_le_bytes)),
            Float::Bf16 => self.rows.extend(elements(bytes).map(decode_bf16)),
            _ => {
                let codes = elements(bytes).map(u16::from_le_bytes);
                self.rows.extend(codes.map(|code| F16.decode(code.into())));
            }
        }
    }

    /// Elements of a position: those of a head that are rotated.
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Number of positions.
    pub fn positions(&self) -> u64 {
        self.rows.len() as u64 / self.width
    }

    /// Cosines and sines of a position, which exists.
    fn row(&self, position: u64) -> (&[f32], &[f32]) {
        let width = self.width as usize;
        self.rows[position as usize * width..][..width].split_at(width / 2)
    }
}

/// What the 8-bit elements of an engine's pages are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvQuant {
    /// Elements are as their dtype says.
    #[default]
    None,
    /// `float8_e4m3fn`, of one scale for all tokens.
    Fp8E4m3,
    /// `float8_e5m2`, of one scale for all tokens.
    Fp8E5m2,
}

impl KvQuant {
    /// The flavour with this wire name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "" => Some(Self::None),
            "fp8_e4m3" => Some(Self::Fp8E4m3),
            "fp8_e5m2" => Some(Self::Fp8E5m2),
            _ => None,
        }
    }
}

/// How an engine rotates the keys of one kernel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRope {
    /// Index of the cos/sin cache; `None` if the keys are not rotated.
    pub table: Option<usize>,
    /// First element and number of elements of a head that are rotated.
    pub window: [u64; 2],
    /// Elements of a head's key.
    pub head_size: u64,
    /// Whether an element is rotated with the one half a window away, instead of with its neighbour.
    pub neox: bool,
    /// Flavour of 8-bit elements.
    pub quant: KvQuant,
}

/// RoPE of all kernel groups of a layout.
#[derive(Debug)]
pub struct Rope {
    pub(crate) layout_id: u64,
    tables: Vec<RopeTable>,
    groups: Vec<GroupRope>,
}

impl Rope {
    /// Checks a description, of one entry per kernel group.
    ///
    /// # Errors
    /// What does not fit the pages, and pages whose tokens cannot be placed one by one: recurrent states, several tokens per
    /// slot, objects without the first tokens of a chunk.
    pub fn check(
        layout: &KvLayout,
        tables: Vec<RopeTable>,
        groups: Vec<GroupRope>,
    ) -> Result<Self, LayoutError> {
        let expected = layout.kernel_groups().len();
        if groups.len() != expected {
            let allowed = format!("{expected}, one per kernel group");
            return Err(LayoutError::new("rope groups", groups.len(), allowed));
        }
        for (rope, group) in groups.iter().zip(layout.kernel_groups()) {
            let field = |name: &str| format!("kernel group {}: {name}", group.index);
            let slots = (group.slots_per_block, group.slots_per_chunk);
            if group.recurrent_state || slots != (group.tokens_per_block, layout.chunk_tokens()) {
                let value = if group.recurrent_state {
                    "a recurrent state".to_owned()
                } else {
                    format!("{} and {} slots", slots.0, slots.1)
                };
                let allowed = format!(
                    "keys and values in one slot per token: {} and {}",
                    group.tokens_per_block,
                    layout.chunk_tokens()
                );
                return Err(LayoutError::new(field("block and object"), value, allowed));
            }
            let Some(table) = rope.table else { continue };
            let Some(table) = tables.get(table) else {
                let allowed = format!("below {}, the caches registered", tables.len());
                return Err(LayoutError::new(field("cos/sin cache"), table, allowed));
            };
            rope.check(group, table)?;
        }
        Ok(Self {
            layout_id: layout.id,
            tables,
            groups,
        })
    }

    /// Positions of a kernel group's cos/sin cache, if it has one.
    pub(crate) fn positions(&self, group: usize) -> Option<u64> {
        let table = self.groups[group].table?;
        Some(self.tables[table].positions())
    }

    /// The rotation of a kernel group's keys from one position to another, both in its cache; `None` if they stay as they are.
    ///
    /// # Errors
    /// A row of the cache that is no cosine and sine.
    pub(crate) fn rotation(
        &self,
        group: &KernelGroup,
        old: u64,
        new: u64,
    ) -> Result<Option<Rotation>, LayoutError> {
        let rope = self.groups[group.index];
        let Some((table, float)) = rope.table.zip(rope.float(group)).filter(|_| old != new) else {
            return Ok(None);
        };
        let (from, to) = (self.tables[table].row(old), self.tables[table].row(new));
        let rows = from.0.iter().zip(from.1).zip(to.0.iter().zip(to.1));
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for ((cos_old, sin_old), (cos_new, sin_new)) in rows {
            let [a, b] = [f64::from(*cos_old), f64::from(*sin_old)];
            let [c, d] = [f64::from(*cos_new), f64::from(*sin_new)];
            // Cancels a magnitude that is part of the cache, as YaRN's.
            let magnitude = a.hypot(b) * c.hypot(d);
            if !magnitude.is_normal() {
                return Err(LayoutError::new(
                    format!("cos/sin cache {table} at positions {old} and {new}"),
                    format!("of magnitude {magnitude}"),
                    "cosines and sines",
                ));
            }
            cos.push(((c * a + d * b) / magnitude) as f32);
            sin.push(((d * a - c * b) / magnitude) as f32);
        }
        Ok(Some(Rotation {
            float,
            neox: rope.neox,
            window: rope
                .window
                .map(|elements| (elements * float.bytes()) as usize),
            head: (group.head_size * float.bytes()) as usize,
            cos,
            sin,
        }))
    }
}

impl GroupRope {
    /// Type of the keys' elements, if they can be rotated.
    fn float(&self, group: &KernelGroup) -> Option<Float> {
        let float = match (self.quant, &*group.dtype_name) {
            (KvQuant::None, name) => Float::from_name(name),
            (KvQuant::Fp8E4m3, "float8_e4m3fn") => Some(Float::E4m3),
            (KvQuant::Fp8E5m2, "float8_e5m2") => Some(Float::E5m2),
            (KvQuant::Fp8E4m3, name) => is_untyped(name).then_some(Float::E4m3),
            (KvQuant::Fp8E5m2, name) => is_untyped(name).then_some(Float::E5m2),
        };
        float.filter(|float| float.bytes() == group.dtype_size)
    }

    fn check(&self, group: &KernelGroup, table: &RopeTable) -> Result<(), LayoutError> {
        let refuse = |name: &str, value: String, allowed: String| {
            let field = format!("kernel group {}: {name}", group.index);
            Err(LayoutError::new(field, value, allowed))
        };
        let content = group.format.token_content();
        let head_size = match content {
            TokenContent::KeyAndValue | TokenContent::Latent => group.head_size,
            TokenContent::PackedHeads if group.head_size.is_multiple_of(2) => group.head_size / 2,
            _ => {
                let allowed = "keys and values, or latent vectors, to rotate keys".into();
                return refuse("format", group.format.to_string(), allowed);
            }
        };
        if self.float(group).is_none() {
            let value = format!("{} with kv_quant {:?}", group.dtype_name, self.quant);
            let allowed = "float32, bfloat16, float16; 8 bits with fp8_e4m3 or fp8_e5m2 declared";
            return refuse("dtype", value, allowed.into());
        }
        if self.head_size != head_size {
            let allowed = format!("{head_size}, as in the pages");
            return refuse("head size", self.head_size.to_string(), allowed);
        }
        let [offset, width] = self.window;
        if width != table.width {
            let allowed = format!("{}, as in its cos/sin cache", table.width);
            return refuse("width of the rotated window", width.to_string(), allowed);
        }
        let is_latent = content == TokenContent::Latent;
        let most = head_size.checked_sub(width);
        if !most.is_some_and(|most| offset == most || offset < most && !is_latent) {
            let value = format!("{width} elements from {offset} on");
            let place = if is_latent { "at the end of" } else { "inside" };
            let allowed = format!("{place} the {head_size} elements of a head");
            return refuse("rotated window", value, allowed);
        }
        Ok(())
    }
}

/// The rotation by one difference of positions.
#[derive(Debug)]
pub(crate) struct Rotation {
    float: Float,
    neox: bool,
    /// First byte and number of bytes of a head that are rotated.
    window: [usize; 2],
    /// Bytes from head to head.
    head: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotation {
    /// Rotates the keys of whole rows.
    pub fn apply(&self, rows: &mut [u8]) {
        match self.float {
            Float::F32 => self.run(rows, f32::from_le_bytes, f32::to_le_bytes),
            Float::Bf16 => self.run(rows, decode_bf16, encode_bf16),
            Float::F16 => self.run(
                rows,
                |bytes| F16.decode(u16::from_le_bytes(bytes).into()),
                |value| (F16.encode(value) as u16).to_le_bytes(),
            ),
            Float::E4m3 => self.run_small(rows, E4M3),
            Float::E5m2 => self.run_small(rows, E5M2),
        }
    }

    fn run_small(&self, rows: &mut [u8], float: Minifloat) {
        let values: [f32; 256] = std::array::from_fn(|code| float.decode(code as u32));
        self.run(
            rows,
            |[code]| values[usize::from(code)],
            |value| [float.encode(value) as u8],
        );
    }

    #[inline]
    fn run<const N: usize>(
        &self,
        rows: &mut [u8],
        decode: impl Fn([u8; N]) -> f32,
        encode: impl Fn(f32) -> [u8; N],
    ) {
        let rotate = |x: &mut [u8; N], y: &mut [u8; N], cos: f32, sin: f32| {
            let (a, b) = (decode(*x), decode(*y));
            *x = encode(a * cos - b * sin);
            *y = encode(b * cos + a * sin);
        };
        let [offset, width] = self.window;
        for head in rows.chunks_exact_mut(self.head) {
            let window = &mut head[offset..offset + width];
            let angles = self.cos.iter().zip(&self.sin);
            if self.neox {
                let (x, y) = window.split_at_mut(width / 2);
                let pairs = x.as_chunks_mut().0.iter_mut().zip(y.as_chunks_mut().0);
                pairs
                    .zip(angles)
                    .for_each(|((x, y), (cos, sin))| rotate(x, y, *cos, *sin));
            } else {
                let (pairs, _) = window.as_chunks_mut::<N>().0.as_chunks_mut();
                pairs
                    .iter_mut()
                    .zip(angles)
                    .for_each(|([x, y], (cos, sin))| rotate(x, y, *cos, *sin));
            }
        }
    }
}
