//! Files that a server has left in `/dev/shm`, damaged before the next one starts.

use crate::prompts::{CHUNKS, read};
use crate::server::{Segments, Server};

/// Damage to the files of a server that has ended.
#[derive(Clone, Copy, Debug)]
enum Damage {
    None,
    /// The pool ends after the first prompt.
    ShortPool,
    EmptyPool,
    /// A pool with the same bytes that is another file.
    CopiedPool,
    NoPool,
    OpenPool,
    ForeignPool,
    NoLedger,
    EmptyLedger,
    /// Ends within the header.
    ShortLedger,
    /// Ends within the records' first piece.
    ShortRecords,
    ZeroedLedger,
    Version,
    Header,
    OpenLedger,
    ForeignLedger,
    LinkedLedger,
}

impl Damage {
    fn inflict(self, pool: &str, ledger: &str) {
        use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
        let write = |path: &str| std::fs::File::options().write(true).open(path).unwrap();
        let cut = |path: &str, len| write(path).set_len(len).unwrap();
        let open_to_others = |path: &str| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
        };
        let give_away = |path: &str| std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        let len = |path: &str| std::fs::metadata(path).unwrap().len();
        match self {
            Self::None => {}
            Self::ShortPool => cut(pool, CHUNKS * 8192),
            Self::EmptyPool => cut(pool, 0),
            Self::CopiedPool => {
                let copy = format!("{pool}.copy");
                std::fs::copy(pool, &copy).unwrap();
                std::fs::rename(copy, pool).unwrap();
            }
            Self::NoPool => std::fs::remove_file(pool).unwrap(),
            Self::OpenPool => open_to_others(pool),
            Self::ForeignPool => give_away(pool),
            Self::NoLedger => std::fs::remove_file(ledger).unwrap(),
            Self::EmptyLedger => cut(ledger, 0),
            Self::ShortLedger => cut(ledger, 100),
            Self::ShortRecords => cut(ledger, len(ledger) - 4096),
            Self::ZeroedLedger => {
                let size = len(ledger);
                cut(ledger, 0);
                cut(ledger, size);
            }
            Self::Version => write(ledger).write_all_at(&[99], 8).unwrap(),
            Self::Header => write(ledger).write_all_at(&[0xff; 4], 80).unwrap(),
            Self::OpenLedger => open_to_others(ledger),
            Self::ForeignLedger => give_away(ledger),
            Self::LinkedLedger => {
                let other = format!("{ledger}.other");
                std::fs::rename(ledger, &other).unwrap();
                std::os::unix::fs::symlink(&other, ledger).unwrap();
            }
        }
    }

    /// Objects of the eight that the next server has, or what its log says.
    fn expected(self) -> Result<u64, &'static str> {
        match self {
            Self::None => Ok(2 * CHUNKS),
            Self::ShortPool => Ok(CHUNKS),
            Self::EmptyPool | Self::ShortRecords => Ok(0),
            Self::CopiedPool => Err("another arena"),
            Self::NoPool | Self::OpenPool | Self::ForeignPool => Err("no earlier server has left"),
            Self::NoLedger | Self::OpenLedger | Self::ForeignLedger | Self::LinkedLedger => {
                Err("has no ledger")
            }
            Self::EmptyLedger | Self::ShortLedger | Self::ZeroedLedger => Err("there is none"),
            Self::Version => Err("format version 99"),
            Self::Header => Err("its header is damaged"),
        }
    }
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn damaged_segments_are_not_believed() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: files of other users, since only root can give files away");
    }
    for damage in [
        Damage::None,
        Damage::ShortPool,
        Damage::EmptyPool,
        Damage::CopiedPool,
        Damage::NoPool,
        Damage::OpenPool,
        Damage::ForeignPool,
        Damage::NoLedger,
        Damage::EmptyLedger,
        Damage::ShortLedger,
        Damage::ShortRecords,
        Damage::ZeroedLedger,
        Damage::Version,
        Damage::Header,
        Damage::OpenLedger,
        Damage::ForeignLedger,
        Damage::LinkedLedger,
    ] {
        if matches!(damage, Damage::ForeignPool | Damage::ForeignLedger) && !is_root {
            continue;
        }
        let base = tempfile::tempdir().unwrap();
        let segments = Segments::new();
        let server = Server::start(base.path(), "0.0078125", &[]);
        drop(server.worker_with(1, "a", 0..2));
        server.stop();
        let pool = Segments::pool();
        let ledger = format!("{pool}.ledger");
        damage.inflict(&pool, &ledger);
        let server = Server::start(base.path(), "0.0078125", &[]);
        match damage.expected() {
            Ok(objects) => {
                assert_eq!(
                    server.restored(),
                    Some(objects),
                    "{damage:?}: {}",
                    server.log
                );
            }
            Err(told) => {
                assert_eq!(server.restored(), None, "{damage:?}: {}", server.log);
                assert!(server.log.contains(told), "{damage:?}: {}", server.log);
            }
        }
        // What it has is right, and it goes on.
        let mut worker = server.worker(2, "a");
        let hits: u64 = (0..2)
            .map(|number| read(&mut worker, "a", number).unwrap())
            .sum();
        assert_eq!(hits, damage.expected().unwrap_or(0), "{damage:?}");
        drop(server.worker_with(1, "a", 0..3));
        for number in 0..3 {
            assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{damage:?}");
        }
        server.stop();
        let _ = std::fs::remove_file(format!("{ledger}.other"));
        drop(segments);
    }
}
