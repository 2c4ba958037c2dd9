//! Runs the scenarios of `tests/rest`, which are data; `tests/rest/README.md` says how they are written.

use std::path::Path;

use serde_json::Value;
use toml::Table;

use super::served::{ADMIN, READER, Served, Setup, bearer};

/// The scenario of this name, on a server of its own in each of its setups.
fn run(name: &str) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/rest");
    let text = std::fs::read_to_string(directory.join(name)).unwrap();
    let scenario: Table = text
        .parse()
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    only(&scenario, &["setups", "flags", "step"], name);
    let words = |key: &str| -> Vec<String> {
        let list = scenario.get(key).map(|list| list.as_array().unwrap());
        let list = list.into_iter().flatten();
        list.map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let (flags, setups) = (words("flags"), words("setups"));
    let steps = scenario["step"].as_array().unwrap();
    assert!(
        !setups.is_empty() && !steps.is_empty(),
        "{name} does nothing"
    );
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    for setup in setups {
        let server = Served::start(Setup::named(&setup), &flags);
        for (number, step) in (1..).zip(steps) {
            let place = format!("{name}, {setup}, step {number}");
            take(&server, step.as_table().unwrap(), &place);
        }
    }
}

fn only(table: &Table, known: &[&str], place: &str) {
    for key in table.keys() {
        assert!(
            known.contains(&key.as_str()),
            "{place}: unknown key {key:?}"
        );
    }
}

fn take(server: &Served, step: &Table, place: &str) {
    let keys = [
        "request", "as", "headers", "body", "status", "answer", "has", "text", "header",
    ];
    only(step, &keys, place);
    let text = |key: &str| step.get(key).map(|value| value.as_str().unwrap());
    let pairs = |key: &str| -> Vec<(String, String)> {
        let table = step.get(key).map(|table| table.as_table().unwrap());
        let table = table.into_iter().flatten();
        table
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect()
    };
    let mut headers = pairs("headers");
    match text("as").unwrap_or("admin") {
        "anonymous" => {}
        _ if !server.has_tokens() => {}
        "admin" => headers.push(bearer(ADMIN)),
        "reader" => headers.push(bearer(READER)),
        other => panic!("{place}: no client is named {other:?}"),
    }
    let request = text("request").unwrap();
    let answer = server.ask(request, &headers, text("body").unwrap_or_default());
    let context = format!("{place}: {request}: {answer:?}");
    assert_eq!(
        i64::from(answer.status),
        step["status"].as_integer().unwrap(),
        "{context}"
    );
    let json = |text: &str| -> Value {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text:?}: {context}"))
    };
    if let Some(expected) = text("answer") {
        assert_eq!(json(&answer.body), json(expected), "{context}");
    }
    if let Some(expected) = text("has") {
        assert!(covers(&json(expected), &json(&answer.body)), "{context}");
    }
    if let Some(expected) = text("text") {
        assert_eq!(answer.body, expected, "{context}");
    }
    for (name, value) in pairs("header") {
        assert_eq!(
            answer.header(&name),
            Some(value.to_lowercase().as_str()).filter(|v| !v.is_empty()),
            "{context}"
        );
    }
}

/// Whether every member of `expected` is in `answer`.
fn covers(expected: &Value, answer: &Value) -> bool {
    match (expected, answer) {
        (Value::Object(expected), Value::Object(answer)) => expected
            .iter()
            .all(|(key, value)| answer.get(key).is_some_and(|own| covers(value, own))),
        _ => expected == answer,
    }
}

macro_rules! scenarios {
    ($($name:ident: $file:literal;)*) => {
        $(#[test]
        fn $name() {
            run($file);
        })*

        // proves: docs/compare.md#http
        // proves: docs/operate.md#dashboard
        #[test]
        fn every_file_is_run() {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/rest");
            for entry in std::fs::read_dir(directory).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                assert!(!name.ends_with(".toml") || [$($file),*].contains(&name.as_str()), "{name} is not run");
            }
        }
    };
}

scenarios! {
    routes_answer_the_same_with_and_without_tokens_and_tls: "routes.toml";
    tokens_open_what_their_role_may: "tokens.toml";
    without_tokens_web_pages_of_others_are_kept_out: "open.toml";
    what_is_absent_by_design_is_absent: "absent.toml";
    hostile_salts_have_exact_answers: "salts.toml";
    tenants_are_named_without_their_prefix: "tenant_names.toml";
    dashboard_needs_a_token_for_what_it_shows: "dashboard.toml";
}
