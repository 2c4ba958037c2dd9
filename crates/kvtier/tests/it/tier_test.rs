//! `kvtier tier-test`: tiers in Python, a right one and a wrong one.

use assert_cmd::Command;

const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bindings/python/python");

fn tier_test(case: &str) -> Command {
    let mut command = Command::cargo_bin("kvtier").unwrap();
    command.env("PYTHONPATH", PACKAGE);
    command.args(["tier-test", "--case", case, "--command", "python3", "-B"]);
    command
}

// proves: docs/compare.md#other-tiers
#[test]
fn right_tier_passes_and_is_left_empty() {
    let directory = tempfile::tempdir().unwrap();
    let objects = directory.path().join("objects");
    let output = tier_test("round_trip")
        .args(["-m", "kvtier.tier.directory", "--path"])
        .arg(&objects)
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert_eq!(
        text,
        "tier directory: delete, list, shared, metadata\nok      round_trip\n1 passed, 0 failed, 0 skipped\n"
    );
    let shards = std::fs::read_dir(&objects).unwrap();
    let left = shards.map(|shard| std::fs::read_dir(shard.unwrap().path()).unwrap().count());
    assert_eq!(left.sum::<usize>(), 0);
}

/// Redis lists like this while its table of keys grows, which the contract allows.
#[test]
fn tier_may_list_an_object_on_two_pages() {
    let program = r#"
from kvtier.tier import serve
from kvtier.tier.directory import Directory
import os, sys
class Repeats(Directory):
    def list(self, cursor, limit):
        page, next = super().list(cursor, limit)
        first, _ = super().list(None, 1)
        return [*page, *first], next
serve(os.environ["KVTIER_SOCKET"], Repeats(sys.argv[1]))
"#;
    let directory = tempfile::tempdir().unwrap();
    let output = tier_test("bytes_agree_at_every_step")
        .args(["-c", program])
        .arg(directory.path().join("objects"))
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("1 passed, 0 failed, 0 skipped"), "{text}");
}

#[test]
fn wrong_tier_fails_with_the_reason() {
    let program = r#"
from kvtier.tier import Found, Tier, serve
import os
class Wrong(Tier):
    def store(self, objects): return [True] * len(objects)
    def lookup(self, keys): return [None] * len(keys)
    def load(self, objects): return [Found(len(one.data), "") for one in objects]
serve(os.environ["KVTIER_SOCKET"], Wrong())
"#;
    let output = tier_test("round_trip")
        .args(["-c", program])
        .assert()
        .code(1);
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("FAILED  round_trip: after a store"), "{text}");
    assert!(text.contains("0 passed, 1 failed, 0 skipped"), "{text}");
}

#[test]
fn tier_that_is_not_there_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::cargo_bin("kvtier").unwrap();
    command.args(["tier-test", "--timeout", "100ms", "--socket"]);
    let output = command.arg(directory.path().join("none")).assert().code(1);
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(text.contains("the tier does not answer"), "{text}");
    Command::cargo_bin("kvtier")
        .unwrap()
        .arg("tier-test")
        .assert()
        .code(2);
}

#[test]
fn configured_tier_passes_all_cases() {
    let directory = tempfile::tempdir().unwrap();
    let tier = format!(r#"{{"type":"fs","base_path":{:?}}}"#, directory.path());
    let mut command = Command::cargo_bin("kvtier").unwrap();
    let output = command
        .args(["tier-test", "--l2-adapter", &tier])
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(
        text.starts_with("tier fs: delete, list, shared, metadata\n"),
        "{text}"
    );
    assert!(text.contains("ok      round_trip\n"), "{text}");
    assert!(text.contains(" passed, 0 failed, "), "{text}");
}

#[test]
fn configured_tier_that_does_not_work_is_an_error() {
    for (tier, told) in [
        (
            r#"{"type":"resp","host":"127.0.0.1","port":1}"#,
            "the tier does not work",
        ),
        (
            r#"{"type":"peers","peers":["127.0.0.1:1"]}"#,
            "the tier does not work: 127.0.0.1:1: ",
        ),
        (r#"{"type":"none"}"#, "--l2-adapter: "),
    ] {
        let mut command = Command::cargo_bin("kvtier").unwrap();
        let output = command
            .args(["tier-test", "--l2-adapter", tier])
            .assert()
            .code(1);
        let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn what_a_program_prints_before_it_ends_is_shown() {
    let output = tier_test("round_trip")
        .args(["-c", "raise SystemExit('no such store')"])
        .assert()
        .code(1);
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(text.contains("no such store"), "{text}");
    assert!(text.contains("the tier does not answer"), "{text}");
}

#[test]
fn program_that_ends_at_once_fails_without_waiting() {
    // A wait for the timeout would be ended as a hang.
    let mut command = Command::cargo_bin("kvtier").unwrap();
    command.args(["tier-test", "--timeout", "1440m", "--command", "false"]);
    let output = command.assert().code(1);
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(
        text.contains("the program has ended 3 times without an answer"),
        "{text}"
    );
}
