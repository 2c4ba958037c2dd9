//! Files that are not what was stored.

use std::fs;
use std::io::{Seek, SeekFrom, Write};

use super::*;
use kvtier_l2::trailer::Trailer;

/// Damages the file of a stored object, and expects a miss, a quarantined file, and that a store writes it again.
fn is_found_out(what: &str, damage: impl Fn(&Path)) {
    for direct in [false, true] {
        let fixture = Fixture::with(|options| options.use_odirect = direct);
        let (object, other) = (object(1), object(2));
        fixture.store(&object).unwrap();
        fixture.store(&other).unwrap();
        let path = fixture.path(&object);
        damage(&path);
        assert_eq!(fixture.load(&object), Err(ErrorKind::Corrupt), "{what}");
        assert!(!path.exists(), "{what}");
        assert_eq!(fixture.status("quarantined_files"), 1, "{what}");
        let quarantined = fixture
            .base()
            .join(".quarantine")
            .join(path.file_name().unwrap());
        assert!(quarantined.exists(), "{what}");
        assert!(!fixture.has(&object), "{what}");
        assert_eq!(fixture.load(&object), Err(ErrorKind::NotFound), "{what}");
        assert!(
            matches!(fixture.store(&object), Ok(Stored::Written(_))),
            "{what}"
        );
        assert_eq!(fixture.load(&object), Ok(true), "{what}");
        assert_eq!(fixture.load(&other), Ok(true), "{what}");
    }
}

fn truncate(path: &Path, len: u64) {
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(len)
        .unwrap();
}

fn flip(path: &Path, at: u64) {
    let byte = fs::read(path).unwrap()[at as usize] ^ 4;
    let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte]).unwrap();
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn a_truncated_file() {
    is_found_out("by half", |path| truncate(path, LEN / 2));
    is_found_out("by a byte", |path| truncate(path, len(path) - 1));
    is_found_out("inside the object", |path| truncate(path, LEN - 1));
}

#[test]
fn an_emptied_file() {
    is_found_out("emptied", |path| truncate(path, 0));
}

#[test]
fn a_longer_file() {
    is_found_out("longer", |path| truncate(path, len(path) + 1));
    is_found_out("by blocks", |path| truncate(path, len(path) + 8192));
}

#[test]
fn a_flipped_bit_anywhere() {
    for at in [0, 1, 4095, 4096, LEN - 1] {
        is_found_out("of the object", |path| flip(path, at));
    }
    for before_end in [1, 8, 30, 50, 60, 64] {
        is_found_out("of the trailer", |path| flip(path, len(path) - before_end));
    }
}

#[test]
fn a_file_of_zeroes() {
    is_found_out("zeroes", |path| {
        let len = len(path);
        truncate(path, 0);
        truncate(path, len);
    });
}

#[test]
fn another_objects_file() {
    is_found_out("another's", |path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let other = path.with_file_name(name.replace(&"01".repeat(32), &"02".repeat(32)));
        fs::copy(other, path).unwrap();
    });
}

#[test]
fn file_of_another_layout_stays_until_replaced() {
    for direct in [false, true] {
        // The last has as many bytes with its trailer as the first alone.
        for (len, layout) in [(LEN, LAYOUT + 1), (LEN / 2, LAYOUT), (LEN - 64, LAYOUT)] {
            let fixture = Fixture::with(|options| options.use_odirect = direct);
            let (stored, wanted) = (
                ObjectSpec {
                    len,
                    layout,
                    ..object(1)
                },
                object(1),
            );
            fixture.store(&stored).unwrap();
            assert_eq!(fixture.load(&wanted), Err(ErrorKind::NotFound));
            assert_eq!(fixture.status("other_layout_loads"), 1);
            assert_eq!(fixture.load(&stored), Ok(true));
            assert!(matches!(fixture.store(&wanted), Ok(Stored::Written(_))));
            assert_eq!(fixture.status("replaced_files"), 1);
            assert_eq!(fixture.load(&wanted), Ok(true));
            assert_eq!(fixture.load(&stored), Err(ErrorKind::NotFound));
        }
    }
}

#[test]
fn store_replaces_damaged_file() {
    for damage in [
        (|path: &Path| truncate(path, 100)) as fn(&Path),
        |path| truncate(path, 0),
        |path| flip(path, len(path) - 20),
    ] {
        let fixture = Fixture::new();
        fixture.store(&object(1)).unwrap();
        damage(&fixture.path(&object(1)));
        assert!(matches!(fixture.store(&object(1)), Ok(Stored::Written(_))));
        assert_eq!(fixture.load(&object(1)), Ok(true));
    }
}

#[test]
fn quarantine_is_bounded() {
    let fixture = Fixture::new();
    let numbers = 0..40;
    for number in numbers.clone() {
        fixture.store(&object(number)).unwrap();
        truncate(&fixture.path(&object(number)), 1);
        assert_eq!(fixture.load(&object(number)), Err(ErrorKind::Corrupt));
    }
    let kept = fixture.status("quarantined_files");
    assert_eq!(
        names_in(&fixture.base().join(".quarantine")).len() as u64,
        kept
    );
    assert_eq!(kept + fixture.status("discarded_files"), 40);
    assert!((1..40).contains(&kept));
    // Nor by starting again.
    let again = Fixture::with(|options| options.base_path = fixture.base().to_owned());
    again.store(&object(50)).unwrap();
    truncate(&again.path(&object(50)), 1);
    assert_eq!(again.load(&object(50)), Err(ErrorKind::Corrupt));
    assert_eq!(
        (
            again.status("quarantined_files"),
            again.status("discarded_files")
        ),
        (0, 1)
    );
}

#[test]
fn failed_quarantine_takes_no_slot() {
    let fixture = Fixture::new();
    let quarantine = fixture.base().join(".quarantine");
    let damage = |number| {
        fixture.store(&object(number)).unwrap();
        truncate(&fixture.path(&object(number)), 1);
        assert_eq!(fixture.load(&object(number)), Err(ErrorKind::Corrupt));
        ["quarantined_files", "discarded_files"].map(|counter| fixture.status(counter))
    };
    // A file of another program, where the directory has to be.
    fs::write(&quarantine, "").unwrap();
    for number in 0..40 {
        assert_eq!(damage(number), [0, u64::from(number) + 1]);
    }
    fs::remove_file(&quarantine).unwrap();
    assert_eq!(damage(40), [1, 40]);
}

#[test]
fn file_that_replaced_a_damaged_one_stays() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    let path = fixture.path(&object(1));
    let name = path.file_name().unwrap().to_str().unwrap();
    let base = &fixture.adapter.files.base;
    let seen = rustix::fs::stat(&path).unwrap();
    truncate(&path, 10);
    // It is stored again before it is quarantined.
    let held = fs::File::open(&path).unwrap();
    fixture.store(&object(1)).unwrap();
    let result = base.quarantine(&base.dir(), name, &seen);
    assert_eq!(result, Ok(crate::fs::base::Quarantined::Replaced));
    assert_eq!(fixture.load(&object(1)), Ok(true));
    drop(held);
}

#[test]
fn links_directories_and_pipes_are_foreign() {
    let fixture = Fixture::new();
    let secret = fixture.dir.path().join("secret");
    fs::write(&secret, bytes(&object(1))).unwrap();
    std::os::unix::fs::symlink(&secret, fixture.path(&object(1))).unwrap();
    fs::create_dir(fixture.path(&object(2))).unwrap();
    let pipe = fixture.path(&object(3));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    for number in [1, 2, 3] {
        let object = object(number);
        assert!(!fixture.has(&object));
        assert_eq!(fixture.load(&object), Err(ErrorKind::NotFound));
        assert_eq!(fixture.store(&object), Err(ErrorKind::Refused));
        assert_eq!(
            block_on(fixture.adapter.delete(vec![object.key.clone()])),
            [Ok(false)]
        );
    }
    let (listed, recovered) = fixture.recover();
    assert_eq!((listed.len(), recovered.foreign), (0, 3));
    assert_eq!(fs::read(&secret).unwrap(), bytes(&object(1)));
    assert!(fixture.path(&object(1)).is_symlink());
}

/// Writes the trailer of another release to a file.
fn set_version(path: &Path, version: u16) {
    let bytes = fs::read(path).unwrap();
    let trailer = Trailer::decode(&bytes).unwrap();
    let at = bytes.len() - kvtier_l2::trailer::LEN;
    let changed = Trailer { version, ..trailer }.encode();
    fs::write(path, [&bytes[..at], &changed].concat()).unwrap();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn file_of_another_release_is_a_miss_until_replaced() {
    for direct in [false, true] {
        for version in [1, 3] {
            let fixture = Fixture::with(|options| options.use_odirect = direct);
            let (wanted, shorter) = (
                object(1),
                ObjectSpec {
                    len: LEN - 64,
                    ..object(1)
                },
            );
            fixture.store(&wanted).unwrap();
            set_version(&fixture.path(&wanted), version);
            // As the object itself, and where its length would be that of another layout.
            for object in [&wanted, &shorter] {
                assert_eq!(fixture.load(object), Err(ErrorKind::NotFound));
            }
            assert!(fixture.path(&wanted).exists());
            assert_eq!(fixture.status("other_version_loads"), 2);
            assert_eq!(fixture.status("quarantined_files"), 0);
            assert!(matches!(fixture.store(&wanted), Ok(Stored::Written(_))));
            assert_eq!(fixture.status("replaced_files"), 1);
            assert_eq!(fixture.load(&wanted), Ok(true));
        }
    }
}
