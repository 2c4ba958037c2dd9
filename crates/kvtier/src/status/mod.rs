//! `kvtier status`: a server's `/status` as text, or that of several in a line each.

mod gpus;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use indicatif::{HumanBytes, HumanCount, HumanDuration};
use kvtier_observe::api::{
    AgentSessionsStatus, Health, QuotaStatus, Recovery, StateStatus, Status, StorageManagerStatus,
    TierStatus,
};
use serde_json::{Map, Value, json};

use crate::address::HttpListArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client, typed};

/// Arguments of `kvtier status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    servers: HttpListArgs,
    /// Print the server's answer unchanged, as JSON; of several servers an object by URL
    #[arg(long)]
    json: bool,
    /// Timeout, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "3", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

/// Prints the status. Exit code 1, with one line on stderr, if a server is not healthy or does not answer.
pub fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let urls = args.servers.urls();
    let [url] = urls[..] else {
        return several(&urls, args);
    };
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

/// Prints a line per server, asked at the same time, and their totals.
fn several(urls: &[&str], args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let ask =
        |url: &str| Client::new(url, &args.access, args.timeout)?.json("GET", "/status", None);
    let answers: Vec<anyhow::Result<Value>> = thread::scope(|scope| {
        let asked: Vec<_> = urls.iter().map(|url| scope.spawn(|| ask(url))).collect();
        let answers = asked.into_iter().map(|asked| asked.join());
        answers
            .map(|answer| answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let width = urls.iter().map(|url| url.len()).max().unwrap_or_default();
    let (mut out, mut all, mut total, mut healthy) =
        (String::new(), Map::new(), Usage::default(), 0);
    let mut count = urls.len();
    // URL of each server, by its start in nanoseconds.
    let mut starts = HashMap::new();
    for (url, answer) in urls.iter().zip(answers) {
        let status = answer.and_then(|answer| {
            let status: Status = typed(url, &answer)?;
            all.insert((*url).to_owned(), answer);
            Ok(status)
        });
        let text = match status {
            Ok(status) if starts.contains_key(&status.kv_events.incarnation) => {
                count -= 1;
                format!("the same as {}", starts[&status.kv_events.incarnation])
            }
            Ok(status) => {
                // LMCache's server has no such time.
                if status.kv_events.incarnation > 0 {
                    starts.insert(status.kv_events.incarnation, url);
                }
                healthy += usize::from(status.is_healthy);
                let usage = Usage::of(&status);
                total.add(&usage);
                format!("{}, {}", health(&status), usage.text())
            }
            Err(error) => {
                let error = format!("{error:#}");
                all.insert((*url).to_owned(), json!({ "error": error }));
                error
            }
        };
        let _ = writeln!(out, "{url:<width$}  {text}");
    }
    let name = format!("{count} servers");
    let _ = writeln!(out, "{name:<width$}  {healthy} healthy, {}", total.text());
    if args.json {
        out = out::json(&Value::Object(all)) + "\n";
    }
    write!(out::stdout(), "{out}")?;
    if healthy == count {
        return Ok(ExitCode::SUCCESS);
    }
    out::complain(
        "status",
        format!("{healthy} of {count} servers are healthy"),
    );
    Ok(ExitCode::FAILURE)
}

/// What a server has and serves, or several together.
#[derive(Default)]
struct Usage {
    used_bytes: u64,
    total_bytes: u64,
    objects: u64,
    sessions: usize,
    workers: usize,
}

impl Usage {
    fn of(status: &Status) -> Self {
        let l1 = &status.storage_manager.l1_manager;
        Self {
            used_bytes: l1.memory_used_bytes,
            total_bytes: l1.memory_total_bytes,
            objects: l1.total_object_count,
            sessions: status.active_sessions.unwrap_or_default(),
            workers: status.cache_context_meta.len() + status.non_cuda_context_meta.len(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.used_bytes += other.used_bytes;
        self.total_bytes += other.total_bytes;
        self.objects += other.objects;
        self.sessions += other.sessions;
        self.workers += other.workers;
    }

    fn text(&self) -> String {
        let l1 = in_use(self.used_bytes, self.total_bytes);
        let objects = HumanCount(self.objects);
        let (sessions, workers) = (self.sessions, self.workers);
        format!("L1 {l1}, objects {objects}, sessions {sessions}, workers {workers}")
    }
}

/// Prints the status; returns whether the server is healthy.
fn status(url: &str, client: &Client, json: bool) -> anyhow::Result<bool> {
    let answer = client.json("GET", "/status", None)?;
    if json {
        writeln!(out::stdout(), "{}", out::json(&answer))?;
    }
    let status: Status = typed(url, &answer)?;
    if !json {
        write!(out::stdout(), "{}", summary(url, &status))?;
    }
    Ok(status.is_healthy)
}

/// Bytes in use, with their share of the size.
fn in_use(used: u64, size: u64) -> String {
    let share = 100.0 * used as f64 / size.max(1) as f64;
    let (used, size) = (HumanBytes(used), HumanBytes(size));
    format!("{used} of {size} in use ({share:.1} %)")
}

/// The server's reason for not being healthy.
fn reason(client: &Client) -> String {
    let reason = client
        .get("/healthcheck")
        .ok()
        .and_then(|(_, body)| serde_json::from_str::<Health>(&body).ok())
        .and_then(|health| health.reason);
    reason.unwrap_or_else(|| "its status says so".to_owned())
}

/// Whether the server is healthy, and how many of its tiers are not.
pub(crate) fn health(status: &Status) -> String {
    let tiers = &status.storage_manager.l2_adapters;
    let failed = tiers.iter().filter(|tier| !tier.is_healthy).count();
    match (status.is_healthy, failed) {
        (true, 0) => "healthy".to_owned(),
        (true, failed) => format!("healthy, {failed} of {} second tiers failed", tiers.len()),
        (false, _) => "NOT HEALTHY".to_owned(),
    }
}

/// The lines. Missing fields are left out, so it works with LMCache's own server too.
fn summary(url: &str, status: &Status) -> String {
    let mut out = String::new();
    let health = health(status);
    let version = status
        .version
        .as_ref()
        .map(|version| format!("version {version}"));
    let uptime = status.uptime_seconds.map(Duration::from_secs);
    let uptime = uptime.map(|uptime| format!("up {}", HumanDuration(uptime)));
    let about = [version, status.instance_id.clone(), uptime];
    line(&mut out, "server", &format!("{url}: {health}"), about);
    for warning in &status.warnings {
        line(&mut out, "warning", warning, []);
    }

    let manager = &status.storage_manager;
    let l1 = &manager.l1_manager;
    let (used, size) = (l1.memory_used_bytes, l1.memory_total_bytes);
    if size > 0 {
        let prefaulted = l1.prefaulted_bytes.filter(|touched| *touched < size);
        let more = [
            Some(format!("{} objects", HumanCount(l1.total_object_count))),
            Some(format!("{} leased", HumanCount(l1.read_locked_count))),
            Some(format!(
                "{} being written",
                HumanCount(l1.write_locked_count)
            )),
            prefaulted.map(|touched| format!("{} pre-faulted", HumanBytes(touched))),
        ];
        line(&mut out, "L1", &in_use(used, size), more);
    }
    let eviction = &manager.l1_eviction_controller.eviction;
    if !eviction.eviction_policy.is_empty() {
        let watermark = eviction.trigger_watermark.map(|part| 100.0 * part);
        let more = watermark.map(|percent| format!("in the background from {percent:.0} % on"));
        line(&mut out, "eviction", &eviction.eviction_policy, [more]);
    }
    tiers(&mut out, manager);
    if let Some(port) = &status.peer_port {
        let (objects, bytes) = (HumanCount(port.sent_objects), HumanBytes(port.sent_bytes));
        let connections = format!("{} connections", port.connections);
        let sent = format!("{objects} objects sent, {bytes}");
        line(&mut out, "peers", &connections, [Some(sent)]);
    }
    if let Some(cuda) = &status.devices.cuda {
        gpus::write(&mut out, cuda);
    }
    quotas(&mut out, &status.quotas);
    state(&mut out, &status.state, l1.restored_objects);
    if let Some(tokens) = status.chunk_size {
        let hash = or(&status.hash_algorithm, "unknown hash").to_owned();
        line(
            &mut out,
            "chunks",
            &format!("{tokens} tokens"),
            [Some(hash)],
        );
    }
    if let Some(sessions) = status.active_sessions {
        let transfers = status.pending_transfers;
        let withheld = Some(status.withheld_transfers).filter(|count| *count > 0);
        let more = [
            transfers.map(|count| format!("{count} transfers in flight")),
            withheld.map(|count| format!("{count} abandoned, memory withheld")),
        ];
        line(&mut out, "sessions", &sessions.to_string(), more);
    }
    let AgentSessionsStatus { sessions, chunks } = status.agent_sessions;
    if sessions > 0 {
        let more = [Some(format!("{chunks} chunks in their prompts"))];
        line(&mut out, "agents", &sessions.to_string(), more);
    }
    if let Some(blend) = &status.blend {
        let known = format!("{} chunks known", blend.segments);
        let most = [Some(format!("at most {}", blend.max_segments))];
        line(&mut out, "blending", &known, most);
    }
    let workers = workers(status);
    line(&mut out, "workers", &workers.len().to_string(), []);
    for worker in workers {
        let _ = writeln!(out, "  {worker}");
    }
    out
}

/// The text, or `other` if it is empty.
fn or<'a>(text: &'a str, other: &'a str) -> &'a str {
    Some(text).filter(|text| !text.is_empty()).unwrap_or(other)
}

/// Appends a line with the parts that there are.
fn line(out: &mut String, name: &str, text: &str, more: impl IntoIterator<Item = Option<String>>) {
    let _ = write!(out, "{name:<9} {text}");
    for part in more.into_iter().flatten() {
        let _ = write!(out, ", {part}");
    }
    out.push('\n');
}

/// Appends what outlives the process, and what the server has of the one before; nothing for another server's status.
fn state(out: &mut String, state: &StateStatus, objects: u64) {
    let text = match (&state.directory, &state.reason) {
        (Some(directory), _) => format!("in {directory}"),
        (None, Some(reason)) => format!("none is kept: {reason}"),
        (None, None) => return,
    };
    let l1 = match (&state.l1_file, &state.l1_reason) {
        (Some(file), _) => Some(format!("L1 kept in {file}")),
        (None, Some(reason)) if state.directory.is_some() => {
            Some(format!("L1 ends with the process: {reason}"))
        }
        _ => None,
    };
    let restored = |count, one: &str| match count {
        0 => None,
        1 => Some(format!("1 {one} restored")),
        more => Some(format!("{} {one}s restored", HumanCount(more))),
    };
    let left_out: u64 = state.left_out_workers.values().sum();
    let reasons: Vec<_> = state.left_out_workers.keys().map(String::as_str).collect();
    let more = [
        l1,
        restored(objects, "object"),
        restored(state.restored_workers, "worker"),
        (left_out > 0).then(|| format!("{left_out} left out ({})", reasons.join(", "))),
    ];
    line(out, "state", &text, more);
}

/// Appends the quotas, if any tier enforces them.
fn quotas(out: &mut String, quotas: &QuotaStatus) {
    if quotas.enforced_by.is_empty() {
        return;
    }
    let tenants = HumanCount(quotas.num_tenants as u64);
    let default = match quotas.default_limit_bytes {
        None => "unlimited".to_owned(),
        Some(bytes) => format!("at most {}", HumanBytes(bytes)),
    };
    let file = match &quotas.file {
        None => "until the server ends".to_owned(),
        Some(file) => format!("in {file}"),
    };
    let more = [
        Some(format!(
            "{tenants} {} one, all others {default}",
            if tenants.0 == 1 {
                "tenant has"
            } else {
                "tenants have"
            }
        )),
        Some(format!("kept {file}")),
    ];
    let (mode, tiers) = (
        or(&quotas.mode, "unknown"),
        quotas.enforced_by.join(" and "),
    );
    line(out, "quotas", &format!("{mode}, of {tiers}"), more);
}

/// Appends the second tiers: what is queued for them, and one line per tier.
fn tiers(out: &mut String, manager: &StorageManagerStatus) {
    let tiers = &manager.l2_adapters;
    if tiers.is_empty() {
        return;
    }
    let plural = if tiers.len() == 1 { "" } else { "s" };
    let stores = &manager.store_controller;
    let bytes = stores.pending_bytes.map(HumanBytes);
    let bytes = bytes.map_or(String::new(), |bytes| format!(" ({bytes})"));
    let waiting = HumanCount(stores.pending_keys_count);
    let dropped = Some(stores.dropped_objects).filter(|count| *count > 0);
    let loading = manager.prefetch_controller.loading_objects;
    let more = [
        Some(format!("{waiting} objects to be stored{bytes}")),
        dropped.map(|count| format!("{} dropped", HumanCount(count))),
        loading.map(|count| format!("{} being loaded", HumanCount(count as u64))),
    ];
    line(out, "L2", &format!("{} tier{plural}", tiers.len()), more);
    for status in tiers {
        let _ = writeln!(out, "  {}", tier(status));
    }
}

/// One tier. The name of its type is LMCache's if the server has no better one.
fn tier(tier: &TierStatus) -> String {
    let kind = tier.type_name.as_ref().unwrap_or(&tier.r#type);
    let kind = or(kind, "unknown type");
    let mut parts = vec![match &tier.name {
        Some(name) => format!("{name}: {kind}"),
        None => kind.to_owned(),
    }];
    parts.push(match (tier.is_healthy, tier.cause()) {
        (true, _) => "healthy".to_owned(),
        (false, Some(cause)) => format!("NOT HEALTHY: {cause}"),
        (false, None) => "NOT HEALTHY".to_owned(),
    });
    if let Some(peers) = tier.more.get("peers").and_then(Value::as_array) {
        let connected = peers.iter().filter(|peer| peer["connected"] != 0).count();
        let error = peers.iter().find_map(|peer| peer["error"].as_str());
        let error = error.filter(|_| tier.is_healthy);
        let error = error.map(|it| format!(" ({it})")).unwrap_or_default();
        parts.push(format!(
            "{connected} of {} peers connected{error}",
            peers.len()
        ));
    }
    for (call, breaker) in &tier.breaker {
        if breaker.state != "closed" {
            parts.push(format!("breaker of {call}s {}", breaker.state));
        }
    }
    if tier.is_full {
        parts.push("FULL".to_owned());
    }
    if let Some(used) = tier.current_size_bytes {
        parts.push(match tier.max_capacity_bytes {
            0 => format!("{} in use", HumanBytes(used)),
            size => in_use(used, size),
        });
    }
    if let Some(objects) = tier.stored_object_count {
        parts.push(format!("{} objects", HumanCount(objects)));
    }
    if tier.read_only == Some(true) {
        parts.push("read_only".to_owned());
    }
    if let Some(engine) = &tier.io_engine {
        parts.push(format!("I/O by {engine}"));
    }
    match &tier.recovery {
        Some(Recovery::Running) => parts.push("recovery in progress".to_owned()),
        Some(Recovery::Failed { error }) => parts.push(format!("recovery failed: {error}")),
        Some(Recovery::Done { objects, .. }) if *objects > 0 => {
            parts.push(format!("{} of them recovered", HumanCount(*objects)));
        }
        Some(Recovery::Done { .. } | Recovery::Unknown) | None => {}
    }
    for (what, failures) in [
        ("stores", &tier.store_failures),
        ("loads", &tier.load_failures),
    ] {
        let all: u64 = failures.values().sum();
        if all > 0 {
            let reasons = failures.iter();
            let reasons = reasons.map(|(reason, times)| format!("{reason} {times}"));
            let reasons = reasons.collect::<Vec<_>>().join(", ");
            parts.push(format!("{} {what} failed ({reasons})", HumanCount(all)));
        }
    }
    parts.join(", ")
}

/// The registered workers and their KV, one line per worker and per group.
fn workers(status: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    let identity = |id: &String, model: &str, world_size: u32, releases: &str| {
        let client = match releases {
            "" => String::new(),
            // kvtier's own clients speak it too.
            releases => format!(", protocol of LMCache {releases}"),
        };
        format!(
            "{id}: {}, world of {world_size}{client}",
            or(model, "unknown model")
        )
    };
    for (id, worker) in &status.cache_context_meta {
        let layout = &worker.kv_cache_layout;
        let device = status.devices.of_instances.get(id);
        let device = device.map_or_else(String::new, |device| format!(" on {device}"));
        lines.push(format!(
            "{}, lmcache-driven{device}, {} layers, {} blocks, {} bytes per token",
            identity(
                id,
                &worker.model_name,
                worker.world_size,
                &worker.client_releases
            ),
            layout.num_layers,
            layout.num_blocks,
            layout.cache_size_per_token
        ));
        for group in &layout.kernel_groups {
            lines.push(format!(
                "  group {}: {} layers, {} tokens per block, {}, {}",
                group.kernel_group_idx,
                group.num_layers,
                group.tokens_per_block,
                or(&group.dtype, "unknown dtype"),
                group.engine_kv_shape,
            ));
        }
    }
    for (id, worker) in &status.non_cuda_context_meta {
        lines.push(format!(
            "{}, engine-driven, {} tokens per block{}",
            identity(
                id,
                &worker.model_name,
                worker.world_size,
                &worker.client_releases
            ),
            worker.block_size,
            if worker.use_mla {
                ", K and V in one tensor"
            } else {
                ""
            }
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lines(status: Value) -> String {
        summary("u", &serde_json::from_value(status).unwrap())
    }

    #[test]
    fn missing_fields_are_left_out() {
        assert_eq!(
            lines(json!({ "of_a_newer_server": { "a": [1] } })),
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
            "peer_port": { "connections": 5, "sent_objects": 1234, "sent_bytes": 1 << 20 },
            "cache_context_meta": { "5": { "model_name": "m", "world_size": 2, "kv_cache_layout": {} } },
            "non_cuda_context_meta": { "7": { "model_name": "m", "world_size": 2, "block_size": 16, "use_mla": true } },
        });
        let text = lines(status);
        assert!(
            text.contains("512.00 KiB of 1.00 MiB in use (50.0 %), 1,234 objects, 0 leased"),
            "{text}"
        );
        assert!(
            text.contains("\npeers     5 connections, 1,234 objects sent, 1.00 MiB\n"),
            "{text}"
        );
        assert!(
            text.contains("\n  5: m, world of 2, lmcache-driven on cuda, "),
            "{text}"
        );
        assert!(
            text.contains(
                "\n  7: m, world of 2, engine-driven, 16 tokens per block, K and V in one tensor\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn status_of_lmcache_is_shown() {
        let recorded = include_str!("../../../kvtier-server/tests/vectors/http_exchanges.json");
        let recorded: Value = serde_json::from_str(recorded).unwrap();
        let mut exchanges = recorded["exchanges"].as_array().unwrap().iter();
        let status = exchanges.find(|exchange| exchange["request"]["path"] == "/status");
        let expected = "\
server    u: healthy
L1        8.00 MiB of 1.00 GiB in use (0.8 %), 16 objects, 0 leased, 0 being written
eviction  IsolatedLRU, in the background from 80 % on
L2        2 tiers, 0 objects to be stored
  FSL2Adapter, healthy
  MockL2Adapter, healthy, 8.00 MiB of 1.00 GiB in use (0.8 %), 16 objects
chunks    256 tokens, blake3
sessions  0
workers   2
  1000: test-model, world of 1, lmcache-driven, 4 layers, 256 blocks, 2048 bytes per token
    group 0: 4 layers, 16 tokens per block, torch.float16, NL x [2, NB, BS, NH, HS]
";
        assert_eq!(lines(status.unwrap()["response"]["body"].clone()), expected);
    }

    #[test]
    fn tiers_are_listed_with_their_errors() {
        let status = json!({ "is_healthy": true, "storage_manager": {
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
                  "breaker": { "load": { "state": "open" }, "store": { "state": "closed" } },
                  "error": "disk: away", "last_store_error": "disk: full" },
                { "name": "fs-2", "type_name": "fs", "is_healthy": true,
                  "read_only": true, "io_engine": "uring",
                  "recovery": { "state": "failed", "error": "no such directory" } },
                { "name": "peers-0", "type_name": "peers", "is_healthy": true,
                  "peers": [{ "connected": 2, "error": null }, { "connected": 0, "error": "b:1: WRONGPASS" }] },
                // Of LMCache's own server.
                { "type": "FSL2Adapter", "is_healthy": true, "base_path": "/data" },
            ],
        } });
        let expected = "\
L2        5 tiers, 1,200 objects to be stored (3.00 MiB), 7 dropped, 2 being loaded
  fs-0: fs, healthy, 1.00 GiB of 4.00 GiB in use (25.0 %), 1,234 objects, 1,000 of them recovered
  fs-1: fs, NOT HEALTHY: disk: away, breaker of loads open, FULL, 512 B in use, recovery in progress, \
5 stores failed (deadline 2, full 3), 1 loads failed (corrupt 1)
  fs-2: fs, healthy, read_only, I/O by uring, recovery failed: no such directory
  peers-0: peers, healthy, 1 of 2 peers connected (b:1: WRONGPASS)
  FSL2Adapter, healthy
";
        let text = lines(status);
        assert!(
            text.starts_with("server    u: healthy, 1 of 5 second tiers failed\n"),
            "{text}"
        );
        assert!(text.contains(expected), "{text}");
    }
}
