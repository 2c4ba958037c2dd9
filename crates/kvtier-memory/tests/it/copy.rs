//! The affine copy against one byte at a time.

use kvtier_memory::{
    AccessError, AffineCopy, Arena, ArenaKind, CopyLoop, Direction, Extent, ForeignSegment,
    OwnSegment, Run, copy_affine, copy_runs,
};
use proptest::prelude::*;

const SIZE: u64 = 1 << 16;

struct Sides {
    segment: ForeignSegment,
    arena: Arena,
    segment_bytes: Vec<u8>,
    arena_bytes: Vec<u8>,
}

impl Sides {
    fn new() -> Self {
        let own = OwnSegment::create(SIZE).unwrap();
        let segment = ForeignSegment::open(own.name(), SIZE).unwrap();
        let arena = Arena::create(ArenaKind::Anonymous, SIZE).unwrap();
        // Bytes that differ everywhere on both sides.
        let fill = |seed: u32| -> Vec<u8> {
            (0..SIZE as u32)
                .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
                .collect()
        };
        let (segment_bytes, arena_bytes) = (fill(1), fill(77_777));
        segment.write(0, &segment_bytes).unwrap();
        arena.write(Extent::new(0, SIZE), 0, &arena_bytes).unwrap();
        Self {
            segment,
            arena,
            segment_bytes,
            arena_bytes,
        }
    }

    /// Does to the private bytes what the copy should do; `None` if it leaves either side.
    fn model(&mut self, extent: Extent, direction: Direction, copy: &AffineCopy) -> Option<u64> {
        let mut pieces = vec![(copy.segment_offset, copy.arena_offset)];
        for l in copy.loops {
            pieces = pieces
                .iter()
                .flat_map(|(s, a)| {
                    (0..l.count).map(move |i| (s + i * l.segment_stride, a + i * l.arena_stride))
                })
                .collect();
        }
        let inner = copy.inner_bytes;
        let bytes = pieces.len() as u64 * inner;
        if bytes == 0 {
            return Some(0);
        }
        let outside = |(s, a): &(u64, u64)| s + inner > SIZE || a + inner > extent.len;
        if bytes > extent.len || pieces.iter().any(outside) {
            return None;
        }
        for (s, a) in pieces {
            for i in 0..inner {
                let there = (s + i) as usize;
                let here = (extent.offset + a + i) as usize;
                match direction {
                    Direction::SegmentToArena => {
                        self.arena_bytes[here] = self.segment_bytes[there];
                    }
                    Direction::ArenaToSegment => {
                        self.segment_bytes[there] = self.arena_bytes[here];
                    }
                }
            }
        }
        Some(bytes)
    }

    fn check(&self) {
        let mut bytes = Vec::new();
        self.segment.read_into(0, SIZE, &mut bytes).unwrap();
        assert!(bytes == self.segment_bytes);
        bytes.clear();
        let all = Extent::new(0, SIZE);
        self.arena.read_into(all, 0, SIZE, &mut bytes).unwrap();
        assert!(bytes == self.arena_bytes);
    }
}

fn inner() -> impl Strategy<Value = u64> {
    prop_oneof![
        prop::sample::select(vec![1_u64, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512]),
        0_u64..700,
    ]
}

/// Copies as layouts make them: every loop's stride is what lies inside it, or more.
fn nested() -> impl Strategy<Value = AffineCopy> {
    let count = prop_oneof![3 => Just(1_u64), 6 => 1_u64..6, 1 => Just(0_u64)];
    let gap = prop_oneof![2 => Just(0_u64), 1 => 0_u64..40];
    let one = (count, gap.clone(), gap);
    let loops = prop::collection::vec(one, 4);
    let order = Just([0_usize, 1, 2, 3]).prop_shuffle();
    (inner(), loops, order, 0_u64..2000, 0_u64..2000).prop_map(
        |(inner, loops, order, segment_offset, arena_offset)| {
            let mut made = [CopyLoop::ONCE; 4];
            let mut segment_stride = inner;
            for (l, (count, segment_gap, _)) in made.iter_mut().zip(&loops).rev() {
                segment_stride += segment_gap;
                (l.count, l.segment_stride) = (*count, segment_stride);
                segment_stride *= (*count).max(1);
            }
            // The other side nests the same loops in another order: a transposition.
            let mut arena_stride = inner;
            for index in order {
                arena_stride += loops[index].2;
                made[index].arena_stride = arena_stride;
                arena_stride *= made[index].count.max(1);
            }
            AffineCopy::new(segment_offset, arena_offset, inner, &made)
        },
    )
}

fn direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(vec![Direction::SegmentToArena, Direction::ArenaToSegment])
}

proptest! {
    #[test]
    fn equals_one_byte_at_a_time(
        copies in prop::collection::vec(nested(), 1..4),
        direction in direction(),
        start in 0_u64..5000,
        len in prop_oneof![4 => Just(60_000_u64), 1 => 0_u64..60_000],
    ) {
        let mut sides = Sides::new();
        let extent = Extent::new(start, len);
        let (segment, arena) = (sides.segment_bytes.clone(), sides.arena_bytes.clone());
        let expected: Option<u64> = copies
            .iter()
            .map(|copy| sides.model(extent, direction, copy))
            .sum();
        if expected.is_none() {
            // Refused as a whole, before anything is copied.
            (sides.segment_bytes, sides.arena_bytes) = (segment, arena);
        }
        let copied = copy_affine(&sides.segment, &sides.arena, extent, direction, &copies);
        prop_assert_eq!(copied.ok(), expected);
        sides.check();
    }

    #[test]
    fn hostile_numbers_are_refused(
        counts in prop::array::uniform4(any::<u64>()),
        segment_strides in prop::array::uniform4(any::<u64>()),
        arena_strides in prop::array::uniform4(any::<u64>()),
        offsets in any::<(u64, u64)>(),
        inner in any::<u64>(),
        shift in 0_u32..64,
        direction in direction(),
    ) {
        let sides = Sides::new();
        let loops: [CopyLoop; 4] = std::array::from_fn(|i| CopyLoop {
            count: (counts[i] >> shift).max(1),
            segment_stride: segment_strides[i] >> shift,
            arena_stride: arena_strides[i] >> shift,
        });
        let copy = AffineCopy::new(offsets.0 >> shift, offsets.1 >> shift, inner, &loops);
        // Whatever fits was copied inside bounds, whatever does not is an error: no crash.
        let extent = Extent::new(4096, 8192);
        let _ = copy_affine(&sides.segment, &sides.arena, extent, direction, &[copy]);
        let mut outside = Vec::new();
        sides.arena.read_into(Extent::new(0, 4096), 0, 4096, &mut outside).unwrap();
        prop_assert!(outside == sides.arena_bytes[..4096]);
    }

    #[test]
    fn runs_equal_copies_without_loops(
        runs in prop::collection::vec((0_u64..70_000, 0_u64..70_000, 0_u64..5_000), 0..8),
        direction in direction(),
    ) {
        let (one, two) = (Sides::new(), Sides::new());
        let extent = Extent::new(0, SIZE);
        let copies: Vec<_> = runs.iter().map(|r| AffineCopy::new(r.0, r.1, r.2, &[])).collect();
        let runs: Vec<_> = runs
            .iter()
            .filter(|r| r.2 > 0)
            .map(|r| Run { segment_offset: r.0, arena_offset: r.1, len: r.2 })
            .collect();
        let by_runs = copy_runs(&one.segment, &one.arena, extent, direction, &runs);
        let by_copies = copy_affine(&two.segment, &two.arena, extent, direction, &copies);
        prop_assert_eq!(by_runs.ok(), by_copies.ok());
        let bytes = |sides: &Sides| {
            let mut bytes = Vec::new();
            sides.segment.read_into(0, SIZE, &mut bytes).unwrap();
            sides.arena.read_into(extent, 0, SIZE, &mut bytes).unwrap();
            bytes
        };
        prop_assert!(bytes(&one) == bytes(&two));
    }
}

#[test]
fn refusals_say_what_does_not_fit() {
    let sides = Sides::new();
    let try_copy = |extent, copy| {
        let way = Direction::SegmentToArena;
        copy_affine(&sides.segment, &sides.arena, extent, way, &[copy])
    };
    let all = Extent::new(0, SIZE);
    let refused = |what, error: Result<u64, AccessError>| match error {
        Err(AccessError::OutOfBounds { what: w, .. } | AccessError::Overflow { what: w, .. }) => {
            assert_eq!(w, what);
        }
        other => panic!("{other:?}"),
    };
    refused(
        "segment",
        try_copy(all, AffineCopy::new(SIZE - 7, 0, 8, &[])),
    );
    refused(
        "extent",
        try_copy(all, AffineCopy::new(0, SIZE - 7, 8, &[])),
    );
    refused(
        "arena",
        try_copy(Extent::new(8, SIZE), AffineCopy::new(0, 0, 8, &[])),
    );
    // Endless work without leaving the bounds.
    let again = CopyLoop {
        count: 1 << 40,
        ..CopyLoop::ONCE
    };
    refused("extent", try_copy(all, AffineCopy::new(0, 0, 8, &[again])));
    let far = CopyLoop {
        count: 3,
        segment_stride: u64::MAX / 2,
        arena_stride: 8,
    };
    refused("segment", try_copy(all, AffineCopy::new(9, 0, 8, &[far])));
}
