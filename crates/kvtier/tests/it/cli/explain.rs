//! `kvtier explain`.

use std::time::Duration;

use assert_cmd::Command as Assert;
use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, Options, Prompt, Scope,
};
use serde_json::Value;

use super::{KVTIER, Server, complaint, kvtier, lines};

/// The command with these tokens on its standard input.
fn explain(server: &Server, args: &[&str], tokens: &str) -> std::process::Output {
    let place = ["--url", &server.http];
    Assert::new(KVTIER)
        .args([&["explain", "--tokens", "-"], args, &place].concat())
        .write_stdin(tokens)
        .timeout(Duration::from_secs(300))
        .output()
        .unwrap()
}

// proves: docs/troubleshoot.md#why-did-it-miss
#[test]
fn misses_are_explained_for_people_and_programs() {
    let server = Server::start_with(&["--shm-name", "", "--chunk-size", "16"]);
    let scope = Scope::new("cli/explain#1").with_salt("t");
    let connection = Connection::connect_with(&server.requests, Options::default()).unwrap();
    let mut spec = EngineDrivenSpec::new(InstanceId(1), scope, 2, 64);
    spec.block_tokens = 4;
    let mut worker = EngineDrivenWorker::register(connection, spec).unwrap();
    let tokens: Vec<u32> = (0..70).collect();
    let (prompt, len) = (Prompt::new(&tokens[..32]), worker.chunk_bytes());
    let stored = worker.store(&prompt, 0..32, "s", |_| vec![1; len]);
    assert_eq!(stored.unwrap().chunks, [0, 1]);
    assert_eq!(worker.lookup(&Prompt::new(&tokens), "r").unwrap(), 2);
    let asked = ["--model", "cli/explain", "--cache-salt", "t"];
    let list = format!("{tokens:?}");
    let answer = explain(&server, &asked, &list);
    assert!(answer.status.success(), "{:?}", lines(&answer.stderr));
    let text = lines(&answer.stdout);
    assert_eq!(
        text[0],
        "a lookup finds 32 of 70 tokens: 32 in L1, 0 in tiers; from chunk 2 (token 32) on it misses: \
         never stored, as far back as the server remembers"
    );
    assert_eq!(
        text[1],
        "model     cli/explain#1, world size 1, chunks of 16 tokens"
    );
    for line in [
        "          chunks 0 to 1 (tokens 0 to 31): in L1",
        "          chunks 2 to 3 (tokens 32 to 63): never stored, as far back as the server remembers",
    ] {
        assert!(text.iter().any(|other| other == line), "{text:?}");
    }
    let last = text.last().unwrap();
    assert!(
        last.ends_with("s ago: found 32 of 64 tokens; this prompt's first chunk; cli/explain#1"),
        "{last}"
    );
    let words = list.trim_matches(['[', ']']);
    let json = explain(&server, &[&asked[..], &["--json"]].concat(), words);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (&json["hit_tokens"], &json["chunks"]),
        (&32.into(), &4.into())
    );
    // Another tenant has none of it, and a name of no worker is said to be one.
    let stranger = explain(&server, &["--model", "cli/explain"], &list);
    let text = lines(&stranger.stdout).join("\n");
    assert!(text.starts_with("a lookup finds 0 of 70 tokens"), "{text}");
    let none = explain(&server, &["--model", "none", "--chunk-size", "16"], &list);
    let text = lines(&none.stdout).join("\n");
    let why = "a lookup finds nothing, whatever is stored: no worker of model none is registered with world size 1 and chunks of 16 tokens";
    assert!(text.starts_with(why), "{text}");
}

#[test]
fn wrong_questions_have_one_line_each() {
    let server = Server::start_with(&["--shm-name", ""]);
    let model = ["--model", "m"];
    let text = complaint(&explain(&server, &model, "1 x"), 1);
    assert_eq!(
        text,
        "kvtier explain: --tokens: standard input: \"x\" is not a token id; allowed: token ids from 0 to 4294967295: \
         invalid digit found in string"
    );
    let text = complaint(&explain(&server, &["--model", "a@b"], "1"), 1);
    assert!(
        text.contains("refuses: 400, model_name must not contain '@'"),
        "{text}"
    );
    let missing = kvtier(&["explain", "--tokens", "/nowhere", "--model", "m"]);
    let text = complaint(&missing, 1);
    assert!(text.contains("--tokens: /nowhere cannot be read"), "{text}");
    let text = complaint(&kvtier(&["explain"]), 2);
    assert!(text.contains("--tokens <FILE> --model <NAME>"), "{text}");
}
