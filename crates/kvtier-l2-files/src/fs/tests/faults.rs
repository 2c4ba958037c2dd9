//! Disks that are full, broken or missing, and threads that fail.

use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use kvtier_memory::FileError;
use rustix::io::Errno;

use super::*;
use crate::io::{Engine, Posix};

/// Fails in a chosen way until it is repaired; a write fails behind its first bytes.
struct Faulty {
    error: Arc<AtomicU32>,
    panics: bool,
}

impl Faulty {
    fn fault(&self) -> Result<(), FileError> {
        match self.error.load(Ordering::Relaxed) {
            0 => Ok(()),
            error => {
                assert!(!self.panics, "as the test wants it");
                Err(FileError::System {
                    done: 0,
                    source: Errno::from_raw_os_error(error as i32).into(),
                })
            }
        }
    }
}

impl Engine for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn read(
        &self,
        file: (BorrowedFd<'_>, u64),
        to: &Buffer,
        body: u64,
        tail: &mut [u8],
        size: u64,
    ) -> Result<(u64, Option<u128>), FileError> {
        self.fault()?;
        Posix.read(file, to, body, tail, size)
    }

    fn write(
        &self,
        file: (BorrowedFd<'_>, u64),
        from: &Buffer,
        body: u64,
        tail: &[u8],
    ) -> Result<(), FileError> {
        if let Err(error) = self.fault() {
            Posix.write(file, from, body.min(4096), &[])?;
            return Err(error);
        }
        Posix.write(file, from, body, tail)
    }
}

fn given(engine: impl Engine) -> Option<Choice> {
    Some(Choice {
        engine: Box::new(engine),
        reason: "a test".into(),
    })
}

fn faulty(panics: bool) -> (Fixture, Arc<AtomicU32>) {
    let mut fixture = Fixture::new();
    let error = Arc::new(AtomicU32::new(0));
    let engine = Faulty {
        error: Arc::clone(&error),
        panics,
    };
    fixture.adapter = FsAdapter::open_with("fs", &fixture.options, given(engine)).unwrap();
    (fixture, error)
}

#[test]
fn full_disk_refuses_only_stores() {
    for full in [Errno::NOSPC, Errno::DQUOT] {
        let (fixture, error) = faulty(false);
        fixture.store(&object(1)).unwrap();
        error.store(full.raw_os_error() as u32, Ordering::Relaxed);
        assert_eq!(fixture.store(&object(2)), Err(ErrorKind::Full));
        assert_eq!(fixture.names().len(), 1, "no part of a file is left");
        assert!(fixture.has(&object(1)) && !fixture.has(&object(2)));
        assert_eq!(fixture.adapter.status()["is_healthy"], true);
        error.store(0, Ordering::Relaxed);
        assert_eq!(fixture.load(&object(1)), Ok(true));
        assert!(matches!(fixture.store(&object(2)), Ok(Stored::Written(_))));
    }
}

#[test]
fn failing_writes_show_in_status() {
    let (fixture, error) = faulty(false);
    for (errno, kind) in [
        (Errno::IO, ErrorKind::Unavailable),
        (Errno::FBIG, ErrorKind::Refused),
        (Errno::ROFS, ErrorKind::Refused),
    ] {
        error.store(errno.raw_os_error() as u32, Ordering::Relaxed);
        assert_eq!(fixture.store(&object(1)), Err(kind));
        assert_eq!(fixture.names(), [""; 0]);
        assert_eq!(fixture.adapter.status()["is_healthy"], false);
    }
    error.store(0, Ordering::Relaxed);
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.adapter.status()["is_healthy"], true);
}

#[test]
fn unreadable_file_stays_until_replaced() {
    let (fixture, error) = faulty(false);
    fixture.store(&object(1)).unwrap();
    // Through the page cache and past it.
    for (reads, errno) in [(1, Errno::IO), (2, Errno::NODATA)] {
        error.store(errno.raw_os_error() as u32, Ordering::Relaxed);
        assert_eq!(fixture.load(&object(1)), Err(ErrorKind::Unreadable));
        assert_eq!(fixture.status("unreadable_files"), reads);
        error.store(0, Ordering::Relaxed);
        assert_eq!(fixture.load(&object(1)), Ok(true));
    }
    assert_eq!(fixture.status("quarantined_files"), 0);
    for stored in [true, false] {
        let is_written = matches!(fixture.store(&object(1)), Ok(Stored::Written(_)));
        assert_eq!(is_written, stored);
    }
    assert_eq!(fixture.status("replaced_files"), 1);
    // What may pass by itself costs no file.
    error.store(Errno::NOMEM.raw_os_error() as u32, Ordering::Relaxed);
    assert_eq!(fixture.load(&object(1)), Err(ErrorKind::Unavailable));
    error.store(0, Ordering::Relaxed);
    assert_eq!(fixture.load(&object(1)), Ok(true));
}

#[test]
fn refused_direct_io_uses_page_cache() {
    let (mut fixture, error) = faulty(false);
    let mut options = fixture.options.clone();
    options.use_odirect = true;
    /// Refuses once a file, as file systems with larger blocks do.
    struct Picky;
    fn is_direct(file: BorrowedFd<'_>) -> Result<(), FileError> {
        if rustix::fs::fcntl_getfl(file)
            .unwrap()
            .contains(rustix::fs::OFlags::DIRECT)
        {
            Err(FileError::System {
                done: 0,
                source: Errno::INVAL.into(),
            })
        } else {
            Ok(())
        }
    }
    impl Engine for Picky {
        fn name(&self) -> &'static str {
            "picky"
        }
        fn read(
            &self,
            file: (BorrowedFd<'_>, u64),
            to: &Buffer,
            body: u64,
            tail: &mut [u8],
            size: u64,
        ) -> Result<(u64, Option<u128>), FileError> {
            is_direct(file.0)?;
            Posix.read(file, to, body, tail, size)
        }
        fn write(
            &self,
            file: (BorrowedFd<'_>, u64),
            from: &Buffer,
            body: u64,
            tail: &[u8],
        ) -> Result<(), FileError> {
            is_direct(file.0)?;
            Posix.write(file, from, body, tail)
        }
    }
    drop(error);
    fixture.adapter = FsAdapter::open_with("fs", &options, given(Picky)).unwrap();
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.load(&object(1)), Ok(true));
    // None, where the file system refuses O_DIRECT when a file is opened already.
    assert!(fixture.status("not_direct_files") % 2 == 0);
}

#[test]
fn panicking_job_fails_alone() {
    let (fixture, error) = faulty(true);
    error.store(Errno::IO.raw_os_error() as u32, Ordering::Relaxed);
    for _ in 0..8 {
        assert_eq!(fixture.store(&object(1)), Err(ErrorKind::Unavailable));
    }
    error.store(0, Ordering::Relaxed);
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.load(&object(1)), Ok(true));
}

#[test]
fn removed_directory_is_a_miss_and_recreated() {
    for layout in [Layout::Flat, Layout::Sharded] {
        let fixture = Fixture::with(|options| {
            options.layout = layout;
            options.relative_tmp_dir = "being/written".into();
        });
        for _ in 0..2 {
            fixture.store(&object(1)).unwrap();
            std::fs::remove_dir_all(fixture.base()).unwrap();
            assert!(!fixture.has(&object(1)));
            assert_eq!(fixture.load(&object(1)), Err(ErrorKind::NotFound));
            assert_eq!(
                block_on(fixture.adapter.delete(vec![object(1).key])),
                [Ok(false)]
            );
            assert!(matches!(fixture.store(&object(1)), Ok(Stored::Written(_))));
            assert_eq!(fixture.load(&object(1)), Ok(true));
        }
        // Only what is inside: the directory itself stays.
        for inside in std::fs::read_dir(fixture.base()).unwrap() {
            let path = inside.unwrap().path();
            let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
        }
        assert!(matches!(fixture.store(&object(2)), Ok(Stored::Written(_))));
        assert_eq!(fixture.load(&object(2)), Ok(true));
    }
}

#[test]
fn concurrent_recreation_keeps_the_lock() {
    let fixture = Fixture::new();
    let base = &fixture.adapter.files.base;
    let lock = names_in(fixture.base()).remove(0);
    std::fs::remove_dir_all(fixture.base()).unwrap();
    for _ in 0..2 {
        base.restored().unwrap();
    }
    let lock = std::fs::File::open(fixture.base().join(lock)).unwrap();
    assert!(
        lock.try_lock().is_err(),
        "leftovers look like writes in flight"
    );
}

#[test]
fn directory_recreated_by_others_is_found() {
    let fixture = Fixture::new();
    std::fs::remove_dir_all(fixture.base()).unwrap();
    let other = Fixture::with(|options| options.base_path = fixture.base().to_owned());
    other.store(&object(1)).unwrap();
    assert!(fixture.has(&object(1)));
    assert_eq!(fixture.load(&object(1)), Ok(true));
}

#[test]
fn each_way_of_syncing_stores() {
    for fsync in [Fsync::Never, Fsync::File, Fsync::FileAndDir] {
        for layout in [Layout::Flat, Layout::Sharded] {
            let fixture = Fixture::with(|options| {
                options.fsync = fsync;
                options.layout = layout;
                options.read_ahead_size = Some(4096);
            });
            fixture.store(&object(1)).unwrap();
            assert_eq!(fixture.load(&object(1)), Ok(true));
        }
    }
}

#[test]
fn dropped_call_keeps_memory_in_use() {
    use std::future::poll_fn;
    use std::task::Poll;

    let fixture = Fixture::new();
    let hold: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
    let extent = Extent::new(0, LEN);
    let from = Buffer::new(Arc::clone(&fixture.arena), extent, Arc::clone(&hold));
    from.write(0, &bytes(&object(1))).unwrap();
    let batch = vec![StoreItem {
        object: object(1),
        from,
    }];
    let mut wait = fixture.adapter.store(batch);
    block_on(poll_fn(|context| {
        let _ = wait.as_mut().poll(context);
        Poll::Ready(())
    }));
    drop(wait);
    // Closing waits for work in flight; after that the memory is free for certain.
    block_on(fixture.adapter.close());
    assert_eq!(Arc::strong_count(&hold), 1);
    assert!(fixture.names().len() <= 1);
}

/// Expects that nothing reaches the directory, and that the status says why.
fn is_unused(fixture: &Fixture, why: &str) {
    block_on(fixture.adapter.check());
    let status = fixture.adapter.status();
    assert_eq!(status["is_healthy"], false);
    let error = status["error"].as_str().unwrap();
    assert!(error.ends_with(&format!(": {why}")), "{error}");
    let (stored, new) = (object(1), object(2));
    assert_eq!(fixture.store(&new), Err(ErrorKind::Unavailable));
    assert_eq!(fixture.load(&stored), Err(ErrorKind::Unavailable));
    let lookup = block_on(fixture.adapter.lookup(vec![stored.clone()]));
    assert_eq!(lookup.unwrap_err().kind(), ErrorKind::Unavailable);
    let deleted = block_on(fixture.adapter.delete(vec![stored.key]));
    assert_eq!(
        deleted[0].as_ref().unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    let listed = block_on(fixture.adapter.list(None, 10));
    assert_eq!(listed.unwrap_err().kind(), ErrorKind::Unavailable);
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn base_renamed_or_replaced_is_unused_until_back() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    let elsewhere = fixture.dir.path().join("elsewhere");
    fs::rename(fixture.base(), &elsewhere).unwrap();
    let before = names_in(&elsewhere);
    is_unused(&fixture, "it was renamed or moved");
    fs::create_dir(fixture.base()).unwrap();
    is_unused(
        &fixture,
        "another directory was put or mounted in its place",
    );
    assert_eq!(names_in(fixture.base()), [""; 0]);
    assert_eq!(names_in(&elsewhere), before);

    fs::remove_dir(fixture.base()).unwrap();
    fs::rename(&elsewhere, fixture.base()).unwrap();
    block_on(fixture.adapter.check());
    assert_eq!(fixture.adapter.status()["is_healthy"], true);
    assert_eq!(fixture.load(&object(1)), Ok(true));
    fixture.store(&object(2)).unwrap();
}

#[test]
fn base_removed_is_made_again_after_a_check() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    fs::remove_dir_all(fixture.base()).unwrap();
    block_on(fixture.adapter.check());
    assert_eq!(fixture.adapter.status()["is_healthy"], true);
    fixture.store(&object(1)).unwrap();
    block_on(fixture.adapter.check());
    assert_eq!(fixture.load(&object(1)), Ok(true));
}
