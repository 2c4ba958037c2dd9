//! Where the bytes of a piece are while they are on the GPU and not yet in pages, or not yet in the arena.

use super::super::device_copy::DeviceCopy;

/// Bytes that adjoin in the arena, and where they are staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagedRange {
    pub host: u64,
    pub bytes: u64,
    pub staged: u64,
}

/// The ranges of a piece, by address.
#[derive(Debug)]
pub(super) struct StagedRanges(Vec<StagedRange>);

impl StagedRanges {
    pub fn all(&self) -> &[StagedRange] {
        &self.0
    }

    /// Where the byte at an address of the host, which is in one of the ranges, is staged.
    pub fn staged(&self, host: u64) -> u64 {
        let after = self.0.partition_point(|range| range.host <= host);
        let range = &self.0[after - 1];
        range.staged + (host - range.host)
    }
}

/// Gives the bytes that copies touch in the arena places in a buffer, as far off a multiple of 16 as they are there.
///
/// `None` when there are holes, bytes that no copy touches between those of one (copying the whole would write them
/// too), or when the buffer is too small.
pub(super) fn stage(copies: &[DeviceCopy], buffer: u64, room: u64) -> Option<StagedRanges> {
    let mut spans: Vec<(u64, u64)> = Vec::with_capacity(copies.len());
    let mut bytes = 0u64;
    for copy in copies {
        // A copy lies inside its extent, so nothing here overflows.
        let steps = |step: &kvtier_memory::CopyLoop| (step.count - 1) * step.arena_stride;
        let span = copy.inner_bytes + copy.loops.iter().map(steps).sum::<u64>();
        spans.push((copy.host, copy.host + span));
        bytes += copy.bytes();
    }
    spans.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in spans {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    // Copies do not overlap where they write, and each reads what it moves once: equal sums mean no holes.
    if merged.iter().map(|(start, end)| end - start).sum::<u64>() != bytes {
        return None;
    }
    let mut ranges = Vec::with_capacity(merged.len());
    let mut used = 0u64;
    for (start, end) in merged {
        let at = used.next_multiple_of(16) + start % 16;
        used = at + (end - start);
        ranges.push(StagedRange {
            host: start,
            bytes: end - start,
            staged: buffer + at,
        });
    }
    (used <= room).then_some(StagedRanges(ranges))
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
    fn copies_that_interleave_are_one_range() {
        // Two heads of four tokens, and a run that adjoins.
        let copies = [
            copy(1000, 8, 4, 16),
            copy(1008, 8, 4, 16),
            copy(1064, 10, 1, 0),
        ];
        let ranges = stage(&copies, 4096, 128).unwrap();
        assert_eq!(
            ranges.all(),
            [StagedRange {
                host: 1000,
                bytes: 74,
                staged: 4096 + 8
            }]
        );
        assert_eq!(ranges.staged(1008), 4096 + 16);
        assert!(stage(&copies, 4096, 81).is_none());
    }

    #[test]
    fn ranges_apart_are_staged_apart_and_as_aligned() {
        let copies = [copy(5003, 5, 1, 0), copy(1000, 8, 1, 0)];
        let ranges = stage(&copies, 4096, 64).unwrap();
        let staged: Vec<_> = ranges.all().iter().map(|range| range.staged).collect();
        assert_eq!(staged, [4096 + 8, 4096 + 16 + 11]);
        assert_eq!(ranges.staged(5004), 4096 + 16 + 12);
    }

    #[test]
    fn holes_are_not_staged() {
        assert!(stage(&[copy(1000, 8, 4, 16)], 4096, 1 << 20).is_none());
    }
}
