//! The real library, for tests.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Returns `KVTIER_NIXL_LIBRARY`, or the wheel that `tests/setup.sh` unpacks. Without either it prints that `test` is
/// skipped.
#[must_use]
pub fn library(test: &str) -> Option<PathBuf> {
    let given = std::env::var_os("KVTIER_NIXL_LIBRARY").map(PathBuf::from);
    let found = given.or_else(unpacked);
    if found.is_none() {
        println!("skipped: {test}: no NIXL here; run tests/setup.sh or set KVTIER_NIXL_LIBRARY");
    }
    found
}

fn unpacked() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let home = variable("KVTIER_E2E_HOME");
    let home = home.or_else(|| Some(variable("HOME")?.join(".cache/kvtier-e2e")))?;
    let is_wheel = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("nixl-cu12-"))
    };
    let clients = std::fs::read_dir(Path::new(&home).join("clients")).ok()?;
    clients.flatten().map(|entry| entry.path()).find(is_wheel)
}
