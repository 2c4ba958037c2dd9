//! Staging layout: places of a piece's bytes in its staging buffer on the GPU.

use super::super::device_copy::DeviceCopy;

/// A contiguous range of the arena and its address in the staging buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagedRange {
    pub host: u64,
    pub bytes: u64,
    pub staged: u64,
}

/// The ranges of a piece, by address; reused for many pieces.
#[derive(Debug, Default)]
pub(super) struct StagedRanges {
    ranges: Vec<StagedRange>,
    /// Start and end of each copy.
    spans: Vec<(u64, u64)>,
}

impl StagedRanges {
    pub fn all(&self) -> &[StagedRange] {
        &self.ranges
    }

    /// Staging address of a host address, which is in one of the ranges.
    pub fn staged(&self, host: u64) -> u64 {
        let after = self.ranges.partition_point(|range| range.host <= host);
        let range = &self.ranges[after - 1];
        range.staged + (host - range.host)
    }

    /// Assigns the arena bytes of the copies to places in a buffer, with the same alignment modulo 16. Returns `false` if
    /// the copies have holes (bytes of the span that no copy moves, which staging would overwrite) or the buffer is too
    /// small.
    pub fn fill(&mut self, copies: &[DeviceCopy], buffer: u64, buffer_bytes: u64) -> bool {
        let Self { ranges, spans } = self;
        ranges.clear();
        spans.clear();
        let mut bytes = 0u64;
        for copy in copies {
            // A copy is inside its extent, so nothing here overflows.
            let steps = |step: &kvtier_memory::CopyLoop| (step.count - 1) * step.arena_stride;
            let span = copy.inner_bytes + copy.loops.iter().map(steps).sum::<u64>();
            spans.push((copy.host, copy.host + span));
            bytes += copy.bytes();
        }
        spans.sort_unstable();
        for &(start, end) in spans.iter() {
            match ranges.last_mut() {
                Some(last) if start <= last.host + last.bytes => {
                    last.bytes = last.bytes.max(end - last.host);
                }
                _ => ranges.push(StagedRange {
                    host: start,
                    bytes: end - start,
                    staged: 0,
                }),
            }
        }
        // Copies do not overlap on either side, so equal sums mean that there are no holes.
        if ranges.iter().map(|range| range.bytes).sum::<u64>() != bytes {
            return false;
        }
        let mut used = 0u64;
        for range in ranges {
            let at = used.next_multiple_of(16) + range.host % 16;
            used = at + range.bytes;
            range.staged = buffer + at;
        }
        used <= buffer_bytes
    }
}

#[cfg(test)]
mod tests {
    use kvtier_memory::CopyLoop;

    use super::*;

    fn copy(host: u64, inner_bytes: u64, count: u64, arena_stride: u64) -> DeviceCopy {
        let mut loops = [CopyLoop::ONCE; 3];
        loops[1] = CopyLoop {
            count,
            segment_stride: 1 << 20,
            arena_stride,
        };
        DeviceCopy {
            engine: 0,
            host,
            inner_bytes,
            loops,
        }
    }

    #[test]
    fn interleaved_copies_are_one_range() {
        // Two heads of four tokens, and an adjacent run.
        let copies = [
            copy(1000, 8, 4, 16),
            copy(1008, 8, 4, 16),
            copy(1064, 10, 1, 0),
        ];
        let mut ranges = StagedRanges::default();
        assert!(ranges.fill(&copies, 4096, 128));
        assert_eq!(
            ranges.all(),
            [StagedRange {
                host: 1000,
                bytes: 74,
                staged: 4096 + 8
            }]
        );
        assert_eq!(ranges.staged(1008), 4096 + 16);
        assert!(!ranges.fill(&copies, 4096, 81));
    }

    #[test]
    fn separate_ranges_keep_their_alignment() {
        let copies = [copy(5003, 5, 1, 0), copy(1000, 8, 1, 0)];
        let mut ranges = StagedRanges::default();
        assert!(ranges.fill(&copies, 4096, 64));
        let staged: Vec<_> = ranges.all().iter().map(|range| range.staged).collect();
        assert_eq!(staged, [4096 + 8, 4096 + 16 + 11]);
        assert_eq!(ranges.staged(5004), 4096 + 16 + 12);
    }

    #[test]
    fn copies_with_holes_are_not_staged() {
        let copies = [copy(1000, 8, 4, 16)];
        assert!(!StagedRanges::default().fill(&copies, 4096, 1 << 20));
    }
}
