//! The types, and configurations of them.

use kvtier_l2::{AdapterType, Registry};
use serde_json::{Value, json};

#[test]
fn types_are_sound_and_in_order() {
    let mut again = Registry::of(&[]);
    let all = kvtier_config::adapters::registry();
    for kind in all.types() {
        again.add(*kind).unwrap();
    }
    let names: Vec<_> = all.types().iter().map(AdapterType::name).collect();
    assert!(names.is_sorted(), "{names:?}");
}

// proves: docs/compare.md#lmcaches-other-backends
#[test]
fn lmcache_type_is_registered_or_refused_with_alternative() {
    const LMCACHE: &[&str] = &[
        "aerospike",
        "bigtable",
        "dax",
        "fault_inject",
        "fs",
        "fs_native",
        "hf3fs",
        "hfbucket",
        "mock",
        "mooncake_store",
        "native_plugin",
        "nixl_native",
        "nixl_store",
        "nixl_store_dynamic",
        "p2p",
        "plugin",
        "raw_block",
        "resp",
        "s3",
        "sagemaker-hyperpod",
        "valkey",
    ];
    let registry = kvtier_config::adapters::registry();
    for name in LMCACHE {
        let is_registered = registry.types().iter().any(|kind| kind.name() == *name);
        let line = registry.parse(&json!({"type": name})).unwrap_err();
        let is_refused = line
            .to_string()
            .starts_with(&format!("type {name:?} is not built into kvtier; "));
        assert!(is_registered != is_refused, "{name}: {line}");
    }
}

#[test]
fn plugins_are_referred_to_processes() {
    for name in [
        "plugin",
        "native_plugin",
        "mooncake_store",
        "aerospike",
        "bigtable",
        "hfbucket",
        "sagemaker-hyperpod",
        "p2p",
    ] {
        let error = kvtier_config::adapters::registry()
            .parse(&json!({"type": name}))
            .unwrap_err()
            .to_string();
        assert_eq!(error.contains("\"process\""), name != "p2p", "{error}");
    }
}

/// The error or the warnings of an `fs` with this key.
fn fs(key: &str, value: Value) -> Result<Vec<String>, String> {
    let mut spec = json!({"type": "fs", "base_path": "/x", "num_workers": 2});
    spec[key] = value;
    let parsed = kvtier_config::adapters::registry().parse(&spec);
    parsed
        .map(|config| config.warnings)
        .map_err(|error| error.to_string())
}

#[test]
fn fs_capacity_of_less_than_a_block_is_refused() {
    assert_eq!(
        fs("max_capacity_gb", json!(1e-12)).unwrap_err(),
        r#"type "fs": key "max_capacity_gb": 1e-12 is not allowed; give 0 for no bound, or at least 0.000004 (4 KiB)"#
    );
    assert_eq!(fs("max_capacity_gb", json!(0.000_004)), Ok(vec![]));
}

#[test]
fn fs_path_that_is_not_written_out_is_refused() {
    let keys = ["base_path", "relative_tmp_dir"];
    for (key, path) in keys
        .iter()
        .flat_map(|key| ["a\0b", "~/a", "$HOME/a"].map(|path| (*key, path)))
    {
        let line = fs(key, json!(path)).unwrap_err();
        assert!(line.contains(key), "{line}");
        assert!(
            line.ends_with("give a path written out, without ~ or $ at its start and without NUL"),
            "{line}"
        );
    }
}

#[test]
fn fs_keys_without_effect_are_named() {
    assert_eq!(
        fs("persist_enabled", json!(false)).unwrap(),
        [r#"type "fs": persist_enabled changes nothing: files stay when the server stops"#]
    );
    assert_eq!(
        fs("checksums", json!(1_000_000)).unwrap(),
        [r#"type "fs": checksums changes nothing: each file has a checksum of its own"#]
    );
    assert_eq!(fs("read_only", json!(true)), Ok(vec![]));
    let spec = json!({"type": "fs", "base_path": "/x", "read_only": true, "max_capacity_gb": 1});
    let config = kvtier_config::adapters::registry().parse(&spec).unwrap();
    assert_eq!(
        config.warnings,
        [
            r#"type "fs": max_capacity_gb changes nothing with read_only: nothing is stored or evicted there"#
        ]
    );
    assert_eq!(config.capacity_bytes(), None);
}
