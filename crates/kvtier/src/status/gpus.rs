//! GPUs in the status: state and transfers of each, and how much of L1 is pinned.

use std::fmt::Write as _;

use indicatif::{HumanBytes, HumanCount};
use kvtier_observe::api::{CudaStatus, Gpu, Pinning};

use super::line;

/// Appends the lines.
pub(super) fn write(out: &mut String, cuda: &CudaStatus) {
    let gpus = match &cuda.gpus {
        Some(gpus) if cuda.available => gpus,
        _ => return line(out, "GPUs", "none", [cuda.reason.clone()]),
    };
    let version = gpus.driver_version;
    let version = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    let more = [Some(version), gpus.pinning.as_ref().map(pinning)];
    line(out, "GPUs", &gpus.gpus.len().to_string(), more);
    for status in &gpus.gpus {
        let _ = writeln!(out, "  {}", gpu(status));
    }
}

fn pinning(pinning: &Pinning) -> String {
    let how = match (pinning.is_running, &pinning.error) {
        (true, _) => ", in progress".to_owned(),
        (false, None) => String::new(),
        (false, Some(error)) => format!(", NOT ALL: {error}"),
    };
    let pinned = HumanBytes(pinning.pinned_bytes);
    let total = HumanBytes(pinning.total_bytes);
    format!("{pinned} of {total} of L1 pinned{how}")
}

fn gpu(gpu: &Gpu) -> String {
    let mut parts = vec![format!("{}: {}", gpu.ordinal, gpu.name)];
    let not_healthy = |error: &Option<String>| {
        let error = error.as_deref().unwrap_or("unknown error");
        format!("NOT HEALTHY: {error}")
    };
    let Some(state) = &gpu.state else {
        // Its first worker could not use it, for example because the driver hangs.
        parts.push(match &gpu.error {
            Some(_) => not_healthy(&gpu.error),
            None => "no worker so far".to_owned(),
        });
        return parts.join(", ");
    };
    parts.push(if state.healthy {
        "healthy".to_owned()
    } else {
        not_healthy(&state.error)
    });
    if let Some(open) = state.open_allocations {
        parts.push(format!("{} allocations open", HumanCount(open as u64)));
    }
    let in_flight = &state.transfers_in_flight;
    for (direction, done, in_flight) in [
        ("store", "stored", in_flight.store),
        ("retrieve", "retrieved", in_flight.retrieve),
    ] {
        let moved = state.moved.iter();
        let moved = moved.filter(|moved| moved.direction == direction);
        let bytes = HumanBytes(moved.map(|moved| moved.bytes).sum());
        parts.push(format!("{bytes} {done} ({in_flight} in flight)"));
    }
    if state.event_timeouts > 0 {
        let late = HumanCount(state.event_timeouts);
        parts.push(format!("{late} events timed out"));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn written(cuda: &Value) -> String {
        let mut out = String::new();
        write(&mut out, &serde_json::from_value(cuda.clone()).unwrap());
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
    fn missing_gpus_have_a_reason() {
        let none = json!({ "available": false, "reason": "off" });
        assert_eq!(written(&none), "GPUs      none, off\n");
    }
}
