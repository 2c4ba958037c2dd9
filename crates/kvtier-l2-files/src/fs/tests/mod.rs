//! Tests of the adapter on real directories. The conformance suite has the general ones.

mod access;
mod crash;
mod damage;
mod engines;
mod faults;
mod io_nixl;
mod nixl;
mod places;
mod scan;
mod suite;
mod unnamed;

use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::hashing::ChunkHash;
use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_memory::{Arena, ArenaKind, Extent};
use tempfile::TempDir;

use super::names::FilePlace;
use super::*;
use kvtier_l2::Buffer;

const LAYOUT: u64 = 7;
/// Bytes of an object in most tests; no multiple of a block.
const LEN: u64 = 10_000;
/// Bytes of the arena per object.
const SLOT: u64 = 64 << 10;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(future)
}

fn key(number: u8, model: &str, salt: &str) -> ObjectKey {
    ObjectKey::new(ChunkHash([number; 32]), model, 0x0101_0000, 0, salt).unwrap()
}

fn object(number: u8) -> ObjectSpec {
    ObjectSpec {
        key: key(number, "org/model", ""),
        len: LEN,
        layout: LAYOUT,
    }
}

/// Returns the bytes of an object, which are unique to it.
fn bytes(object: &ObjectSpec) -> Vec<u8> {
    let seed =
        kvtier_memory::checksum::checksum64(object.key.text().name(KeyShape::Grouped).as_bytes());
    let mut bytes = Vec::new();
    while bytes.len() < object.len as usize {
        let next = seed
            .wrapping_add(bytes.len() as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&next.to_le_bytes());
    }
    bytes.truncate(object.len as usize);
    bytes
}

/// A directory and an adapter over it.
struct Fixture {
    dir: TempDir,
    arena: Arc<Arena>,
    options: FsOptions,
    adapter: FsAdapter,
}

impl Fixture {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut FsOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = FsOptions::new(dir.path().join("objects"));
        engines::set(&mut options);
        options.num_workers = 2;
        change(&mut options);
        Self {
            arena: Arc::new(Arena::create(ArenaKind::Anonymous, 64 * SLOT).unwrap()),
            adapter: FsAdapter::open("fs", &options).unwrap(),
            options,
            dir,
        }
    }

    fn base(&self) -> &Path {
        &self.options.base_path
    }

    fn path(&self, object: &ObjectSpec) -> PathBuf {
        self.base()
            .join(FilePlace::of(&object.key, self.options.names, self.options.layout).path)
    }

    fn buffer(&self, slot: u64, len: u64) -> Buffer {
        Buffer::new(
            Arc::clone(&self.arena),
            Extent::new(slot * SLOT, len),
            Arc::new(()),
        )
    }

    fn item(&self, object: &ObjectSpec) -> StoreItem {
        let from = self.buffer(0, object.len);
        from.write(0, &bytes(object)).unwrap();
        StoreItem {
            object: object.clone(),
            from,
        }
    }

    fn store(&self, object: &ObjectSpec) -> Result<Stored, ErrorKind> {
        store_by(&self.adapter, self.item(object))
    }

    fn has(&self, object: &ObjectSpec) -> bool {
        block_on(self.adapter.lookup(vec![object.clone()])).unwrap()[0].is_some()
    }

    /// Whether the bytes had a checksum; they are compared here in any case.
    fn load(&self, object: &ObjectSpec) -> Result<bool, ErrorKind> {
        let to = self.buffer(1, object.len);
        to.write(0, &vec![0xee; object.len as usize]).unwrap();
        let item = LoadItem {
            object: object.clone(),
            to: to.clone(),
        };
        let loaded = block_on(self.adapter.load(vec![item]))
            .remove(0)
            .map_err(|error| error.kind())?;
        let mut found = Vec::new();
        to.read_into(0, object.len, &mut found).unwrap();
        assert!(found == bytes(object), "wrong bytes of {:?}", object.key);
        Ok(loaded.verified)
    }

    fn recover(&self) -> (Vec<Listed>, Recovered) {
        let listed = Mutex::new(Vec::new());
        let found = |page: Vec<Listed>| {
            listed.lock().extend(page);
            true
        };
        let recovered = block_on(self.adapter.recover(&found)).unwrap();
        (listed.into_inner(), recovered)
    }

    /// Names below the base, but for its writers' own.
    fn names(&self) -> Vec<String> {
        let mut names = names_in(self.base());
        names.retain(|name| !name.starts_with(super::names::TEMPORARY) || name.contains("-tmp-x"));
        names
    }

    /// Writes a file as LMCache does.
    fn write_bare(&self, object: &ObjectSpec, naming: Naming, padded_to: usize) {
        let mut bytes = bytes(object);
        bytes.resize(bytes.len().max(padded_to), 0);
        let place = FilePlace::of(&object.key, naming, Layout::Flat);
        std::fs::write(self.base().join(place.path), bytes).unwrap();
    }

    fn status(&self, counter: &str) -> u64 {
        self.adapter.status()[counter].as_u64().unwrap()
    }
}

fn store_by(adapter: &FsAdapter, item: StoreItem) -> Result<Stored, ErrorKind> {
    let mut stored = block_on(adapter.store(vec![item]));
    stored.remove(0).map_err(|error| error.kind())
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            names.extend(
                names_in(&entry.path())
                    .iter()
                    .map(|inside| format!("{name}/{inside}")),
            )
        } else {
            names.push(name)
        }
    }
    names.sort();
    names
}

/// Environment variable of a test in a process of its own.
const ALONE: &str = "KVTIER_FS_TEST_ALONE";

fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs a test in a process of its own, by this command if one is given.
fn alone(test: &str, by: &[&str]) {
    let this = std::env::current_exe().unwrap();
    let mut words: Vec<_> = by.iter().map(std::ffi::OsString::from).collect();
    words.push(this.into());
    let ran = Command::new(&words[0])
        .args(&words[1..])
        .args(["--exact", test])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// Whether a process can have mounts of its own, which end with it; and a word if not.
fn may_mount() -> bool {
    let probe = Command::new("unshare").args(["-rm", "true"]).status();
    let may = probe.is_ok_and(|status| status.success());
    if !may {
        println!("skipped: mounting is not permitted here");
    }
    may
}

#[test]
fn file_bytes_are_readable_by_lmcache() {
    for direct in [false, true] {
        let fixture = Fixture::with(|options| options.use_odirect = direct);
        for len in [0, 1, 4032, 4096, LEN, 1 << 15] {
            let object = ObjectSpec {
                len,
                ..object(len as u8 ^ 3)
            };
            let stored = fixture.store(&object).unwrap();
            let file = std::fs::read(fixture.path(&object)).unwrap();
            assert_eq!(stored, Stored::Written(file.len() as u64));
            assert_eq!(file[..len as usize], bytes(&object));
            assert!(fixture.has(&object));
            assert_eq!(fixture.load(&object), Ok(true));
            assert_eq!(
                fixture.store(&object),
                Ok(Stored::AlreadyThere(file.len() as u64))
            );
        }
    }
}

#[test]
fn each_mode_reads_files_of_the_other() {
    for direct in [false, true] {
        let writer = Fixture::with(|options| options.use_odirect = direct);
        let reader = Fixture::with(|options| {
            options.base_path = writer.base().to_owned();
            options.use_odirect = !direct;
        });
        for len in [100, 4096, LEN] {
            let object = ObjectSpec {
                len,
                ..object(len as u8)
            };
            writer.store(&object).unwrap();
            assert_eq!(reader.load(&object), Ok(true));
        }
    }
}

#[test]
fn files_are_readable_only_by_their_owner() {
    let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
    fixture.store(&object(1)).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let file = fixture.path(&object(1));
    assert_eq!(mode(&file), 0o600);
    for dir in file.ancestors().skip(1).take(3) {
        assert_eq!(mode(dir), 0o700, "{dir:?}");
    }
}

#[tokio::test]
async fn configuration_opens_both_types_and_names_errors() {
    let dir = tempfile::tempdir().unwrap();
    let registry = kvtier_l2::Registry::of(&[FS, FS_NATIVE]);
    let given = |kind: &str, more: &str| {
        let base = dir.path().join(kind);
        let spec = format!(r#"{{"type":{kind:?},"base_path":{base:?}{more}}}"#);
        registry.parse_json(&spec)
    };
    for kind in ["fs", "fs_native"] {
        let more = r#","layout":"sharded","names":"0.4","fsync":"file+dir","io_engine":"posix","relative_tmp_dir":"a/b",
            "use_odirect":true,"num_workers":3,"read_ahead_size":4096,"require_checksum":true,
            "trust_missing_layout":true,"max_capacity_gb":1.5"#;
        let config = given(kind, more).unwrap();
        let expected = FsOptions {
            base_path: dir.path().join(kind),
            relative_tmp_dir: "a/b".into(),
            read_ahead_size: Some(4096),
            use_odirect: true,
            num_workers: 3,
            layout: Layout::Sharded,
            names: Naming::Ungrouped,
            align_bytes: 4096,
            nixl: NixlOptions::default(),
            fsync: Fsync::FileAndDir,
            io_engine: IoEngine::Posix,
            require_checksum: true,
            trust_missing_layout: true,
            read_only: false,
        };
        assert_eq!(FsOptions::of(&config), expected);
        assert_eq!(config.options.gib("max_capacity_gb"), 3 << 29);
        let read_only = given(kind, r#","read_only":true"#).unwrap();
        assert!(FsOptions::of(&read_only).read_only);
        let adapter = registry.open(&config).unwrap();
        assert_eq!(adapter.kind(), kind);
        assert!(dir.path().join(kind).join("a/b").is_dir());
        adapter.close().await;
    }
    for bad in ["/x", "..", "x/../../y"] {
        let error = given("fs", &format!(r#","relative_tmp_dir":{bad:?}"#)).unwrap_err();
        assert!(error.to_string().contains("relative_tmp_dir"), "{error}");
    }
    for (key, value) in [
        ("num_workers", "0"),
        ("read_ahead_size", "0"),
        ("io_engine", r#""uring""#),
        ("base_path", r#""""#),
    ] {
        let error = given("fs", &format!(r#",{key:?}:{value}"#)).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn invalid_base_path_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = FsAdapter::open("fs", &FsOptions::new(&path)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
}

#[test]
fn closed_adapter_answers_and_leaves_no_file() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    block_on(fixture.adapter.close());
    assert_eq!(fixture.store(&object(2)), Err(ErrorKind::Unavailable));
    assert_eq!(fixture.load(&object(1)), Err(ErrorKind::Unavailable));
    assert_eq!(fixture.adapter.status()["is_healthy"], false);
    let Fixture {
        adapter,
        options,
        dir,
        ..
    } = fixture;
    drop(adapter);
    assert_eq!(names_in(&options.base_path).len(), 1);
    drop(dir);
}

#[test]
fn buffers_of_other_lengths_are_refused() {
    let fixture = Fixture::new();
    let mut item = fixture.item(&object(1));
    item.object.len -= 1;
    assert_eq!(store_by(&fixture.adapter, item), Err(ErrorKind::Refused));
    let item = LoadItem {
        object: object(1),
        to: fixture.buffer(1, LEN - 1),
    };
    let loaded = block_on(fixture.adapter.load(vec![item])).remove(0);
    assert_eq!(loaded.unwrap_err().kind(), ErrorKind::Refused);
}

#[test]
fn free_bytes_are_those_of_the_disk() {
    let fixture = Fixture::new();
    let free = || block_on(fixture.adapter.free_bytes());
    assert!(free().unwrap() > Some(0));
    // By the threads of the pool, not by the caller.
    block_on(fixture.adapter.close());
    assert_eq!(free().unwrap_err().kind(), ErrorKind::Unavailable);
}
