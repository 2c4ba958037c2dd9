//! Our one kernel, `kernel/kvcopy.cu`, and the work lists it runs: items say where bytes are, tiles
//! which of them one warp moves. Plain data, which the kernel reads where it lies; who launches is elsewhere.
//!
//! What a plan costs: 96 bytes for each copy and 16 for each tile, so 1.4% of the bytes it moves
//! when every page of 8 KiB is a copy of its own, and 0.1% when they adjoin. What it keeps on its
//! way: 64 bytes a thread of units of 16, which is 32 KiB a block of [`THREADS`].

use super::device_copy::DeviceCopy;
use crate::plan::Direction;

/// The kernel for the driver's own compiler: PTX 6.4 for compute capability 7.5 and later.
/// `kernel/build.sh` makes it.
pub const PTX: &str = include_str!("kernel/kvcopy.ptx");

/// Threads of a block: what the registers of half a multiprocessor are for.
pub const THREADS: u32 = 512;
/// Threads that share a tile.
const LANES: u32 = 32;
/// Most bytes of a tile: enough that finding its place costs little beside moving it, few enough
/// that a chunk of a megabyte is work for 64 warps.
const TILE_BYTES: u64 = 16 << 10;
/// Most bytes of an item, so that its units are counted in 32 bits whatever they are.
const ITEM_BYTES: u64 = 1 << 31;

/// What the kernel moves at a time: all addresses and lengths are multiples of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// 16 bytes.
    Sixteen,
    /// 8 bytes.
    Eight,
    /// 4 bytes.
    Four,
    /// 2 bytes.
    Two,
    /// 1 byte.
    One,
}

impl Unit {
    /// All of them, from the largest.
    pub const ALL: [Self; 5] = [Self::Sixteen, Self::Eight, Self::Four, Self::Two, Self::One];

    /// The largest one that divides every address, stride and length of a copy.
    pub fn of(copy: &DeviceCopy) -> Self {
        let strides = copy
            .loops
            .iter()
            .filter(|step| step.count > 1)
            .fold(0, |bits, step| {
                bits | step.segment_stride | step.arena_stride
            });
        let bits = copy.engine | copy.host | copy.inner_bytes | strides;
        Self::ALL[4 - bits.trailing_zeros().min(4) as usize]
    }

    /// How many bytes.
    pub fn bytes(self) -> u64 {
        16 >> self as u32
    }

    /// The entry point in [`PTX`]. Its parameters: address of the items, address of the tiles, number
    /// of tiles (32 bits).
    pub fn kernel(self) -> &'static str {
        match self {
            Self::Sixteen => "kvcopy_16",
            Self::Eight => "kvcopy_8",
            Self::Four => "kvcopy_4",
            Self::Two => "kvcopy_2",
            Self::One => "kvcopy_1",
        }
    }
}

/// A copy as the kernel reads it: three loops, outermost first, around a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Item {
    src: u64,
    dst: u64,
    /// Bytes a step.
    src_stride: [u64; 3],
    dst_stride: [u64; 3],
    count: [u32; 3],
    /// Units that adjoin on both sides.
    run_units: u32,
    /// How far [`LANES`] units are, as steps of the loops and units of a run: the digits of a number
    /// whose places count up to `count` and `run_units`.
    step: [u32; 3],
    run_step: u32,
}

/// What one warp moves of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Tile {
    item: u32,
    /// The first one, counted over all loops.
    first_unit: u32,
    units: u32,
    /// Not 0 when all of it is in one run.
    straight: u32,
}

const _: () = assert!(size_of::<Item>() == 96 && size_of::<Tile>() == 16);

/// The items and tiles of one launch.
#[derive(Debug, Clone, Default)]
pub struct KernelWork {
    items: Vec<Item>,
    tiles: Vec<Tile>,
}

impl KernelWork {
    /// The items.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The tiles; they name items by their position.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// The items as the kernel reads them.
    pub fn item_bytes(&self) -> &[u8] {
        bytes_of(&self.items)
    }

    /// The tiles as the kernel reads them.
    pub fn tile_bytes(&self) -> &[u8] {
        bytes_of(&self.tiles)
    }

    /// Blocks of [`THREADS`] threads that give every tile a warp of its own, but at most `most`.
    pub fn blocks(&self, most: u32) -> u32 {
        let blocks = self.tiles.len().div_ceil((THREADS / LANES) as usize);
        u32::try_from(blocks).map_or(most, |blocks| blocks.min(most))
    }

    /// Appends a copy of at most [`ITEM_BYTES`].
    fn push(&mut self, copy: &DeviceCopy, direction: Direction, unit: Unit) {
        // A power of two.
        let units = |bytes: u64| (bytes >> unit.bytes().trailing_zeros()) as u32;
        let count = copy.loops.map(|step| step.count as u32);
        let run_units = units(copy.inner_bytes);
        let (step, run_step) = match LANES < run_units {
            true => ([0; 3], LANES),
            false => {
                let (runs, left) = (LANES / run_units, LANES % run_units);
                let (middle, inner) = (runs / count[2], runs % count[2]);
                ([middle / count[1], middle % count[1], inner], left)
            }
        };
        let engine = copy.loops.map(|step| step.segment_stride);
        let host = copy.loops.map(|step| step.arena_stride);
        let (src, dst, src_stride, dst_stride) = match direction {
            Direction::Store => (copy.engine, copy.host, engine, host),
            Direction::Retrieve => (copy.host, copy.engine, host, engine),
        };
        // A list of 2^32 items would be 400 GB.
        let item = self.items.len() as u32;
        self.items.push(Item {
            src,
            dst,
            src_stride,
            dst_stride,
            count,
            run_units,
            step,
            run_step,
        });
        let total = units(copy.bytes());
        let most = units(TILE_BYTES);
        let mut first_unit = 0;
        while first_unit < total {
            let units = most.min(total - first_unit);
            let straight = total == run_units || first_unit % run_units + units <= run_units;
            self.tiles.push(Tile {
                item,
                first_unit,
                units,
                straight: u32::from(straight),
            });
            first_unit += units;
        }
    }
}

/// Copies as launches of the kernel, at most one for each [`Unit`].
#[derive(Debug, Clone, Default)]
pub struct KernelPlan {
    /// In the order of [`Unit::ALL`].
    work: [KernelWork; 5],
}

impl KernelPlan {
    /// Forgets the work and keeps its memory.
    pub fn clear(&mut self) {
        for work in &mut self.work {
            work.items.clear();
            work.tiles.clear();
        }
    }

    /// Appends copies of one direction. Their host addresses must be those at which the device sees
    /// the host's memory.
    pub fn push(&mut self, copies: &[DeviceCopy], direction: Direction) {
        for copy in copies {
            let unit = Unit::of(copy);
            let work = &mut self.work[unit as usize];
            copy.each_part(ITEM_BYTES, &mut |part| work.push(part, direction, unit));
        }
    }

    /// The launches there are.
    pub fn launches(&self) -> impl Iterator<Item = (Unit, &KernelWork)> {
        let launches = Unit::ALL.into_iter().zip(&self.work);
        launches.filter(|(_, work)| !work.tiles.is_empty())
    }
}

/// What can be looked at as bytes: no padding, any bytes are a value.
trait Plain: Copy {}
impl Plain for Item {}
impl Plain for Tile {}

fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding, so all bytes of the slice are initialised; they are
    // borrowed for as long as the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests;
