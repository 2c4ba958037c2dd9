//! `kvtier bench l2`: measurements, with the bytes compared.

use assert_cmd::Command;
use serde_json::Value;

fn bench(adapter: &str) -> Command {
    let mut command = Command::cargo_bin("kvtier").unwrap();
    command.args(["bench", "l2", "--rounds", "2", "--num-keys", "20"]);
    command.args(["--data-size-kb", "4", "--l2-adapter", adapter]);
    command
}

#[test]
fn tier_of_files_is_compared_with_plain_files() {
    let directory = tempfile::tempdir().unwrap();
    let tier = directory.path().join("tier");
    let report = directory.path().join("report.json");
    let adapter = format!(r#"{{"type":"fs","base_path":"{}"}}"#, tier.display());
    let output = bench(&adapter)
        .args(["--json", report.to_str().unwrap()])
        .assert()
        .success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("20 objects of 4 KiB"), "{text}");
    let report: Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    let steps = report["steps"].as_array().unwrap();
    let names: Vec<_> = steps
        .iter()
        .map(|step| step["step"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["store", "lookup", "load"]);
    for step in steps {
        for figure in ["us_per_object", "plain_us_per_object"] {
            assert!(step[figure].as_f64().unwrap() > 0.0, "{step}");
        }
    }
    let left = std::fs::read_dir(&tier)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left
        .filter(|name| name.to_str().unwrap().ends_with(".data"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn failed_load_fails_bench() {
    let directory = tempfile::tempdir().unwrap();
    let adapter = format!(
        r#"{{"type":"fault_inject","rate":1,"inner":{{"type":"fs","base_path":"{}"}}}}"#,
        directory.path().display()
    );
    let output = bench(&adapter).assert().failure();
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(text.contains("a load failed"), "{text}");
}

#[test]
fn invalid_tier_is_reported_by_key() {
    let output = bench(r#"{"type":"fs"}"#).assert().failure();
    let text = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(
        text.contains("--l2-adapter") && text.contains("base_path"),
        "{text}"
    );
}
