// The panels that follow the stream. Each takes a tick.

import { bound, byteRate, bytes, count, known, latency, moment, NONE, percent, rate, span } from "./format.js";
import { byId, element, facts, meter, pill, replace, say, table } from "./dom.js";
import { Chart } from "./chart.js";

const CHARTS = [
  { title: "Hit rate of tokens", series: [{ name: "hit_rate", label: "found" }], format: percent, top: 1 },
  {
    title: "Requests per second",
    series: [{ name: "lookups", label: "lookups" }, { name: "stores", label: "stores" }, { name: "retrieves", label: "retrieves" }],
    format: rate,
  },
  {
    title: "Latency, p99 below",
    series: [{ name: "lookup_p99", label: "lookups" }, { name: "store_p99", label: "stores" }, { name: "retrieve_p99", label: "retrieves" }],
    format: latency,
    largest: true,
    least: 1e-5,
  },
  { title: "L1 in use", series: [{ name: "l1_used_bytes", label: "used" }], format: bytes, bytes: true, top: "l1" },
  {
    title: "Eviction of L1, and tiers",
    series: [{ name: "l1_evicted_bytes", label: "evicted" }, { name: "l2_stored_bytes", label: "stored" }, { name: "l2_loaded_bytes", label: "loaded" }],
    format: byteRate,
    bytes: true,
  },
  { title: "Refused requests per second", series: [{ name: "refused", label: "refused" }], format: rate },
];

let charts = [];

/** @param {import("./chart.js").History} history @param {Object|null} status @param {number} seconds */
export function drawCharts(history, status, seconds) {
  if (charts.length === 0) {
    charts = CHARTS.map((options) => new Chart({ ...options }));
    byId("charts").replaceChildren(...charts.map((chart) => chart.element));
  }
  const total = status?.storage_manager.l1_manager.memory_total_bytes;
  CHARTS.forEach(({ top }, at) => {
    if (top === "l1") charts[at].options.top = total || undefined;
  });
  for (const chart of charts) chart.draw(history, seconds);
}

/** @param {Object} tick @param {import("./chart.js").History} history */
export function showPanels(tick, history) {
  head(tick);
  tiles(tick, history);
  const { status, traffic } = tick;
  if (!status) return;
  places(status, traffic);
  requests(traffic);
  workers(status, traffic);
  lookups(tick.lookups);
  log(tick.warnings);
}

function head({ health, status }) {
  const failed = health.failed_tiers ?? [];
  const isHealthy = health.status === "healthy" && status?.is_healthy !== false;
  const state = byId("health");
  say(state, isHealthy ? (failed.length > 0 ? "degraded" : "healthy") : "not healthy");
  state.className = `pill ${isHealthy ? (failed.length > 0 ? "warn" : "good") : "bad"}`;
  byId("instance").textContent = status?.instance_id ?? "";
  byId("about").textContent = status ? `version ${status.version}, up ${span(status.uptime_seconds)}` : "";
  const tiers = status?.storage_manager.l2_adapters ?? [];
  const unserved = Object.keys(status?.unserved_instances ?? {}).length;
  const l1 = status?.storage_manager.l1_manager;
  const reasons = [
    health.reason,
    l1 && !l1.is_healthy && `L1: ${l1.accounting_errors ? `${count(l1.accounting_errors)} accounting errors` : "its memory was lost"}`,
    ...failed.map((name) => `tier ${name}: ${trouble(tiers.find((tier) => tier.name === name))}`),
    unserved > 0 && `${count(unserved)} workers are refused, see Workers`,
  ].filter(Boolean);
  const place = byId("reasons");
  place.hidden = reasons.length === 0;
  replace(place, reasons, () => reasons.map((reason) => element("li", {}, reason)));
}

/** Why a tier fails, in words. */
function trouble(tier) {
  if (!tier) return "fails";
  const open = Object.entries(tier.breaker ?? {}).filter(([, breaker]) => breaker.state !== "closed");
  const parts = [
    open.length > 0 && `the breaker of ${open.map(([call, breaker]) => `${call} is ${breaker.state}`).join(", ")}`,
    typeof tier.error === "string" && tier.error,
    tier.last_store_error,
  ].filter(Boolean);
  return parts.join("; ") || "its backend does not answer";
}

function tile(title, value, detail, part) {
  return element("div", { class: "tile" },
    element("h3", {}, title),
    element("p", { class: "value" }, value),
    known(part) && meter(part, `${title}: ${percent(part)}`),
    element("p", { class: "quiet" }, detail));
}

function flow(title, rates) {
  const isIdle = !rates || bound(rates, "p50") === NONE;
  return tile(title, rate(rates?.per_second), isIdle ? "none in the last seconds" : `p50 < ${bound(rates, "p50")}, p99 < ${bound(rates, "p99")}`);
}

/** Tokens found of those that were asked for in the last minute. */
function lastMinute(history) {
  const points = Math.round(60 / history.interval);
  const asked = history.series.requested_tokens.slice(-points);
  const hits = history.series.hit_rate.slice(-points);
  const all = asked.reduce((sum, tokens) => sum + (tokens ?? 0), 0);
  const found = asked.reduce((sum, tokens, at) => sum + (tokens ?? 0) * (hits[at] ?? 0), 0);
  return all > 0 ? found / all : null;
}

function tiles({ status, traffic }, history) {
  const l1 = status?.storage_manager.l1_manager;
  const asked = traffic?.requested_tokens ?? 0;
  const hitRate = lastMinute(history);
  const agents = status?.agent_sessions;
  const shown = [traffic, hitRate, l1, status?.active_sessions, agents];
  replace(byId("tiles"), shown, () => [
    tile("Hit rate, last minute", percent(hitRate), `of ${rate(asked)} tokens/s now, ${rate(traffic?.hit_tokens_l2 ?? 0)} from tiers`),
    flow("Lookups/s", traffic?.lookups),
    flow("Stores/s", traffic?.stores),
    flow("Retrieves/s", traffic?.retrieves),
    tile("L1", l1 ? percent(l1.memory_usage_ratio) : NONE, l1 ? `${bytes(l1.memory_used_bytes)} of ${bytes(l1.memory_total_bytes)}` : "", l1?.memory_usage_ratio),
    tile("Sessions", count(status?.active_sessions), status ? `${count(l1.read_locked_count)} objects leased, ${count(l1.write_locked_count)} being written` : ""),
    tile("Sessions of agents", count(agents?.sessions), agents ? `${count(agents.chunks)} chunks in their prompts` : ""),
  ]);
}

function places(status, traffic) {
  const storage = status.storage_manager;
  replace(byId("places"), [storage, traffic?.tiers, traffic?.l1_evicted_objects, traffic?.l1_evicted_bytes], () => [
    l1Card(status, traffic),
    ...storage.l2_adapters.map((tier) => tierCard(tier, storage, traffic?.tiers[tier.name])),
    ...(storage.l2_adapters.length > 0 ? [queueCard(storage)] : [element("p", { class: "card empty" }, "No tier below L1 is configured (--l2-adapter).")]),
  ]);
}

function usage(used, capacity) {
  if (!(capacity > 0)) return element("p", { class: "usage" }, element("b", {}, bytes(used)), " used, no limit");
  return element("div", {},
    element("p", { class: "usage" }, element("b", {}, percent(used / capacity)), ` ${bytes(used)} of ${bytes(capacity)}, ${bytes(Math.max(0, capacity - used))} free`),
    meter(used / capacity, `${percent(used / capacity)} used`));
}

function l1Card(status, traffic) {
  const l1 = status.storage_manager.l1_manager;
  const eviction = status.storage_manager.l1_eviction_controller;
  const restored = l1.restored_objects > 0 && ["Restored at the start", `${count(l1.restored_objects)} objects, ${bytes(l1.restored_bytes)}`];
  return element("article", { class: "card place" },
    element("h3", {}, "L1", pill(l1.is_healthy ? "sound" : "not sound", l1.is_healthy ? "good" : "bad")),
    usage(l1.memory_used_bytes, l1.memory_total_bytes),
    facts([
      ["Objects", count(l1.total_object_count)],
      ["Leased", count(l1.read_locked_count)],
      ["Largest free extent", bytes(l1.memory_largest_free_bytes)],
      ["Uncommitted stores", `${bytes(l1.staging_uncommitted_bytes)} of ${bytes(l1.staging_limit_bytes)}`],
      ["Evicted", `${count(traffic?.l1_evicted_objects)} objects, ${byteRate(traffic?.l1_evicted_bytes)}`],
      ["Policy", `${eviction.eviction_policy}, from ${percent(eviction.trigger_watermark)} on`],
      ["Tenants", `${count(eviction.num_cache_salt_buckets)}, ${count(eviction.num_over_quota_buckets)} over quota`],
      ["Transfers", `${count(status.pending_transfers)} prepared, ${count(status.withheld_transfers)} withheld`],
      restored,
      l1.accounting_errors > 0 && ["Accounting errors", count(l1.accounting_errors), "bad"],
    ].filter(Boolean)));
}

function failures(byReason) {
  const all = Object.entries(byReason ?? {}).filter(([, number]) => number > 0);
  return all.map(([reason, number]) => `${count(number)} ${reason}`).join(", ") || "none";
}

function tierCard(tier, storage, traffic) {
  const eviction = storage.l2_eviction_controller.adapters.find(({ adapter }) => adapter === tier.name);
  const failed = Object.values({ ...tier.store_failures, ...tier.load_failures }).some((number) => number > 0);
  const breakers = Object.entries(tier.breaker ?? {});
  const calls = Object.entries(tier.calls ?? {}).map(([call, it]) => `${call} ${count(it.in_flight)}${it.waiting ? ` + ${count(it.waiting)} waiting` : ""}`);
  const recovery = tier.recovery?.state;
  return element("article", { class: "card place" },
    element("h3", {}, tier.name ?? tier.type, element("span", { class: "quiet" }, tier.type_name ?? ""),
      pill(tier.is_healthy ? "healthy" : "fails", tier.is_healthy ? "good" : "bad"),
      tier.is_full && pill("full", "warn"),
      tier.read_only && pill("read only", "quiet"),
      recovery === "running" && pill("adopting", "quiet")),
    usage(tier.current_size_bytes ?? 0, tier.max_capacity_bytes),
    facts([
      ["Objects", count(tier.stored_object_count)],
      ["Stored", byteRate(traffic?.stored_bytes)],
      ["Loaded", byteRate(traffic?.loaded_bytes)],
      ["Found of what it was asked", percent(traffic?.hit_rate)],
      ["Evicted", `${count(traffic?.evicted_objects)} objects${eviction ? `, ${eviction.eviction_policy}` : ""}`],
      ["Queued", `${count(tier.pending_objects)} objects, ${bytes(tier.pending_bytes)}`, tier.dropped_objects > 0 ? "warn" : undefined],
      ["Dropped", count(tier.dropped_objects), tier.dropped_objects > 0 ? "warn" : undefined],
      ["In flight", calls.join(", ") || `${count(tier.stores_in_flight)} stores, ${count(tier.loads_in_flight)} loads`],
      breakers.length > 0 && ["Breakers", breakers.map(([call, breaker]) => `${call} ${breaker.state}${breaker.opened ? ` (opened ${count(breaker.opened)})` : ""}`).join(", "), breakers.some(([, breaker]) => breaker.state !== "closed") ? "bad" : undefined],
      ["Failed stores", failures(tier.store_failures), failed ? "warn" : undefined],
      ["Failed loads", failures(tier.load_failures), failed ? "warn" : undefined],
      !tier.is_healthy && ["Cause", trouble(tier), "bad"],
      recovery === "failed" && ["Adoption", tier.recovery.error, "bad"],
    ].filter(Boolean)));
}

function queueCard(storage) {
  const { store_controller: stores, prefetch_controller: prefetches } = storage;
  return element("article", { class: "card place" },
    element("h3", {}, "Between L1 and the tiers"),
    facts([
      ["Waiting to be stored", `${count(stores.pending_keys_count)} objects, ${bytes(stores.pending_bytes)}`],
      ["Being stored", `${count(stores.in_flight_task_count)} batches`],
      ["Not stored, queue full", `${count(stores.dropped_objects)} objects, ${bytes(stores.dropped_bytes)}`, stores.dropped_objects > 0 ? "warn" : undefined],
      ["Lookups that ask", `${count(prefetches.lookup_phase_count)} of ${count(prefetches.max_in_flight)}`],
      ["Lookups that wait for loads", count(prefetches.load_phase_count)],
      ["Queued lookups", count(prefetches.pending_queue_size)],
      ["Objects being loaded", count(prefetches.loading_objects)],
    ]));
}

function requests(traffic) {
  const operations = traffic?.operations ?? [];
  replace(byId("operations"), operations, () => table("Requests of the last seconds", [
    { title: "Operation", cell: (it) => it.name },
    { title: "Per second", number: true, cell: (it) => rate(it.per_second) },
    { title: "p50 below", number: true, cell: (it) => bound(it, "p50") },
    { title: "p99 below", number: true, cell: (it) => bound(it, "p99") },
  ], operations, "No request in the last seconds."));
  const refused = [...(traffic?.refused ?? []), ...(traffic?.early_exits ?? []).map((it) => ({ ...it, operation: "lookup (asked for nothing)" }))];
  replace(byId("refused"), refused, () => table("Refused requests", [
    { title: "Operation", cell: (it) => it.operation },
    { title: "Reason", cell: (it) => it.reason },
    { title: "Per second", number: true, cell: (it) => rate(it.per_second) },
    { title: "Since start", number: true, cell: (it) => count(it.total) },
  ], refused, "None since the start."));
}

function workers(status, traffic) {
  const rows = [
    ...Object.entries(status.cache_context_meta).map(([id, it]) => ({ id, ...it, mode: "server copies" })),
    ...Object.entries(status.non_cuda_context_meta).map(([id, it]) => ({ id, ...it, mode: "copies by itself" })),
  ].map((it) => ({ ...it, device: status.devices.of_instances[it.id] ?? "", unserved: status.unserved_instances[it.id] }));
  const models = new Map();
  for (const { model_name: name, world_size: size } of rows) {
    const key = JSON.stringify([name, size]);
    models.set(key, (models.get(key) ?? 0) + 1);
  }
  const port = status.request_port;
  replace(byId("engines"), [rows.length, [...models], port, status.active_prefetch_jobs, status.worker_liveness], () => [
    tile("Workers", count(rows.length), `of ${count(models.size)} models and world sizes`),
    tile("Connections", count(port.connections), `of at most ${count(port.connections_max)}`),
    tile("Lookups not yet read", count(status.active_prefetch_jobs), "results that no engine has asked for"),
    tile("Considered dead", status.worker_liveness.enabled ? `after ${span(status.worker_liveness.reap_timeout_seconds)}` : "never", "without a ping"),
  ]);
  replace(byId("worker-table"), rows, () => table("Registered workers", [
    { title: "Worker", cell: (it) => it.id },
    { title: "Model", cell: (it) => element("span", { class: "name" }, it.model_name) },
    { title: "Transfer mode", cell: (it) => it.mode },
    { title: "World size", number: true, narrow: false, cell: (it) => count(it.world_size) },
    { title: "Tokens per chunk", number: true, narrow: false, cell: (it) => count(it.chunk_size) },
    { title: "Pages", narrow: false, cell: (it) => (it.kv_cache_layout ? `${count(it.kv_cache_layout.num_layers)} layers, ${bytes(it.kv_cache_layout.cache_size_per_token)} per token` : `${count(it.block_size)} tokens per block`) },
    { title: "Device", narrow: false, cell: (it) => it.device || NONE },
    { title: "Client", narrow: false, cell: (it) => it.client_releases },
    { title: "Served", cell: (it) => (it.unserved ? pill(it.unserved, "bad") : pill("yes", "good")) },
  ], rows, "No worker is registered."));
  gpus(status.devices.cuda, traffic?.gpus ?? {});
}

function gpus(cuda, rates) {
  replace(byId("gpus"), [cuda, rates], () => {
    if (!cuda?.available) return [element("p", { class: "card empty" }, `No GPU is used${cuda?.reason ? `: ${cuda.reason}` : "."}`)];
    const pinning = cuda.pinning;
    return cuda.gpus.map((gpu) => {
      const error = gpu.error ?? gpu.state?.error;
      const moved = rates[String(gpu.ordinal)];
      return element("article", { class: "card place" },
        element("h3", {}, `GPU ${gpu.ordinal}`, element("span", { class: "quiet" }, gpu.name), pill(error ? "unusable" : gpu.in_use ? "in use" : "idle", error ? "bad" : gpu.in_use ? "good" : "quiet")),
        facts([
          error && ["Cause", error, "bad"],
          ["To L1", byteRate(moved?.store ?? 0)],
          ["From L1", byteRate(moved?.retrieve ?? 0)],
          gpu.state && ["Copied by", executors(gpu.state.moved)],
          gpu.state && ["Transfers in flight", `${count(gpu.state.transfers_under_way.store)} stores, ${count(gpu.state.transfers_under_way.retrieve)} retrieves`],
          gpu.state && ["Event timeouts", count(gpu.state.event_timeouts), gpu.state.event_timeouts > 0 ? "warn" : undefined],
          gpu.state && ["Open allocations", count(gpu.state.open_allocations)],
          pinning && ["Pinned memory", `${bytes(pinning.pinned_bytes)} of ${bytes(pinning.total_bytes)}${pinning.under_way ? ", running" : ""}`, pinning.error ? "warn" : undefined],
          ["Bus", `${gpu.pci_bus_id}, NUMA node ${gpu.numa_node}`],
        ].filter(Boolean)));
    });
  });
}

/** The share of each executor in what a GPU has copied. */
function executors(moved) {
  const sums = new Map();
  for (const { executor, bytes: part } of moved) sums.set(executor, (sums.get(executor) ?? 0) + part);
  const all = [...sums.values()].reduce((sum, part) => sum + part, 0);
  return all === 0 ? NONE : [...sums].filter(([, part]) => part > 0).map(([name, part]) => `${name} ${percent(part / all)}`).join(", ");
}

function lookups(latest) {
  replace(byId("lookup-table"), latest, () => table("The latest lookups", [
    { title: "Ago", cell: (it) => span(it.seconds_ago) },
    { title: "Model", narrow: false, cell: (it) => element("span", { class: "name" }, it.model_name) },
    { title: "Tenant", cell: (it) => element("span", { class: "name" }, it.cache_salt) },
    { title: "Found", number: true, cell: (it) => `${count(it.hit_tokens)} of ${count(it.tokens)}` },
    { title: "First chunk missed", cell: (it) => missed(it) },
  ], latest, "No lookup since the start."));
}

function missed(lookup) {
  if (lookup.refused) return `asked for nothing: ${lookup.refused}`;
  return lookup.missing ?? (lookup.tokens > 0 ? "all found" : "shorter than a chunk");
}

function log(lines) {
  replace(byId("warnings"), lines, () => (lines.length === 0
    ? element("p", { class: "empty" }, "No warning since the start.")
    : element("ol", { class: "log" }, lines.map((line) => element("li", {},
      element("time", { datetime: new Date(line.at).toISOString() }, moment(line.at)),
      pill(line.level.toLowerCase(), line.level === "ERROR" ? "bad" : "warn"),
      element("span", { class: "quiet" }, line.target),
      element("span", { class: "text" }, line.text))))));
}

/** The configuration, by section. @param {Object} sections */
export function showFlags(sections) {
  const shown = (value) => (value === null ? element("span", { class: "quiet" }, "not set") : value === "***" ? element("span", { class: "quiet" }, "hidden") : typeof value === "object" ? JSON.stringify(value) : String(value));
  byId("flags").replaceChildren(...Object.entries(sections).map(([section, flags]) => element("div", {},
    element("h3", {}, section),
    facts(Object.entries(flags ?? {}).map(([flag, value]) => [flag, shown(value)])))));
}
