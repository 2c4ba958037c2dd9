//! Device copies: a plan with addresses instead of offsets, the input of every executor.

use kvtier_memory::{AccessError, CopyLoop, within};

use crate::blocks::BlockTable;
use crate::device::DeviceError;
use crate::layout::KvLayout;
use crate::plan::{ChunkRequest, Direction, PlannedCopy, PlannedRun};

/// Number of loops of a [`DeviceCopy`]: blocks, slots, heads.
const LOOPS: usize = 3;
/// Names of the two sides in errors.
const MEMORY: &str = "engine's memory";
const EXTENT: &str = "extent";

/// A range of addresses: a mapped memory of the engine, or the extent of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl AddressRange {
    /// Checks that the end does not overflow.
    #[inline]
    fn checked(self, what: &'static str) -> Result<Self, AccessError> {
        match self.address.checked_add(self.bytes) {
            Some(_) => Ok(self),
            None => Err(AccessError::Overflow { what, index: 0 }),
        }
    }
}

/// One of a layout's memories. A missing one is empty.
#[inline]
fn memory_at(memories: &[AddressRange], index: usize) -> Result<AddressRange, AccessError> {
    let none = AddressRange {
        address: 0,
        bytes: 0,
    };
    memories.get(index).unwrap_or(&none).checked(MEMORY)
}

/// Copies `inner_bytes` contiguous bytes for every combination of loop steps, one way or the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCopy {
    /// First byte in the engine's memory, an address of the device.
    pub engine: u64,
    /// First byte in the object.
    pub host: u64,
    /// Bytes of a run, contiguous on both sides.
    pub inner_bytes: u64,
    /// Loops around the run, outermost first: the segment's stride is the engine's, the arena's the host's.
    pub loops: [CopyLoop; LOOPS],
}

/// A run: bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRun {
    /// First byte in the engine's memory, an address of the device.
    pub engine: u64,
    /// First byte in the object.
    pub host: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl DeviceRun {
    /// Resolves a planned run between the memories of its layout and an extent.
    #[inline]
    fn new(
        planned: PlannedRun,
        memories: &[AddressRange],
        extent: AddressRange,
    ) -> Result<Self, AccessError> {
        let PlannedRun {
            memory,
            segment_offset,
            arena_offset,
            bytes,
        } = planned;
        let memory = memory_at(memories, memory)?;
        let extent = extent.checked(EXTENT)?;
        within(MEMORY, segment_offset, bytes, memory.bytes)?;
        within(EXTENT, arena_offset, bytes, extent.bytes)?;
        Ok(Self {
            engine: memory.address + segment_offset,
            host: extent.address + arena_offset,
            bytes,
        })
    }

    /// Source and target address.
    pub fn source_and_target(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::Store => (self.engine, self.host),
            Direction::Retrieve => (self.host, self.engine),
        }
    }
}

impl DeviceCopy {
    /// Resolves a planned copy between the memories of its layout, by index, and an extent.
    ///
    /// # Errors
    /// [`AccessError::OutOfBounds`] or [`AccessError::Overflow`] if it exceeds either side.
    ///
    /// # Panics
    /// If the copy has four loops; a plan has at most three.
    pub fn new(
        planned: &PlannedCopy,
        memories: &[AddressRange],
        extent: AddressRange,
    ) -> Result<Self, AccessError> {
        let copy = &planned.copy;
        let memory = memory_at(memories, planned.memory)?;
        let extent = extent.checked(EXTENT)?;
        let overflow = |what| AccessError::Overflow { what, index: 0 };
        let [outermost, loops @ ..] = copy.loops;
        assert!(outermost.count == 1, "a planned copy of four loops");
        // Bytes moved, and on each side the span from the first byte to the end of the last one.
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
        // Strides of zero could describe unlimited work inside those bounds.
        within(EXTENT, 0, bytes, extent.bytes)?;
        Ok(Self {
            engine: memory.address + copy.segment_offset,
            host: extent.address + copy.arena_offset,
            inner_bytes: copy.inner_bytes,
            loops,
        })
    }

    /// Bytes moved, at most those of the extent ([`DeviceCopy::new`]).
    pub fn bytes(&self) -> u64 {
        self.inner_bytes * self.runs()
    }

    /// Number of runs of `inner_bytes`.
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|step| step.count).product()
    }

    /// Appends a run if this is a single run and both are adjacent on both sides.
    #[inline]
    fn extend(&mut self, next: DeviceRun) -> bool {
        let adjoins = self.engine + self.inner_bytes == next.engine
            && self.host + self.inner_bytes == next.host
            && self.runs() == 1;
        if adjoins {
            self.inner_bytes += next.bytes;
        }
        adjoins
    }

    /// Calls `visit` with parts of at most `most` bytes, which is a multiple of 16.
    pub fn visit_parts(&self, most: u64, visit: &mut impl FnMut(&Self)) {
        let bytes = self.bytes();
        if bytes <= most {
            return match bytes {
                0 => {}
                _ => visit(self),
            };
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
        front.visit_parts(most, visit);
        back.visit_parts(most, visit);
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

/// Pieces in which host memory is registered with the driver, all of one size except the last. A copy by the driver must
/// not cross a border between pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedPieces {
    /// Start address of the first piece.
    pub start: u64,
    /// Bytes of a piece; 0 if there are no borders.
    pub bytes: u64,
}

impl PinnedPieces {
    /// One piece without borders.
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

/// Number and bytes of the runs of some copies, before they are merged or cut at borders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunLengths {
    /// Number of runs.
    pub runs: u64,
    /// Bytes of all runs.
    pub bytes: u64,
}

impl RunLengths {
    /// Average bytes of a run; 0 without runs.
    pub fn mean(&self) -> u64 {
        self.bytes.checked_div(self.runs).unwrap_or(0)
    }
}

/// Limits of one piece, the copies that are submitted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceLimits {
    /// Maximum bytes.
    pub bytes: u64,
    /// Maximum runs.
    pub runs: u64,
    /// Maximum copies.
    pub copies: usize,
}

/// List of copies; adjacent runs are merged, also across planes and chunks.
#[derive(Debug, Clone, Default)]
pub struct DeviceCopies {
    copies: Vec<DeviceCopy>,
    lengths: RunLengths,
}

impl DeviceCopies {
    /// Removes the copies and keeps their memory.
    pub fn clear(&mut self) {
        self.copies.clear();
        self.lengths = RunLengths::default();
    }

    /// The copies, in object order.
    pub fn as_slice(&self) -> &[DeviceCopy] {
        &self.copies
    }

    /// Appends a copy, unless it is empty.
    pub fn push(&mut self, copy: DeviceCopy) {
        if copy.runs() == 1 {
            self.push_run(DeviceRun {
                engine: copy.engine,
                host: copy.host,
                bytes: copy.inner_bytes,
            });
        } else if copy.bytes() > 0 {
            self.push_apart(copy);
        }
    }

    /// Appends a run.
    #[inline]
    fn push_run(&mut self, run: DeviceRun) {
        let last = self.copies.last_mut();
        if last.is_some_and(|last| last.extend(run)) {
            self.lengths.bytes += run.bytes;
        } else if run.bytes > 0 {
            self.push_apart(DeviceCopy {
                engine: run.engine,
                host: run.host,
                inner_bytes: run.bytes,
                loops: [CopyLoop::ONCE; LOOPS],
            });
        }
    }

    /// Appends a copy without merging it with the previous one.
    pub fn push_apart(&mut self, copy: DeviceCopy) {
        self.lengths.runs += copy.runs();
        self.lengths.bytes += copy.bytes();
        self.copies.push(copy);
    }

    /// Appends copies of `waiting` from position `from` on, within the limits `most`; returns the position of the next
    /// one. An empty list takes at least one.
    pub fn fill(&mut self, waiting: &Self, from: usize, most: PieceLimits) -> usize {
        let fits = |own: &Self, other: RunLengths, copies: usize| {
            own.lengths.bytes + other.bytes <= most.bytes
                && own.lengths.runs + other.runs <= most.runs
                && own.copies.len() + copies <= most.copies
        };
        let all = waiting.copies.as_slice();
        if let (0, [first, rest @ ..]) = (from, all)
            && fits(self, waiting.lengths, all.len())
        {
            let before = self.lengths;
            self.push(*first);
            // The others were not merged with their predecessors in `waiting`, and are not merged here.
            self.copies.extend_from_slice(rest);
            let joined = self.lengths.runs - before.runs < first.runs();
            self.lengths.bytes = before.bytes + waiting.lengths.bytes;
            self.lengths.runs = before.runs + waiting.lengths.runs - u64::from(joined);
            return all.len();
        }
        for (at, copy) in all.iter().enumerate().skip(from) {
            let (bytes, runs) = (copy.bytes(), copy.runs());
            if !fits(self, RunLengths { runs, bytes }, 1) && !self.copies.is_empty() {
                return at;
            }
            self.push(*copy);
        }
        all.len()
    }

    /// Appends the copies of one chunk and returns their bytes. On an error some may have been appended.
    ///
    /// # Errors
    /// A chunk that the layout or the block table does not have, an extent shorter than the object, or memories smaller
    /// than the layout needs.
    pub fn push_chunk(
        &mut self,
        layout: &KvLayout,
        blocks: &BlockTable,
        request: ChunkRequest,
        memories: &[AddressRange],
        extent: AddressRange,
    ) -> Result<u64, DeviceError> {
        layout.check_extent(request.object_group, extent.bytes)?;
        let before = self.lengths.bytes;
        // Merged here as runs, which are smaller than copies.
        request.visit_spans(layout, blocks, |span| {
            match span.run() {
                Some(run) => self.push_run(DeviceRun::new(run, memories, extent)?),
                None => self.push(DeviceCopy::new(&span.copy(), memories, extent)?),
            }
            Ok::<(), DeviceError>(())
        })?;
        Ok(self.lengths.bytes - before)
    }

    /// Number and bytes of the runs.
    pub fn run_lengths(&self) -> RunLengths {
        self.lengths
    }

    /// Calls `visit` with the runs in order, adjacent ones merged, cut at the borders of the pinned pieces.
    ///
    /// # Errors
    /// The error of `visit`.
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
