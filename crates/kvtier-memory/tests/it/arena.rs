//! Arenas of every kind: creation, names, access, prefaulting, and what is left behind (nothing).

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier_memory::SHM_PREFIX;
use kvtier_memory::checksum::{checksum64, checksum128};
use kvtier_memory::{
    AccessError, Arena, ArenaError, ArenaKind, Extent, FileId, PrefaultEnd, remove_stale_pools,
};
use proptest::prelude::*;

use crate::huge_mount::HugeMount;

fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("kvtier_test_{}_{number}", std::process::id())
}

fn shm(name: &str) -> ArenaKind {
    ArenaKind::Shm {
        name: name.to_owned(),
    }
}

fn shm_path(arena: &Arena) -> PathBuf {
    PathBuf::from("/dev/shm").join(arena.shm_name().unwrap())
}

fn round_trip(arena: &Arena) {
    let extent = Extent::new(arena.len() - 8192, 8192);
    let bytes: Vec<u8> = (0..8192_u32).map(|i| (i % 253) as u8).collect();
    arena.write(extent, 0, &bytes).unwrap();
    arena.write(extent, 5, b"hello").unwrap();
    let mut read = b"before".to_vec();
    arena.read_into(extent, 3, 9, &mut read).unwrap();
    assert_eq!(read, b"before\x03\x04hello\x0a\x0b");
    let mut all = Vec::new();
    arena.read_into(extent, 0, 8192, &mut all).unwrap();
    assert_eq!(arena.checksum(extent).unwrap(), checksum128(&all));
    assert_eq!(arena.checksum64(extent).unwrap(), checksum64(&all));
    assert_eq!(arena.poisoned(), None);
}

/// Stored objects have them: they are the same in every release and on every processor.
#[test]
fn sums_are_those_of_xxh3_whole_and_in_pieces() {
    let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
    for (len, short, long) in [
        (
            0,
            0x2d06_8005_38d3_94c2,
            0x99aa_06d3_0147_98d8_6001_c324_468d_497f,
        ),
        (
            1,
            0xc44b_dff4_074e_ecdb,
            0xa6cd_5e93_9200_0f6a_c44b_dff4_074e_ecdb,
        ),
        (
            100,
            0x1efb_aa65_2af7_dfb7,
            0x2701_f07d_2c26_abff_94b1_9615_20a1_1588,
        ),
        (
            300,
            0x2536_56b9_aabf_8ead,
            0xe265_8505_5626_3cb1_2536_56b9_aabf_8ead,
        ),
        (
            100_000,
            0x02df_1e98_5a77_6b74,
            0x2868_4b2a_d44c_d4a4_02df_1e98_5a77_6b74_u128,
        ),
    ] {
        let bytes: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8).collect();
        assert_eq!((checksum64(&bytes), checksum128(&bytes)), (short, long));
        let extent = Extent::new(4096, len as u64);
        arena.write(extent, 0, &bytes).unwrap();
        assert_eq!(arena.checksum64(extent), Ok(short));
        assert_eq!(arena.checksum(extent), Ok(long));
    }
}

#[test]
fn every_kind_keeps_bytes() {
    for kind in [ArenaKind::Anonymous, shm(&unique_name())] {
        let arena = Arena::create(kind.clone(), 100_001).unwrap();
        assert_eq!(arena.len() % arena.page_bytes(), 0);
        assert!(arena.len() >= 100_001 && arena.len() < 100_001 + arena.page_bytes());
        assert_eq!(arena.kind(), &kind);
        round_trip(&arena);
    }
}

#[test]
fn huge_pages_or_a_reason() {
    // Alone, or without any.
    let mount = HugeMount::new("huge_pages_or_a_reason", 2, "");
    match Arena::create(ArenaKind::Hugepages, 3 << 20) {
        Ok(arena) => {
            assert_eq!((arena.len(), arena.page_bytes()), (4 << 20, 2 << 20));
            round_trip(&arena);
        }
        Err(ArenaError::Hugepages { needed: 2, free }) => assert!(free < 2 && mount.is_none()),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn large_arenas_are_not_touched_at_creation() {
    // Anonymous, since /dev/shm may be small. Had the pages been touched, the machine would
    // most likely not have them.
    let arena = Arena::create(ArenaKind::Anonymous, 8 << 30).unwrap();
    let resident = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = resident.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(pages * arena.page_bytes() < 1 << 30);
    round_trip(&arena);
}

#[test]
fn sizes_are_checked() {
    for bytes in [0, u64::MAX, i64::MAX as u64] {
        let error = Arena::create(ArenaKind::Anonymous, bytes).unwrap_err();
        assert!(matches!(error, ArenaError::Size { .. }), "{error}");
    }
    let error = Arena::create(shm(&unique_name()), 1 << 62).unwrap_err();
    assert!(
        matches!(
            error,
            ArenaError::OutOfMemory { .. } | ArenaError::System { .. }
        ),
        "{error}"
    );
}

#[test]
fn shm_names_are_prefixed_and_private() {
    let name = unique_name();
    for given in [
        name.clone(),
        format!("/{name}"),
        format!("{SHM_PREFIX}{name}"),
        format!("/{SHM_PREFIX}{name}"),
    ] {
        let arena = Arena::create(shm(&given), 4096).unwrap();
        assert_eq!(
            arena.shm_name(),
            Some(format!("{SHM_PREFIX}{name}").as_str())
        );
        let path = shm_path(&arena);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(arena);
        assert!(!path.exists());
    }
}

#[test]
fn impossible_names_are_refused() {
    let long = "x".repeat(256 - SHM_PREFIX.len());
    for name in ["", "/", "a/b", "//a", "a/", "../a", "a\0b", &long] {
        let error = Arena::create(shm(name), 4096).unwrap_err();
        assert!(matches!(error, ArenaError::Name { .. }), "{error}");
    }
    let longest = format!("{}{}", unique_name(), "x".repeat(300));
    let longest = &longest[..255 - SHM_PREFIX.len()];
    assert!(Arena::create(shm(longest), 4096).is_ok());
}

#[test]
fn a_stale_segment_is_replaced_and_a_living_one_is_not() {
    let name = unique_name();
    let path = PathBuf::from(format!("/dev/shm/{SHM_PREFIX}{name}"));
    fs::write(&path, b"left behind").unwrap();
    let arena = Arena::create(shm(&name), 4096).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
    assert_eq!(fs::read(&path).unwrap(), vec![0; 4096]);
    let error = Arena::create(shm(&name), 4096).unwrap_err();
    assert!(matches!(error, ArenaError::NameInUse { .. }), "{error}");
    assert!(path.exists());
    drop(arena);
    assert!(!path.exists());
}

#[test]
fn stale_segment_is_removed_before_capacity_is_checked() {
    let name = unique_name();
    let path = PathBuf::from(format!("/dev/shm/{SHM_PREFIX}{name}"));
    fs::write(&path, b"left behind").unwrap();
    Arena::create(shm(&name), 1 << 62).unwrap_err();
    assert!(!path.exists());
}

/// Made by any local user, in a directory where each may make names.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn names_of_another_user_are_replaced_by_root() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may remove what another user has made in /dev/shm");
        return;
    }
    let name = unique_name();
    let path = PathBuf::from(format!("/dev/shm/{SHM_PREFIX}{name}"));
    let target = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    fs::write(target.path(), b"kept").unwrap();
    let disown = |path: &std::path::Path| {
        std::os::unix::fs::lchown(path, Some(65534), Some(65534)).unwrap();
    };
    let held = || {
        let file = File::create(&path).unwrap();
        file.lock().unwrap();
        file
    };
    let make: [&dyn Fn(); 5] = [
        &|| std::os::unix::fs::symlink(target.path(), &path).unwrap(),
        &|| fs::create_dir(&path).unwrap(),
        &|| drop(std::os::unix::net::UnixListener::bind(&path).unwrap()),
        &|| fs::hard_link(target.path(), &path).unwrap(),
        &|| drop(File::create(&path).unwrap()),
    ];
    for (number, make) in make.iter().enumerate() {
        make();
        disown(&path);
        let arena = Arena::create(shm(&name), 4096).unwrap();
        let found = fs::symlink_metadata(&path).unwrap();
        assert!(found.is_file() && found.uid() == 0, "{number}");
        assert_eq!(fs::read(target.path()).unwrap(), b"kept", "{number}");
        drop(arena);
        assert!(!path.exists());
    }
    // A file that is locked is a server's.
    for user in [0, 65534] {
        let lock = held();
        std::os::unix::fs::chown(&path, Some(user), None).unwrap();
        let id = FileId::named(path.file_name().unwrap());
        let error = Arena::create(shm(&name), 4096).unwrap_err();
        let is_foreign = matches!(error, ArenaError::NameOfUser { user: 65534, .. });
        let is_own = matches!(error, ArenaError::NameInUse { .. });
        assert!(if user == 0 { is_own } else { is_foreign }, "{error}");
        assert_eq!(FileId::named(path.file_name().unwrap()), id);
        drop(lock);
        fs::remove_file(&path).unwrap();
    }
    // A directory with something in it stays.
    fs::create_dir(&path).unwrap();
    fs::write(path.join("x"), b"x").unwrap();
    let error = Arena::create(shm(&name), 4096).unwrap_err();
    assert!(error.to_string().contains("another user"), "{error}");
    assert!(path.join("x").exists());
    fs::remove_dir_all(&path).unwrap();
}

#[test]
fn only_pools_of_the_dead_are_stale() {
    let prefix = unique_name();
    let living = Arena::create(shm(&format!("{prefix}_living")), 4096).unwrap();
    let left = |name: &str| {
        let path = shm_path(&living).with_file_name(format!("{SHM_PREFIX}{name}"));
        fs::write(&path, b"left").unwrap();
        path
    };
    let (dead, other) = (left(&format!("{prefix}_dead")), left(&format!("x{prefix}")));
    // What is no file is no pool, as a cache on disk that was put there.
    let folder = dead.with_extension("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("data"), b"kept").unwrap();
    assert_eq!(remove_stale_pools(&prefix), 1);
    assert_eq!(remove_stale_pools(&prefix), 0);
    assert!(folder.join("data").exists());
    fs::remove_dir_all(folder).unwrap();
    assert!(shm_path(&living).exists() && !dead.exists() && other.exists());
    fs::remove_file(&other).unwrap();
    assert_eq!(remove_stale_pools(""), 0);
}

#[test]
fn unlink_removes_only_our_own() {
    let arena = Arena::create(shm(&unique_name()), 4096).unwrap();
    let path = shm_path(&arena);
    arena.unlink();
    assert!(!path.exists());
    fs::write(&path, b"another's").unwrap();
    arena.unlink();
    drop(arena);
    assert!(path.exists());
    fs::remove_file(&path).unwrap();

    // Replaced behind our back.
    let arena = Arena::create(shm(&unique_name()), 4096).unwrap();
    let path = shm_path(&arena);
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"another's").unwrap();
    drop(arena);
    assert_eq!(fs::read(&path).unwrap(), b"another's");
    fs::remove_file(&path).unwrap();
}

#[test]
fn other_mappings_see_the_same_bytes() {
    let arena = Arena::create(shm(&unique_name()), 8192).unwrap();
    arena.write(Extent::new(4096, 4096), 1, b"shared").unwrap();
    let file = fs::read(shm_path(&arena)).unwrap();
    assert_eq!(&file[4097..4103], b"shared");
}

#[test]
fn prefault_reports_and_stops() {
    let arena = Arena::create(ArenaKind::Anonymous, 1_200 << 10).unwrap();
    let mut seen = Vec::new();
    let stop = AtomicBool::new(false);
    let end = arena
        .prefault(arena.whole(), &stop, |progress| {
            seen.push(progress.done);
            if progress.done == 512 << 10 {
                stop.store(true, Ordering::Relaxed);
            }
        })
        .unwrap();
    assert_eq!(end, PrefaultEnd::Stopped { done: 512 << 10 });
    stop.store(false, Ordering::Relaxed);
    let end = arena
        .prefault(arena.whole(), &stop, |p| seen.push(p.done))
        .unwrap();
    assert_eq!(end, PrefaultEnd::Complete);
    assert_eq!(seen, [512 << 10, 512 << 10, 1_024 << 10, 1_200 << 10]);
}

#[test]
fn prefault_runs_beside_writers() {
    let arena = Arena::create(shm(&unique_name()), 32 << 20).unwrap();
    let stop = AtomicBool::new(false);
    let extent = |index: u64| Extent::new(index << 16, 1 << 16);
    std::thread::scope(|scope| {
        let prefault = scope.spawn(|| arena.prefault(arena.whole(), &stop, |_| {}));
        for index in (0..512).rev() {
            arena
                .write(extent(index), 0, &[index as u8 | 1; 1 << 16])
                .unwrap();
        }
        assert_eq!(prefault.join().unwrap().unwrap(), PrefaultEnd::Complete);
    });
    let mut bytes = Vec::new();
    for index in 0..512 {
        bytes.clear();
        arena
            .read_into(extent(index), 0, 1 << 16, &mut bytes)
            .unwrap();
        assert!(bytes.iter().all(|b| *b == index as u8 | 1));
    }
}

proptest! {
    #[test]
    fn accesses_outside_are_refused(
        offset in prop_oneof![0_u64..20_000, any::<u64>()],
        len in prop_oneof![0_u64..20_000, any::<u64>()],
        at in prop_oneof![0_u64..20_000, any::<u64>()],
        count in 0_u64..20_000,
    ) {
        let arena = Arena::create(ArenaKind::Anonymous, 16384).unwrap();
        let extent = Extent::new(offset, len);
        let fits = |a: u64, b: u64, limit: u64| a.checked_add(b).is_some_and(|end| end <= limit);
        let inside = fits(at, count, len)
            && offset.checked_add(at).is_some_and(|start| fits(start, count, 16384));
        let bytes = vec![7; count as usize];
        prop_assert_eq!(arena.write(extent, at, &bytes).is_ok(), inside);
        prop_assert_eq!(arena.address(extent, at, count).is_ok(), inside);
        let mut read = Vec::new();
        match arena.read_into(extent, at, count, &mut read) {
            Ok(()) => prop_assert!(inside && read == bytes),
            Err(AccessError::OutOfBounds { .. }) => prop_assert!(!inside && read.is_empty()),
            Err(other) => panic!("{other}"),
        }
        prop_assert_eq!(arena.checksum(extent).is_ok(), fits(offset, len, 16384));
    }
}

#[test]
fn bytes_in_place_only_of_private_memory() {
    let mut arena = Arena::create(ArenaKind::Anonymous, 8192).unwrap();
    let extent = Extent::new(4096, 100);
    arena.bytes_mut().unwrap()[4096..4101].copy_from_slice(b"hello");
    let mut read = [0; 5];
    arena.read(extent, 0, &mut read).unwrap();
    assert_eq!(&read, b"hello");
    let beyond = arena.read(extent, 96, &mut read);
    assert!(matches!(beyond, Err(AccessError::OutOfBounds { .. })));
    assert_eq!(arena.bytes_mut().unwrap().len() as u64, arena.len());

    let mut shared = Arena::create(shm(&unique_name()), 8192).unwrap();
    assert!(shared.bytes_mut().is_none());
}

#[test]
fn kept_arena_is_found_with_its_bytes() {
    let name = format!("kvtier_kept_{}", std::process::id());
    let kind = ArenaKind::Shm { name: name.clone() };
    assert!(Arena::find(kind.clone(), 8192).unwrap().is_none());
    let first = Arena::create(kind.clone(), 16_384).unwrap();
    first.keep();
    let id = first.file_id();
    let extent = Extent::new(4096, 3);
    first.write(extent, 0, b"abc").unwrap();
    // Locked while its process has it.
    assert!(matches!(
        Arena::find(kind.clone(), 8192),
        Err(ArenaError::NameInUse { .. })
    ));
    first.unlink();
    first.release();
    let read = |arena: &Arena| {
        let mut found = [0; 3];
        arena.read(extent, 0, &mut found).unwrap();
        found
    };
    let size = || {
        std::fs::metadata(format!("/dev/shm/{SHM_PREFIX}{name}"))
            .unwrap()
            .len()
    };
    let (second, old) = Arena::find(kind.clone(), 32_768).unwrap().unwrap();
    assert_eq!(size(), 16_384, "what names later bytes is still there");
    second.grow().unwrap();
    assert_eq!(size(), 32_768);
    assert_eq!((second.file_id(), second.len(), old), (id, 32_768, 16_384));
    assert_eq!(read(&second), *b"abc");
    // Both have it open.
    assert!(!second.is_alone());
    drop(first);
    assert!(second.is_alone());
    second.write(Extent::new(20_480, 1), 0, b"x").unwrap();
    drop(second);
    let (third, old) = Arena::find(kind.clone(), 8192).unwrap().unwrap();
    assert_eq!(old, 8192);
    assert_eq!(read(&third), *b"abc");
    assert_eq!(size(), 32_768, "other processes may map the rest");
    third.trim();
    assert_eq!(size(), 8192);
    assert_eq!(third.shm_name(), third.segment_name());
    let private = third.into_private();
    assert!(private.shm_name().is_none() && private.segment_name().is_some());
    drop(private);
    assert!(kvtier_memory::remove_kept(Path::new("/dev/shm"), &name));
    assert!(!kvtier_memory::remove_kept(Path::new("/dev/shm"), &name));
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn kept_hugepages_are_found_and_grow_only_when_asked() {
    let test = "kept_hugepages_are_found_and_grow_only_when_asked";
    let Some(mount) = HugeMount::new(test, 6, "pagesize=2M") else {
        return;
    };
    let page = 2 << 20;
    let kind = ArenaKind::HugeFile {
        folder: mount.folder(),
        name: unique_name(),
    };
    let find = |bytes| Arena::find(kind.clone(), bytes);
    assert!(find(page).unwrap().is_none());
    let mut first = Arena::create(kind.clone(), 3 << 20).unwrap();
    assert_eq!((first.len(), first.page_bytes()), (2 * page, page));
    assert_eq!(HugeMount::free(), 4, "reserved, and not touched");
    assert!(first.bytes_mut().is_none() && first.is_alone());
    round_trip(&first);
    first.keep();
    let id = first.file_id();
    assert!(matches!(find(page), Err(ArenaError::NameInUse { .. })));
    drop(first);
    assert_eq!(kind.kept_bytes(), 2 * page);

    // One more than there are, besides those that it has: nothing has changed.
    let Err(ArenaError::Hugepages { needed, free }) = find(7 * page) else {
        panic!("7 pages of 6");
    };
    assert_eq!((needed, free, kind.kept_bytes()), (5, 4, 2 * page));
    // A process that ends before it grows leaves the length that records are compared with.
    let (second, old) = find(6 * page).unwrap().unwrap();
    assert_eq!(
        (second.file_id(), old, second.len()),
        (id, 2 * page, 6 * page)
    );
    assert_eq!((kind.kept_bytes(), HugeMount::free()), (2 * page, 0));
    second.grow().unwrap();
    assert_eq!(kind.kept_bytes(), 6 * page);
    let mut kept = [0; 5];
    second
        .read(Extent::new(2 * page - 8192, 8192), 5, &mut kept)
        .unwrap();
    assert_eq!(&kept, b"hello");
    round_trip(&second);
    drop(second);
    let (third, old) = find(page).unwrap().unwrap();
    assert_eq!(old, page);
    third.trim();
    assert_eq!((kind.kept_bytes(), HugeMount::free()), (page, 5));
    drop(third);
    let name = mount.files().pop().unwrap();
    let name = name.file_name().unwrap().to_str().unwrap();
    assert!(kvtier_memory::remove_kept(&mount.folder(), name));
    assert!(mount.files().is_empty());

    // One that is not kept leaves nothing.
    drop(Arena::create(kind.clone(), page).unwrap());
    assert!(Arena::create(kind, 7 * page).is_err());
    assert!(mount.files().is_empty());
    assert_eq!(HugeMount::free(), 6);
}

#[test]
fn lost_hugepage_is_an_error_and_no_end() {
    let test = "lost_hugepage_is_an_error_and_no_end";
    // None is left to take the place of a lost one.
    let Some(mount) = HugeMount::new(test, 2, "pagesize=2M") else {
        return;
    };
    let kind = ArenaKind::HugeFile {
        folder: mount.folder(),
        name: unique_name(),
    };
    let arena = Arena::create(kind, 4 << 20).unwrap();
    round_trip(&arena);
    let other = mount.files().pop().unwrap();
    let file = fs::File::options().write(true).open(other).unwrap();
    file.set_len(2 << 20).unwrap();
    let _all = Arena::create(ArenaKind::Hugepages, 2 << 20).unwrap();
    let lost = Extent::new(2 << 20, 4096);
    let mut bytes = [0; 16];
    assert!(matches!(
        arena.read(lost, 0, &mut bytes),
        Err(AccessError::Poisoned { .. })
    ));
    assert_eq!(arena.poisoned(), Some(Extent::new(2 << 20, 2 << 20)));
    arena.write(Extent::new(0, 4096), 0, b"there").unwrap();
}

/// A segment whose pages were never touched takes none: others may have taken them since.
#[test]
fn kept_arena_whose_pages_cannot_be_had_is_not_used() {
    let name = unique_name();
    let kind = ArenaKind::Shm { name: name.clone() };
    let first = Arena::create(kind.clone(), 16_384).unwrap();
    first.keep();
    drop(first);
    let stat = rustix::fs::statvfs("/dev/shm").unwrap();
    let more_than_there_is = 2 * stat.f_blocks * stat.f_frsize;
    let path = format!("/dev/shm/{SHM_PREFIX}{name}");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(more_than_there_is).unwrap();
    drop(file);
    let (second, old) = Arena::find(kind, more_than_there_is).unwrap().unwrap();
    assert_eq!(old, more_than_there_is);
    assert!(matches!(second.grow(), Err(ArenaError::OutOfMemory { .. })));
    std::fs::remove_file(path).unwrap();
}
