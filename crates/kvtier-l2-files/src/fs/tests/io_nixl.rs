//! NIXL as the I/O engine. What every engine has to pass is in `engines`.

use super::engines::nixl;
use super::*;
use crate::io::nixl::Nixl;
use crate::io::{Engine, FileWork, Move, Moved};

#[test]
fn nixl_moves_objects_and_leaves_the_rest() {
    let Some(nixl) = nixl() else { return };
    for (use_odirect, use_uring) in [(false, false), (true, false), (true, true)] {
        let fixture = Fixture::with(|options| {
            options.io_engine = IoEngine::Nixl;
            options.nixl = NixlOptions {
                params: [("use_uring".into(), use_uring.to_string())].into(),
                ..nixl.clone()
            };
            options.use_odirect = use_odirect;
        });
        let status = fixture.adapter.status();
        assert_eq!(status["io_engine"], "nixl");
        let reason = status["io_engine_reason"].as_str().unwrap();
        assert!(
            reason.contains("POSIX") && reason.contains("libnixl_capi.so"),
            "{reason}"
        );
        for len in [0, 1, 4095, 4096, LEN, 60_000] {
            let object = ObjectSpec {
                len,
                ..object(len as u8)
            };
            fixture.store(&object).unwrap();
            assert_eq!(fixture.load(&object), Ok(true), "{len}");
        }
        // An empty part is a transfer of nothing.
        let status = fixture.adapter.status()["io_engine_status"].take();
        assert_eq!(
            (&status["transfers"], &status["failed_transfers"]),
            (&12.into(), &0.into())
        );
    }
}

#[test]
fn transfers_that_nixl_fails_are_left_to_the_system() {
    let Some(nixl) = nixl() else { return };
    let fixture = Fixture::with(|options| {
        options.io_engine = IoEngine::Nixl;
        options.nixl = nixl;
    });
    fixture.store(&object(1)).unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(fixture.path(&object(1)))
        .unwrap();
    let whole = file.metadata().unwrap().len();
    let reader = Nixl::new(&fixture.options.nixl).unwrap();
    let read = |size| {
        let mut work = One {
            work: Some(Move {
                at: 0,
                number: 0,
                file: std::fs::File::open(fixture.path(&object(1)))
                    .unwrap()
                    .into(),
                buffer: fixture.buffer(1, LEN),
                body: LEN,
                tail: kvtier_memory::uring::Tail::default(),
                size: Some(size),
            }),
            moved: None,
        };
        reader.run(&mut work);
        work.moved.unwrap().unwrap().0
    };
    assert_eq!(read(LEN), LEN);
    file.set_len(LEN / 2).unwrap();
    assert_eq!(read(whole), LEN / 2);
    let status = reader.status().unwrap();
    assert_eq!(
        (&status["transfers"], &status["failed_transfers"]),
        (&1.into(), &1.into())
    );
}

/// One transfer and its result.
struct One {
    work: Option<Move>,
    moved: Option<Moved>,
}

impl FileWork for One {
    fn next(&mut self) -> Option<Move> {
        self.work.take()
    }

    fn done(&mut self, _: Move, moved: Moved) {
        self.moved = Some(moved);
    }

    fn lost(&mut self, _: usize) {
        panic!("it is lost");
    }
}

#[test]
fn missing_nixl_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let open = |library: &Path, backend: &str| {
        let mut options = FsOptions::new(dir.path());
        options.io_engine = IoEngine::Nixl;
        options.nixl.library = Some(library.to_owned());
        options.nixl.backend = backend.into();
        let error = FsAdapter::open("fs", &options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused);
        error.to_string()
    };
    let absent = dir.path().join("libnixl_capi.so");
    let line = open(&absent, "POSIX");
    for word in [
        "io_engine",
        "nixl_library",
        "pip install nixl-cu12",
        absent.to_str().unwrap(),
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
    if let Some(NixlOptions { library, .. }) = nixl() {
        let line = open(&library.unwrap(), "NO_SUCH");
        assert!(line.contains("\"NO_SUCH\""), "{line}");
    }
}
