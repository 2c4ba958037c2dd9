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
    assert_eq!(
        (&report["seed"], &report["aborted"]),
        (&7.into(), &Value::Null)
    );
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        assert_eq!(
            (&row["failed"], &row["mismatched"]),
            (&0.into(), &0.into()),
            "{row:#}"
        );
    }
    let fact = |row: &Value, name: &str| {
        let fact = row["facts"][name].as_f64();
        fact.unwrap_or_else(|| panic!("no {name} in {row:#}"))
    };
    let (roomy, tight) = (row(&report, "all fits"), row(&report, "under pressure"));
    for phase in [roomy, tight] {
        for name in [
            "hit rate",
            "chunks stored",
            "chunks compared",
            "lookups by other tenants",
            "retrieves refused to other tenants",
        ] {
            assert!(fact(phase, name) > 0.0, "{name} is 0 in {phase:#}");
        }
        assert!(fact(phase, "tokens hit") < fact(phase, "tokens asked"));
        // Hits were retrieved, except in the first request of engines that pickle.
        let compared = fact(phase, "chunks compared") * report["chunk_tokens"].as_f64().unwrap();
        assert!(compared <= fact(phase, "tokens hit"));
    }
    // Four tenants with three engines each, two turns.
    assert_eq!(fact(roomy, "requests"), (4 * 3 * 2) as f64);
    assert_eq!(fact(roomy, "evicted objects"), 0.0);
    assert!(fact(tight, "evicted objects") > 0.0);
    let lookups = rows
        .iter()
        .filter(|row| row["name"].as_str().unwrap().contains("lookup"));
    let lookups: u64 = lookups.map(|row| row["count"].as_u64().unwrap()).sum();
    assert_eq!(
        lookups as f64,
        fact(roomy, "requests") + fact(tight, "requests")
    );
}

/// The row of this name.
fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == name);
    row.unwrap_or_else(|| panic!("no {name} in {report:#}"))
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
        let facts = &row(&report, "tier, with L1 emptied")["facts"];
        facts["chunks compared"].as_f64().unwrap() as u64
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
fn demo_that_blends_finds_passages_in_another_order() {
    let flags = ["demo", "--turns", "1", "--seconds", "0", "--json"];
    let output = kvtier(&[&flags[..], &["--l1-size-gb", "0.0625", "--blend"]].concat());
    assert!(output.status.success(), "{:?}", lines(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let facts = &row(&report, "passages in another order")["facts"];
    // Three passages of two chunks, each behind 37 other tokens.
    let blended = 3.0 * 2.0 * report["chunk_tokens"].as_f64().unwrap();
    let expected = [
        ("tokens asked", blended + 3.0 * 37.0),
        ("tokens hit by prefix", 0.0),
        ("tokens hit by blending", blended),
    ];
    for (name, tokens) in expected {
        assert_eq!(facts[name].as_f64(), Some(tokens), "{name}");
    }
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
