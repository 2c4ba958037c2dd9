use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use tempfile::tempfile;

use super::*;
use crate::arena::ArenaKind;

const SLOT: u64 = 64 << 10;

/// A ring, or a word on why this machine has none.
fn ring<H>(most: usize) -> Option<Ring<H>> {
    Ring::new(most)
        .inspect_err(|error| println!("skipped: no io_uring here: {error}"))
        .ok()
}

fn arena() -> Arc<Arena> {
    Arc::new(Arena::create(ArenaKind::Anonymous, 32 * SLOT).unwrap())
}

fn tail(bytes: &[u8]) -> Tail {
    let mut tail = Tail::default();
    tail.resize(bytes.len());
    tail.copy_from_slice(bytes);
    tail
}

fn transfer<H>(
    file: &File,
    arena: &Arc<Arena>,
    slot: u64,
    enough: Option<u64>,
    hold: H,
) -> Transfer<H> {
    Transfer {
        file: file.try_clone().unwrap().into(),
        at: 0,
        arena: Arc::clone(arena),
        extent: Extent::new(slot * SLOT, 10_000),
        tail: tail(&[slot as u8; 100]),
        enough,
        hold,
    }
}

#[test]
fn many_files_are_written_and_read_back() {
    let Some(mut ring) = ring(4) else { return };
    let arena = arena();
    let files: Vec<_> = (0..10).map(|_| tempfile().unwrap()).collect();
    for round in [None, Some(10_100)] {
        let mut left = (0..10).rev().collect::<Vec<u64>>();
        let mut ended = 0;
        while ended < 10 {
            while !ring.is_full()
                && let Some(number) = left.pop()
            {
                let (from, to) = (number, number + 10);
                let slot = if round.is_none() { from } else { to };
                if round.is_none() {
                    let bytes = vec![number as u8 ^ 0x55; 10_000];
                    arena
                        .write(Extent::new(slot * SLOT, SLOT), 0, &bytes)
                        .unwrap();
                }
                let transfer = transfer(&files[number as usize], &arena, slot, round, number);
                assert!(ring.begin(transfer).is_ok());
            }
            let (transfer, moved) = ring.wait().unwrap();
            assert_eq!(moved.unwrap(), 10_100);
            if round.is_some() {
                let mut bytes = Vec::new();
                arena
                    .read_into(transfer.extent, 0, 10_000, &mut bytes)
                    .unwrap();
                assert!(bytes == vec![transfer.hold as u8 ^ 0x55; 10_000]);
                assert!(
                    transfer
                        .tail
                        .iter()
                        .all(|byte| *byte == transfer.hold as u8)
                );
            }
            ended += 1;
        }
        assert!(ring.is_empty() && ring.wait().is_none() && !ring.is_broken());
    }
}

#[test]
fn what_cannot_be_begun_comes_back() {
    let Some(mut ring) = ring(1) else { return };
    let (arena, file) = (arena(), tempfile().unwrap());
    let outside = Transfer {
        extent: Extent::new(31 * SLOT, 2 * SLOT),
        ..transfer(&file, &arena, 0, None, ())
    };
    let mut outside = ring.begin(outside).unwrap_err();
    assert!(matches!(outside.finish(0), Err(FileError::Memory(_))));
    assert!(ring.begin(transfer(&file, &arena, 0, None, ())).is_ok());
    let mut second = ring
        .begin(transfer(&file, &arena, 1, None, ()))
        .unwrap_err();
    assert_eq!(second.finish(0).unwrap(), 10_100);
    assert!(ring.wait().is_some() && !ring.is_broken());
}

#[test]
fn the_end_of_a_file_ends_a_read() {
    let Some(mut ring) = ring(2) else { return };
    let (arena, file) = (arena(), tempfile().unwrap());
    for len in [0, 5000, 10_050] {
        file.set_len(len).unwrap();
        assert!(
            ring.begin(transfer(&file, &arena, 0, Some(10_100), ()))
                .is_ok()
        );
        assert_eq!(ring.wait().unwrap().1.unwrap(), len);
    }
}

#[test]
fn a_refusal_says_why() {
    let Some(mut ring) = ring(2) else { return };
    let (arena, full) = (
        arena(),
        File::options().write(true).open("/dev/full").unwrap(),
    );
    assert!(ring.begin(transfer(&full, &arena, 0, None, ())).is_ok());
    let error = ring.wait().unwrap().1.unwrap_err();
    let FileError::System { done: 0, source } = error else {
        panic!("{error}");
    };
    assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
    // For reading only.
    let file = File::open("/dev/null").unwrap();
    assert!(ring.begin(transfer(&file, &arena, 0, None, ())).is_ok());
    assert!(ring.wait().unwrap().1.is_err());
    assert!(!ring.is_broken());
}

/// A pipe that is empty: a read of it ends when the test writes to it.
fn pipe() -> (File, File) {
    let (reader, writer) = io::pipe().unwrap();
    (
        File::from(OwnedFd::from(reader)),
        File::from(OwnedFd::from(writer)),
    )
}

/// Runs a function on drop.
struct Held {
    _hold: Arc<()>,
    at_end: Option<Box<dyn FnOnce() + Send>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(at_end) = self.at_end.take() {
            at_end();
        }
    }
}

/// Two reads are in flight. The second can end; once its hold is released, the first can end too. So the ring has
/// waited for the second, and has not released the first.
fn waits_for_reads_in_flight(end: fn(Ring<Held>)) {
    let Some(mut ring) = ring(2) else { return };
    let (arena, hold) = (arena(), Arc::new(()));
    let (first, mut to_first) = pipe();
    let (second, mut to_second) = pipe();
    let (told, tell) = std::sync::mpsc::channel();
    let (seen_hold, seen_arena) = (Arc::downgrade(&hold), Arc::downgrade(&arena));
    let at_end = move || {
        let counts = (seen_hold.strong_count(), seen_arena.strong_count());
        told.send(counts).unwrap();
        io::Write::write_all(&mut to_first, b"bytes").unwrap();
    };
    let read = |slot, file, hold, at_end| {
        let held = Held {
            _hold: hold,
            at_end,
        };
        transfer(file, &arena, slot, Some(1), held)
    };
    let reads = [
        read(0, &first, Arc::clone(&hold), None),
        read(1, &second, Arc::default(), Some(Box::new(at_end) as _)),
    ];
    for read in reads {
        assert!(ring.begin(read).is_ok());
    }
    io::Write::write_all(&mut to_second, b"x").unwrap();
    end(ring);
    assert_eq!(tell.try_recv(), Ok((2, 2)));
    let counts = (Arc::strong_count(&hold), Arc::strong_count(&arena));
    assert_eq!(counts, (1, 1));
    let mut bytes = Vec::new();
    arena
        .read_into(Extent::new(0, 5), 0, 5, &mut bytes)
        .unwrap();
    assert_eq!(bytes, b"bytes");
}

#[test]
fn memory_is_held_until_the_system_is_through() {
    waits_for_reads_in_flight(drop);
}

#[test]
fn panic_waits_for_reads_in_flight() {
    waits_for_reads_in_flight(|ring| {
        let panics = std::thread::spawn(move || {
            let _ring = ring;
            panic!("as the test wants it");
        });
        assert!(panics.join().is_err());
    });
}

#[test]
fn failed_ring_frees_nothing() {
    let Some(mut ring) = ring(2) else { return };
    let (arena, hold) = (arena(), Arc::new(()));
    let (reader, writer) = pipe();
    let held = transfer(&reader, &arena, 0, Some(1), Arc::clone(&hold));
    assert!(ring.begin(held).is_ok());
    // Its descriptor is no ring any more, so neither waiting nor handing in works; the real one lives on elsewhere.
    let number = ring.inner.ring.as_raw_fd();
    let file = tempfile().unwrap();
    // SAFETY: both are descriptors of ours; the ring's becomes another name of the file's.
    let real = unsafe { libc::dup(number) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    let mut second = ring
        .begin(transfer(&file, &arena, 1, None, Arc::clone(&hold)))
        .unwrap_err();
    assert!(ring.is_broken());
    assert_eq!(second.finish(0).unwrap(), 10_100);
    assert!(ring.wait().is_none() && !ring.is_empty());
    drop((ring, second));
    assert_eq!(
        Arc::strong_count(&hold),
        2,
        "the system may still write there"
    );
    drop(writer);
    // SAFETY: made above, and used nowhere else.
    unsafe { libc::close(real) };
    let _ = (&reader).read(&mut [0]);
}

#[test]
fn tails_are_aligned() {
    let mut tail = Tail::default();
    assert!(tail.is_empty());
    for len in [1, 4096, 100, 70_000] {
        tail.resize(len);
        assert_eq!(tail.len(), len);
        assert!(tail.as_ptr().addr().is_multiple_of(ALIGN));
    }
}
