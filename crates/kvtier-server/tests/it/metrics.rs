//! `/metrics` as Prometheus reads it.

use kvtier_client::{InstanceId, Scope};

use crate::http::request;
use crate::support::{Steps as _, TestServer, prompt, range};

/// Why a metric of LMCache's busy server is absent after a store, a lookup and a retrieve here; none if it must be there.
fn absent(name: &str) -> Option<&'static str> {
    let reasons = [
        ("python_", "of another language"),
        (
            "process_",
            "of another language's library; the system tells the same",
        ),
        ("target_info", "of the telemetry library"),
        ("lmcache_mp_event_bus_", "there is no bus of events"),
        ("lmcache_mp_active_p2p_", "there are no other servers"),
        (
            "lmcache_mp_l0_l1_",
            "request latencies tell it, without sampling",
        ),
        ("lmcache_mp_l1_chunk_", "sampled lives of chunks"),
        ("lmcache_mp_real_reuse_", "sampled lives of chunks"),
        (
            "lmcache_mp_l1_evicted_chunks",
            "counted without tenants, under our own name",
        ),
    ];
    reasons
        .into_iter()
        .find(|(prefix, _)| name.starts_with(prefix))
        .map(|(_, reason)| reason)
}

#[test]
fn metrics_have_the_names_of_lmcaches_and_count() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("http/metrics").with_salt("tenant \"one\"\n");
    let mut worker = server.engine_driven(1, &scope);
    // Workers of one model name whose objects differ in layout would find only what both have.
    let mut pages = server.lmcache_driven(2, &Scope::new("http/metrics/pages").with_salt("pages"));
    let prompt = prompt(1, 2);
    worker.stored(&prompt, 0..2, 1);
    assert!(
        pages
            .store(&prompt, range(0..2), "s", &[1, 2, 3, 4, 5, 6, 7, 8])
            .unwrap()
    );
    assert_eq!(pages.lookup(&prompt, "p").unwrap(), 2);
    assert!(
        pages
            .retrieve(&prompt, range(0..2), "p", &[1, 2, 3, 4, 5, 6, 7, 8], 0)
            .unwrap()
    );
    drop(pages);
    worker
        .connection()
        .unregister_kv_cache(InstanceId(2))
        .unwrap();
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    assert!(
        worker
            .retrieve(&prompt, range(0..2), "r", |_, _| {})
            .unwrap()
            .is_some()
    );

    let (status, head, text) = request(&server, "GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(
        head.contains("\r\ncontent-type: application/openmetrics-text"),
        "{head}"
    );
    let metrics = parse_metrics(&text);
    let names = std::fs::read_to_string(format!(
        "{}/tests/vectors/metrics_names.txt",
        env!("CARGO_MANIFEST_DIR")
    ));
    for line in names.unwrap().lines() {
        let (name, kind) = line.split_once(' ').unwrap();
        if name.contains("_l2_") {
            // There is no tier here; a test of its own has some.
            continue;
        }
        match absent(name) {
            Some(reason) => assert!(
                !metrics.iter().any(|metric| metric.name == name),
                "{name} is there: {reason}"
            ),
            None => assert!(
                metrics
                    .iter()
                    .any(|metric| metric.name == name && metric.kind == kind),
                "{name} is missing, or no {kind}"
            ),
        }
    }
    let value = |name: &str, label: &str| value_of(&metrics, name, label);
    let tenant = r#"cache_salt="tenant \"one\"\n""#;
    for (name, expected) in [
        ("lmcache_mp_lookup_requested_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_l1_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_l1_keys_total", 2.0),
        ("lmcache_mp_lookups_requests_total", 1.0),
        ("lmcache_mp_l1_read_chunks_total", 2.0),
        ("lmcache_mp_l1_write_chunks_total", 2.0),
        ("lmcache_mp_num_chunks_loaded_total", 2.0),
    ] {
        assert_eq!(value(name, tenant), expected, "{name}");
    }
    for name in [
        "submitted_stores",
        "finished_stores",
        "submitted_retrieves",
        "finished_retrieves",
    ] {
        assert_eq!(
            value(&format!("lmcache_mp_num_{name}_total"), r#"device="cpu""#),
            2.0,
            "{name}"
        );
    }
    assert_eq!(
        value("lmcache_mp_l1_memory_usage_bytes", "dram"),
        server.readings().used_bytes as f64
    );
    assert_eq!(value("kvtier_accounting_errors_total", ""), 0.0);
    for operation in [
        "lookup",
        "store",
        "retrieve",
        "prepare_store",
        "commit_store",
        "prepare_retrieve",
    ] {
        let label = format!(r#"operation="{operation}""#);
        assert!(
            value("kvtier_request_duration_seconds_count", &label) >= 1.0,
            "{operation}"
        );
    }
}

#[test]
fn client_chosen_names_do_not_fill_metrics() {
    let server = TestServer::start(&[]);
    let mut client = server.connect();
    let prompt = prompt(1, 1);
    for number in 0..3000 {
        let scope = Scope::new(format!("model {number}")).with_salt(format!("salt {number}"));
        client
            .lookup(&scope.scheduler_key(&prompt, range(0..1), "r"))
            .unwrap();
    }
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let series = text.lines().filter(|line| line.contains("model ")).count();
    assert!((1..=1100).contains(&series), "{series} series");
}

/// One sample.
pub struct Metric {
    pub name: String,
    pub kind: String,
    pub labels: String,
    pub value: f64,
}

/// The only sample of this name whose labels have this in them.
pub fn value_of(metrics: &[Metric], name: &str, label: &str) -> f64 {
    let mut found = metrics
        .iter()
        .filter(|metric| metric.name == name && metric.labels.contains(label));
    let value = found
        .next()
        .unwrap_or_else(|| panic!("no {name} with {label}"))
        .value;
    assert!(found.next().is_none(), "{name} with {label} is there twice");
    value
}

/// Every sample, with the kind of its family. Fails for text that Prometheus would refuse.
pub fn parse_metrics(text: &str) -> Vec<Metric> {
    let mut kinds: Vec<(String, String)> = Vec::new();
    let mut metrics = Vec::new();
    let mut ended = false;
    for line in text.lines() {
        assert!(!ended, "{line:?} behind the end");
        ended = line == "# EOF";
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(
                !kinds.iter().any(|(known, _)| known == name),
                "{name} is described twice"
            );
            kinds.push((name.into(), kind.into()));
        } else if !line.starts_with("# ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = match series.split_once('{') {
                Some((name, labels)) => (name, labels.strip_suffix('}').unwrap()),
                None => (series, ""),
            };
            assert!(
                name.chars()
                    .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'),
                "{line:?}"
            );
            let family = kinds.iter().find(|(family, kind)| {
                let suffixes: &[&str] = match kind.as_str() {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                suffixes
                    .iter()
                    .any(|suffix| name.strip_suffix(suffix) == Some(family))
            });
            let (_, kind) = family.unwrap_or_else(|| panic!("{line:?} belongs to no family"));
            let metric = Metric {
                name: name.into(),
                kind: kind.clone(),
                labels: labels.into(),
                value: value.parse().unwrap(),
            };
            metrics.push(metric);
        }
    }
    assert!(ended, "no end");
    metrics
}
