//! What is used, what is refused, and which server has it.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn refusal(base: &Path, instance: &str) -> String {
    let error = StateDir::open(base, instance).unwrap_err();
    assert_ne!(error.kind(), ErrorKind::InUse, "{error}");
    error.to_string()
}

#[test]
fn folder_is_private_and_made_with_its_parents() {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("a/b");
    let state = StateDir::open(&base, "kvtier-5555").unwrap();
    assert_eq!(state.path(), base.join("kvtier-5555"));
    for path in [&base, state.path(), &root.path().join("a")] {
        assert_eq!(mode(path), 0o700, "{path:?}");
    }
    assert_eq!(mode(&state.path().join("lock")), 0o600);
    assert_eq!(state.file("quotas"), Ok(state.path().join("quotas")));
}

#[test]
fn preflight_finds_what_an_open_would_and_makes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("a/b");
    assert_eq!(preflight(&base, "i"), Ok(base.join("i")));
    assert!(!root.path().join("a").exists());
    let state = StateDir::open(&base, "i").unwrap();
    let found = preflight(&base, "i").unwrap_err();
    assert_eq!(found.kind(), ErrorKind::InUse);
    assert_eq!(found, StateDir::open(&base, "i").unwrap_err());
    drop(state);
    for _ in 0..2 {
        assert_eq!(preflight(&base, "i"), Ok(base.join("i")));
    }
    set_mode(&base, 0o777);
    let found = preflight(&base, "i").unwrap_err().to_string();
    assert_eq!(found, refusal(&base, "i"));
    set_mode(&base, 0o700);
    symlink(root.path(), base.join("link")).unwrap();
    let found = preflight(&base, "link").unwrap_err().to_string();
    assert_eq!(found, refusal(&base, "link"));
    std::fs::write(root.path().join("file"), "").unwrap();
    for base in ["file", "file/below"].map(|name| root.path().join(name)) {
        let found = preflight(&base, "i").unwrap_err();
        assert_ne!(found.kind(), ErrorKind::InUse, "{base:?}");
        assert!(StateDir::open(&base, "i").is_err(), "{base:?}");
    }
}

#[test]
fn second_server_learns_the_process_id_of_the_first() {
    let base = tempfile::tempdir().unwrap();
    let first = StateDir::open(base.path(), "a").unwrap();
    let error = StateDir::open(base.path(), "a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    let told = error.to_string();
    let pid = format!("process {} on ", std::process::id());
    assert!(
        told.contains(&pid) && told.contains("--instance-id"),
        "{told}"
    );
    StateDir::open(base.path(), "b").unwrap();
    // The lock is released, whatever the file says.
    first.release();
    let third = StateDir::open(base.path(), "a").unwrap();
    drop(third);
    StateDir::open(base.path(), "a").unwrap();
}

#[test]
fn id_is_of_one_folder_and_no_copy_of_it() {
    let base = tempfile::tempdir().unwrap();
    let id = |instance: &str| StateDir::open(base.path(), instance).unwrap().id;
    let own = id("a");
    assert_eq!(id("a"), own, "for as long as the folder is there");
    assert_ne!(id("b"), own);
    let file = base.path().join("a/id");
    let random = std::fs::read_to_string(&file).unwrap();
    assert!(own.ends_with(&random) && random.len() == ID_LEN, "{random}");
    // Copied, and copied back.
    std::fs::create_dir(base.path().join("copy")).unwrap();
    std::fs::set_permissions(base.path().join("copy"), Permissions::from_mode(0o700)).unwrap();
    std::fs::copy(&file, base.path().join("copy/id")).unwrap();
    let copy = id("copy");
    assert!(copy.ends_with(&random) && copy != own);
    // A later folder may have the inode of one that was removed.
    std::fs::remove_file(&file).unwrap();
    assert_ne!(id("a"), own);
    for torn in ["", &random[1..], &format!("{random}0"), &"z".repeat(ID_LEN)] {
        std::fs::write(&file, torn).unwrap();
        let renewed = id("a");
        assert!(!renewed.ends_with(&format!(":{torn}")), "{renewed}");
        assert_eq!(id("a"), renewed);
    }
}

#[test]
fn lock_without_a_process_id_is_a_lock_too() {
    let base = tempfile::tempdir().unwrap();
    let first = StateDir::open(base.path(), "a").unwrap();
    for content in ["", "x", "-1", "99999999999999999999999999"] {
        std::fs::write(first.path().join("lock"), content).unwrap();
        let told = StateDir::open(base.path(), "a").unwrap_err().to_string();
        assert!(told.contains("another process"), "{content}: {told}");
    }
}

#[test]
fn hostile_names_of_instances_stay_below_the_base() {
    let base = tempfile::tempdir().unwrap();
    let long = "x/".repeat(300);
    let longer = format!("{long}y");
    let names = [
        "", ".", "..", "../up", "a/b", "a%2Fb", "\0", "é", ".a", &long, &longer,
    ];
    let mut folders: Vec<_> = names.iter().map(|name| folder(name)).collect();
    for name in names.iter().filter(|name| !name.is_empty()) {
        let state = StateDir::open(base.path(), name).unwrap();
        assert_eq!(state.path().parent(), Some(base.path()), "{name:?}");
    }
    folders.sort();
    folders.dedup();
    assert_eq!(folders.len(), names.len(), "each has its own");
    assert!(folders.iter().all(|folder| folder.len() <= MAX_NAME_BYTES));
    assert_eq!(folder("Kvtier-5555_a.b"), "Kvtier-5555_a.b");
}

#[test]
fn links_and_foreign_permissions_are_refused_by_name() {
    let base = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    symlink(elsewhere.path(), base.path().join("link")).unwrap();
    std::fs::write(base.path().join("file"), "").unwrap();
    for name in ["link", "file"] {
        let told = refusal(base.path(), name);
        assert!(
            told.contains("is a symbolic link or no directory"),
            "{told}"
        );
    }
    assert!(elsewhere.path().read_dir().unwrap().next().is_none());

    let open = StateDir::open(base.path(), "open").unwrap();
    for foreign in [0o720, 0o702, 0o777] {
        set_mode(open.path(), foreign);
        let told = refusal(base.path(), "open");
        assert!(
            told.contains(&format!("mode {foreign:04o}; allowed")),
            "{told}"
        );
    }
    set_mode(open.path(), 0o700);
    let victim = elsewhere.path().join("victim");
    std::fs::write(&victim, "content").unwrap();
    let quotas = open.path().join("quotas");
    symlink(&victim, &quotas).unwrap();
    assert!(open.file("quotas").is_err());
    std::fs::remove_file(&quotas).unwrap();
    std::fs::write(&quotas, "").unwrap();
    set_mode(&quotas, 0o666);
    assert!(open.file("quotas").is_err());
    set_mode(&quotas, 0o600);
    assert!(open.file("quotas").is_ok());

    let lock = open.path().join("lock");
    open.release();
    std::fs::remove_file(&lock).unwrap();
    symlink(&victim, &lock).unwrap();
    assert!(refusal(base.path(), "open").contains("lock"));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "content");
}

#[test]
fn base_that_others_may_rename_in_is_refused() {
    let base = tempfile::tempdir().unwrap();
    set_mode(base.path(), 0o777);
    assert!(refusal(base.path(), "a").contains("mode 0777"));
    // As /tmp.
    set_mode(base.path(), 0o1777);
    StateDir::open(base.path(), "a").unwrap();
}

#[test]
fn unwritable_base_is_an_error_that_names_it() {
    let told = refusal(Path::new("/proc/kvtier-state"), "a");
    assert!(
        told.starts_with("/proc/kvtier-state/a: cannot be created"),
        "{told}"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(!refusal(file.path(), "a").is_empty());
}

#[test]
fn only_root_can_have_files_of_others() {
    let base = tempfile::tempdir().unwrap();
    if own_user() != 0 {
        eprintln!("skipped: only root can give a file to another user");
        return;
    }
    let state = StateDir::open(base.path(), "a").unwrap();
    let quotas = state.path().join("quotas");
    std::fs::write(&quotas, "").unwrap();
    std::os::unix::fs::chown(&quotas, Some(65_534), None).unwrap();
    let told = state.file("quotas").unwrap_err().to_string();
    assert!(told.contains("belongs to user 65534"), "{told}");
    std::os::unix::fs::chown(state.path(), Some(65_534), None).unwrap();
    assert!(refusal(base.path(), "a").contains("belongs to user 65534"));
}

#[test]
fn existing_file_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("base");
    assert_eq!(existing_file(&base, "a", "quotas"), None);
    assert!(!base.exists());
    let state = StateDir::open(&base, "a").unwrap();
    assert_eq!(existing_file(&base, "a", "quotas"), None);
    let path = state.file("quotas").unwrap();
    std::fs::write(&path, "").unwrap();
    // Also while the server runs.
    assert_eq!(existing_file(&base, "a", "quotas"), Some(path));
}
