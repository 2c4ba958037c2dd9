//! The tiers below L1 over HTTP.

mod deletion;
mod listing;
mod prefetches;
mod state;

use std::path::Path;

use kvtier_client::{EngineDrivenWorker, Scope};
use serde_json::{Value, json};

use crate::http::json_of;
use crate::l2::{fs, with_tiers};
use crate::support::TestServer;

const MOCK: &str = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":100}"#;

const OBJECTS: &str = "/cache/objects";

/// A server with a directory as its tier, and a worker.
fn with_worker(directory: &Path, scope: &Scope) -> (TestServer, EngineDrivenWorker) {
    let server = with_tiers(&[&fs(directory)], &[]);
    let worker = server.engine_driven(1, scope);
    (server, worker)
}

/// Every entry of a listing, page by page.
fn list(server: &TestServer, query: &str) -> Vec<Value> {
    let (mut entries, mut token) = (Vec::new(), String::new());
    loop {
        let path = format!("{OBJECTS}?{query}{token}");
        let (status, page) = json_of(server, "GET", &path, "");
        assert_eq!(status, 200, "{path}: {page}");
        entries.extend(page["entries"].as_array().unwrap().iter().cloned());
        match page["next_page_token"].as_str() {
            Some(next) => token = format!("&page_token={next}"),
            None => return entries,
        }
    }
}

fn delete(server: &TestServer, body: &Value) -> Value {
    let (status, answer) = json_of(server, "DELETE", OBJECTS, &body.to_string());
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

/// Deleted, skipped and whether all went well.
fn counts(answer: &Value) -> (u64, u64, bool) {
    let count = |key: &str| answer[key].as_u64().unwrap();
    (
        count("deleted"),
        count("skipped"),
        answer["ok"].as_bool().unwrap(),
    )
}

fn detail(text: &str) -> Value {
    json!({ "detail": text })
}
