//! Configurations that are refused, and secrets that are not shown.

use serde_json::{Value, json};

use super::*;
use kvtier_l2::{AdapterConfig, ConfigError, Registry};

fn parse(change: Value) -> Result<AdapterConfig, ConfigError> {
    let mut config = json!({"type": "process", "socket_path": "/run/x.sock"});
    for (key, value) in change.as_object().unwrap() {
        config[key] = value.clone();
    }
    Registry::of(&[PROCESS]).parse(&config)
}

#[test]
fn keys_have_defaults() {
    let options = ProcessOptions::of(&parse(json!({})).unwrap());
    assert_eq!(options.shared_memory_bytes, 256 << 20);
    assert_eq!(options.request_timeout, Duration::from_secs(30));
    assert!(options.command.is_empty() && options.options.is_empty());
    let given = json!({"command": ["a", "b c"], "options": {"x": [1]}, "shared_memory_mb": 1});
    let options = ProcessOptions::of(&parse(given).unwrap());
    assert_eq!(options.command, ["a", "b c"]);
    assert_eq!(options.options["x"], json!([1]));
    assert_eq!(options.shared_memory_bytes, 1 << 20);
}

#[test]
fn mistakes_are_named() {
    for (change, part) in [
        (
            json!({"socket_path": "x.sock"}),
            "key \"socket_path\": \"x.sock\" is not allowed; give an absolute path",
        ),
        (
            json!({"socket_path": format!("/{}", "x".repeat(200))}),
            "an absolute path of at most 107 bytes",
        ),
        (json!({"command": "python"}), "give a list of texts"),
        (json!({"command": [""]}), "give a list of texts"),
        (json!({"command": ["a\0"]}), "texts without NUL"),
        (json!({"options": [1]}), "give an object"),
        (
            json!({"options": {"x": "y".repeat(2 << 20)}}),
            "an object of at most 1048576 bytes",
        ),
        (
            json!({"shared_memory_mb": 0}),
            "a whole number from 1 to 1048576",
        ),
        (json!({"request_timeout": 0}), "a number above 0"),
        (json!({"socket": "/x"}), "key \"socket\" is unknown"),
    ] {
        let error = parse(change).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = Registry::of(&[PROCESS])
        .parse(&json!({"type": "process"}))
        .unwrap_err();
    assert!(
        error.to_string().contains("key \"socket_path\" is missing"),
        "{error}"
    );
}

#[test]
fn secrets_of_options_are_not_shown() {
    let command = ["x", "--url=redis://svc:IN-URL@host"];
    let secret =
        json!({"command": command, "options": {"password": "MARK", "inner": {"api_key": "MARK"}}});
    let config = parse(secret.clone()).unwrap();
    assert!(!format!("{config:?}").contains("MARK"));
    let options = ProcessOptions::of(&config);
    let error = options.error(ErrorKind::Refused, "login of svc with MARK failed");
    assert!(!error.to_string().contains("MARK"), "{error}");
    let line = supervisor::shown(&options, b"login of svc with MARK failed\n");
    assert_eq!(line, "login of svc with *** failed");
    assert_eq!(supervisor::shown(&options, b"no IN-URL"), "no ***");
    let mut bad = secret;
    bad["options"]["long"] = "y".repeat(2 << 20).into();
    assert!(!parse(bad).unwrap_err().to_string().contains("MARK"));
}

#[test]
fn keys_without_effect_are_warned_of() {
    let warnings = parse(json!({"persist_enabled": false, "checksums": 5}))
        .unwrap()
        .warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    let trusting = json!({"trust_missing_layout": true, "checksums": 5});
    assert!(parse(trusting).unwrap().warnings.is_empty());
}
