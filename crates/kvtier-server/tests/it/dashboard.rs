//! The dashboard's events and tenants, as its page reads them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use kvtier_client::Scope;
use serde_json::{Value, json};

use crate::http::{json_of, request};
use crate::l2::{settle, store, with_tiers};
use crate::support::{PATIENCE, Steps as _, TestServer, given_stored, prompt};

/// A stream of events.
struct Events(BufReader<TcpStream>);

impl Events {
    fn open(server: &TestServer) -> Self {
        let mut stream = TcpStream::connect(server.http_address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut events = Self(BufReader::new(stream));
        let head = events.line().unwrap();
        assert_eq!(head, "HTTP/1.1 200 OK");
        while !events.line().unwrap().is_empty() {}
        events
    }

    /// None at the end.
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let length = self.0.read_line(&mut line).unwrap();
        (length > 0).then(|| line.trim_end().to_owned())
    }

    /// The data of the next event, which is one chunk of the body; none at the end.
    fn next(&mut self, name: &str) -> Option<Value> {
        let length = usize::from_str_radix(&self.line()?, 16).unwrap();
        let mut chunk = vec![0; length + 2];
        self.0.read_exact(&mut chunk).unwrap();
        let text = String::from_utf8(chunk).unwrap();
        let event = text.strip_prefix(&format!("event: {name}\ndata: "));
        let data = event.map(|event| event.strip_suffix("\n\n\r\n").unwrap());
        (length > 0).then(|| serde_json::from_str(data.unwrap()).unwrap())
    }
}

#[test]
fn events_have_the_history_and_the_state() {
    let (server, scope, mut worker, prompt) = given_stored("model", 3);
    let mut events = Events::open(&server);
    let history = events.next("history").unwrap();
    assert_eq!(history["role"], "admin");
    assert_eq!(history["caller"], Value::Null);
    assert_eq!(history["capacity"], 1800);
    assert_eq!(history["series"].as_object().unwrap().len(), 17);
    // At once, not after an interval.
    let tick = events.next("tick").unwrap();
    let (_, status) = json_of(&server, "GET", "/status", "");
    let shown = &tick["status"]["storage_manager"];
    for key in ["l1_manager", "l1_eviction_controller", "l2_adapters"] {
        assert_eq!(shown[key], status["storage_manager"][key], "{key}");
    }
    assert_eq!(tick["health"], json!({ "status": "healthy" }));
    assert_eq!(shown["l1_manager"]["total_object_count"], 3);
    assert_eq!(
        tick["status"]["non_cuda_context_meta"]["1"]["model_name"],
        *scope.model_name
    );
    assert_eq!(shown["l1_managers"], json!({}));
    // What happens is in a later one, and in the history.
    let mut lookups = 0;
    let traffic = loop {
        worker.lookup(&prompt, &format!("r{lookups}")).unwrap();
        lookups += 1;
        let tick = events.next("tick").unwrap();
        if tick["traffic"]["lookups"]["per_second"].as_f64() > Some(0.0) {
            break tick["traffic"].clone();
        }
    };
    assert_eq!(traffic["hit_rate"], 1.0);
    assert!(traffic["lookups"]["p99"].as_f64() <= Some(10.0));
    let again = Events::open(&server).next("history").unwrap();
    let points = again["series"]["lookups"].as_array().unwrap();
    assert_eq!(json!(points.len()), again["sequence"]);
    assert!(
        points.iter().any(|point| point.as_f64() > Some(0.0)),
        "{points:?}"
    );
    worker.close().unwrap();
    server.assert_sound();
}

// proves: docs/operate.md#dashboard
#[test]
fn latest_lookups_say_what_they_missed() {
    let (server, _, mut worker, stored) = given_stored("model", 3);
    let unknown = prompt(2, 2);
    worker.lookup(&stored, "found").unwrap();
    worker.lookup(&unknown, "unknown").unwrap();
    let cleared = request(&server, "POST", "/cache/clear", r#"{"force": true}"#);
    assert_eq!(cleared.0, 200);
    worker.lookup(&stored, "cleared").unwrap();
    worker.lookup(&prompt(3, 1), "early").unwrap();
    worker.stored(&prompt(3, 1), 0..1, 1);
    let mut events = Events::open(&server);
    events.next("history").unwrap();
    let tick = events.next("tick").unwrap();
    let lookups = tick["lookups"].as_array().unwrap();
    let seen: Vec<_> = lookups.iter().map(|lookup| &lookup["missing"]).collect();
    assert_eq!(*seen[0], "not there yet, in L1 by now");
    let removed = seen[1].as_str().unwrap();
    assert!(removed.starts_with("removed from L1 0 s ago"), "{seen:?}");
    assert_eq!(
        *seen[2],
        "never stored, as far back as the server remembers"
    );
    assert_eq!(*seen[3], Value::Null);
    assert_eq!(lookups[3]["hit_tokens"], 48);
    assert_eq!(lookups[3]["cache_salt"], "_default");
    worker.close().unwrap();
}

/// Names of the tenants of an answer.
fn listed(server: &TestServer, query: &str) -> (Value, Vec<String>) {
    let (status, list) = json_of(server, "GET", &format!("/tenants{query}"), "");
    assert_eq!(status, 200, "{list}");
    let tenants = list["tenants"].as_array().unwrap();
    let names = tenants
        .iter()
        .map(|tenant| tenant["cache_salt"].as_str().unwrap().to_owned());
    let counts = json!([list["total"], list["matching"]]);
    (counts, names.collect())
}

// proves: docs/operate.md#dashboard
#[test]
fn tenants_are_listed_in_the_order_asked_for() {
    let mock = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":100}"#;
    let server = with_tiers(&[mock], &["--eviction-policy", "IsolatedLRU"]);
    let hostile = "<img src=x onerror=alert(1)>";
    for (number, (name, chunks)) in (1..).zip([("small", 1), (hostile, 3), ("Large", 5)]) {
        let scope = Scope::new("m").with_salt(name);
        let mut worker = server.engine_driven(number, &scope);
        store(&mut worker, &prompt(1, chunks), 1);
        worker.close().unwrap();
    }
    settle(&server);
    for (name, limit) in [("empty", "1MiB"), ("small", "16KiB"), ("Large", "1GiB")] {
        let body = json!({ "limit_gb": limit }).to_string();
        assert_eq!(
            request(&server, "PUT", &format!("/quota/{name}"), &body).0,
            200
        );
    }
    let all = json!([4, 4]);
    for (query, expected) in [
        ("", ["Large", hostile, "small", "empty"]),
        ("?order=asc", ["empty", "small", hostile, "Large"]),
        ("?sort=name", [hostile, "Large", "empty", "small"]),
        (
            "?sort=name&order=desc",
            ["small", "empty", "Large", hostile],
        ),
    ] {
        let (counts, names) = listed(&server, query);
        assert_eq!(
            (&counts, &names[..]),
            (&all, &expected.map(str::to_owned)[..]),
            "{query}"
        );
    }
    assert_eq!(listed(&server, "?sort=share").1[0], "small");
    assert_eq!(
        listed(&server, "?search=LARGE"),
        (json!([4, 1]), vec!["Large".to_owned()])
    );
    assert_eq!(listed(&server, "?offset=1&limit=2").1, [hostile, "small"]);
    assert_eq!(listed(&server, "?offset=4").1, [""; 0]);
    for query in [
        "?sort=bytes",
        "?order=up",
        "?limit=0",
        "?limit=501",
        "?offset=-1",
    ] {
        let (status, answer) = json_of(&server, "GET", &format!("/tenants{query}"), "");
        assert_eq!(status, 422, "{query}: {answer}");
    }
    server.assert_sound();
}
