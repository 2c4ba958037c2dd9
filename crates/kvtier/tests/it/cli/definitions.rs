//! `kvtier completions` and `kvtier man`.

use std::collections::BTreeSet;

use super::{complaint, kvtier};

/// Flags of `kvtier server` and of a command with another one below it, and commands.
const NAMES: [&str; 6] = [
    "l1-size-gb",
    "http-token-file",
    "limit",
    "token-file",
    "quota",
    "tier-test",
];

// proves: docs/operate.md#completions-and-man-pages
#[test]
fn completions_of_every_shell_name_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = kvtier(&["completions", shell]);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{shell}"
        );
        for name in NAMES {
            assert!(script.contains(name), "{shell} does not complete {name}");
        }
        // Known for LMCache's sake only, without effect.
        assert!(!script.contains("enable-gc-monitor"), "{shell}");
    }
    let line = complaint(&kvtier(&["completions", "tcsh"]), 2);
    assert!(line.contains("tcsh") && line.contains("bash"), "{line}");
}

#[test]
fn bash_accepts_and_uses_the_completions() {
    let script = kvtier(&["completions", "bash"]).stdout;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.bash");
    std::fs::write(&file, script).unwrap();
    let complete = "source \"$1\"; COMP_WORDS=(kvtier server --http-to); COMP_CWORD=2; \
                    _kvtier kvtier --http-to server; echo \"${COMPREPLY[@]}\"";
    let output = std::process::Command::new("bash")
        .args(["-c", complete, "bash"])
        .arg(&file)
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "--http-token-file\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

// proves: docs/operate.md#completions-and-man-pages
#[test]
fn man_writes_a_page_per_command() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("new/man1");
    let output = kvtier(&["man", pages.to_str().unwrap()]);
    assert!(output.status.success() && output.stderr.is_empty());
    let written: BTreeSet<_> = std::fs::read_dir(&pages)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let help = String::from_utf8(kvtier(&["--help"]).stdout).unwrap();
    let commands = help.split_once("Commands:\n").unwrap().1.lines();
    let commands = commands.take_while(|line| line.starts_with("  "));
    let names: Vec<_> = commands
        .map(|line| line.split_whitespace().next().unwrap())
        .filter(|name| *name != "help")
        .collect();
    assert!(names.len() > 9, "{names:?}");
    for name in names {
        let page = format!("kvtier-{name}.1");
        assert!(written.contains(&page), "no {page} in {written:?}");
    }
    assert!(written.contains("kvtier.1") && written.contains("kvtier-quota-set.1"));
    let server = std::fs::read_to_string(pages.join("kvtier-server.1")).unwrap();
    for text in [r"\-\-l1\-size\-gb", "REQUEST SERVER", "Tokens of one chunk"] {
        assert!(server.contains(text), "{text} is not in the page");
    }
    let one = kvtier(&["man"]);
    let page = String::from_utf8(one.stdout).unwrap();
    assert_eq!(
        page,
        std::fs::read_to_string(pages.join("kvtier.1")).unwrap()
    );
}

#[test]
fn man_names_a_directory_it_cannot_write() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("man1");
    let line = complaint(&kvtier(&["man", below.to_str().unwrap()]), 1);
    assert!(line.contains(below.to_str().unwrap()), "{line}");
}
