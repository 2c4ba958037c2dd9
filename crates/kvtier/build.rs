//! Puts the commit and the target into the version. The commit is that of `KVTIER_COMMIT`, or of the git checkout that is
//! built; a build without either has none.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KVTIER_COMMIT");
    // Written by every commit and checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let given = env::var("KVTIER_COMMIT").ok();
    let commit = given.filter(|commit| !commit.is_empty());
    let commit = commit.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    let variable = |name| env::var(name).unwrap_or_default();
    let (version, target) = (variable("CARGO_PKG_VERSION"), variable("TARGET"));
    let commit = commit.map_or_else(String::new, |commit| format!("commit {commit}, "));
    println!("cargo:rustc-env=KVTIER_VERSION={version} ({commit}{target})");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
