//! Files from and to an arena.

use std::io::Write;
use std::os::fd::AsFd;

use kvtier_memory::{AccessError, Arena, ArenaKind, Extent, FileError};

fn arena() -> Arena {
    Arena::create(ArenaKind::Anonymous, 64 << 10).unwrap()
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

#[test]
fn an_extent_and_its_tail_come_back() {
    let arena = arena();
    let file = tempfile::tempfile().unwrap();
    let data = bytes(5000, 1);
    let from = Extent::new(4096, 5000);
    arena.write(from, 0, &data).unwrap();
    arena.write_file(from, b"tail", file.as_fd(), 7).unwrap();

    let to = Extent::new(20_000, 5000);
    let mut tail = [0; 4];
    let read = arena.read_file(to, &mut tail, file.as_fd(), 7, u64::MAX);
    assert_eq!(read.unwrap(), 5004);
    let mut back = Vec::new();
    arena.read_into(to, 0, 5000, &mut back).unwrap();
    assert_eq!((back, &tail), (data, b"tail"));
}

#[test]
fn a_file_that_ends_early_gives_what_it_has() {
    let arena = arena();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes(100, 3)).unwrap();
    let mut tail = [9; 8];
    let to = Extent::new(0, 96);
    let read = |to, tail: &mut [u8], at| arena.read_file(to, tail, file.as_fd(), at, u64::MAX);
    assert_eq!(read(to, &mut tail, 0).unwrap(), 100);
    assert_eq!(tail[..4], bytes(100, 3)[96..]);
    assert_eq!(tail[4..], [9; 4]);
    assert_eq!(read(to, &mut tail, 60).unwrap(), 40);
    assert_eq!(read(to, &mut tail, 100).unwrap(), 0);
    assert_eq!(read(Extent::new(0, 0), &mut [], 0).unwrap(), 0);
}

#[test]
fn a_summed_read_gives_the_checksum_of_what_was_read() {
    let arena = Arena::create(ArenaKind::Anonymous, 4 << 20).unwrap();
    for len in [
        0,
        1,
        5000,
        256 << 10,
        (512 << 10) - 1,
        512 << 10,
        (1 << 20) + 7,
    ] {
        let file = tempfile::tempfile().unwrap();
        let from = Extent::new(0, len);
        arena.write(from, 0, &bytes(len as usize, 5)).unwrap();
        arena.write_file(from, b"tail", file.as_fd(), 9).unwrap();
        let to = Extent::new(2 << 20, len);
        let mut tail = [0; 4];
        let read = arena.read_file_summed(to, &mut tail, file.as_fd(), 9, len + 4);
        let sum = kvtier_memory::checksum::checksum128(&bytes(len as usize, 5));
        assert_eq!((read.unwrap(), &tail), ((len + 4, sum), b"tail"), "{len}");
        // A file that ends early.
        file.set_len(9 + len / 2).unwrap();
        let read = arena.read_file_summed(to, &mut tail, file.as_fd(), 9, len + 4);
        assert_eq!(read.unwrap().0, len / 2);
    }
}

#[test]
fn nothing_outside_the_arena_is_touched() {
    let arena = arena();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes(100, 3)).unwrap();
    let beyond = Extent::new(arena.len() - 10, 11);
    let read = arena.read_file(beyond, &mut [], file.as_fd(), 0, u64::MAX);
    assert!(matches!(
        read,
        Err(FileError::Memory(AccessError::OutOfBounds { .. }))
    ));
    let write = arena.write_file(beyond, &[], file.as_fd(), 0);
    assert!(matches!(
        write,
        Err(FileError::Memory(AccessError::OutOfBounds { .. }))
    ));
}

#[test]
fn what_the_system_says_is_told() {
    let arena = arena();
    let extent = Extent::new(0, 100);
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let error = arena.write_file(extent, b"x", full.as_fd(), 0).unwrap_err();
    assert!(matches!(
        &error,
        FileError::System { done: 0, source } if source.raw_os_error() == Some(libc::ENOSPC)
    ));
    // Offsets that no file has.
    let file = tempfile::tempfile().unwrap();
    assert!(
        arena
            .write_file(extent, b"x", file.as_fd(), u64::MAX)
            .is_err()
    );
    assert!(
        arena
            .read_file(extent, &mut [], file.as_fd(), i64::MAX as u64, 1)
            .is_err()
    );
    // Nothing can be read from what was opened for writing.
    assert!(
        arena
            .read_file(extent, &mut [], full.as_fd(), 0, 1)
            .is_err()
    );
}

/// Environment variable of a test that is the child.
const CHILD: &str = "KVTIER_MEMORY_FILE_TEST_CHILD";

#[test]
#[ignore = "run by the test below, as a process with a limit on files"]
fn child_that_may_write_6000_bytes() {
    use rustix::process::{Resource, Rlimit, setrlimit};

    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: ignoring a signal runs no code; else the limit would end this process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = Rlimit {
        current: Some(6000),
        maximum: Some(6000),
    };
    setrlimit(Resource::Fsize, limit).unwrap();
    let arena = arena();
    let file = tempfile::tempfile().unwrap();
    let error = arena
        .write_file(Extent::new(0, 10_000), b"tail", file.as_fd(), 0)
        .unwrap_err();
    assert!(matches!(
        error,
        FileError::System { done: 6000, source } if source.raw_os_error() == Some(libc::EFBIG)
    ));
    println!("limit met");
}

#[test]
fn a_short_write_is_gone_on_with() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "file::child_that_may_write_6000_bytes",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("limit met"),
        "{said}"
    );
}
