//! Pinning of the arena in the background: completely, partly, or not at all.

use std::sync::Arc;
use std::time::Duration;

use kvtier_device::cuda::{Executor, GpuOptions, PinningStatus};
use kvtier_device::{Direction, Transfer};
use kvtier_memory::{Arena, ArenaKind, Extent};

use super::setup::{Pages, Server, content, wait};
use crate::exporter::Exporter;

const ARENA: u64 = 1 << 20;
const PIECES: u64 = 4;

fn in_pieces(executor: Executor) -> GpuOptions {
    GpuOptions {
        executor: Some(executor),
        pin_bytes: ARENA / PIECES,
        ..GpuOptions::default()
    }
}

#[test]
fn arena_is_pinned_while_a_gpu_is_in_use() {
    let server = Server::with("", in_pieces(Executor::Batch), ARENA);
    let mut engine = Exporter::start();
    assert_eq!(server.cuda.pinning(), None);
    let pages = Pages::on(0, &server, &mut engine, [8, 64, 8]).unwrap();
    let other = Pages::on(1, &server, &mut engine, [8, 64, 8]).unwrap();
    server.pinned();
    let expected = PinningStatus {
        bytes: ARENA,
        total: ARENA,
        is_running: false,
        error: None,
    };
    assert_eq!(server.cuda.pinning(), Some(expected));
    // And the memory of a trial for each.
    assert_eq!(server.count("cuMemHostRegister_v2"), PIECES + 2);
    assert_eq!(server.count("cuMemHostUnregister"), 2);
    // The driver would touch pages while its other calls wait.
    assert_eq!(server.count("registered.untouched"), 0);
    drop(pages);
    other.run(other.store(&server, 1)).unwrap();
    assert_eq!(server.count("pageable"), 0);
    drop(other);
    assert_eq!(server.count("cuMemHostUnregister"), 2);
    let rest = server.without_device();
    assert_eq!(rest.count("cuMemHostUnregister"), PIECES + 2);
    rest.is_clean();
}

/// What is pinned is used as such, and what is not is copied all the same.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn unpinnable_piece_is_reported_and_skipped() {
    let server = Server::with(
        // After the trial's.
        "fail cuMemHostRegister_v2=2@2",
        in_pieces(Executor::Kernel),
        ARENA,
    );
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let status = server.cuda.pinning().unwrap();
    assert_eq!(status.bytes, ARENA - ARENA / PIECES);
    assert!(!status.is_running);
    let error = status.error.unwrap();
    assert!(
        error.starts_with("262144 bytes from ") && error.contains("cuMemHostRegister_v2"),
        "{error}"
    );
    // Every 32 KiB of the arena, both ways.
    let bytes = pages.content.len() as u64;
    let expected = pages.gather(&pages.backwards(8));
    for place in (0..ARENA).step_by(bytes as usize) {
        for direction in [Direction::Store, Direction::Retrieve] {
            let mut transfer = pages.transfer(&server, direction, &pages.backwards(8));
            for chunk in &mut transfer.chunks {
                chunk.extent.offset += place;
            }
            assert_eq!(pages.run(transfer).unwrap(), bytes);
        }
        let mut stored = Vec::new();
        server
            .arena
            .read_into(Extent::new(place, bytes), 0, bytes, &mut stored)
            .unwrap();
        assert!(stored == expected, "at {place}");
    }
    assert!(engine.read(pages.number, 0, bytes as usize) == pages.content);
    let moved = server.readings().moved;
    let by = |executor| {
        let moved = moved.iter().filter(|moved| moved.1 == executor);
        moved.map(|moved| moved.2.bytes).sum::<u64>()
    };
    assert_eq!(by(Executor::Staged), 2 * ARENA / PIECES);
    assert_eq!(by(Executor::Kernel), 2 * (ARENA - ARENA / PIECES));
    drop(pages);
    server.ends_clean();
}

/// The kernel goes by the GPU's addresses; where they are not the host's own, it is not used.
#[test]
fn kernel_needs_equal_addresses_on_host_and_gpu() {
    for (executor, used) in [
        (Executor::Kernel, Executor::Staged),
        (Executor::Batch, Executor::Batch),
    ] {
        let server = Server::with(
            "fail cuMemHostGetDevicePointer_v2=1",
            in_pieces(executor),
            ARENA,
        );
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        assert_eq!(server.cuda.pinning().unwrap().bytes, ARENA);
        pages.run(pages.store(&server, 8)).unwrap();
        let moved = server.readings().moved;
        assert_eq!((moved.len(), moved[0].1), (1, used));
        assert_eq!(server.count("pageable"), 0);
        let bytes = pages.content.len() as u64;
        assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(8)));
        // It stays registered, for copies may rely on it.
        assert_eq!(server.count("cuMemHostUnregister"), 0);
        drop(pages);
        server.ends_clean();
    }
}

/// Another arena is memory as any other.
#[test]
fn foreign_arena_is_not_pinned() {
    let server = Server::with("", in_pieces(Executor::Kernel), ARENA);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let other = Arc::new(Arena::create(ArenaKind::Anonymous, ARENA).unwrap());
    let mut transfer = pages.store(&server, 8);
    transfer.arena = Arc::clone(&other);
    let bytes = pages.content.len() as u64;
    assert_eq!(pages.run(transfer).unwrap(), bytes);
    assert!(content(&other, bytes) == pages.gather(&pages.backwards(8)));
    assert!(server.count("pageable") > 0);
    drop(pages);
    server.ends_clean();
}

/// The driver copies memory that is not pinned in the thread that asks for it, which is not the one for all else.
#[test]
fn pageable_transfer_delays_no_other() {
    let server = Server::with("", in_pieces(Executor::Batch), ARENA);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let other = Arc::new(Arena::create(ArenaKind::Anonymous, ARENA).unwrap());
    server.script("hold d2h");
    let mut slow = pages.store(&server, 8);
    slow.arena = Arc::clone(&other);
    let slow = pages.begin(slow);
    wait(|| server.count("pageable") == 1);
    let bytes = pages.content.len() as u64;
    assert_eq!(pages.run(pages.retrieve(&server, 8)).unwrap(), bytes);
    assert!(!slow.has_ended());
    assert_eq!(server.readings().in_flight, [1, 0]);
    server.script("release");
    assert_eq!(slow.end().unwrap(), bytes);
    // The retrieve has brought what was in the arena: nothing.
    let expected = vec![0; bytes as usize];
    assert!(engine.read(pages.number, 0, bytes as usize) == expected);
    drop(pages);
    server.ends_clean();
}

/// Retrieves are in order, whichever thread suits their memory: a later one follows one that waits.
#[test]
fn retrieve_follows_the_previous_one_to_its_thread() {
    let server = Server::with("", in_pieces(Executor::Batch), ARENA);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let other = Arc::new(Arena::create(ArenaKind::Anonymous, ARENA).unwrap());
    let unpinned = |mut transfer: Transfer| {
        transfer.arena = Arc::clone(&other);
        transfer
    };
    pages.run(unpinned(pages.store(&server, 8))).unwrap();
    let bytes = pages.content.len() as u64;
    for first_is_unpinned in [true, false] {
        let [mut first, second] = [first_is_unpinned, !first_is_unpinned].map(|is_unpinned| {
            let transfer = pages.retrieve(&server, 8);
            if is_unpinned {
                unpinned(transfer)
            } else {
                transfer
            }
        });
        engine.ask("script hold kernel");
        engine.ask(&format!("set {} 77", pages.number));
        first.event = engine.bytes("event");
        let first = pages.begin(first);
        let second = pages.begin(second);
        let asked = server.count("cuEventQuery");
        wait(|| server.count("cuEventQuery") >= asked + 20);
        assert!(!first.has_ended() && !second.has_ended());
        engine.ask("script release");
        assert_eq!(first.end().unwrap(), bytes);
        assert_eq!(second.end().unwrap(), bytes);
        let expected = if first_is_unpinned {
            vec![0; bytes as usize]
        } else {
            pages.content.clone()
        };
        assert!(engine.read(pages.number, 0, bytes as usize) == expected);
    }
    drop(pages);
    server.ends_clean();
}

/// A trial may take long; status calls do not wait for it.
#[test]
fn activation_of_a_gpu_delays_no_other() {
    let server = Server::with("hold h2d", GpuOptions::default(), ARENA);
    let mut engine = Exporter::start();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| {
            let pages = Pages::on(0, &server, &mut engine, [8, 64, 8]).unwrap();
            pages.run(pages.store(&server, 1)).unwrap();
        });
        wait(|| server.count("h2d") > 0);
        assert!(
            server
                .cuda
                .status()
                .iter()
                .all(|gpu| gpu.readings.is_none())
        );
        assert_eq!(server.cuda.pinning(), None);
        assert!(!registering.is_finished());
        server.script("release");
    });
    assert!(server.cuda.status()[0].readings.is_some());
    server.ends_clean();
}

/// An object over a border of pinned pieces: copies end there, and the kernel does not go over it.
#[test]
fn object_across_a_piece_border_is_copied() {
    for executor in Executor::ALL {
        let server = Server::with("", in_pieces(executor), ARENA);
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let border = ARENA / PIECES;
        let bytes = pages.content.len() as u64;
        // One run of all pages, that begins 100 bytes before the border.
        let ids: Vec<i64> = (0..64).collect();
        let mut transfer = pages.transfer(&server, Direction::Store, &ids);
        for chunk in &mut transfer.chunks {
            chunk.extent.offset += border - 100;
        }
        assert_eq!(pages.run(transfer.clone()).unwrap(), bytes);
        let mut stored = Vec::new();
        server
            .arena
            .read_into(Extent::new(border - 100, bytes), 0, bytes, &mut stored)
            .unwrap();
        assert!(stored == pages.content, "{executor:?}");
        transfer.direction = Direction::Retrieve;
        pages.run(transfer).unwrap();
        assert_eq!(server.count("pageable"), 0);
        let copies = match executor {
            Executor::Plain => ("cuMemcpyAsync", 4),
            Executor::Batch => ("batched", 4),
            Executor::Kernel | Executor::Staged => ("cuMemcpyAsync", 4),
        };
        assert_eq!(server.count(copies.0), copies.1, "{executor:?}");
        drop(pages);
        server.ends_clean();
    }
}

/// A terabyte has thousands of pieces, and the driver walks the pages of each.
#[test]
fn pieces_are_unpinned_in_parallel() {
    let mut options = in_pieces(Executor::Batch);
    options.pin_bytes = ARENA / 16;
    let server = Server::with("", options, ARENA);
    let mut engine = Exporter::start();
    drop(Pages::register(&server, &mut engine, [8, 64, 8]));
    server.script("hold cuMemHostUnregister");
    let Server { cuda, rest, .. } = server;
    let dropping = std::thread::spawn(move || drop(cuda));
    wait(|| rest.count("cuMemHostUnregister") == 4);
    assert_eq!(rest.count("live.host"), 16);
    rest.script("release");
    dropping.join().unwrap();
    assert_eq!(rest.count("cuMemHostUnregister"), 16);
    rest.is_clean();
}

/// Unpinning waits for a timeout, then leaves the memory pinned and returns its size.
#[test]
fn hanging_unpin_is_abandoned_with_the_arena() {
    for held in ["cuMemHostUnregister", "cuMemHostRegister_v2"] {
        let mut options = in_pieces(Executor::Batch);
        // Long enough for threads that have nothing left to do: without their end nothing is unpinned.
        options.leave_timeout = Duration::from_secs(1);
        let server = Server::with("", options, ARENA);
        let mut engine = Exporter::start();
        let pinned_bytes = match held {
            "cuMemHostUnregister" => {
                drop(Pages::register(&server, &mut engine, [8, 64, 8]));
                server.script("hold cuMemHostUnregister");
                ARENA
            }
            held => {
                // The first one is of what the GPU is tried with.
                server.script(&format!("hold {held}@2+"));
                drop(Pages::on(0, &server, &mut engine, [8, 64, 8]).unwrap());
                wait(|| server.count(held) == 2);
                0
            }
        };
        // A machine that is busy with others may take longer to end what goes on.
        wait(|| server.cuda.stop().is_empty());
        assert_eq!(server.cuda.unpin(), Err(pinned_bytes), "{held}");
        // A second call neither waits nor tries again.
        assert_eq!(server.cuda.unpin(), Err(pinned_bytes), "{held}");
        // Pieces are pinned one by one, and unpinned by several threads.
        let calls = match held {
            "cuMemHostUnregister" => PIECES,
            _ => 2,
        };
        assert_eq!(server.count(held), calls, "{held}");
        let rest = server.without_device();
        assert!(rest.count("live.contexts") > 0);
        rest.script("release");
        wait(|| rest.count("live.contexts") == 0);
        rest.is_clean();
    }
}
