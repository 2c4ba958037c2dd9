//! The engines side by side: each passes the same tests.

use std::os::fd::{FromRawFd, OwnedFd};

use kvtier_memory::uring::Ring;
use rustix::io::Errno;

use super::*;
use crate::io::uring::Uring;
use crate::io::{self, Engine, FileWork, Move, Moved};

/// Environment variable with the engine that the tests use.
const ENGINE: &str = "KVTIER_FS_TEST_ENGINE";

/// Whether this run is one of another engine.
fn is_rerun() -> bool {
    std::env::var_os(ENGINE).is_some()
}

/// Sets the engine of this run.
pub(super) fn set(options: &mut FsOptions) {
    options.io_engine = match std::env::var_os(ENGINE) {
        Some(name) if name == "io_uring" => IoEngine::Uring,
        Some(name) if name == "nixl" => {
            options.nixl = nixl().expect("the outer run has found it");
            IoEngine::Nixl
        }
        _ => IoEngine::Posix,
    };
}

/// NIXL, if it is here.
pub(super) fn nixl() -> Option<NixlOptions> {
    Some(NixlOptions {
        library: Some(crate::nixl::testing::library("tests of io_engine nixl")?),
        ..NixlOptions::default()
    })
}

/// Whether there is io_uring, and a word if not.
fn has_uring() -> bool {
    Ring::<()>::new(1)
        .inspect_err(|error| println!("skipped: no io_uring here: {error}"))
        .is_ok()
}

/// Runs the tests of the adapter with another engine.
fn rerun(engine: &str, tests: &[&str]) {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .arg("--test-threads=2")
        .env(ENGINE, engine)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}");
    assert!(!said.contains("running 0 tests"), "{said}");
}

#[test]
fn adapter_tests_pass_with_io_uring() {
    if !is_rerun() && has_uring() {
        // No engine lists a directory or finds a file's place.
        let but = ["--skip", "fs::tests::scan", "--skip", "fs::tests::places"];
        rerun("io_uring", &[&["fs::tests::"], &but[..]].concat());
    }
}

#[test]
fn adapter_tests_pass_with_nixl() {
    if !is_rerun() && nixl().is_some() {
        // Those of what moves bytes; an agent of NIXL takes a while to start.
        let tests = [
            "fs::tests::damage",
            "fs::tests::faults",
            "fs::tests::nixl",
            "fs::tests::suite",
        ];
        rerun("nixl", &tests);
    }
}

/// A batch larger than what a ring holds, of every kind of object at once.
fn mixed(io_engine: IoEngine, use_odirect: bool) -> Vec<String> {
    const COUNT: u8 = 50;
    let fixture = Fixture::with(|options| {
        options.io_engine = io_engine;
        options.use_odirect = use_odirect;
        options.num_workers = 1;
    });
    let len = |number: u8| [0, 1, 4096, 10_000, 40_000][usize::from(number) % 5];
    let spec = |number: u8| ObjectSpec {
        len: len(number),
        ..object(number)
    };
    let buffer = |number: u8, len| fixture.buffer(u64::from(number), len);
    let stores = (0..COUNT).map(|number| {
        let object = spec(number);
        let from = buffer(number, len(number));
        from.write(0, &bytes(&object)).unwrap();
        StoreItem { object, from }
    });
    // Some are there, and some of these are not what they should be.
    for number in [3, 13, 23] {
        std::fs::write(fixture.path(&object(number)), b"other").unwrap();
    }
    std::fs::create_dir(fixture.path(&object(33))).unwrap();
    let stored = block_on(fixture.adapter.store(stores.collect()));
    let mut answers: Vec<_> = stored
        .iter()
        .map(|stored| format!("{:?}", stored.as_ref().map_err(L2Error::kind)))
        .collect();
    for number in [4, 14, 24] {
        let mut file = std::fs::read(fixture.path(&spec(number))).unwrap();
        file[7] ^= 1;
        std::fs::write(fixture.path(&spec(number)), file).unwrap();
    }
    let loads = (0..COUNT).map(|number| LoadItem {
        object: spec(number),
        to: {
            let to = buffer(number, len(number));
            to.write(0, &vec![0xee; len(number) as usize]).unwrap();
            to
        },
    });
    let loaded = block_on(fixture.adapter.load(loads.collect()));
    for (number, loaded) in (0..COUNT).zip(&loaded) {
        if loaded.is_ok() {
            let mut found = Vec::new();
            let to = buffer(number, len(number));
            to.read_into(0, len(number), &mut found).unwrap();
            assert!(found == bytes(&spec(number)), "wrong bytes of {number}");
        }
    }
    answers.extend(
        loaded
            .iter()
            .map(|loaded| format!("{:?}", loaded.as_ref().map_err(L2Error::kind))),
    );
    answers.push(format!("{:?}", fixture.names()));
    for counter in ["quarantined_files", "replaced_files"] {
        answers.push(format!("{counter} {}", fixture.status(counter)));
    }
    answers
}

#[test]
fn engines_return_equal_results() {
    if !has_uring() {
        return;
    }
    for direct in [false, true] {
        let posix = mixed(IoEngine::Posix, direct);
        assert!(posix.iter().any(|answers| answers.contains("Corrupt")));
        assert!(posix.iter().any(|answers| answers.contains("Refused")));
        assert_eq!(mixed(IoEngine::Uring, direct), posix);
    }
}

#[test]
fn status_has_io_engine_and_reason() {
    let fixture = Fixture::with(|options| options.io_engine = IoEngine::Posix);
    assert_eq!(fixture.adapter.status()["io_engine"], "posix");
    let fixture = Fixture::with(|options| options.io_engine = IoEngine::Auto);
    let status = fixture.adapter.status();
    assert_eq!(status["io_engine"], "posix");
    assert_eq!(status["io_engine_reason"], "use_odirect is off");
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.load(&object(1)), Ok(true));
    let fixture = Fixture::with(|options| {
        options.io_engine = IoEngine::Auto;
        options.use_odirect = true;
    });
    let status = fixture.adapter.status();
    let reason = status["io_engine_reason"].as_str().unwrap();
    if has_uring() {
        assert_eq!(
            (&status["io_engine"], reason),
            (&"io_uring".into(), "use_odirect is on")
        )
    } else {
        assert!(reason.contains("io_uring is not available"), "{reason}")
    }
    if has_uring() {
        let fixture = Fixture::with(|options| options.io_engine = IoEngine::Uring);
        assert_eq!(fixture.adapter.status()["io_engine"], "io_uring");
    }
}

#[test]
fn full_file_system_is_reported_by_both_engines() {
    use rustix::fs::OFlags;

    /// One write to a device that is always full.
    struct Full<'a>(&'a Fixture, bool, Option<Errno>);

    impl FileWork for Full<'_> {
        fn next(&mut self) -> Option<Move> {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let full = rustix::fs::open("/dev/full", flags, rustix::fs::Mode::empty()).unwrap();
            (!std::mem::replace(&mut self.1, true)).then(|| Move {
                number: 0,
                at: 0,
                file: full,
                buffer: self.0.buffer(0, LEN),
                body: LEN,
                tail: kvtier_memory::uring::Tail::default(),
                size: None,
            })
        }

        fn done(&mut self, _: Move, moved: Moved) {
            self.2 = moved.err().and_then(|error| io::reason(&error));
        }

        fn lost(&mut self, _: usize) {}
    }

    let fixture = Fixture::new();
    let mut engines: Vec<Box<dyn Engine>> = vec![Box::new(io::Posix)];
    if has_uring() {
        engines.push(Box::new(Uring::new().unwrap()));
    }
    for engine in engines {
        let mut full = Full(&fixture, false, None);
        engine.run(&mut full);
        assert_eq!(full.2, Some(Errno::NOSPC), "{}", engine.name());
    }
}

/// Breaks its rings after this number of objects of a batch.
struct Breaking(Uring, usize);

/// Counts what is begun.
struct Counted<'a>(&'a mut dyn FileWork, usize);

impl FileWork for Counted<'_> {
    fn next(&mut self) -> Option<Move> {
        if self.1 == 0 {
            break_rings();
        }
        self.1 = self.1.wrapping_sub(1);
        self.0.next()
    }

    fn done(&mut self, one: Move, moved: Moved) {
        self.0.done(one, moved);
    }

    fn lost(&mut self, number: usize) {
        self.0.lost(number);
    }
}

/// Makes all rings of this process other files, so that neither handing in nor waiting works.
fn break_rings() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut broken = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let is_ring =
            std::fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().contains("io_uring"));
        if is_ring {
            let number = path.file_name().unwrap().to_str().unwrap();
            // SAFETY: of an open ring, whose owner goes on to close whatever has its number.
            let mut ring = std::mem::ManuallyDrop::new(unsafe {
                OwnedFd::from_raw_fd(number.parse().unwrap())
            });
            rustix::io::dup2(&null, &mut ring).unwrap();
            broken += 1;
        }
    }
    assert!(broken > 0);
}

impl Engine for Breaking {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn run(&self, work: &mut dyn FileWork) {
        match self.0.name() {
            "io_uring" => self.0.run(&mut Counted(work, self.1)),
            _ => self.0.run(work),
        }
    }
}

fn items(fixture: &Fixture) -> Vec<StoreItem> {
    let item = |number| {
        let from = fixture.buffer(u64::from(number), LEN);
        from.write(0, &bytes(&object(number))).unwrap();
        let object = object(number);
        StoreItem { object, from }
    };
    (0..12).map(item).collect()
}

#[test]
fn stores_continue_after_a_broken_ring() {
    const AT: usize = 5;
    if !is_alone() {
        let name = "fs::tests::engines::stores_continue_after_a_broken_ring";
        return alone(name, &[]);
    }
    if !has_uring() {
        return;
    }
    for direct in [false, true] {
        let mut fixture = Fixture::with(|options| {
            options.use_odirect = direct;
            options.num_workers = 1;
        });
        let engine = Choice {
            engine: Box::new(Breaking(Uring::new().unwrap(), AT)),
            reason: "a test".into(),
        };
        fixture.adapter = FsAdapter::open_with("fs", &fixture.options, Some(engine)).unwrap();
        assert_eq!(fixture.adapter.status()["io_engine"], "io_uring");
        let stored = block_on(fixture.adapter.store(items(&fixture)));
        assert_eq!(fixture.adapter.status()["io_engine"], "posix");
        for (number, stored) in (0..).zip(&stored) {
            match stored {
                Ok(Stored::Written(_)) => assert!(fixture.has(&object(number))),
                // The outcome of transfers in flight is lost.
                Err(error) if usize::from(number) < AT => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable);
                    assert!(!fixture.has(&object(number)));
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        let there = stored.iter().filter(|stored| stored.is_ok()).count();
        assert_eq!(fixture.names().len(), there);
        let stored = block_on(fixture.adapter.store(items(&fixture)));
        assert!(stored.iter().all(Result::is_ok), "{stored:?}");
        for number in 0..12 {
            assert_eq!(fixture.load(&object(number)), Ok(true));
        }
    }
}

/// The system writes a part of a file; the result of the rest is reported.
#[test]
fn short_write_is_reported_by_both_engines() {
    if !is_alone() {
        let name = "fs::tests::engines::short_write_is_reported_by_both_engines";
        if may_mount() {
            alone(name, &["unshare", "-rm"]);
        }
        return;
    }
    let small = tempfile::tempdir().unwrap();
    // Capacity for a part of the first file.
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=24k", "kvtier-test"])
        .arg(small.path())
        .status();
    assert!(mounted.unwrap().success());
    let engines = [IoEngine::Posix, IoEngine::Uring];
    for io_engine in engines.into_iter().take(1 + usize::from(has_uring())) {
        let fixture = Fixture::with(|options| {
            options.io_engine = io_engine;
            options.base_path = small.path().join("objects");
        });
        let large = ObjectSpec {
            len: 40_000,
            ..object(1)
        };
        assert_eq!(fixture.store(&large), Err(ErrorKind::Full));
        assert_eq!(fixture.names().len(), 0);
        assert!(matches!(fixture.store(&object(2)), Ok(Stored::Written(_))));
        assert_eq!(fixture.load(&object(2)), Ok(true));
        std::fs::remove_dir_all(fixture.base()).unwrap();
    }
    let ended = Command::new("umount").arg(small.path()).status();
    assert!(ended.unwrap().success());
}
