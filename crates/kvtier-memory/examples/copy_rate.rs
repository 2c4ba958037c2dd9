//! Prints how fast the copies of this crate are, beside plain `memcpy` in the same run.
//!
//! `cargo run --release -p kvtier-memory --example copy_rate [MiB a side, default 512]`
//!
//! All ways move the same chunks between the same two memories (larger than the caches), in
//! turns, and the best and median round of each is shown. GB/s count each byte once.

use std::error::Error;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvtier_memory::{
    AffineCopy, Arena, ArenaKind, CopyLoop, Direction, Extent, FreeExtents, OwnSegment, Run,
    copy_affine, copy_runs,
};

const CHUNK: u64 = 2 << 20;
const ROUNDS: usize = 9;

/// One way to copy the chunk that begins at an offset equal on both sides.
type Way<'a> = (
    String,
    Box<dyn FnMut(u64) -> Result<(), Box<dyn Error>> + 'a>,
);

/// `layers` x `tokens` x `heads` pieces of `piece` bytes: the segment has heads outside tokens,
/// the arena tokens outside heads.
fn transposed(base: u64, layers: u64, tokens: u64, heads: u64, piece: u64) -> AffineCopy {
    let loops = [
        CopyLoop {
            count: layers,
            segment_stride: tokens * heads * piece,
            arena_stride: tokens * heads * piece,
        },
        CopyLoop {
            count: tokens,
            segment_stride: piece,
            arena_stride: heads * piece,
        },
        CopyLoop {
            count: heads,
            segment_stride: tokens * piece,
            arena_stride: piece,
        },
    ];
    AffineCopy::new(base, 0, piece, &loops)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mib: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 512,
    };
    let bytes = (mib << 20).next_multiple_of(CHUNK);
    let started = Instant::now();
    let arena = Arena::create(ArenaKind::Anonymous, bytes)?;
    println!("arena of {mib} MiB created in {:?}", started.elapsed());
    let started = Instant::now();
    arena.prefault(arena.whole(), &AtomicBool::new(false), |_| {})?;
    let rate = bytes as f64 / started.elapsed().as_secs_f64() / 1e9;
    println!("prefaulted at {rate:.2} GB/s");
    let own = OwnSegment::create(bytes)?;
    let segment = own.as_segment();
    let filler: Vec<u8> = (0..CHUNK).map(|i| (i % 255) as u8).collect();
    for base in (0..bytes).step_by(CHUNK as usize) {
        segment.write(base, &filler)?;
    }

    let source = vec![1_u8; bytes as usize];
    let mut target = vec![2_u8; bytes as usize];
    let (arena, store) = (&arena, Direction::SegmentToArena);
    let retrieve = Direction::ArenaToSegment;
    let extent = |base| Extent::new(base, CHUNK);
    let mut ways: Vec<Way<'_>> = vec![(
        "memcpy, 2 MiB".to_owned(),
        Box::new(move |base| {
            let range = base as usize..(base + CHUNK) as usize;
            target[range.clone()].copy_from_slice(&source[range]);
            std::hint::black_box(&mut target);
            Ok(())
        }),
    )];
    for (name, direction) in [("store", store), ("retrieve", retrieve)] {
        ways.push((
            format!("{name}, 2 MiB contiguous"),
            Box::new(move |base| {
                let copy = [AffineCopy::new(base, 0, CHUNK, &[])];
                copy_affine(segment, arena, extent(base), direction, &copy)?;
                Ok(())
            }),
        ));
        ways.push((
            format!("{name}, 64 runs of 32 KiB"),
            Box::new(move |base| {
                let run = |i: u64| Run {
                    // Scattered: blocks of a chunk lie anywhere.
                    segment_offset: base + (i * 37 % 64) * (32 << 10),
                    arena_offset: i * (32 << 10),
                    len: 32 << 10,
                };
                let runs: Vec<Run> = (0..64).map(run).collect();
                copy_runs(segment, arena, extent(base), direction, &runs)?;
                Ok(())
            }),
        ));
        for piece in [512, 256, 128, 64, 16] {
            ways.push((
                format!("{name}, {piece} B transposed"),
                Box::new(move |base| {
                    let layers = CHUNK / (16 * 8 * piece);
                    let copy = [transposed(base, layers, 16, 8, piece)];
                    copy_affine(segment, arena, extent(base), direction, &copy)?;
                    Ok(())
                }),
            ));
        }
    }
    ways.push((
        "checksum, 128 bits".to_owned(),
        Box::new(move |base| {
            std::hint::black_box(arena.checksum(extent(base))?);
            Ok(())
        }),
    ));

    let mut times = vec![Vec::with_capacity(ROUNDS); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, way), times) in ways.iter_mut().zip(&mut times) {
            let started = Instant::now();
            for base in (0..bytes).step_by(CHUNK as usize) {
                way(base)?;
            }
            times.push(started.elapsed());
        }
    }
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    let mut plain = None;
    println!("{:32} {:>9} {:>9}  of memcpy", "GB/s", "best", "median");
    for ((name, _), times) in ways.iter().zip(&mut times) {
        times.sort_unstable();
        let (best, median) = (rate(times[0]), rate(times[ROUNDS / 2]));
        let plain = *plain.get_or_insert(median);
        println!("{name:32} {best:9.2} {median:9.2}  {:.2}", median / plain);
    }
    allocator_rate()
}

/// Frees and allocations in turns, with 100 000 extents in use.
fn allocator_rate() -> Result<(), Box<dyn Error>> {
    const LIVE: usize = 100_000;
    const OPERATIONS: u32 = 1_000_000;
    for (name, sizes) in [("of mixed sizes", 4 << 20), ("of one size", 1)] {
        let mut allocator = FreeExtents::new(1 << 40)?;
        let mut live = Vec::with_capacity(LIVE);
        let mut state = 1_u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        for _ in 0..LIVE {
            live.push(allocator.allocate(CHUNK + random() % sizes)?);
        }
        let started = Instant::now();
        for _ in 0..OPERATIONS / 2 {
            let index = random() as usize % LIVE;
            allocator.free(live[index])?;
            live[index] = allocator.allocate(CHUNK + random() % sizes)?;
        }
        let each = started.elapsed() / OPERATIONS;
        println!("allocator: {each:?} an operation, {LIVE} extents {name}");
    }
    Ok(())
}
