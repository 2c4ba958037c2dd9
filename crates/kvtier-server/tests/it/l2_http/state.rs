//! Which tiers there are, how they are, and what they do.

use std::time::{Duration, Instant};

use kvtier_client::Scope;
use serde_json::json;

use super::MOCK;
use crate::http::{json_of, request};
use crate::l2::{fs, hits, settle, store, with_tiers};
use crate::metrics::{parse_metrics, value_of};
use crate::support::{CHUNK, PATIENCE, TestServer, prompt, wait_until};

#[test]
fn adapters_are_listed_in_order() {
    let adapters = |server: &TestServer| json_of(server, "GET", "/config/adapters", "");
    let alone = TestServer::start(&[]);
    assert_eq!(adapters(&alone), (200, json!({ "adapters": [] })));
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let expected = json!({ "adapters": [
        { "index": 0, "type_name": "fs", "name": "fs-0", "tier": "l2", "primary": true, "reconfigurable": false },
        { "index": 1, "type_name": "mock", "name": "mock-1", "tier": "l2", "primary": false, "reconfigurable": false },
    ] });
    assert_eq!(adapters(&server), (200, expected));
}

#[test]
fn status_reports_health_of_each_tier() {
    let directory = tempfile::tempdir().unwrap();
    let bounded = json!({
        "type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100,
        "eviction": { "eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.3 },
    });
    let server = with_tiers(&[&fs(directory.path()), &bounded.to_string()], &[]);
    let mut worker = server.engine_driven(1, &Scope::new("status").with_salt("t"));
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    let started = Instant::now();
    let manager = loop {
        let status = json_of(&server, "GET", "/status", "").1;
        let manager = status["storage_manager"].clone();
        if manager["l2_adapters"][0]["recovery"]["state"] == "done" {
            break manager;
        }
        assert!(started.elapsed() < PATIENCE, "{status}");
    };
    let len = worker.chunk_bytes() as u64;
    let [fs, mock] = [0, 1].map(|number| &manager["l2_adapters"][number]);
    // Those of LMCache's that are known to be read.
    for (status, key, expected) in [
        (fs, "is_healthy", json!(true)),
        (fs, "type", json!("FSL2Adapter")),
        (fs, "base_path", json!(directory.path())),
        (fs, "use_odirect", json!(false)),
        (mock, "type", json!("MockL2Adapter")),
        (mock, "stored_object_count", json!(3)),
        (mock, "locked_key_count", json!(0)),
        (mock, "max_capacity_bytes", json!(1 << 30)),
        (fs, "type_name", json!("fs")),
        (fs, "name", json!("fs-0")),
        (fs, "stored_object_count", json!(3)),
        (fs, "max_capacity_bytes", json!(0)),
        (fs, "usage_fraction", json!(-1.0)),
        (fs, "cache_salt_count", json!(1)),
        (fs, "is_full", json!(false)),
        (fs, "pending_objects", json!(0)),
        (fs, "dropped_objects", json!(0)),
        (fs, "stores_in_flight", json!(0)),
        (fs, "loads_in_flight", json!(0)),
        (fs, "store_failures", json!({})),
        (fs, "load_failures", json!({})),
    ] {
        assert_eq!(status[key], expected, "{key} of {}", status["name"]);
    }
    assert!(mock["current_size_bytes"].as_u64().unwrap() >= 3 * len);
    assert_eq!(fs["breaker"]["load"]["state"], "closed");
    assert_eq!(manager["num_l2_adapters"], 2);
    let eviction = &manager["l2_eviction_controller"]["adapters"];
    assert_eq!(eviction.as_array().unwrap().len(), 1);
    for (key, expected) in [
        ("adapter", json!("mock-1")),
        ("eviction_policy", json!("LRU")),
        ("trigger_watermark", json!(0.9)),
        ("eviction_ratio", json!(0.3)),
        ("total_bytes_used", mock["current_size_bytes"].clone()),
        ("total_capacity_bytes", json!(1 << 30)),
        ("num_cache_salt_buckets", json!(1)),
        ("current_usage", mock["usage_fraction"].clone()),
    ] {
        assert_eq!(eviction[0][key], expected, "{key}");
    }
}

#[test]
fn tier_operations_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("metrics/tiers").with_salt("t");
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let mut worker = server.engine_driven(1, &scope);
    let known = prompt(1, 4);
    store(&mut worker, &known, 1);
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &known, "r"), 4);
    // In L1 from now on.
    assert_eq!(hits(worker.connection(), &scope, &known, "s"), 4);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let value = |name: &str, label: &str| value_of(&metrics, name, label);
    let names = include_str!("../../vectors/metrics_names.txt").lines();
    for line in names.filter(|line| line.contains("_l2_")) {
        let (name, kind) = line.split_once(' ').unwrap();
        if name == "lmcache_mp_l2_evicted_objects_chunks_total" {
            // Nothing was evicted here.
            continue;
        }
        let there = metrics.iter().any(|metric| {
            let base = metric.name.strip_suffix("_count").unwrap_or(&metric.name);
            base == name && metric.kind == kind
        });
        assert!(there, "{name} is missing, or no {kind}");
    }
    let (tenant, fs, mock) = (
        r#"cache_salt="t""#,
        r#"l2_name="fs-0""#,
        r#"l2_name="mock-1""#,
    );
    let tokens = (4 * CHUNK) as f64;
    for (name, label, expected) in [
        ("lmcache_mp_lookup_hit_tokens_total", tenant, 2.0 * tokens),
        ("lmcache_mp_lookup_hit_l1_tokens_total", tenant, tokens),
        ("lmcache_mp_lookup_hit_l2_tokens_total", tenant, tokens),
        ("lmcache_mp_lookup_hit_l1_keys_total", tenant, 4.0),
        ("lmcache_mp_lookup_hit_l2_keys_total", tenant, 4.0),
        // Both tiers store, the first one loads.
        ("lmcache_mp_l2_store_submitted_requests_total", "", 2.0),
        (
            "lmcache_mp_l2_store_submitted_objects_chunks_total",
            tenant,
            8.0,
        ),
        (
            "lmcache_mp_l2_store_completed_objects_chunks_total",
            tenant,
            8.0,
        ),
        ("lmcache_mp_l2_store_completed_requests_total", fs, 1.0),
        ("lmcache_mp_l2_store_completed_requests_total", mock, 1.0),
        (
            "lmcache_mp_l2_store_throughput_GB_per_second_count",
            mock,
            1.0,
        ),
        ("lmcache_mp_l2_prefetch_lookup_requests_total", "", 1.0),
        (
            "lmcache_mp_l2_prefetch_lookup_objects_chunks_total",
            tenant,
            4.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_submitted_requests_total",
            "",
            1.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total",
            tenant,
            4.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_completed_chunks_total",
            tenant,
            4.0,
        ),
        ("lmcache_mp_l2_load_completed_requests_total", fs, 1.0),
        ("lmcache_mp_l2_load_throughput_GB_per_second_count", fs, 1.0),
        ("lmcache_mp_num_inflight_l2_stores", fs, 0.0),
        (
            "lmcache_mp_num_inflight_l2_loads",
            r#"adapter_index="1""#,
            0.0,
        ),
        ("lmcache_mp_inflight_load_memory_usage_bytes", fs, 0.0),
        ("lmcache_mp_l2_store_adapters", r#"state="active""#, 2.0),
        (
            "lmcache_mp_l2_prefetch_adapters",
            r#"state="draining""#,
            0.0,
        ),
        ("kvtier_l2_objects", fs, 4.0),
        ("kvtier_l2_stored_objects_total", mock, 4.0),
        ("kvtier_l2_looked_up_objects_total", fs, 4.0),
        ("kvtier_l2_looked_up_objects_total", mock, 0.0),
        ("kvtier_l2_found_objects_total", fs, 4.0),
        ("kvtier_l2_loaded_objects_total", fs, 4.0),
        ("kvtier_l2_unverified_objects_total", fs, 0.0),
        ("kvtier_l2_dropped_objects_total", fs, 0.0),
        ("kvtier_l2_queued_bytes", fs, 0.0),
        ("kvtier_l2_capacity_bytes", mock, f64::from(1 << 30)),
        ("kvtier_l2_healthy", fs, 1.0),
        ("kvtier_l2_full", fs, 0.0),
        ("kvtier_l2_prefetches", r#"phase="load""#, 0.0),
        (
            "kvtier_l2_call_duration_seconds_count",
            r#"call="lookup",l2_name="fs-0""#,
            1.0,
        ),
        (
            "kvtier_l2_call_duration_seconds_count",
            r#"call="store",l2_name="mock-1""#,
            1.0,
        ),
        (
            "kvtier_l2_breaker_open",
            r#"call="store",l2_name="fs-0""#,
            0.0,
        ),
        (
            "kvtier_l2_late_calls_total",
            r#"call="load",l2_name="fs-0""#,
            0.0,
        ),
    ] {
        assert_eq!(value(name, label), expected, "{name} {label}");
    }
    let used = server.readings().tiers[0].used_bytes as f64;
    assert_eq!(value("lmcache_mp_l2_usage_bytes", fs), used);
    assert!(used >= 4.0 * worker.chunk_bytes() as f64);
}

#[test]
fn tier_failures_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("metrics/failures");
    let failing = format!(
        r#"{{"type":"fault_inject","gap_indices":[1],"inner":{}}}"#,
        fs(directory.path())
    );
    let server = with_tiers(&[&failing], &[]);
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 3), "r"), 1);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let sum = |name: &str| -> f64 {
        let found = metrics.iter().filter(|metric| metric.name == name);
        found.map(|metric| metric.value).sum()
    };
    assert_eq!(sum("lmcache_mp_l2_prefetch_failure_chunks_total"), 1.0);
    assert!(sum("kvtier_l2_load_failures_total") >= 1.0);
    let (_, status) = json_of(&server, "GET", "/status", "");
    let tier = &status["storage_manager"]["l2_adapters"][0];
    assert!(
        !tier["load_failures"].as_object().unwrap().is_empty(),
        "{tier}"
    );
}

#[test]
fn health_warns_of_full_tier() {
    let scope = Scope::new("health/full");
    let full = format!(
        r#"{{"type":"fault_inject","faults":[{{"kind":"fail","operation":"store","error":"full","limit":3}}],"inner":{MOCK}}}"#
    );
    let server = with_tiers(&[&full], &[]);
    let mut worker = server.engine_driven(1, &scope);
    let health = || json_of(&server, "GET", "/healthcheck", "");
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    let warning = "tier fault_inject-0 is full: objects are not stored there";
    let warned = json!({ "status": "healthy", "warnings": [warning] });
    assert_eq!(health(), (200, warned));
    store(&mut worker, &prompt(2, 3), 1);
    settle(&server);
    assert_eq!(health(), (200, json!({ "status": "healthy" })));
}

#[test]
fn hit_stores_what_a_tier_could_not_store() {
    let scope = Scope::new("stored/later");
    let away = format!(
        r#"{{"type":"fault_inject","retries":0,"faults":[{{"kind":"fail","operation":"store","error":"unavailable","limit":3}}],"inner":{MOCK}}}"#
    );
    let server = with_tiers(&[&away], &[]);
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    server.pass(Duration::from_secs(2));
    let mut hits = |request| hits(worker.connection(), &scope, &prompt(1, 3), request);
    assert_eq!(hits("first"), 3);
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits("from the tier"), 3);
}

#[test]
fn health_names_failed_tier_and_stays_200() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    let failed = format!(r#"{{"type":"resp","unix_socket":"{}"}}"#, absent.display());
    let server = with_tiers(&[MOCK, &failed], &[]);
    let healthy = json!({ "status": "healthy" });
    let health = || {
        let (code, health) = json_of(&server, "GET", "/healthcheck", "");
        assert_eq!(code, 200);
        health
    };
    // The first connection may not have been tried yet.
    wait_until("the name of the tier", || health() != healthy);
    let named = json!({ "status": "healthy", "failed_tiers": ["resp-1"] });
    assert_eq!(health(), named);
    let scraped = parse_metrics(&request(&server, "GET", "/metrics", "").2);
    for (tier, is_healthy) in [("mock-0", 1.0), ("resp-1", 0.0)] {
        let labels = format!(r#"l2_name="{tier}""#);
        assert_eq!(value_of(&scraped, "kvtier_l2_healthy", &labels), is_healthy);
    }
}
