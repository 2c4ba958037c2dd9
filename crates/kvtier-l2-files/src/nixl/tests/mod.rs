//! Tests with the real library; each names itself and says why if it is skipped.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use kvtier_common::extent::Extent;
use kvtier_memory::uring::{Tail, Transfer};
use kvtier_memory::{Arena, ArenaKind};

use super::*;

mod fake;

const LEN: u64 = 1 << 20;

fn installed(test: &str) -> Option<Arc<Library>> {
    Some(Library::load(Some(&testing::library(test)?)).unwrap())
}

fn params(params: &[(&str, &str)]) -> BTreeMap<String, String> {
    params
        .iter()
        .map(|(name, value)| ((*name).into(), (*value).into()))
        .collect()
}

fn transfer(
    arena: &Arc<Arena>,
    at: u64,
    file: File,
    enough: Option<u64>,
) -> Transfer<&'static str> {
    Transfer {
        file: OwnedFd::from(file),
        at: 0,
        arena: Arc::clone(arena),
        extent: Extent::new(at, LEN),
        tail: Tail::default(),
        enough,
        hold: "held",
    }
}

fn ended(outcome: NixlOutcome<&'static str>) -> Result<(), NixlError> {
    match outcome {
        NixlOutcome::Ended(transfer, moved) => {
            assert_eq!(transfer.hold, "held");
            moved
        }
        NixlOutcome::Lost => panic!("it is lost"),
    }
}

#[test]
fn bytes_are_moved_by_every_queue_of_posix() {
    let Some(library) = installed("bytes_are_moved_by_every_queue_of_posix") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 4 * LEN).unwrap());
    let bytes: Vec<u8> = (0..LEN).map(|at| (at ^ (at >> 8)) as u8).collect();
    let source = Extent::new(LEN, LEN);
    arena.write(source, 0, &bytes).unwrap();
    for queue in ["", "use_uring", "use_aio", "use_posix_aio"] {
        let chosen = match queue {
            "" => params(&[]),
            queue => params(&[(queue, "true")]),
        };
        let mut agent = Agent::start(&library, "POSIX", &chosen).unwrap();
        for round in 0..3_u64 {
            let path = dir.path().join(format!("{queue}{round}"));
            let file = File::create(&path).unwrap();
            ended(agent.run(transfer(&arena, LEN, file, None))).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{queue}");
            arena
                .write(Extent::new(0, LEN), 0, &vec![0xee; LEN as usize])
                .unwrap();
            let file = File::open(&path).unwrap();
            ended(agent.run(transfer(&arena, 0, file, Some(LEN)))).unwrap();
            let mut found = Vec::new();
            arena
                .read_into(Extent::new(0, LEN), 0, LEN, &mut found)
                .unwrap();
            assert!(found == bytes, "{queue}");
        }
    }
}

#[test]
fn failed_transfers_are_errors() {
    let Some(library) = installed("failed_transfers_are_errors") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, 4 * LEN).unwrap());
    let mut agent = Agent::start(&library, "POSIX", &params(&[])).unwrap();
    // A file that is shorter than what is read.
    let path = dir.path().join("short");
    std::fs::write(&path, [7; 5000]).unwrap();
    let moved = ended(agent.run(transfer(&arena, 0, File::open(&path).unwrap(), Some(LEN))));
    assert!(moved.is_err());
    // A file that is open for reads only, and one for writes only.
    let moved = ended(agent.run(transfer(&arena, 0, File::open(&path).unwrap(), None)));
    assert!(moved.is_err());
    assert_eq!(std::fs::read(&path).unwrap(), [7; 5000]);
    let writable = OpenOptions::new().write(true).open(&path).unwrap();
    let moved = ended(agent.run(transfer(&arena, 0, writable, Some(LEN))));
    assert!(moved.is_err());
    // Memory that is not the arena's.
    let file = File::create(dir.path().join("none")).unwrap();
    let moved = ended(agent.run(transfer(&arena, 4 * LEN, file, None)));
    assert!(matches!(moved, Err(NixlError::Memory(_))));
    // The agent still works.
    let path = dir.path().join("good");
    ended(agent.run(transfer(&arena, 0, File::create(&path).unwrap(), None))).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), LEN);
}

#[test]
fn unknown_backend_is_refused_by_name() {
    let Some(library) = installed("unknown_backend_is_refused_by_name") else {
        return;
    };
    let error = Agent::start(&library, "NO_SUCH", &params(&[]))
        .err()
        .unwrap();
    let line = error.to_string();
    assert!(
        line.contains("\"NO_SUCH\"") && line.contains("libnixl_capi.so"),
        "{line}"
    );
    let error = Agent::start(&library, "POSIX\0", &params(&[]))
        .err()
        .unwrap();
    assert!(matches!(error, NixlError::Text(_)), "{error}");
}

#[test]
fn other_files_are_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("libnixl_capi.so");
    std::fs::write(&text, "not a library").unwrap();
    let absent = dir.path().join("absent.so");
    for (given, why) in [
        // A library, but another one.
        (
            Path::new("/lib/x86_64-linux-gnu/libc.so.6"),
            "nixl_capi_is_stub",
        ),
        (&text, "file too short"),
        (dir.path(), "file too short"),
        (&absent, "No such file"),
    ] {
        if given.starts_with("/lib") && !given.exists() {
            println!(
                "skipped: other_files_are_refused_with_advice: no {}",
                given.display()
            );
            continue;
        }
        let line = Library::load(Some(given)).unwrap_err().to_string();
        for word in [why, "pip install nixl-cu12", &given.display().to_string()] {
            assert!(line.contains(word), "{word}: {line}");
        }
    }
}

#[test]
fn wheel_is_found_in_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let wheel = dir.path().join(".nixl_cu99.mesonpy.libs");
    std::fs::create_dir(&wheel).unwrap();
    std::fs::write(wheel.join(super::library::LIBRARY), "x").unwrap();
    let line = Library::load(Some(dir.path())).unwrap_err().to_string();
    assert!(
        line.contains(".nixl_cu99.mesonpy.libs/libnixl_capi.so ("),
        "{line}"
    );
}
