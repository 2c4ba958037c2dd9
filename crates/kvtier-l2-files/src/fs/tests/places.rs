//! Where objects are found: both generations of names, both layouts, names that do not fit.

use std::fs;

use super::*;
use crate::fs::names::parse;

#[test]
fn files_of_lmcache_are_read_without_a_checksum() {
    for direct in [false, true] {
        let fixture = Fixture::with(|options| options.use_odirect = direct);
        // As written through the page cache, and past it.
        for (number, padded_to) in [(1, 0), (2, 12_288)] {
            let object = object(number);
            fixture.write_bare(&object, Naming::Grouped, padded_to);
            let size = (LEN as usize).max(padded_to) as u64;
            let found = block_on(fixture.adapter.lookup(vec![object.clone()])).unwrap();
            assert_eq!(found, [Some(size)]);
            assert_eq!(fixture.load(&object), Ok(false));
            assert_eq!(fixture.store(&object), Ok(Stored::AlreadyThere(size)));
        }
        assert_eq!(fixture.status("unverified_loads"), 2);
        // Other lengths are not the object, and not found.
        fixture.write_bare(&object(3), Naming::Grouped, LEN as usize + 1);
        assert!(!fixture.has(&object(3)));
        assert_eq!(fixture.load(&object(3)), Err(ErrorKind::Corrupt));
    }
}

#[test]
fn require_checksum_makes_bare_files_misses() {
    let fixture = Fixture::with(|options| options.require_checksum = true);
    // LMCache's, and one of ours cut off right behind the object.
    fixture.write_bare(&object(1), Naming::Grouped, 0);
    fixture.store(&object(2)).unwrap();
    let cut = fs::OpenOptions::new()
        .write(true)
        .open(fixture.path(&object(2)));
    cut.unwrap().set_len(LEN).unwrap();
    for number in [1, 2] {
        assert!(!fixture.has(&object(number)));
        assert_eq!(fixture.load(&object(number)), Err(ErrorKind::NotFound));
        assert!(fixture.path(&object(number)).exists());
        let stored = fixture.store(&object(number));
        assert!(matches!(stored, Ok(Stored::Written(_))));
        assert_eq!(fixture.load(&object(number)), Ok(true));
    }
}

#[test]
fn both_generations_are_found_configured_one_is_written() {
    for (names, other) in [
        (Naming::Grouped, Naming::Ungrouped),
        (Naming::Ungrouped, Naming::Grouped),
    ] {
        let fixture = Fixture::with(|options| options.names = names);
        let salted = ObjectSpec {
            key: key(1, "m", "tenant"),
            ..object(1)
        };
        let plain = object(2);
        for object in [&salted, &plain] {
            fixture.write_bare(object, other, 0);
            assert!(fixture.has(object));
            assert_eq!(fixture.load(object), Ok(false));
            assert_eq!(fixture.store(object), Ok(Stored::AlreadyThere(LEN)));
        }
        let (listed, recovered) = fixture.recover();
        assert_eq!((listed.len(), recovered.foreign), (2, 0));
        assert!(fixture.has(&salted));

        fixture.store(&object(3)).unwrap();
        let name = fixture.path(&object(3));
        let name = name.file_name().unwrap().to_str().unwrap();
        assert!(
            matches!(parse(name), crate::fs::names::NamedFile::Object(_, shape) if shape == names)
        );
        let keys = [&salted, &plain, &object(3)].map(|object| object.key.clone());
        let deleted = block_on(fixture.adapter.delete(keys.to_vec()));
        assert_eq!(deleted, [Ok(true), Ok(true), Ok(true)]);
        assert_eq!(fixture.names(), [""; 0]);
    }
}

#[test]
fn other_groups_have_one_name_in_both_generations() {
    let key = ObjectKey::new(ChunkHash([5; 32]), "m", 1, 2, "").unwrap();
    let object = ObjectSpec { key, ..object(5) };
    let old = Fixture::with(|options| options.names = Naming::Ungrouped);
    old.store(&object).unwrap();
    let new = Fixture::with(|options| options.base_path = old.base().to_owned());
    assert_eq!(new.load(&object), Ok(true));
    assert_eq!(new.recover().0.len(), 1);
    assert_eq!(new.adapter.files.others.get(), (false, false));
}

#[test]
fn both_layouts_are_found_configured_one_is_written() {
    for layout in [Layout::Flat, Layout::Sharded] {
        let theirs = Fixture::with(|options| options.layout = layout.other());
        let ours = Fixture::with(|options| {
            options.layout = layout;
            options.base_path = theirs.base().to_owned();
        });
        theirs.store(&object(1)).unwrap();
        ours.store(&object(2)).unwrap();
        for fixture in [&theirs, &ours] {
            for number in [1, 2] {
                assert!(fixture.has(&object(number)));
                assert_eq!(fixture.load(&object(number)), Ok(true));
                assert!(matches!(
                    fixture.store(&object(number)),
                    Ok(Stored::AlreadyThere(_))
                ));
            }
            assert_eq!(fixture.recover().0.len(), 2);
        }
        assert!(ours.path(&object(2)).exists() && theirs.path(&object(1)).exists());
        assert_eq!(
            block_on(ours.adapter.delete(vec![object(1).key])),
            [Ok(true)]
        );
        assert!(!theirs.has(&object(1)));
    }
}

#[test]
fn foreign_file_does_not_hide_another_place() {
    let wanted = object(1);
    let other = ObjectSpec {
        layout: LAYOUT + 1,
        ..object(1)
    };
    let fixture = || {
        let fixture = Fixture::new();
        fixture.store(&other).unwrap();
        fixture.write_bare(&wanted, Naming::Ungrouped, 0);
        assert_eq!(fixture.load(&wanted), Ok(false));
        fixture
    };
    let damaged = fixture();
    fs::write(damaged.path(&wanted), "damaged").unwrap();
    assert_eq!(damaged.load(&wanted), Ok(false));
    assert_eq!(damaged.status("quarantined_files"), 1);
    // A store repairs its own place, where the next load finds it first.
    let repaired = fixture();
    assert!(matches!(repaired.store(&wanted), Ok(Stored::Written(_))));
    assert_eq!(repaired.load(&wanted), Ok(true));
}

#[test]
fn unused_names_are_probed_once_per_interval() {
    let fixture = Fixture::new();
    assert_eq!(fixture.adapter.files.others.get(), (true, true));
    fixture.recover();
    assert_eq!(fixture.adapter.files.others.get(), (false, false));
    fixture.write_bare(&object(1), Naming::Ungrouped, 0);
    assert!(!fixture.has(&object(1)));
    fixture.adapter.files.others.make_due();
    assert!(fixture.has(&object(1)));
    assert_eq!(fixture.adapter.files.others.get(), (true, false));
    // From then on at once.
    fixture.write_bare(&object(2), Naming::Ungrouped, 0);
    assert!(fixture.has(&object(2)));
}

#[test]
fn object_in_two_places_is_listed_once_deleted_twice() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    fixture.write_bare(&object(1), Naming::Ungrouped, 0);
    let (listed, recovered) = fixture.recover();
    assert_eq!((listed.len(), recovered.objects), (1, 1));
    assert_eq!(
        listed[0].bytes,
        fs::metadata(fixture.path(&object(1))).unwrap().len()
    );
    assert_eq!(
        block_on(fixture.adapter.delete(vec![object(1).key])),
        [Ok(true)]
    );
    assert_eq!(fixture.names(), [""; 0]);
}

#[test]
fn overlong_or_ambiguous_names_store_and_recover() {
    for layout in [Layout::Flat, Layout::Sharded] {
        for direct in [false, true] {
            let fixture = Fixture::with(|options| {
                options.layout = layout;
                options.use_odirect = direct;
            });
            let long = "é".repeat(128);
            let keys = [
                key(1, &"m".repeat(100), &long),
                key(1, &"m".repeat(100), &long[2..]),
                key(1, "a/b", ""),
                key(1, "a-SEP-b", ""),
                key(2, "nul\0", ""),
                key(3, &"m".repeat(10_000), ""),
            ];
            let objects = keys.map(|key| ObjectSpec { key, ..object(0) });
            for object in &objects {
                assert!(!fixture.has(object));
                fixture.store(object).unwrap();
                assert!(fixture.has(object));
                assert!(matches!(fixture.store(object), Ok(Stored::AlreadyThere(_))));
            }
            for object in &objects {
                assert_eq!(fixture.load(object), Ok(true));
            }
            let (listed, recovered) = fixture.recover();
            assert_eq!((listed.len(), recovered.foreign), (objects.len(), 0));
            for object in &objects {
                assert!(listed.iter().any(|listed| listed.key == object.key));
            }
            // A hash's file under another hash's name.
            let [first, second] = [&objects[0], &objects[1]].map(|object| fixture.path(object));
            fs::copy(second, first).unwrap();
            assert!(matches!(fixture.load(&objects[0]), Err(ErrorKind::Corrupt)));
        }
    }
    // Longer than any file's trailer can tell.
    let fixture = Fixture::new();
    let object = ObjectSpec {
        key: key(1, &"m".repeat(70_000), ""),
        ..object(1)
    };
    assert_eq!(fixture.store(&object), Err(ErrorKind::Refused));
    assert_eq!(fixture.load(&object), Err(ErrorKind::NotFound));
}

#[test]
fn tenants_are_apart() {
    let fixture = Fixture::new();
    let [none, a, b] = ["", "a", "b"].map(|salt| ObjectSpec {
        key: key(1, "m", salt),
        ..object(1)
    });
    fixture.store(&a).unwrap();
    assert!(fixture.has(&a) && !fixture.has(&b) && !fixture.has(&none));
    // A file of one tenant under the name of the other.
    fs::copy(fixture.path(&a), fixture.path(&b)).unwrap();
    assert_eq!(fixture.load(&b), Err(ErrorKind::Corrupt));
}

#[test]
fn relative_base_path_is_reported_absolute() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let relative = dir.path().file_name().unwrap();
    let adapter = FsAdapter::open("fs", &FsOptions::new(relative)).unwrap();
    let whole = std::env::current_dir().unwrap().join(relative);
    assert_eq!(adapter.status()["base_path"], whole.to_str().unwrap());
}

#[test]
fn links_below_base_are_not_followed() {
    let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
    let other = Fixture::with(|options| options.layout = Layout::Sharded);
    let (one, two) = (object(1), object(2));
    other.store(&one).unwrap();
    other.store(&two).unwrap();
    // In the place of both of its parts, and of the directory for what is damaged.
    std::os::unix::fs::symlink(other.base().join("01"), fixture.base().join("01")).unwrap();
    std::fs::create_dir(fixture.base().join("02")).unwrap();
    std::os::unix::fs::symlink(other.base().join("02/02"), fixture.base().join("02/02")).unwrap();
    std::os::unix::fs::symlink(other.base(), fixture.base().join(".quarantine")).unwrap();
    for object in [&one, &two] {
        assert!(!fixture.has(object));
        assert_eq!(fixture.load(object), Err(ErrorKind::NotFound));
        assert_eq!(fixture.store(object), Err(ErrorKind::Refused));
        let deleted = block_on(fixture.adapter.delete(vec![object.key.clone()]));
        assert_eq!(deleted, [Ok(false)]);
        assert_eq!(other.load(object), Ok(true));
    }
    let new = ObjectSpec {
        key: key(1, "another/model", ""),
        ..object(1)
    };
    assert_eq!(fixture.store(&new), Err(ErrorKind::Refused));
    assert!(!other.has(&new));
    assert_eq!(fixture.recover().0, []);
    let before = names_in(other.base());
    fixture.store(&object(3)).unwrap();
    std::fs::write(fixture.path(&object(3)), "damaged").unwrap();
    assert_eq!(fixture.load(&object(3)), Err(ErrorKind::Corrupt));
    assert_eq!(names_in(other.base()), before);
}

#[test]
fn the_directory_itself_may_be_a_link() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("real")).unwrap();
    std::os::unix::fs::symlink("real", dir.path().join("link")).unwrap();
    for layout in [Layout::Flat, Layout::Sharded] {
        let fixture = Fixture::with(|options| {
            options.base_path = dir.path().join("link");
            options.layout = layout;
        });
        let object = object(layout as u8);
        fixture.store(&object).unwrap();
        assert_eq!(fixture.load(&object), Ok(true));
    }
}

#[test]
fn temporary_directory_is_no_link() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/tmp", dir.path().join("tmp")).unwrap();
    for inside in ["tmp", "tmp/inside"] {
        let mut options = FsOptions::new(dir.path());
        options.relative_tmp_dir = inside.into();
        let refused = FsAdapter::open("fs", &options).err().unwrap();
        assert!(
            refused.to_string().contains("links are not followed"),
            "{refused}"
        );
    }
}

#[test]
fn read_only_directory_is_unchanged() {
    let mut fixture = Fixture::new();
    for number in 1..=3 {
        fixture.store(&object(number)).unwrap();
    }
    std::fs::write(fixture.path(&object(2)), "damaged").unwrap();
    let leftover = fixture.base().join(".kvtier-tmp-0-1");
    let old = std::time::SystemTime::UNIX_EPOCH;
    let file = std::fs::File::create(&leftover).unwrap();
    file.set_modified(old).unwrap();
    let mut options = fixture.options.clone();
    options.read_only = true;
    let writable = std::mem::replace(
        &mut fixture.adapter,
        FsAdapter::open("fs", &options).unwrap(),
    );
    drop(writable);
    let before = names_in(fixture.base());
    assert!(fixture.has(&object(1)));
    assert_eq!(fixture.load(&object(1)), Ok(true));
    assert_eq!(fixture.load(&object(2)), Err(ErrorKind::Corrupt));
    assert_eq!(fixture.store(&object(4)), Err(ErrorKind::Unsupported));
    let deleted = block_on(fixture.adapter.delete(vec![object(1).key]));
    assert_eq!(
        deleted[0].as_ref().unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    assert_eq!(fixture.recover().1.objects, 3);
    drop(FsAdapter::open("fs", &options).unwrap());
    assert_eq!(names_in(fixture.base()), before);
    // It is not made either.
    options.base_path = fixture.base().join("absent");
    assert!(FsAdapter::open("fs", &options).is_err());
    assert!(!options.base_path.exists());
}

/// An object whose bytes fit only pages like those they were stored from.
fn page_bound(number: u8) -> ObjectSpec {
    ObjectSpec {
        layout: LAYOUT | kvtier_l2::PAGE_BOUND,
        ..object(number)
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn page_bound_object_without_layout_misses_until_replaced() {
    let fixture = Fixture::new();
    for object in [page_bound(1), object(2)] {
        fixture.write_bare(&object, Naming::Grouped, 0);
    }
    assert!(!fixture.has(&page_bound(1)));
    assert_eq!(fixture.load(&page_bound(1)), Err(ErrorKind::NotFound));
    assert!(matches!(
        fixture.store(&page_bound(1)),
        Ok(Stored::Written(_))
    ));
    assert_eq!(fixture.load(&page_bound(1)), Ok(true));
    // Of others the length says enough.
    assert_eq!(fixture.load(&object(2)), Ok(false));
}

#[test]
fn page_bound_object_without_layout_loads_if_trusted() {
    let fixture = Fixture::with(|options| options.trust_missing_layout = true);
    fixture.write_bare(&page_bound(1), Naming::Grouped, 0);
    assert!(fixture.has(&page_bound(1)));
    assert_eq!(fixture.load(&page_bound(1)), Ok(false));
    assert!(matches!(
        fixture.store(&page_bound(1)),
        Ok(Stored::AlreadyThere(_))
    ));
}
