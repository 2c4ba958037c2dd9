//! `kvtier status`: a server's `/status` as text.

mod gpus;

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use indicatif::{HumanBytes, HumanCount, HumanDuration};
use serde_json::Value;

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client, refusal};

/// Arguments of `kvtier status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    server: HttpArgs,
    /// Print the server's answer unchanged, as JSON
    #[arg(long)]
    json: bool,
    /// Timeout, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "3", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

/// Prints the status. Exit code 1, with one line on stderr, if the server is not healthy or does not answer.
pub fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let url = args.server.url();
    let outcome = Client::new(url, &args.access, args.timeout).and_then(|client| {
        let is_healthy = status(url, &client, args.json)?;
        Ok((!is_healthy).then(|| reason(&client)))
    });
    match outcome {
        Ok(None) => Ok(ExitCode::SUCCESS),
        Ok(Some(reason)) => {
            out::complain("status", format!("{url} is not healthy: {reason}"));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => {
            out::complain("status", format!("{error:#}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Prints the status; returns whether the server is healthy.
fn status(url: &str, client: &Client, json: bool) -> anyhow::Result<bool> {
    let (code, body) = client.get("/status")?;
    let status: Value = serde_json::from_str(&body)
        .ok()
        .filter(Value::is_object)
        .with_context(|| format!("{url} answers /status with {code} and no JSON object"))?;
    if code != 200 {
        anyhow::bail!("{url}/status returned {}", refusal(code, &body));
    }
    if json {
        writeln!(out::stdout(), "{}", out::json(&status))?;
    } else {
        write!(out::stdout(), "{}", summary(url, &out::shown(&status)))?;
    }
    Ok(status["is_healthy"].as_bool().unwrap_or(false))
}

/// The server's reason for not being healthy.
fn reason(client: &Client) -> String {
    let reason = client
        .get("/healthcheck")
        .ok()
        .and_then(|(_, body)| serde_json::from_str::<Value>(&body).ok())
        .and_then(|body| body["reason"].as_str().map(str::to_owned));
    reason.unwrap_or_else(|| "its status says so".to_owned())
}

/// The lines. Missing fields are left out, so it works with LMCache's own server too.
fn summary(url: &str, status: &Value) -> String {
    let mut out = String::new();
    let health = match status["is_healthy"].as_bool() {
        Some(true) => "healthy",
        _ => "NOT HEALTHY",
    };
    let mut about = Vec::new();
    if let Some(version) = status["version"].as_str() {
        about.push(format!("version {version}"));
    }
    if let Some(name) = status["instance_id"].as_str() {
        about.push(name.to_owned());
    }
    if let Some(seconds) = status["uptime_seconds"].as_u64() {
        about.push(format!(
            "up {}",
            HumanDuration(Duration::from_secs(seconds))
        ));
    }
    line(&mut out, "server", &format!("{url}: {health}"), &about);

    let l1 = &status["storage_manager"]["l1_manager"];
    let count = |value: &Value| HumanCount(value.as_u64().unwrap_or(0)).to_string();
    if let (Some(used), Some(size)) = (
        l1["memory_used_bytes"].as_u64(),
        l1["memory_total_bytes"].as_u64(),
    ) {
        let share = 100.0 * used as f64 / size.max(1) as f64;
        let mut more = vec![
            format!("{} objects", count(&l1["total_object_count"])),
            format!("{} leased", count(&l1["read_locked_count"])),
            format!("{} being written", count(&l1["write_locked_count"])),
        ];
        if let Some(touched) = l1["prefaulted_bytes"]
            .as_u64()
            .filter(|touched| *touched < size)
        {
            more.push(format!("{} pre-faulted", HumanBytes(touched)));
        }
        let text = format!(
            "{} of {} in use ({share:.1} %)",
            HumanBytes(used),
            HumanBytes(size)
        );
        line(&mut out, "L1", &text, &more);
    }
    let eviction = &status["storage_manager"]["l1_eviction_controller"];
    if let Some(policy) = eviction["eviction_policy"].as_str() {
        let mut more = Vec::new();
        if let Some(watermark) = eviction["trigger_watermark"].as_f64() {
            more.push(format!(
                "in the background from {:.0} % on",
                100.0 * watermark
            ));
        }
        line(&mut out, "eviction", policy, &more);
    }
    tiers(&mut out, &status["storage_manager"]);
    gpus::write(&mut out, &status["devices"]["cuda"]);
    quotas(&mut out, &status["quotas"]);
    if let Some(tokens) = status["chunk_size"].as_u64() {
        let hash = status["hash_algorithm"].as_str().unwrap_or("unknown hash");
        line(
            &mut out,
            "chunks",
            &format!("{tokens} tokens"),
            &[hash.to_owned()],
        );
    }
    if let Some(sessions) = status["active_sessions"].as_u64() {
        let mut more = Vec::new();
        if let Some(transfers) = status["pending_transfers"].as_u64() {
            more.push(format!("{transfers} transfers in flight"));
        }
        if let Some(withheld) = status["withheld_transfers"]
            .as_u64()
            .filter(|count| *count > 0)
        {
            more.push(format!("{withheld} abandoned, memory withheld"));
        }
        line(&mut out, "sessions", &sessions.to_string(), &more);
    }
    let workers = workers(status);
    line(&mut out, "workers", &workers.len().to_string(), &[]);
    for worker in workers {
        let _ = writeln!(out, "  {worker}");
    }
    out
}

fn line(out: &mut String, name: &str, text: &str, more: &[String]) {
    let _ = write!(out, "{name:<9} {text}");
    for part in more {
        let _ = write!(out, ", {part}");
    }
    out.push('\n');
}

/// Appends the quotas, if any tier enforces them.
fn quotas(out: &mut String, quotas: &Value) {
    let tiers = quotas["enforced_by"].as_array().into_iter().flatten();
    let tiers: Vec<_> = tiers.filter_map(Value::as_str).collect();
    if tiers.is_empty() {
        return;
    }
    let tenants = HumanCount(quotas["num_tenants"].as_u64().unwrap_or(0));
    let default = match quotas["default_limit_bytes"].as_u64() {
        None => "unlimited".to_owned(),
        Some(bytes) => format!("at most {}", HumanBytes(bytes)),
    };
    let file = match quotas["file"].as_str() {
        None => "until the server ends".to_owned(),
        Some(file) => format!("in {file}"),
    };
    let mode = quotas["mode"].as_str().unwrap_or("unknown");
    let more = [
        format!("{tenants} tenants with one, all others {default}"),
        format!("kept {file}"),
    ];
    line(
        out,
        "quotas",
        &format!("{mode}, of {}", tiers.join(" and ")),
        &more,
    );
}

/// Appends the second tiers: what is queued for them, and one line per tier.
fn tiers(out: &mut String, manager: &Value) {
    let tiers = manager["l2_adapters"].as_array().into_iter().flatten();
    let lines: Vec<_> = tiers.map(tier).collect();
    if lines.is_empty() {
        return;
    }
    let plural = if lines.len() == 1 { "" } else { "s" };
    let mut more = Vec::new();
    let stores = &manager["store_controller"];
    if let Some(waiting) = stores["pending_keys_count"].as_u64() {
        let bytes = stores["pending_bytes"].as_u64();
        let bytes = bytes.map_or(String::new(), |bytes| format!(" ({})", HumanBytes(bytes)));
        more.push(format!(
            "{} objects to be stored{bytes}",
            HumanCount(waiting)
        ));
    }
    if let Some(dropped) = stores["dropped_objects"].as_u64().filter(|n| *n > 0) {
        more.push(format!("{} dropped", HumanCount(dropped)));
    }
    if let Some(loading) = manager["prefetch_controller"]["loading_objects"].as_u64() {
        more.push(format!("{} being loaded", HumanCount(loading)));
    }
    line(out, "L2", &format!("{} tier{plural}", lines.len()), &more);
    for tier in lines {
        let _ = writeln!(out, "  {tier}");
    }
}

/// One tier. The name of its type is LMCache's if the server has no better one.
fn tier(tier: &Value) -> String {
    let kind = tier["type_name"].as_str().or(tier["type"].as_str());
    let kind = kind.unwrap_or("unknown type");
    let mut parts = vec![match tier["name"].as_str() {
        Some(name) => format!("{name}: {kind}"),
        None => kind.to_owned(),
    }];
    parts.push(match tier["is_healthy"].as_bool() {
        Some(true) => "healthy".to_owned(),
        _ => "NOT HEALTHY".to_owned(),
    });
    for (call, breaker) in tier["breaker"].as_object().into_iter().flatten() {
        if let Some(state) = breaker["state"].as_str().filter(|state| *state != "closed") {
            parts.push(format!("breaker of {call}s {state}"));
        }
    }
    if tier["is_full"] == Value::Bool(true) {
        parts.push("FULL".to_owned());
    }
    if let Some(used) = tier["current_size_bytes"].as_u64() {
        parts.push(match tier["max_capacity_bytes"].as_u64() {
            Some(size) if size > 0 => format!(
                "{} of {} in use ({:.1} %)",
                HumanBytes(used),
                HumanBytes(size),
                100.0 * used as f64 / size as f64
            ),
            _ => format!("{} in use", HumanBytes(used)),
        });
    }
    if let Some(objects) = tier["stored_object_count"].as_u64() {
        parts.push(format!("{} objects", HumanCount(objects)));
    }
    if tier["read_only"] == Value::Bool(true) {
        parts.push("read_only".to_owned());
    }
    if let Some(engine) = tier["io_engine"].as_str() {
        parts.push(format!("I/O by {engine}"));
    }
    let recovery = &tier["recovery"];
    match recovery["state"].as_str() {
        Some("running") => parts.push("recovery in progress".to_owned()),
        Some("failed") => parts.push(format!("recovery failed: {}", text(&recovery["error"]))),
        Some("done") => {
            let adopted = recovery["objects"].as_u64().filter(|n| *n > 0);
            parts.extend(adopted.map(|n| format!("{} of them recovered", HumanCount(n))));
        }
        _ => {}
    }
    for (what, failures) in [
        ("stores", &tier["store_failures"]),
        ("loads", &tier["load_failures"]),
    ] {
        let reasons = failures.as_object().into_iter().flatten();
        let reasons: Vec<_> = reasons
            .filter_map(|(reason, times)| Some((reason, times.as_u64()?)))
            .collect();
        let all: u64 = reasons.iter().map(|(_, times)| times).sum();
        if all > 0 {
            let reasons = reasons
                .iter()
                .map(|(reason, times)| format!("{reason} {times}"));
            let reasons = reasons.collect::<Vec<_>>().join(", ");
            parts.push(format!("{} {what} failed ({reasons})", HumanCount(all)));
        }
    }
    parts.join(", ")
}

/// The registered workers and their KV, one line per worker and per group.
fn workers(status: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    let all = |key: &str| status[key].as_object().into_iter().flatten();
    let identity = |id: &String, worker: &Value| {
        format!(
            "{id}: {}, world of {}",
            worker["model_name"].as_str().unwrap_or("unknown model"),
            worker["world_size"]
        )
    };
    let device_of = |id: &String| {
        let device = status["devices"]["of_instances"][id].as_str();
        device.map_or_else(String::new, |device| format!(" on {device}"))
    };
    for (id, worker) in all("cache_context_meta") {
        let layout = &worker["kv_cache_layout"];
        lines.push(format!(
            "{}, lmcache-driven{}, {} layers, {} blocks, {} bytes per token",
            identity(id, worker),
            device_of(id),
            layout["num_layers"],
            layout["num_blocks"],
            layout["cache_size_per_token"]
        ));
        let groups = layout["kernel_groups"].as_array().into_iter().flatten();
        for group in groups {
            lines.push(format!(
                "  group {}: {} layers, {} tokens per block, {}, {}",
                group["kernel_group_idx"],
                group["num_layers"],
                group["tokens_per_block"],
                group["dtype"].as_str().unwrap_or("unknown dtype"),
                text(&group["engine_kv_shape"]),
            ));
        }
    }
    for (id, worker) in all("non_cuda_context_meta") {
        lines.push(format!(
            "{}, engine-driven, {} tokens per block{}",
            identity(id, worker),
            worker["block_size"],
            if worker["use_mla"] == Value::Bool(true) {
                ", K and V fused or MLA"
            } else {
                ""
            }
        ));
    }
    lines
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn missing_fields_are_left_out() {
        assert_eq!(
            summary("u", &json!({})),
            "server    u: NOT HEALTHY\nworkers   0\n"
        );
        let status = json!({
            "is_healthy": true,
            "chunk_size": 256,
            "hash_algorithm": "blake3",
            "storage_manager": { "l1_manager": {
                "memory_used_bytes": 512 << 10, "memory_total_bytes": 1 << 20, "total_object_count": 1234,
            } },
            "devices": { "of_instances": { "5": "cuda" } },
            "cache_context_meta": { "5": { "model_name": "m", "world_size": 2, "kv_cache_layout": {} } },
            "non_cuda_context_meta": { "7": { "model_name": "m", "world_size": 2, "block_size": 16, "use_mla": true } },
        });
        let text = summary("u", &status);
        assert!(
            text.contains("512.00 KiB of 1.00 MiB in use (50.0 %), 1,234 objects, 0 leased"),
            "{text}"
        );
        assert!(
            text.contains("\n  5: m, world of 2, lmcache-driven on cuda, "),
            "{text}"
        );
        assert!(
            text.contains(
                "\n  7: m, world of 2, engine-driven, 16 tokens per block, K and V fused or MLA\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn tiers_are_listed_with_their_errors() {
        let status = json!({ "storage_manager": {
            "store_controller": { "pending_keys_count": 1200, "pending_bytes": 3 << 20, "dropped_objects": 7 },
            "prefetch_controller": { "loading_objects": 2 },
            "l2_adapters": [
                { "name": "fs-0", "type_name": "fs", "type": "FSL2Adapter", "is_healthy": true,
                  "current_size_bytes": 1 << 30, "max_capacity_bytes": 4_u64 << 30, "stored_object_count": 1234,
                  "recovery": { "state": "done", "objects": 1000 }, "store_failures": {}, "load_failures": {},
                  "breaker": { "load": { "state": "closed" } } },
                { "name": "fs-1", "type_name": "fs", "is_healthy": false, "is_full": true, "current_size_bytes": 512,
                  "max_capacity_bytes": 0, "recovery": { "state": "running" },
                  "store_failures": { "full": 3, "deadline": 2 }, "load_failures": { "corrupt": 1 },
                  "breaker": { "load": { "state": "open" }, "store": { "state": "closed" } } },
                { "name": "fs-2", "type_name": "fs", "is_healthy": true,
                  "read_only": true, "io_engine": "uring",
                  "recovery": { "state": "failed", "error": "no such directory" } },
                // Of LMCache's own server.
                { "type": "FSL2Adapter", "is_healthy": true, "base_path": "/data" },
            ],
        } });
        let expected = "\
L2        4 tiers, 1,200 objects to be stored (3.00 MiB), 7 dropped, 2 being loaded
  fs-0: fs, healthy, 1.00 GiB of 4.00 GiB in use (25.0 %), 1,234 objects, 1,000 of them recovered
  fs-1: fs, NOT HEALTHY, breaker of loads open, FULL, 512 B in use, recovery in progress, \
5 stores failed (deadline 2, full 3), 1 loads failed (corrupt 1)
  fs-2: fs, healthy, read_only, I/O by uring, recovery failed: no such directory
  FSL2Adapter, healthy
";
        let text = summary("u", &status);
        assert!(text.contains(expected), "{text}");
    }
}
