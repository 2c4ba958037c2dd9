//! [`FreeExtents`] against a model: one flag per unit.

use kvtier_common::extent::{AllocateError, Extent, FreeExtents, GeometryError};
use proptest::prelude::*;

#[test]
fn geometry_is_checked() {
    assert!(matches!(
        FreeExtents::with_alignment(1 << 20, 3000),
        Err(GeometryError::Alignment { alignment: 3000 })
    ));
    assert!(matches!(
        FreeExtents::with_alignment(1 << 20, 0),
        Err(GeometryError::Alignment { .. })
    ));
    assert!(FreeExtents::new(4095).is_err());
    assert!(FreeExtents::with_alignment(u64::MAX, 64).is_err());
    assert!(FreeExtents::new(8 << 40).is_err());
    let most = FreeExtents::new((8 << 40) - 4096).unwrap();
    assert_eq!(most.largest_free(), (8 << 40) - 4096);
    // A tail smaller than a unit is left unused.
    assert_eq!(FreeExtents::new(10_000).unwrap().capacity(), 8192);
}

#[test]
fn pieces_tile_the_arena_and_name_their_owners() {
    let mut allocator = FreeExtents::new(10 * 4096).unwrap();
    let taken = [7, 8, 9].map(|owner| allocator.allocate_for(2 * 4096 - 1, owner).unwrap());
    allocator.free(taken[1]).unwrap();
    let unit = |offset: u64, owner| (offset * 4096, owner);
    let owners = |pieces: Vec<kvtier_common::extent::ArenaPiece>| -> Vec<_> {
        let owners = pieces.into_iter();
        owners
            .map(|piece| (piece.extent.offset, piece.owner))
            .collect()
    };
    let all = [
        unit(0, Some(7)),
        unit(2, None),
        unit(4, Some(9)),
        unit(6, None),
    ];
    assert_eq!(owners(allocator.pieces_up(0).collect()), all);
    assert_eq!(owners(allocator.pieces_up(2 * 4096).collect()), all[1..]);
    assert_eq!(owners(allocator.pieces_up(1).collect()), all[1..]);
    let mut down = owners(allocator.pieces_down(4 * 4096).collect());
    down.reverse();
    assert_eq!(down, all[..2]);
    let bytes = allocator
        .pieces_up(0)
        .map(|piece| piece.extent.len)
        .sum::<u64>();
    assert_eq!(bytes, allocator.capacity());
}

#[test]
fn allocation_takes_best_fit_and_free_joins_neighbours() {
    let mut allocator = FreeExtents::new(100 * 4096).unwrap();
    let all: Vec<Extent> = [10, 1, 5, 1, 7, 1]
        .iter()
        .map(|units| allocator.allocate(units * 4096).unwrap())
        .collect();
    // Free: 10 units at 0, 5 at 11, 7 at 17, the rest at 25.
    for index in [0, 2, 4] {
        allocator.free(all[index]).unwrap();
    }
    assert_eq!(allocator.stats().free_extents, 4);
    let six = allocator.allocate(5 * 4096 + 1).unwrap();
    assert_eq!(six, Extent::new(17 * 4096, 5 * 4096 + 1));
    let five = allocator.allocate(5 * 4096).unwrap();
    assert_eq!(five.offset, 11 * 4096);
    allocator.free(six).unwrap();
    allocator.free(five).unwrap();
    for index in [1, 3, 5] {
        allocator.free(all[index]).unwrap();
    }
    let stats = allocator.stats();
    assert_eq!((stats.used, stats.used_extents), (0, 0));
    assert_eq!((stats.free_extents, stats.largest_free), (1, 100 * 4096));
}

#[test]
fn refusals_change_nothing() {
    let mut allocator = FreeExtents::new(8 * 4096).unwrap();
    assert_eq!(allocator.allocate(0), Err(AllocateError::ZeroBytes));
    let one = allocator.allocate(3 * 4096).unwrap();
    let before = allocator.stats();
    assert_eq!(
        allocator.allocate(6 * 4096),
        Err(AllocateError::NoSpace {
            bytes: 6 * 4096,
            free: 5 * 4096,
            largest_free: 5 * 4096
        })
    );
    assert!(allocator.allocate(u64::MAX).is_err());
    for foreign in [
        Extent::new(one.offset, 4096),
        Extent::new(one.offset + 1, one.len),
        Extent::new(one.offset + 4096, 4096),
        Extent::new(one.offset, 0),
        Extent::new(5 * 4096, 4096),
        Extent::new(u64::MAX, u64::MAX),
        Extent::new(1 << 60, 3 * 4096),
    ] {
        assert_eq!(allocator.free(foreign).unwrap_err().extent, foreign);
    }
    assert_eq!(allocator.stats(), before);
    allocator.free(one).unwrap();
    assert!(allocator.free(one).is_err());
    allocator.check_invariants().unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(prop::sample::Index),
    FreeAgain(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..20_000).prop_map(Step::Allocate),
        3 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => any::<prop::sample::Index>().prop_map(Step::FreeAgain),
    ]
}

/// Start of the smallest, then lowest, run of clear flags that has `units`.
fn best_fit(flags: &[bool], units: usize) -> Option<usize> {
    let mut runs = Vec::new();
    let mut start = 0;
    for group in flags.chunk_by(|a, b| a == b) {
        if !group[0] && group.len() >= units {
            runs.push((group.len(), start));
        }
        start += group.len();
    }
    runs.into_iter().min().map(|(_, start)| start)
}

proptest! {
    #[test]
    fn equals_a_bitmap(
        units in 1_usize..200,
        shift in 6_u32..13,
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let unit = 1_u64 << shift;
        let mut allocator =
            FreeExtents::with_alignment(units as u64 * unit, unit).unwrap();
        let mut flags = vec![false; units];
        let mut live: Vec<Extent> = Vec::new();
        let mut dead: Vec<Extent> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(bytes) => {
                    let want = bytes.div_ceil(unit) as usize;
                    let got = allocator.allocate(bytes).ok();
                    let expected = best_fit(&flags, want);
                    prop_assert_eq!(
                        got,
                        expected.map(|at| Extent::new(at as u64 * unit, bytes))
                    );
                    if let (Some(at), Some(extent)) = (expected, got) {
                        flags[at..at + want].fill(true);
                        live.push(extent);
                    }
                }
                Step::Free(_) if live.is_empty() => {}
                Step::Free(index) => {
                    let extent = live.swap_remove(index.index(live.len()));
                    allocator.free(extent).unwrap();
                    let at = (extent.offset / unit) as usize;
                    flags[at..at + extent.len.div_ceil(unit) as usize].fill(false);
                    dead.push(extent);
                }
                Step::FreeAgain(_) if dead.is_empty() => {}
                Step::FreeAgain(index) => {
                    let extent = dead[index.index(dead.len())];
                    let same = |other: &Extent| {
                        other.offset == extent.offset
                            && other.len.div_ceil(unit) == extent.len.div_ceil(unit)
                    };
                    if !live.iter().any(same) {
                        prop_assert!(allocator.free(extent).is_err());
                    }
                }
            }
            prop_assert_eq!(allocator.check_invariants(), Ok(()));
            let used = flags.iter().filter(|flag| **flag).count() as u64 * unit;
            prop_assert_eq!(allocator.used(), used);
        }
        for extent in live {
            allocator.free(extent).unwrap();
        }
        prop_assert_eq!(allocator.largest_free(), allocator.capacity());
    }
}

#[test]
fn taken_extents_are_as_if_allocated_there() {
    let unit = 4096;
    let extent = |offset: u64, bytes| Extent::new(offset * unit, bytes);
    let mut allocator = FreeExtents::new(10 * unit).unwrap();
    let wanted = [
        (extent(1, unit), 7),
        (extent(1, unit), 8),
        (extent(2, unit + 1), 9),
        (extent(3, 1), 10),
        (Extent::new(4 * unit + 1, 1), 11),
        (extent(5, 0), 12),
        (extent(8, 2 * unit), 13),
        (extent(9, unit + 1), 14),
        (extent(10, 1), 15),
        (Extent::new(u64::MAX - unit + 1, 1), 16),
    ];
    let taken = allocator.take_all(&wanted);
    let owners = wanted.iter().zip(&taken).filter(|(_, taken)| **taken);
    let owners: Vec<_> = owners.map(|((_, owner), _)| *owner).collect();
    assert_eq!(owners, [7, 9, 13]);
    allocator.check_invariants().unwrap();
    assert_eq!(allocator.used(), 5 * unit);
    // What is free is found, and what was taken can be freed.
    assert_eq!(allocator.allocate(4 * unit), Ok(extent(4, 4 * unit)));
    assert_eq!(allocator.allocate(unit), Ok(extent(0, unit)));
    assert!(allocator.allocate(1).is_err());
    for at in [0, 2, 6] {
        allocator.free(wanted[at].0).unwrap();
        allocator.check_invariants().unwrap();
    }
    let mut all = FreeExtents::new(2 * unit).unwrap();
    assert_eq!(all.take_all(&[(extent(0, 2 * unit), 1)]), [true]);
    all.check_invariants().unwrap();
}
