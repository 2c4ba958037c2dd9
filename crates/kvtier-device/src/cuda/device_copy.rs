//! A plan with addresses in place of offsets: what every way of copying to and from a GPU works on.

use kvtier_memory::{AccessError, CopyLoop};

use crate::blocks::BlockTable;
use crate::device::DeviceError;
use crate::layout::KvLayout;
use crate::plan::{ChunkRequest, Direction, PlannedCopy};

/// Loops of a [`DeviceCopy`]: blocks, slots, heads.
const LOOPS: usize = 3;
/// The two sides, in errors.
const MEMORY: &str = "engine's memory";
const EXTENT: &str = "extent";

/// Bytes that adjoin: one of the engine's memories as it is mapped here, or the extent of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first one.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// Copies `inner_bytes` contiguous bytes for every combination of loop steps, one way or the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCopy {
    /// First byte in the engine's memory, an address of the device.
    pub engine: u64,
    /// First byte in the object.
    pub host: u64,
    /// Bytes that adjoin on both sides.
    pub inner_bytes: u64,
    /// Loops around them, outermost first: the segment's stride is the engine's, the arena's the
    /// host's.
    pub loops: [CopyLoop; LOOPS],
}

/// Bytes that adjoin on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRun {
    /// First byte in the engine's memory, an address of the device.
    pub engine: u64,
    /// First byte in the object.
    pub host: u64,
    /// How many.
    pub bytes: u64,
}

impl DeviceRun {
    /// Where the bytes come from and where they go.
    pub fn source_and_target(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::Store => (self.engine, self.host),
            Direction::Retrieve => (self.host, self.engine),
        }
    }
}

impl DeviceCopy {
    /// A planned copy between the memories of its layout, by their index, and an extent.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`] or [`AccessError::Overflow`] when it reaches outside either.
    ///
    /// # Panics
    /// If the copy has four loops; a plan has at most three.
    pub fn new(
        planned: &PlannedCopy,
        memories: &[Place],
        extent: Place,
    ) -> Result<Self, AccessError> {
        let copy = &planned.copy;
        let [outermost, loops @ ..] = copy.loops;
        assert!(outermost.count == 1, "a planned copy of four loops");
        // A memory that is not there has no bytes.
        let memory = memories.get(planned.memory).copied();
        let memory = memory.unwrap_or(Place {
            address: 0,
            bytes: 0,
        });
        let overflow = |what| AccessError::Overflow { what, index: 0 };
        for (place, what) in [(memory, MEMORY), (extent, EXTENT)] {
            place
                .address
                .checked_add(place.bytes)
                .ok_or(overflow(what))?;
        }
        // Bytes moved, and on each side those from the first one touched to behind the last one.
        let mut bytes = copy.inner_bytes;
        let (mut engine_span, mut host_span) = (bytes, bytes);
        for step in loops.iter().filter(|step| step.count != 1) {
            let steps = step.count.saturating_sub(1);
            let reach = |span: u64, stride| span.checked_add(steps.checked_mul(stride)?);
            bytes = bytes.checked_mul(step.count).ok_or(overflow(EXTENT))?;
            engine_span = reach(engine_span, step.segment_stride).ok_or(overflow(MEMORY))?;
            host_span = reach(host_span, step.arena_stride).ok_or(overflow(EXTENT))?;
        }
        if bytes == 0 {
            return Ok(Self {
                engine: memory.address,
                host: extent.address,
                inner_bytes: 0,
                loops: [CopyLoop::ONCE; LOOPS],
            });
        }
        within(MEMORY, copy.segment_offset, engine_span, memory.bytes)?;
        within(EXTENT, copy.arena_offset, host_span, extent.bytes)?;
        // Strides of zero could state endless work inside those bounds.
        within(EXTENT, 0, bytes, extent.bytes)?;
        Ok(Self {
            engine: memory.address + copy.segment_offset,
            host: extent.address + copy.arena_offset,
            inner_bytes: copy.inner_bytes,
            loops,
        })
    }

    /// Bytes moved. [`DeviceCopy::new`] has shown that an extent has as many.
    pub fn bytes(&self) -> u64 {
        self.inner_bytes * self.runs()
    }

    /// How often `inner_bytes` are copied.
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|step| step.count).product()
    }

    /// Takes `next` in when both are single runs that adjoin on both sides.
    fn extend(&mut self, next: &Self) -> bool {
        let adjoins = self.engine + self.inner_bytes == next.engine
            && self.host + self.inner_bytes == next.host
            && self.runs() == 1
            && next.runs() == 1;
        if adjoins {
            self.inner_bytes += next.inner_bytes;
        }
        adjoins
    }

    /// Calls `visit` with parts of it of at most `most` bytes, which is a multiple of 16.
    pub fn each_part(&self, most: u64, visit: &mut impl FnMut(&Self)) {
        if self.bytes() == 0 {
            return;
        }
        if self.bytes() <= most {
            return visit(self);
        }
        let (mut front, mut back) = (*self, *self);
        if let Some(at) = self.loops.iter().position(|step| step.count > 1) {
            let CopyLoop {
                count,
                segment_stride,
                arena_stride,
            } = self.loops[at];
            let half = count / 2;
            front.loops[at].count = half;
            back.loops[at].count = count - half;
            back.engine += half * segment_stride;
            back.host += half * arena_stride;
        } else {
            front.inner_bytes = most;
            back.inner_bytes -= most;
            back.engine += most;
            back.host += most;
        }
        front.each_part(most, visit);
        back.each_part(most, visit);
    }

    /// Calls `visit` with every run, in order.
    fn visit_runs<E>(&self, visit: &mut impl FnMut(DeviceRun) -> Result<(), E>) -> Result<(), E> {
        let [a, b, c] = self.loops;
        for i in 0..a.count {
            for j in 0..b.count {
                for k in 0..c.count {
                    let steps = |a: u64, b: u64, c: u64| i * a + j * b + k * c;
                    visit(DeviceRun {
                        engine: self.engine
                            + steps(a.segment_stride, b.segment_stride, c.segment_stride),
                        host: self.host + steps(a.arena_stride, b.arena_stride, c.arena_stride),
                        bytes: self.inner_bytes,
                    })?;
                }
            }
        }
        Ok(())
    }
}

fn within(what: &'static str, offset: u64, len: u64, limit: u64) -> Result<(), AccessError> {
    if offset.checked_add(len).is_some_and(|end| end <= limit) {
        return Ok(());
    }
    Err(AccessError::OutOfBounds {
        what,
        offset,
        len,
        limit,
    })
}

/// How the host's memory is registered with the driver: in pieces of one size, the last one maybe
/// shorter. A copy by the driver must not reach over a border.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedPieces {
    /// Where the first piece starts.
    pub start: u64,
    /// Bytes of a piece; 0 when there are no borders.
    pub bytes: u64,
}

impl PinnedPieces {
    /// All of the memory is one piece.
    pub const WHOLE: Self = Self { start: 0, bytes: 0 };

    /// Bytes from an address to the next border.
    fn left(&self, address: u64) -> u64 {
        match address.checked_sub(self.start) {
            None => self.start - address,
            Some(_) if self.bytes == 0 => u64::MAX,
            Some(offset) => self.bytes - offset % self.bytes,
        }
    }
}

/// What the runs of some copies are like, before they are joined with others or cut at borders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunLengths {
    /// How many.
    pub runs: u64,
    /// Bytes in all of them together.
    pub bytes: u64,
    /// Bytes of the shortest one; 0 when there is none.
    pub shortest: u64,
    /// Bytes of the longest one.
    pub longest: u64,
}

impl RunLengths {
    /// Bytes of a run on average; 0 when there is none.
    pub fn mean(&self) -> u64 {
        self.bytes.checked_div(self.runs).unwrap_or(0)
    }
}

/// Copies to be run together. What adjoins is one copy, also across planes and chunks.
#[derive(Debug, Clone, Default)]
pub struct DeviceCopies {
    copies: Vec<DeviceCopy>,
}

impl DeviceCopies {
    /// Forgets the copies and keeps their memory.
    pub fn clear(&mut self) {
        self.copies.clear();
    }

    /// The copies, in the order of the objects.
    pub fn as_slice(&self) -> &[DeviceCopy] {
        &self.copies
    }

    /// Appends a copy. One of no bytes is none.
    pub fn push(&mut self, copy: DeviceCopy) {
        let last = self.copies.last_mut();
        if copy.bytes() > 0 && !last.is_some_and(|last| last.extend(&copy)) {
            self.copies.push(copy);
        }
    }

    /// Appends the copies of one chunk and gives their bytes. On an error some may have been
    /// appended.
    ///
    /// # Errors
    /// A chunk that the layout or the block table does not have, an extent shorter than the object,
    /// or memories that do not have what the layout says.
    pub fn push_chunk(
        &mut self,
        layout: &KvLayout,
        blocks: &BlockTable,
        request: ChunkRequest,
        memories: &[Place],
        extent: Place,
    ) -> Result<u64, DeviceError> {
        if let Some(object) = layout.object_groups().get(request.object_group)
            && extent.bytes < object.object_bytes
        {
            return Err(DeviceError::ExtentTooSmall {
                len: extent.bytes,
                needed: object.object_bytes,
                group: object.index,
            });
        }
        let mut bytes = 0;
        layout.visit_chunk(blocks, request, |planned| {
            let copy = DeviceCopy::new(planned, memories, extent)?;
            bytes += copy.bytes();
            self.push(copy);
            Ok::<(), DeviceError>(())
        })?;
        Ok(bytes)
    }

    /// What the runs are like.
    pub fn run_lengths(&self) -> RunLengths {
        let mut lengths = RunLengths::default();
        for copy in &self.copies {
            lengths.shortest = match lengths.runs {
                0 => copy.inner_bytes,
                _ => lengths.shortest.min(copy.inner_bytes),
            };
            lengths.longest = lengths.longest.max(copy.inner_bytes);
            lengths.runs += copy.runs();
            lengths.bytes += copy.bytes();
        }
        lengths
    }

    /// Calls `visit` with the runs, in order: those that adjoin on both sides as one, and none over
    /// a border of the pinned pieces.
    ///
    /// # Errors
    /// What `visit` returns.
    pub fn visit_runs<E>(
        &self,
        pieces: PinnedPieces,
        mut visit: impl FnMut(DeviceRun) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut cut = |mut run: DeviceRun| {
            while run.bytes > 0 {
                let bytes = run.bytes.min(pieces.left(run.host));
                visit(DeviceRun { bytes, ..run })?;
                run.engine += bytes;
                run.host += bytes;
                run.bytes -= bytes;
            }
            Ok(())
        };
        let mut pending: Option<DeviceRun> = None;
        for copy in &self.copies {
            copy.visit_runs(&mut |run| match &mut pending {
                Some(last)
                    if last.engine + last.bytes == run.engine
                        && last.host + last.bytes == run.host =>
                {
                    last.bytes += run.bytes;
                    Ok(())
                }
                last => last.replace(run).map_or(Ok(()), &mut cut),
            })?;
        }
        pending.map_or(Ok(()), cut)
    }
}

#[cfg(test)]
mod tests;
