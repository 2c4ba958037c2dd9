//! Clients' segments: which are opened, and the faults they can cause.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvtier_memory::segment::remove_orphans;
use kvtier_memory::{
    AccessError, AffineCopy, Arena, ArenaKind, Direction, Extent, ForeignSegment, OwnSegment, Run,
    SegmentError, copy_affine, copy_runs,
};

fn truncate(name: &str, bytes: u64) {
    let file = fs::File::options()
        .write(true)
        .open(format!("/dev/shm/{}", name.trim_start_matches('/')))
        .unwrap();
    file.set_len(bytes).unwrap();
}

#[test]
fn both_sides_see_the_same_bytes() {
    let own = OwnSegment::create(10_000).unwrap();
    let foreign = ForeignSegment::open(own.name(), 10_000).unwrap();
    assert_eq!((foreign.len(), foreign.name()), (10_000, own.name()));
    own.as_segment().write(9_995, b"bytes").unwrap();
    let mut read = Vec::new();
    foreign.read_into(9_995, 5, &mut read).unwrap();
    assert_eq!(read, b"bytes");
    assert!(foreign.write(9_996, b"bytes").is_err());
    assert!(foreign.read_into(u64::MAX, 5, &mut read).is_err());
    let path = format!("/dev/shm{}", own.name());
    assert!(fs::exists(&path).unwrap());
    drop(own);
    assert!(!fs::exists(&path).unwrap());
    // A mapping outlives the name.
    foreign.read_into(9_995, 5, &mut read).unwrap();
}

#[test]
fn only_segments_of_the_stated_size_are_opened() {
    let own = OwnSegment::create(8192).unwrap();
    assert!(ForeignSegment::open(own.name(), 100).is_ok());
    assert!(matches!(
        ForeignSegment::open(own.name(), 8193),
        Err(SegmentError::TooSmall {
            expected: 8193,
            actual: 8192,
            ..
        })
    ));
    for bytes in [0, u64::MAX, i64::MAX as u64] {
        assert!(matches!(
            ForeignSegment::open(own.name(), bytes),
            Err(SegmentError::Size { .. })
        ));
    }
}

/// Waits for what is true soon: other tests have each segment open for a moment.
fn until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute");
    }
}

/// A file in the place of a segment, which is open unless `held` is dropped; removed on drop.
struct Named {
    name: String,
    held: Option<fs::File>,
}

impl Named {
    fn create(number: u64, bytes: u64) -> Self {
        let name = format!("/lmcache_kv_{}_{number}", std::process::id());
        let file = fs::File::create(path_of(&name)).unwrap();
        file.set_len(bytes).unwrap();
        let held = Some(file);
        Self { name, held }
    }

    fn is_there(&self) -> bool {
        fs::exists(path_of(&self.name)).unwrap()
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = fs::remove_file(path_of(&self.name));
    }
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn sparse_segments_are_bounded_singly_and_together() {
    let huge = Named::create(900, 1 << 44);
    let Err(SegmentError::Size { allowed, .. }) = ForeignSegment::open(&huge.name, 1 << 44) else {
        panic!("mapped");
    };
    let space = rustix::fs::statvfs("/dev/shm").unwrap();
    assert!(allowed <= space.f_blocks * space.f_frsize);
    // Other tests have small ones.
    let bytes = allowed - (64 << 20);
    let sparse: Vec<_> = (901..906)
        .map(|number| Named::create(number, bytes))
        .collect();
    let open = |at: usize| ForeignSegment::open(&sparse[at].name, bytes);
    let mut mapped: Vec<_> = (0..4).map(|at| open(at).unwrap()).collect();
    let Err(SegmentError::Sum {
        bytes: stated,
        mapped: sum,
        allowed: together,
    }) = open(4)
    else {
        panic!("mapped");
    };
    assert_eq!((stated, together), (bytes, 4 * allowed));
    assert!(sum >= 4 * bytes);
    mapped.pop();
    assert!(open(4).is_ok(), "one was unmapped");
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn hostile_names_are_refused() {
    let long = format!("/lmcache_kv_{}", "1".repeat(300));
    for name in [
        "",
        "/",
        "lmcache_kv_1_1",
        "//lmcache_kv_1_1",
        "/lmcache_kv_",
        "/lmcache_kv_1/../../etc/passwd",
        "/lmcache_kv_1_1\0",
        "/lmcache_l1_pool_1",
        "/../etc/passwd",
        &long,
    ] {
        let error = ForeignSegment::open(name, 4096).unwrap_err();
        assert!(matches!(error, SegmentError::Name { .. }), "{error}");
    }
    let error = ForeignSegment::open("/lmcache_kv_0_none", 4096).unwrap_err();
    assert!(matches!(error, SegmentError::System { .. }), "{error}");
}

#[test]
fn links_and_other_files_are_refused() {
    let own = OwnSegment::create(4096).unwrap();
    let process = std::process::id();
    let link = format!("/lmcache_kv_{process}_link");
    let path = format!("/dev/shm{link}");
    std::os::unix::fs::symlink(format!("/dev/shm{}", own.name()), &path).unwrap();
    let opened = ForeignSegment::open(&link, 4096);
    fs::remove_file(&path).unwrap();
    assert!(matches!(opened, Err(SegmentError::System { .. })));

    fs::create_dir(&path).unwrap();
    let opened = ForeignSegment::open(&link, 4096);
    fs::remove_dir(&path).unwrap();
    assert!(opened.is_err());
}

#[test]
fn no_lease_of_a_client_is_waited_for() {
    /// As fcntl(2) has it.
    const F_SETSIG: libc::c_int = 10;
    let leased = Named::create(5, 4096);
    let fd = leased.held.as_ref().unwrap().as_raw_fd();
    // SAFETY: the calls take numbers only, and the descriptor is open.
    until(|| unsafe {
        libc::fcntl(fd, F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0
    });
    let error = ForeignSegment::open(&leased.name, 4096).unwrap_err();
    assert!(matches!(error, SegmentError::System { .. }), "{error}");
}

fn path_of(name: &str) -> String {
    format!("/dev/shm{name}")
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn segments_that_no_process_has_are_removed() {
    let own = OwnSegment::create(4096).unwrap();
    let mut opened = Named::create(2, 4096);
    let mut mapped = Named::create(3, 4096);
    let mapping = ForeignSegment::open(&mapped.name, 4096).unwrap();
    mapped.held = None;
    let _ = remove_orphans();
    assert!(opened.is_there() && mapped.is_there());
    assert!(fs::exists(path_of(own.name())).unwrap());
    // As the end of its process does.
    opened.held = None;
    drop(mapping);
    until(|| {
        let _ = remove_orphans();
        !opened.is_there() && !mapped.is_there()
    });
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn removal_of_orphans_races_no_creation() {
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = remove_orphans();
            }
        });
        for _ in 0..2000 {
            let own = OwnSegment::create(4096).unwrap();
            assert!(own.as_segment().is_current());
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_segment_is_current_while_its_name_leads_to_it() {
    let first = Named::create(4, 4096);
    let name = first.name.clone();
    let segment = ForeignSegment::open(&name, 4096).unwrap();
    assert!(segment.is_current());
    drop(first);
    assert!(!segment.is_current());
    // Made again, as a restarted client with the same process id does.
    let _second = Named::create(4, 4096);
    assert!(!segment.is_current());
    let again = ForeignSegment::open(&name, 4096).unwrap();
    assert!(again.is_current());
    truncate(&name, 0);
    assert!(again.is_current());
    // Once that has been noticed, the mapping is of no more use.
    assert!(again.write(0, b"byte").is_err());
    assert!(!again.is_current());
    fs::remove_file(path_of(&name)).unwrap();
    // Whatever else has the name, no call waits for it.
    assert!(
        Command::new("mkfifo")
            .arg(path_of(&name))
            .status()
            .unwrap()
            .success()
    );
    assert!(!again.is_current());
}

const LENDER: &str = "KVTIER_TEST_LENDER";

/// Not a test of its own: a client that says the name of its segment and lives until it is killed.
#[test]
fn child_lends_a_segment() {
    if std::env::var_os(LENDER).is_none() {
        return;
    }
    let own = OwnSegment::create(4096).unwrap();
    eprintln!("{}", own.name());
    // Ends with the process that started it, if not before.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// A client as above, and the name of its segment.
fn lender() -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "segment::child_lends_a_segment"])
        .env(LENDER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut name = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut name).unwrap();
    (child, name.trim_end().to_owned())
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn a_segment_is_an_orphan_when_its_process_has_ended() {
    let own = OwnSegment::create(4096).unwrap();
    let foreign = ForeignSegment::open(own.name(), 4096).unwrap();
    assert!(!foreign.is_orphan());
    let (mut child, name) = lender();
    let segment = ForeignSegment::open(&name, 4096).unwrap();
    assert!(!segment.is_orphan());
    child.kill().unwrap();
    // Not waited for yet: a process that ended has no memory.
    until(|| segment.is_orphan());
    // It is ours now, and stays.
    let _ = remove_orphans();
    assert!(segment.is_current());
    drop(segment);
    until(|| {
        let _ = remove_orphans();
        !fs::exists(path_of(&name)).unwrap()
    });
    child.wait().unwrap();
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn a_truncated_segment_is_an_error_not_a_crash() {
    let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
    let extent = Extent::new(0, 1 << 20);
    let copy = [AffineCopy::new(0, 0, 1 << 20, &[])];
    for direction in [Direction::SegmentToArena, Direction::ArenaToSegment] {
        let own = OwnSegment::create(1 << 20).unwrap();
        let foreign = ForeignSegment::open(own.name(), 1 << 20).unwrap();
        let copied = copy_affine(&foreign, &arena, extent, direction, &copy);
        assert_eq!(copied, Ok(1 << 20));
        truncate(own.name(), 4096);
        let copied = copy_affine(&foreign, &arena, extent, direction, &copy);
        assert_eq!(copied, Err(AccessError::Poisoned { what: "segment" }));
        assert!(foreign.is_poisoned() && arena.poisoned().is_none());
        // Also the part that is still there: the segment is not what its creator shared.
        let run = Run {
            segment_offset: 0,
            arena_offset: 0,
            len: 8,
        };
        assert!(copy_runs(&foreign, &arena, extent, direction, &[run]).is_err());
        let mut read = Vec::new();
        assert!(foreign.read_into(0, 8, &mut read).is_err() && read.is_empty());
        // The other mapping of the same segment is its own.
        assert!(!own.as_segment().is_poisoned());
        assert!(own.as_segment().write(0, b"ok").is_ok());
        assert!(own.as_segment().write(8192, b"gone").is_err());
    }
    // A new segment, most likely at the same address, starts clean.
    let own = OwnSegment::create(1 << 20).unwrap();
    assert!(!own.as_segment().is_poisoned());
}

#[test]
fn several_threads_meet_the_same_lost_page() {
    let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
    let own = OwnSegment::create(1 << 20).unwrap();
    let foreign = ForeignSegment::open(own.name(), 1 << 20).unwrap();
    truncate(own.name(), 0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (arena, foreign) = (&arena, &foreign);
            scope.spawn(move || {
                let extent = Extent::new(thread << 18, 1 << 18);
                let copy = [AffineCopy::new(0, 0, 1 << 18, &[])];
                let copied = copy_affine(foreign, arena, extent, Direction::SegmentToArena, &copy);
                assert_eq!(copied, Err(AccessError::Poisoned { what: "segment" }));
            });
        }
    });
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn an_arena_loses_only_the_pages_it_lost() {
    let name = format!("kvtier_test_fault_{}", std::process::id());
    let arena = Arena::create(ArenaKind::Shm { name }, 64 << 10).unwrap();
    truncate(arena.shm_name().unwrap(), 32 << 10);
    let page = arena.page_bytes();
    let lost = Extent::new(40 << 10, page);
    assert_eq!(
        arena.write(lost, 0, b"bytes"),
        Err(AccessError::Poisoned { what: "arena" })
    );
    assert_eq!(arena.poisoned(), Some(lost));
    assert!(arena.checksum(lost).is_err());
    assert!(arena.write(Extent::new(0, page), 0, b"bytes").is_ok());
}

const CHILD: &str = "KVTIER_TEST_FAULT_CHILD";

/// Not a test of its own: what the child process of the next one does.
#[test]
fn child_faults_outside() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
    kvtier_memory::fault::install();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let prot = rustix::mm::ProtFlags::READ;
    let shared = rustix::mm::MapFlags::SHARED;
    // SAFETY: a new mapping, which this process keeps until its end.
    let page = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, shared, &file, 0) };
    let page = page.unwrap().cast::<u8>();
    file.set_len(0).unwrap();
    // SAFETY: the fault is what this is about.
    let byte = unsafe { page.read_volatile() };
    unreachable!("read {byte} from a page that is not there");
}

#[test]
fn faults_elsewhere_stay_fatal() {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "segment::child_faults_outside"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS));
}
