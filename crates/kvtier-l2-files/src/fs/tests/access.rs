//! Files and directories that we may not open.

use std::fs;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::*;
use crate::fs::walk::Position;

/// Reduces the rights of this thread to those of a plain user, also where tests run as root.
fn drop_capabilities() {
    let mut sets = capabilities(None).unwrap();
    let override_all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    sets.effective.remove(override_all);
    set_capabilities(None, sets).unwrap();
}

fn lock(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
}

/// Runs on this thread, since those of the pool keep their capabilities.
fn load_here(fixture: &Fixture, object: &ObjectSpec) -> Result<bool, ErrorKind> {
    let item = LoadItem {
        object: object.clone(),
        to: fixture.buffer(1, object.len),
    };
    let files = &fixture.adapter.files;
    let loaded = load::load(files, vec![item]).remove(0);
    loaded
        .map(|loaded| loaded.verified)
        .map_err(|error| error.kind())
}

#[test]
fn file_without_permission_is_replaced_by_store() {
    let fixture = Fixture::new();
    fixture.store(&object(1)).unwrap();
    let path = fixture.path(&object(1));
    lock(&path);
    drop_capabilities();
    assert_eq!(load_here(&fixture, &object(1)), Err(ErrorKind::Corrupt));
    assert!(path.exists(), "it may be another's");
    let files = &fixture.adapter.files;
    let item = fixture.item(&object(1));
    let stored = store::store(files, vec![item]).remove(0);
    assert!(matches!(stored, Ok(Stored::Written(_))), "{stored:?}");
    assert_eq!(load_here(&fixture, &object(1)), Ok(true));
}

#[test]
fn directory_without_permission_does_not_end_scan() {
    let fixture = Fixture::with(|options| options.layout = Layout::Sharded);
    for number in 1..=3 {
        fixture.store(&object(number)).unwrap();
    }
    for dir in ["01", "02/02", "aa"] {
        fs::create_dir_all(fixture.base().join(dir)).unwrap();
        lock(&fixture.base().join(dir));
    }
    drop_capabilities();
    let page = walk::page(&fixture.adapter.files, Position::START, 1000).unwrap();
    assert_eq!((page.objects.len(), page.foreign), (1, 3));
    assert_eq!(page.next, None);
    for dir in ["01", "02/02", "aa"] {
        let path = fixture.base().join(dir);
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
    }
}
