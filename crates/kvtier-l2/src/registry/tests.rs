use serde_json::{Value, json};

use super::*;
use crate::config::Interval;
use crate::{ErrorKind, testing};
use kvtier_core::eviction::EvictionKind;

const KEYS: &[Key] = &[
    Key::text("base_path", "Where").required(),
    Key::integer("num_workers", 1, 64, "Threads").or(Fallback::Integer(4)),
    Key::integer("read_ahead_size", 1, i64::MAX, "Bytes").unit("bytes"),
    Key::number("max_capacity_gb", Interval::from(0.0), "Size").or(Fallback::Number(0.0)),
    Key::switch("use_odirect", "Past the page cache"),
    Key::of("relative_tmp_dir", Shape::AnyText, "Where to write").or(Fallback::Text("")),
    Key::of("layout", Shape::OneOf(&["flat", "sharded"]), "Names").or(Fallback::Text("flat")),
    Key::of("gaps", Shape::Integers { min: 0 }, "Gaps"),
    Key::of(
        "ratios",
        Shape::Numbers(Interval::from(0.0).up_to(1.0)),
        "Ratios",
    ),
];

fn closed(_: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    Err(L2Error::new(ErrorKind::Refused, "cannot be opened"))
}

const DISK: AdapterType =
    AdapterType::new("disk", "Keeps objects", KEYS, closed).check(|options| {
        if options.get::<&str>("relative_tmp_dir").starts_with('/') {
            Err(options.refuse("relative_tmp_dir", "a relative path"))
        } else {
            Ok(())
        }
    });

const AROUND_KEYS: &[Key] = &[Key::of("inner", Shape::Adapter, "What is inside").required()];
const AROUND: AdapterType = AdapterType::new("around", "Around another", AROUND_KEYS, closed);

fn registry() -> Registry {
    let mut registry = Registry { types: Vec::new() };
    registry.add(DISK).unwrap();
    registry.add(AROUND).unwrap();
    registry
}

fn refused(spec: Value) -> String {
    let line = registry().parse(&spec).unwrap_err().to_string();
    assert!(!line.contains('\n'), "{line:?} is more than one line");
    line
}

/// `disk` with one more key.
fn with(key: &str, value: Value) -> Value {
    let mut spec = json!({"type": "disk", "base_path": "/x"});
    spec[key] = value;
    spec
}

#[test]
fn values_and_defaults_are_read_by_type() {
    let config = registry()
        .parse_json(r#"{"type":"disk","base_path":"/x","max_capacity_gb":1.5,"gaps":[1,2],"ratios":[0,1,0.5]}"#)
        .unwrap();
    let options = &config.options;
    assert_eq!(config.kind, "disk");
    assert_eq!(options.get::<&str>("base_path"), "/x");
    assert_eq!(options.get::<usize>("num_workers"), 4);
    assert_eq!(options.find::<u64>("read_ahead_size"), None);
    assert_eq!(options.gib("max_capacity_gb"), 3 << 29);
    assert!(!options.get::<bool>("use_odirect"));
    assert_eq!(options.get::<&str>("layout"), "flat");
    assert_eq!(options.get::<&[i64]>("gaps"), [1, 2]);
    assert_eq!(options.get::<&[f64]>("ratios"), [0.0, 1.0, 0.5]);
}

#[test]
fn null_is_an_unset_key() {
    let config = registry().parse(&with("num_workers", Value::Null)).unwrap();
    assert_eq!(config.options.get::<usize>("num_workers"), 4);
    let line = refused(with("base_path", Value::Null));
    assert!(line.contains("\"base_path\" is missing"), "{line}");
}

#[test]
fn common_defaults_are_those_documented() {
    let config = registry().parse(&with("serde", Value::Null)).unwrap();
    assert!(!config.shared);
    assert!(config.persist_enabled);
    assert_eq!(config.serde, Vec::new());
    assert_eq!(config.eviction, None);
    assert_eq!(config.guards, crate::wrap::Guards::default());
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn eviction_has_lmcaches_defaults() {
    let config = registry()
        .parse(&with("eviction", json!({"eviction_policy": "LRU"})))
        .unwrap();
    let eviction = config.eviction.unwrap();
    assert_eq!(eviction.policy, EvictionKind::Lru);
    assert_eq!(eviction.trigger_watermark, 0.8);
    assert_eq!(eviction.eviction_ratio, 0.2);
}

#[test]
fn another_affinity_tag_is_a_warning() {
    let config = registry()
        .parse(&with("affinity_tag", json!("far")))
        .unwrap();
    assert_eq!(
        config.warnings,
        [r#"type "disk": affinity_tag "far" changes nothing, as there is one L1"#]
    );
}

#[test]
fn errors_name_key_value_and_allowed_values() {
    let cases = [
        (
            json!([1]),
            r#"[1] is not allowed; give an object with a "type""#,
        ),
        (
            json!({}),
            r#"key "type": null is not allowed; give one of disk, around"#,
        ),
        (
            json!({"type": "dusk"}),
            r#"type "dusk" is unknown; known types are disk, around"#,
        ),
        (
            json!({"type": "disk"}),
            r#"type "disk": key "base_path" is missing; give a text that is not empty"#,
        ),
        (
            with("base_path", json!("")),
            r#"type "disk": key "base_path": "" is not allowed; give a text that is not empty"#,
        ),
        (
            with("num_workers", json!(0)),
            r#"type "disk": key "num_workers": 0 is not allowed; give a whole number from 1 to 64"#,
        ),
        (
            with("num_workers", json!(2.5)),
            r#"type "disk": key "num_workers": 2.5 is not allowed; give a whole number from 1 to 64"#,
        ),
        (
            with("read_ahead_size", json!("big")),
            r#"type "disk": key "read_ahead_size": "big" is not allowed; give a whole number from 1 on"#,
        ),
        (
            with("max_capacity_gb", json!(-1)),
            r#"type "disk": key "max_capacity_gb": -1 is not allowed; give a number from 0"#,
        ),
        (
            with("use_odirect", json!("yes")),
            r#"type "disk": key "use_odirect": "yes" is not allowed; give true or false"#,
        ),
        (
            with("layout", json!("deep")),
            r#"type "disk": key "layout": "deep" is not allowed; give flat or sharded"#,
        ),
        (
            with("gaps", json!([1, -1])),
            r#"type "disk": key "gaps": [1,-1] is not allowed; give a list of whole numbers from 0 on"#,
        ),
        (
            with("ratios", json!([1.5])),
            r#"type "disk": key "ratios": [1.5] is not allowed; give a list of numbers from 0 up to 1"#,
        ),
        (
            with("relative_tmp_dir", json!("/tmp")),
            r#"type "disk": key "relative_tmp_dir": "/tmp" is not allowed; give a relative path"#,
        ),
        (
            with("serde", json!({"type": "fp8", "fp8_dtype": "float8_e4m3"})),
            r#"type "disk": serde: key "fp8_dtype": "float8_e4m3" is not allowed; give float8_e4m3fn or float8_e5m2"#,
        ),
        (
            with("eviction", json!({})),
            r#"type "disk": eviction: key "eviction_policy" is missing; give LRU, IsolatedLRU, UserLRU, ARC or noop"#,
        ),
        (
            with("eviction", json!({"eviction_policy": "FIFO"})),
            r#"type "disk": eviction: key "eviction_policy": "FIFO" is not allowed; give LRU, IsolatedLRU, UserLRU, ARC or noop"#,
        ),
        (
            with(
                "eviction",
                json!({"eviction_policy": "LRU", "trigger_watermark": 0}),
            ),
            r#"type "disk": eviction: key "trigger_watermark": 0 is not allowed; give a number above 0 up to 1"#,
        ),
        (
            with(
                "eviction",
                json!({"eviction_policy": "LRU", "eviction_ratio": 1.01}),
            ),
            r#"type "disk": eviction: key "eviction_ratio": 1.01 is not allowed; give a number above 0 up to 1"#,
        ),
        (
            with("eviction", json!({"eviction_policy": "LRU", "ratio": 1})),
            r#"type "disk": eviction: key "ratio" is unknown; known keys are eviction_policy, trigger_watermark, eviction_ratio"#,
        ),
        (
            with("retries", json!(-1)),
            r#"type "disk": key "retries": -1 is not allowed; give a whole number from 0 to 16"#,
        ),
        (
            with("breaker_pause_max_ms", json!(10)),
            r#"type "disk": key "breaker_pause_max_ms": 10 is not allowed; give at least breaker_pause_ms, which is 1000"#,
        ),
        (
            json!({"type": "around", "inner": {"type": "disk"}}),
            r#"type "around": key "inner": type "disk": key "base_path" is missing; give a text that is not empty"#,
        ),
    ];
    for (spec, line) in cases {
        assert_eq!(refused(spec), line);
    }
}

#[test]
fn unknown_key_is_refused_listing_known_keys() {
    let line = refused(with("use_direct", json!(true)));
    let (head, known) = line.split_once("; known keys are ").unwrap();
    assert_eq!(head, r#"type "disk": key "use_direct" is unknown"#);
    let expected: Vec<_> = COMMON.iter().chain(KEYS).map(|key| key.name).collect();
    assert_eq!(known, expected.join(", "));
}

#[test]
fn invalid_json_is_quoted() {
    let line = registry()
        .parse_json("{type: disk}\n")
        .unwrap_err()
        .to_string();
    assert!(
        line.starts_with(r#""{type: disk}\n" is not JSON ("#),
        "{line}"
    );
}

#[test]
fn long_values_are_clipped() {
    let line = refused(with("layout", json!("ä".repeat(5000))));
    assert!(line.len() < 500, "{} bytes", line.len());
}

#[test]
fn inner_keys_are_inherited_unless_set() {
    let mut inner = with("eviction", json!({"eviction_policy": "noop"}));
    inner["shared"] = json!(true);
    inner["retries"] = json!(7);
    let config = registry()
        .parse(
            &json!({"type": "around", "inner": {"type": "around", "inner": inner}, "retries": 1}),
        )
        .unwrap();
    assert!(config.shared);
    assert_eq!(config.guards.retries, 1);
    assert_eq!(config.eviction.unwrap().policy, EvictionKind::Noop);
    let inside = config.options.get::<&AdapterConfig>("inner");
    assert_eq!(inside.kind, "around");
}

#[test]
fn inner_capacity_is_that_of_the_wrapper() {
    let inner = with("max_capacity_gb", json!(1.5));
    let spec = json!({"type": "around", "inner": {"type": "around", "inner": inner}});
    assert_eq!(
        registry().parse(&spec).unwrap().capacity_bytes(),
        Some(3 << 29)
    );
    let spec = json!({"type": "around", "inner": with("max_capacity_gb", json!(0))});
    assert_eq!(registry().parse(&spec).unwrap().capacity_bytes(), None);
}

#[test]
fn eviction_without_capacity_is_a_warning() {
    let warnings = |policy: &str, gib: f64| {
        let mut inner = with("eviction", json!({"eviction_policy": policy}));
        inner["max_capacity_gb"] = json!(gib);
        let spec = json!({"type": "around", "inner": inner});
        registry().parse(&spec).unwrap().warnings.concat()
    };
    for policy in ["LRU", "ARC"] {
        assert!(warnings(policy, 0.0).starts_with(r#"type "around": eviction changes nothing"#));
    }
    for (policy, gib) in [("LRU", 1.0), ("IsolatedLRU", 0.0), ("noop", 0.0)] {
        assert_eq!(warnings(policy, gib), "");
    }
}

#[test]
fn misspelt_key_is_reported_before_missing_one() {
    let line = refused(json!({"type": "disk", "basepath": "/x"}));
    assert!(
        line.starts_with(r#"type "disk": key "basepath" is unknown"#),
        "{line}"
    );
}

#[test]
fn type_is_added_once_without_common_keys() {
    let mut registry = registry();
    let line = registry.add(DISK).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "disk" is registered already; give another name"#
    );
    const CLASH: &[Key] = &[Key::switch("shared", "Clashes")];
    let line = registry
        .add(AdapterType::new("clash", "Clashes", CLASH, closed))
        .unwrap_err()
        .to_string();
    assert!(
        line.starts_with(r#"type "clash": key "shared" is there twice"#),
        "{line}"
    );
}

#[test]
fn absent_types_have_an_alternative() {
    let names: Vec<_> = absent::names().collect();
    assert!(names.is_sorted(), "{names:?}");
    for name in names {
        let line = refused(json!({"type": name}));
        let start = format!("type {name:?} is not built into kvtier; ");
        assert!(
            line.len() > start.len() && line.starts_with(&start),
            "{line}"
        );
    }
}

#[test]
fn toml_table_equals_json() {
    let table: toml::Table = r#"
        [[l2-adapter]]
        type = "disk"
        base_path = "/x"
        num_workers = 8
        max_capacity_gb = 2
        eviction = { eviction_policy = "LRU", trigger_watermark = 0.9 }
    "#
    .parse()
    .unwrap();
    let table = serde_json::to_value(&table["l2-adapter"][0]).unwrap();
    let config = registry().parse(&table).unwrap();
    assert_eq!(config.options.get::<u32>("num_workers"), 8);
    assert_eq!(config.options.gib("max_capacity_gb"), 2 << 30);
    assert_eq!(config.eviction.unwrap().trigger_watermark, 0.9);
}

#[test]
fn the_reference_has_every_key() {
    let markdown = registry().reference_markdown();
    assert!(
        markdown.contains("## `disk`\n\nKeeps objects.\n"),
        "{markdown}"
    );
    assert!(
        markdown.contains("| `num_workers` | 4 | 1 to 64 | Threads |"),
        "{markdown}"
    );
    assert!(
        markdown.contains("| `lookup_timeout_ms` | 1000 | 1 to 86400000 (ms) |"),
        "{markdown}"
    );
    for key in COMMON
        .iter()
        .chain(crate::config::EVICTION)
        .chain(KEYS)
        .chain(AROUND_KEYS)
    {
        assert!(
            markdown.contains(&format!("| `{}` |", key.name)),
            "{}",
            key.name
        );
    }
}

#[test]
fn key_given_twice_is_refused_by_name() {
    for text in [
        r#"{"type":"fs","base_path":"/x","base_path":"/y"}"#,
        r#"{"type":"fault_inject","inner":{"type":"fs","base_path":"/x","base_path":"/y"}}"#,
        r#"{"type":"fault_inject","faults":[{"base_path":1,"base_path":2}]}"#,
    ] {
        let line = testing::registry()
            .parse_json(text)
            .unwrap_err()
            .to_string();
        assert!(
            line.starts_with(r#"key "base_path" is given twice"#),
            "{line}"
        );
        assert!(line.ends_with("give each key once"), "{line}");
    }
    let text = r#"{"a":[null,true,-1,18446744073709551615,0.5,"b",{}]}"#;
    let plain: Value = serde_json::from_str(text).unwrap();
    assert_eq!(json::parse(text).unwrap(), plain);
    assert!(json::parse("{} x").is_err());
}
