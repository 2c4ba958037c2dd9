//! Files without a name until they are whole, and what a name that is taken says.

use super::*;

/// An adapter that has scanned its directory, so that small objects are written without a lookup; and one that
/// creates files with temporary names.
fn both() -> [Fixture; 2] {
    [false, true].map(|is_named| {
        let fixture = Fixture::new();
        if is_named {
            fixture.adapter.files.unnamed.disable();
        } else if !fixture.adapter.files.unnamed.is_possible() {
            println!(
                "skipped: {} takes no files without a name",
                fixture.base().display()
            );
        }
        fixture.recover();
        fixture
    })
}

#[test]
fn existing_object_is_not_written_again() {
    for fixture in both() {
        let written = fixture.store(&object(1)).unwrap();
        let Stored::Written(bytes) = written else {
            panic!("{written:?}");
        };
        assert_eq!(fixture.store(&object(1)), Ok(Stored::AlreadyThere(bytes)));
        assert_eq!(fixture.names().len(), 1);
        assert_eq!(fixture.status("replaced_files"), 0);
        assert_eq!(fixture.load(&object(1)), Ok(true));
        let mode = std::fs::metadata(fixture.path(&object(1)))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn file_of_another_object_is_replaced() {
    for fixture in both() {
        std::fs::write(fixture.path(&object(1)), b"short").unwrap();
        assert!(matches!(fixture.store(&object(1)), Ok(Stored::Written(_))));
        assert_eq!(fixture.status("replaced_files"), 1);
        assert_eq!(fixture.names().len(), 1);
        assert_eq!(fixture.load(&object(1)), Ok(true));
    }
}

#[test]
fn directory_in_place_of_file_stays() {
    for fixture in both() {
        std::fs::create_dir(fixture.path(&object(1))).unwrap();
        assert_eq!(fixture.store(&object(1)), Err(ErrorKind::Refused));
        assert!(fixture.path(&object(1)).is_dir() && fixture.names().is_empty());
    }
}

#[test]
fn file_in_progress_has_no_name() {
    let fixture = Fixture::new();
    let files = &fixture.adapter.files;
    if !files.unnamed.is_possible() {
        println!(
            "skipped: {} takes no files without a name",
            fixture.base().display()
        );
        return;
    }
    let before = names_in(fixture.base());
    let file = files.unnamed.create(&files.base.dir(), false).unwrap();
    assert_eq!(names_in(fixture.base()), before);
    files.unnamed.name(&file, &files.base.dir(), "a").unwrap();
    assert!(fixture.base().join("a").is_file());
    let again = files.unnamed.name(&file, &files.base.dir(), "a");
    assert_eq!(again, Err(rustix::io::Errno::EXIST));
}

#[test]
fn sharded_directories_are_created() {
    let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
    fixture.recover();
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.load(&object(1)), Ok(true));
}

#[test]
fn file_is_created_in_place_if_rename_fails() {
    let name = "fs::tests::unnamed::file_is_created_in_place_if_rename_fails";
    if is_alone() {
        stores_across_mounts();
    } else if may_mount() {
        alone(name, &["unshare", "-rm"]);
    }
}

/// The directories below the base are mounts, so neither links nor renames reach from one to another.
fn stores_across_mounts() {
    for is_named in [false, true] {
        let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
        if is_named {
            fixture.adapter.files.unnamed.disable();
        }
        fixture.recover();
        let shard = |number| fixture.path(&object(number)).parent().unwrap().to_owned();
        for number in [1, 2] {
            std::fs::create_dir_all(shard(number)).unwrap();
            let mounted = Command::new("mount")
                .arg("--bind")
                .args([shard(number), shard(number)])
                .status();
            assert!(mounted.unwrap().success());
        }
        std::fs::write(fixture.base().join("a"), "").unwrap();
        let moved = std::fs::rename(fixture.base().join("a"), shard(1).join("a"));
        let error = rustix::io::Errno::from_io_error(&moved.unwrap_err());
        assert_eq!(error, Some(rustix::io::Errno::XDEV));
        std::fs::remove_file(fixture.base().join("a")).unwrap();
        std::fs::write(fixture.path(&object(2)), "of another length").unwrap();
        // The last one has no directory yet.
        for number in [1, 2, 3] {
            let Ok(Stored::Written(bytes)) = fixture.store(&object(number)) else {
                panic!("{number} is not stored");
            };
            let again = fixture.store(&object(number));
            assert_eq!(again, Ok(Stored::AlreadyThere(bytes)));
            assert_eq!(fixture.load(&object(number)), Ok(true));
        }
        assert_eq!(fixture.names().len(), 3);
        assert_eq!(fixture.status("replaced_files"), 1);
        for number in [1, 2] {
            let ended = Command::new("umount").arg(shard(number)).status();
            assert!(ended.unwrap().success());
        }
    }
}
