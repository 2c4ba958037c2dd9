use kvtier_memory::AffineCopy;

use super::*;

const MEMORY_AT: u64 = 0x7f00_0000_0000;
const EXTENT_AT: u64 = 0x5500_0000_0000;

fn placed(copy: AffineCopy) -> Result<DeviceCopy, AccessError> {
    let memory = AddressRange {
        address: MEMORY_AT,
        bytes: 10_000,
    };
    let extent = AddressRange {
        address: EXTENT_AT,
        bytes: 4_000,
    };
    DeviceCopy::new(&PlannedCopy { memory: 0, copy }, &[memory], extent)
}

fn step(count: u64, segment_stride: u64, arena_stride: u64) -> CopyLoop {
    CopyLoop {
        count,
        segment_stride,
        arena_stride,
    }
}

#[test]
fn copy_may_reach_the_ends_only() {
    let loops = [step(2, 5_000, 2_000), step(4, 1_000, 500)];
    let exact = placed(AffineCopy::new(1_500, 0, 500, &loops)).expect("fits");
    assert_eq!((exact.engine, exact.host), (MEMORY_AT + 1_500, EXTENT_AT));
    assert_eq!((exact.runs(), exact.bytes()), (8, 4_000));

    let error = placed(AffineCopy::new(1_501, 0, 500, &loops)).expect_err("too far");
    assert_eq!(
        error.to_string(),
        "8500 bytes at offset 1501 do not fit in the 10000 bytes of the engine's memory"
    );
    let error = placed(AffineCopy::new(0, 1, 500, &loops)).expect_err("too far");
    assert_eq!(
        error.to_string(),
        "4000 bytes at offset 1 do not fit in the 4000 bytes of the extent"
    );
}

#[test]
fn overflowing_copies_are_refused() {
    for copy in [
        AffineCopy::new(u64::MAX, 0, 1, &[]),
        AffineCopy::new(0, u64::MAX, 1, &[]),
        AffineCopy::new(0, 0, 1, &[step(3, u64::MAX, 0)]),
        AffineCopy::new(0, 0, 1, &[step(3, 0, u64::MAX / 2 + 1)]),
        AffineCopy::new(0, 0, u64::MAX, &[step(2, 0, 0)]),
        // Inside the bounds, and endless.
        AffineCopy::new(0, 0, 1, &[step(u64::MAX, 0, 0)]),
    ] {
        placed(copy).expect_err("outside");
    }
    let at_the_end = AddressRange {
        address: u64::MAX - 5,
        bytes: 10,
    };
    let planned = PlannedCopy {
        memory: 0,
        copy: AffineCopy::new(0, 0, 1, &[]),
    };
    for places in [
        (
            at_the_end,
            AddressRange {
                address: 0,
                bytes: 10,
            },
        ),
        (
            AddressRange {
                address: 0,
                bytes: 10,
            },
            at_the_end,
        ),
    ] {
        DeviceCopy::new(&planned, &[places.0], places.1).expect_err("no such addresses");
    }
    DeviceCopy::new(
        &planned,
        &[],
        AddressRange {
            address: 0,
            bytes: 10,
        },
    )
    .expect_err("no such memory");
}

#[test]
fn empty_copies_are_dropped() {
    let mut copies = DeviceCopies::default();
    for copy in [
        AffineCopy::new(u64::MAX, 0, 0, &[step(7, 5, 5)]),
        AffineCopy::new(0, 0, 100, &[step(0, 5, 5)]),
    ] {
        copies.push(placed(copy).expect("nothing is everywhere"));
    }
    assert!(copies.as_slice().is_empty());
    assert_eq!(copies.run_lengths(), RunLengths::default());
    assert_eq!(copies.run_lengths().mean(), 0);
}

#[test]
fn adjacent_copies_are_merged() {
    let run =
        |engine, host, bytes| placed(AffineCopy::new(engine, host, bytes, &[])).expect("fits");
    let mut copies = DeviceCopies::default();
    copies.push(run(0, 0, 100));
    copies.push(run(100, 100, 50));
    // Adjoins on the host's side only, then on the engine's only.
    copies.push(run(200, 150, 50));
    copies.push(run(250, 300, 50));
    let found: Vec<_> = copies
        .as_slice()
        .iter()
        .map(|copy| (copy.engine - MEMORY_AT, copy.inner_bytes))
        .collect();
    assert_eq!(found, [(0, 150), (200, 50), (250, 50)]);
    let lengths = copies.run_lengths();
    assert_eq!(
        lengths,
        RunLengths {
            runs: 3,
            bytes: 250,
        }
    );
    assert_eq!(lengths.mean(), 83);
}

/// Whole lists are appended at once, parts one by one, with the same result.
#[test]
fn pieces_are_filled_up_to_their_limits() {
    let run = |at, bytes| placed(AffineCopy::new(at, at, bytes, &[])).expect("fits");
    let looped = placed(AffineCopy::new(400, 400, 10, &[step(4, 20, 30)])).expect("fits");
    let list = |copies: &[DeviceCopy]| {
        let mut list = DeviceCopies::default();
        copies.iter().for_each(|copy| list.push(*copy));
        list
    };
    // The first run adjoins the one that is there before, or does not.
    for first in [100, 120] {
        let waiting = [run(first, 50), looped, run(300, 50)];
        let most = PieceLimits {
            bytes: 240,
            runs: 7,
            copies: 4,
        };
        let filled = |before: &[DeviceCopy], from, most| {
            let mut piece = list(before);
            let next = piece.fill(&list(&waiting), from, most);
            let expected = [before, &waiting[from..next]].concat();
            assert_eq!(piece.as_slice(), list(&expected).as_slice());
            assert_eq!(piece.run_lengths(), list(&expected).run_lengths());
            next
        };
        let before = [run(0, 100)];
        assert_eq!(filled(&before, 0, most), 3);
        assert_eq!(filled(&before, 1, most), 3);
        assert_eq!(filled(&before, 3, most), 3);
        assert_eq!(filled(&before, 0, PieceLimits { bytes: 239, ..most }), 2);
        assert_eq!(filled(&before, 1, PieceLimits { bytes: 139, ..most }), 1);
        assert_eq!(filled(&before, 1, PieceLimits { runs: 5, ..most }), 2);
        assert_eq!(filled(&before, 1, PieceLimits { copies: 2, ..most }), 2);
        // An empty list takes at least one.
        let none = PieceLimits {
            bytes: 1,
            runs: 1,
            copies: 1,
        };
        assert_eq!(filled(&before, 0, none), 0);
        assert_eq!(filled(&[], 0, none), 1);
        assert_eq!(filled(&[], 1, none), 2);
    }
}

#[test]
fn runs_are_merged_before_they_are_cut() {
    let mut copies = DeviceCopies::default();
    // The last step of the loop adjoins the copy behind it.
    copies.push(placed(AffineCopy::new(0, 0, 100, &[step(2, 200, 100)])).expect("fits"));
    copies.push(placed(AffineCopy::new(300, 200, 100, &[])).expect("fits"));
    let runs = |pieces| {
        let mut runs = Vec::new();
        let visited: Result<(), ()> = copies.visit_runs(pieces, |run| {
            runs.push((run.engine - MEMORY_AT, run.host - EXTENT_AT, run.bytes));
            Ok(())
        });
        visited.expect("no error");
        runs
    };
    assert_eq!(runs(PinnedPieces::WHOLE), [(0, 0, 100), (200, 100, 200)]);
    let pieces = |start, bytes| PinnedPieces {
        start: EXTENT_AT + start,
        bytes,
    };
    assert_eq!(runs(pieces(0, 300)), runs(PinnedPieces::WHOLE));
    assert_eq!(
        runs(pieces(0, 150)),
        [(0, 0, 100), (200, 100, 50), (250, 150, 150)]
    );
    // Memory in front of the first piece ends where that starts.
    assert_eq!(
        runs(pieces(110, 60)),
        [
            (0, 0, 100),
            (200, 100, 10),
            (210, 110, 60),
            (270, 170, 60),
            (330, 230, 60),
            (390, 290, 10)
        ]
    );
}

#[test]
fn visitor_error_ends_the_visit() {
    let mut copies = DeviceCopies::default();
    copies.push(placed(AffineCopy::new(0, 0, 1, &[step(5, 2, 2)])).expect("fits"));
    let mut seen = 0;
    let result = copies.visit_runs(PinnedPieces::WHOLE, |_| {
        seen += 1;
        if seen == 2 { Err("stop") } else { Ok(()) }
    });
    assert_eq!((result, seen), (Err("stop"), 2));
}

#[test]
fn run_direction_selects_source_and_target() {
    let run = DeviceRun {
        engine: 1,
        host: 2,
        bytes: 3,
    };
    assert_eq!(run.source_and_target(Direction::Store), (1, 2));
    assert_eq!(run.source_and_target(Direction::Retrieve), (2, 1));
}
