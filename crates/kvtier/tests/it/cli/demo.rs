//! `kvtier demo`.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::{KVTIER, complaint, kvtier, lines};

// proves: docs/compare.md#command-line
#[test]
fn demo_is_correct_and_figures_add_up() {
    let output = kvtier(&[
        "demo",
        "--turns",
        "2",
        "--seconds",
        "0",
        "--l1-size-gb",
        "0.0625",
        "--seed",
        "7",
        "--json",
    ]);
    assert!(output.status.success(), "{:?}", lines(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &Value| {
        value
            .as_u64()
            .unwrap_or_else(|| panic!("{value} is no number"))
    };
    assert_eq!(
        (&report["ok"], &report["interrupted"]),
        (&true.into(), &false.into())
    );
    assert_eq!(
        (number(&report["seed"]), number(&report["faults"]["count"])),
        (7, 0)
    );
    let phases = report["phases"].as_array().unwrap();
    assert_eq!(phases.len(), 2);
    for key in [
        "requests",
        "asked_tokens",
        "hit_tokens",
        "stored_bytes",
        "retrieved_bytes",
        "verified_chunks",
        "foreign_lookups",
        "foreign_loads",
    ] {
        let sum: u64 = phases.iter().map(|phase| number(&phase[key])).sum();
        assert_eq!(number(&report["total"][key]), sum, "{key}");
        assert!(
            phases.iter().all(|phase| number(&phase[key]) > 0),
            "{key} is 0"
        );
    }
    let (roomy, tight) = (&phases[0], &phases[1]);
    // Four tenants with three engines each, two turns.
    assert_eq!(number(&roomy["requests"]), 4 * 3 * 2);
    assert_eq!(number(&roomy["evicted_objects"]), 0);
    assert!(number(&tight["evicted_objects"]) > 0);
    for phase in phases {
        assert!(number(&phase["hit_tokens"]) <= number(&phase["asked_tokens"]));
        // Hits were retrieved, except in the first request of engines that pickle.
        let (chunk_bytes, verified) = (
            number(&report["chunk_bytes"]),
            number(&phase["verified_chunks"]),
        );
        assert_eq!(number(&phase["retrieved_bytes"]), verified * chunk_bytes);
        assert!(verified * number(&report["chunk_tokens"]) <= number(&phase["hit_tokens"]));
    }
    let lookups: u64 = report["latency_us"]
        .as_array()
        .unwrap()
        .iter()
        .map(|engine| number(&engine["lookup"]["count"]))
        .sum();
    assert_eq!(lookups, number(&report["total"]["requests"]));
}

// proves: docs/compare.md#command-line
#[test]
fn demo_with_directory_loads_prompts_from_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let flags = ["demo", "--turns", "2", "--seconds", "0", "--json"];
    let demo = |path| kvtier(&[&flags[..], &["--l1-size-gb", "0.0625", "--l2", path]].concat());
    // The second demo finds the files of the first.
    let chunks = [(); 2].map(|()| {
        let output = demo(path);
        assert!(output.status.success(), "{:?}", lines(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let chunks = report["l2"]["verified_chunks"].as_u64().unwrap();
        let bytes = report["l2"]["retrieved_bytes"].as_u64().unwrap();
        assert_eq!(bytes, chunks * report["chunk_bytes"].as_u64().unwrap());
        chunks
    });
    // Four tenants, each at least the two whole chunks of the system prompt.
    assert!(chunks[0] >= 8 && chunks[0] == chunks[1], "{chunks:?}");
    let files = std::fs::read_dir(path).unwrap();
    let files = files.filter(|file| {
        !file
            .as_ref()
            .unwrap()
            .file_name()
            .as_encoded_bytes()
            .starts_with(b".")
    });
    assert_eq!(files.count() as u64, chunks[0]);
    let line = complaint(&demo("/dev/null"), 1);
    assert!(line.contains("base_path /dev/null"), "{line}");
}

#[test]
fn demo_removes_pool_of_killed_demo() {
    let mut killed = Command::new(KVTIER)
        .args(["demo", "--l1-size-gb", "0.0625", "--turns", "1"])
        .args(["--seconds", "3600"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pool = format!("/dev/shm/lmcache_l1_pool_kvtier_demo_{}", killed.id());
    while !std::fs::exists(&pool).unwrap() {
        assert_eq!(killed.try_wait().unwrap(), None, "the demo ended");
        std::thread::yield_now();
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(std::fs::exists(&pool).unwrap());
    // A demo that ends at once is enough.
    kvtier(&["demo", "--turns", "60", "--l1-size-gb", "0.0625"]);
    assert!(!std::fs::exists(&pool).unwrap());
}

#[test]
fn oversized_demo_is_refused_with_reason() {
    let output = kvtier(&["demo", "--turns", "60", "--l1-size-gb", "0.0625"]);
    let line = complaint(&output, 1);
    assert!(
        line.contains("--turns 60") && line.contains("--l1-size-gb"),
        "{line}"
    );
}
