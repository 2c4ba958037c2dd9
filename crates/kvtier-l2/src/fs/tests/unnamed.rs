//! Files without a name until they are whole, and what a name that is taken says.

use super::*;

/// An adapter that has looked through its directory, so that small objects are written without a look; and one that
/// gives files names of their own.
fn both() -> [Fixture; 2] {
    [false, true].map(|is_named| {
        let fixture = Fixture::new();
        if is_named {
            fixture.adapter.files.unnamed.give_up();
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
fn what_is_there_is_not_written_again() {
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
fn what_is_not_the_object_is_replaced() {
    for fixture in both() {
        std::fs::write(fixture.path(&object(1)), b"short").unwrap();
        assert!(matches!(fixture.store(&object(1)), Ok(Stored::Written(_))));
        assert_eq!(fixture.status("replaced_files"), 1);
        assert_eq!(fixture.names().len(), 1);
        assert_eq!(fixture.load(&object(1)), Ok(true));
    }
}

#[test]
fn what_is_no_file_stays() {
    for fixture in both() {
        std::fs::create_dir(fixture.path(&object(1))).unwrap();
        assert_eq!(fixture.store(&object(1)), Err(ErrorKind::Refused));
        assert!(fixture.path(&object(1)).is_dir() && fixture.names().is_empty());
    }
}

#[test]
fn a_file_that_is_being_written_has_no_name() {
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
fn sharded_directories_are_made_for_them() {
    let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
    fixture.recover();
    fixture.store(&object(1)).unwrap();
    assert_eq!(fixture.load(&object(1)), Ok(true));
}
