//! GPUs in the status: state and transfers of each, and how much of L1 is pinned.

use std::fmt::Write as _;

use indicatif::{HumanBytes, HumanCount};
use serde_json::Value;

use super::{line, text};

/// Appends the lines; none for a server without GPU fields.
pub(super) fn write(out: &mut String, cuda: &Value) {
    let gpus = match cuda["available"].as_bool() {
        Some(true) => cuda["gpus"].as_array().into_iter().flatten(),
        Some(false) => return line(out, "GPUs", "none", &[text(&cuda["reason"])]),
        None => return,
    };
    let mut more = Vec::new();
    if let Some(version) = cuda["driver_version"].as_u64() {
        more.push(format!("CUDA {}.{}", version / 1000, version % 1000 / 10));
    }
    more.extend(pinning(&cuda["pinning"]));
    let gpus: Vec<_> = gpus.map(gpu).collect();
    line(out, "GPUs", &gpus.len().to_string(), &more);
    for gpu in gpus {
        let _ = writeln!(out, "  {gpu}");
    }
}

/// None before the first GPU is in use.
fn pinning(pinning: &Value) -> Option<String> {
    let (pinned, total) = (
        pinning["pinned_bytes"].as_u64()?,
        pinning["total_bytes"].as_u64()?,
    );
    let how = match (pinning["under_way"] == Value::Bool(true), &pinning["error"]) {
        (true, _) => ", in progress".to_owned(),
        (false, Value::Null) => String::new(),
        (false, error) => format!(", NOT ALL: {}", text(error)),
    };
    let (pinned, total) = (HumanBytes(pinned), HumanBytes(total));
    Some(format!("{pinned} of {total} of L1 pinned{how}"))
}

fn gpu(gpu: &Value) -> String {
    let mut parts = vec![format!("{}: {}", gpu["ordinal"], text(&gpu["name"]))];
    let state = &gpu["state"];
    if state.is_null() {
        // Its first worker could not use it, for example because the driver hangs.
        parts.push(match gpu["error"].as_str() {
            Some(error) => format!("NOT HEALTHY: {error}"),
            None => "no worker so far".to_owned(),
        });
        return parts.join(", ");
    }
    parts.push(match state["healthy"].as_bool() {
        Some(true) => "healthy".to_owned(),
        _ => format!("NOT HEALTHY: {}", text(&state["error"])),
    });
    if let Some(open) = state["open_allocations"].as_u64() {
        parts.push(format!("{} allocations open", HumanCount(open)));
    }
    for (direction, done) in [("store", "stored"), ("retrieve", "retrieved")] {
        let moved = state["moved"].as_array().into_iter().flatten();
        let moved = moved.filter(|moved| moved["direction"] == direction);
        let bytes = moved.filter_map(|moved| moved["bytes"].as_u64()).sum();
        let in_flight = state["transfers_under_way"][direction].as_u64();
        parts.push(format!(
            "{} {done} ({} in flight)",
            HumanBytes(bytes),
            in_flight.unwrap_or(0)
        ));
    }
    if let Some(late) = state["event_timeouts"].as_u64().filter(|late| *late > 0) {
        parts.push(format!("{} events timed out", HumanCount(late)));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn written(cuda: &Value) -> String {
        let mut out = String::new();
        write(&mut out, cuda);
        out
    }

    #[test]
    fn gpus_are_listed_with_their_errors() {
        let moved = |direction: &str, bytes: u64| json!({ "direction": direction, "executor": "batch", "bytes": bytes });
        let mut cuda = json!({
            "available": true, "driver_version": 12080,
            "pinning": { "pinned_bytes": 1 << 30, "total_bytes": 4_u64 << 30, "under_way": true, "error": null },
            "gpus": [
                { "ordinal": 0, "name": "A", "in_use": true, "state": {
                    "healthy": true, "open_allocations": 3, "event_timeouts": 0,
                    "transfers_under_way": { "store": 2, "retrieve": 0 },
                    "moved": [moved("store", 1 << 20), moved("retrieve", 3 << 20), moved("store", 1 << 20)],
                } },
                { "ordinal": 1, "name": "B", "in_use": true, "state": {
                    "healthy": false, "error": "CUDA_ERROR_ILLEGAL_ADDRESS", "open_allocations": 0, "event_timeouts": 4,
                    "transfers_under_way": { "store": 0, "retrieve": 1 }, "moved": [],
                } },
                { "ordinal": 2, "name": "C", "in_use": false, "error": null, "state": null },
                { "ordinal": 3, "name": "D", "in_use": false, "error": "its trial has not ended in 60s", "state": null },
            ],
        });
        let gpus = "
  0: A, healthy, 3 allocations open, 2.00 MiB stored (2 in flight), 3.00 MiB retrieved (0 in flight)
  1: B, NOT HEALTHY: CUDA_ERROR_ILLEGAL_ADDRESS, 0 allocations open, 0 B stored (0 in flight), \
0 B retrieved (1 in flight), 4 events timed out
  2: C, no worker so far
  3: D, NOT HEALTHY: its trial has not ended in 60s
";
        let first = "GPUs      4, CUDA 12.8";
        let pinned = "1.00 GiB of 4.00 GiB of L1 pinned";
        assert_eq!(
            written(&cuda),
            format!("{first}, {pinned}, in progress{gpus}")
        );
        cuda["pinning"]["under_way"] = json!(false);
        assert_eq!(written(&cuda), format!("{first}, {pinned}{gpus}"));
        cuda["pinning"]["error"] = json!("no memory");
        assert_eq!(
            written(&cuda),
            format!("{first}, {pinned}, NOT ALL: no memory{gpus}")
        );
        cuda["pinning"] = Value::Null;
        assert_eq!(written(&cuda), format!("{first}{gpus}"));
    }

    #[test]
    fn missing_gpus_have_reason_and_missing_fields_no_line() {
        let none = json!({ "available": false, "reason": "off" });
        assert_eq!(written(&none), "GPUs      none, off\n");
        assert_eq!(written(&Value::Null), "");
    }
}
