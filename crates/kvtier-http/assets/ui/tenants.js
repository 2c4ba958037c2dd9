// Tenants, some at a time: the server sorts and searches, so that any number of them stays usable.

import { ask, Refused } from "./server.js";
import { bytes, count, percent } from "./format.js";
import { byId, element, keyed, meter, pill, replace, say, table, toast } from "./dom.js";

const LIMIT = 50;
const REFRESH = 5000;
const TYPING = 250;

const view = { sort: "usage", order: "desc", search: "", offset: 0, shown: null };
let isAdmin = false;
let isVisible = false;
let timer = 0;
let asked = 0;

/** @param {boolean} mayEdit */
export function startTenants(mayEdit) {
  isAdmin = mayEdit;
  byId("tenant-add").hidden = !mayEdit;
  schedule(0);
}

export function stopTenants() {
  clearTimeout(timer);
  asked += 1;
}

function schedule(pause) {
  clearTimeout(timer);
  timer = setTimeout(refresh, pause);
}

async function refresh() {
  const number = (asked += 1);
  const { sort, order, search, offset } = view;
  const query = new URLSearchParams({ sort, order, search, offset, limit: LIMIT });
  try {
    const list = await ask("GET", `tenants?${query}`);
    if (number !== asked) return;
    if (list.tenants.length === 0 && offset > 0) {
      view.offset = Math.max(0, Math.floor((list.matching - 1) / LIMIT) * LIMIT);
      schedule(0);
      return;
    }
    show(list);
  } catch (error) {
    if (number !== asked) return;
    // The stream says so if the server is away.
    if (error instanceof Refused) byId("tenant-counts").textContent = error.message;
  }
  if (isVisible && !document.hidden) schedule(REFRESH);
}

const COLUMNS = [
  { key: "name", title: "Tenant", cell: (it) => element("span", { class: "name" }, it.cache_salt) },
  { key: "usage", title: "Used", number: true, cell: (it) => bytes(used(it)) },
  { title: "In L1", number: true, narrow: false, cell: (it) => bytes(it.tiers.l1?.usage_bytes) },
  { key: "share", title: "Of its limit", cell: (it) => limits(it) },
  { key: "hit_rate", title: "Hit rate", number: true, cell: (it) => percent(it.hit_rate) },
  { key: "requested_chunks", title: "Chunks asked for", number: true, narrow: false, cell: (it) => count(it.requested_chunks) },
  { key: "refused", title: "Not stored", number: true, narrow: false, cell: (it) => count(sum(it, (tier) => tier.refused_over_quota + tier.refused_no_room)) },
];

function sum(tenant, value) {
  return Object.values(tenant.tiers).reduce((total, tier) => total + value(tier), 0);
}

function used(tenant) {
  return sum(tenant, (tier) => tier.usage_bytes);
}

/** The tier that is closest to its limit. */
function limits(tenant) {
  const limited = Object.entries(tenant.tiers).filter(([, tier]) => tier.limit_bytes !== null);
  const enforced = limited.filter(([, tier]) => tier.enforced);
  const part = ([, tier]) => tier.usage_bytes / Math.max(1, tier.limit_bytes);
  const first = (enforced.length > 0 ? enforced : limited).sort((a, b) => part(b) - part(a))[0];
  if (!first) return element("span", { class: "quiet" }, "unlimited");
  const [name, tier] = first;
  const text = `${bytes(tier.usage_bytes)} of ${bytes(tier.limit_bytes)} in ${name}`;
  const isOver = Object.values(tenant.tiers).some((it) => it.over_quota);
  return element("span", { class: "limit" },
    tier.limit_bytes > 0 && meter(part(first), text),
    element("span", {}, text),
    enforced.length === 0 && pill("no effect", "quiet"),
    isOver && pill("over quota", "warn"));
}

function show(list) {
  const columns = COLUMNS.map((column) => ({ ...column, ...sorting(column) }));
  if (isAdmin) {
    columns.push({
      title: "Quota",
      cell: (it) => element("button", { type: "button", "data-key": opener(it), "aria-label": `Edit the quota of ${it.cache_salt}`, onclick: () => edit(it) }, it.exists ? "Edit" : "Set"),
    });
  }
  view.shown = list;
  const empty = view.search ? "No tenant has that in its name." : "No tenant has objects or a quota yet.";
  replace(byId("tenant-table"), [list.tenants, view.sort, view.order, isAdmin, empty], () => table("Tenants", columns, list.tenants, empty));
  say(byId("tenant-counts"), `${count(list.total)} known`);
  const end = view.offset + list.tenants.length;
  say(byId("tenant-range"), list.tenants.length > 0 ? `${count(view.offset + 1)} to ${count(end)} of ${count(list.matching)}` : "");
  byId("tenant-previous").disabled = view.offset === 0;
  byId("tenant-next").disabled = end >= list.matching;
}

/** The key of the button that opens the quota of a tenant. */
function opener(tenant) {
  return `quota of ${tenant.cache_salt}`;
}

function sorting({ key, title }) {
  if (!key) return {};
  const isSorted = view.sort === key;
  const order = view.order === "desc" ? "descending" : "ascending";
  return {
    sorted: isSorted ? order : "none",
    head: () => element("button", { type: "button", class: "sort", "data-key": `by ${key}`, onclick: () => sortBy(key) }, title, element("i", { "aria-hidden": "true" }, isSorted ? (view.order === "desc" ? "↓" : "↑") : "")),
  };
}

function sortBy(key) {
  const usual = key === "name" ? "asc" : "desc";
  const other = usual === "asc" ? "desc" : "asc";
  view.order = view.sort === key && view.order === usual ? other : usual;
  view.sort = key;
  view.offset = 0;
  schedule(0);
}

// -- editing ------------------------------------------------------------------------------------

/** What a limit is in an input. */
function limitText(limit) {
  if (limit === undefined) return "";
  return limit === "unlimited" ? limit : `${limit}`;
}

function field(id, label, value, hint) {
  return element("p", { class: "field" },
    element("label", { for: id }, label),
    element("input", { id, name: id, value, autocomplete: "off", spellcheck: "false", placeholder: hint ?? null }));
}

/** Shows the quota of a tenant, or of one that is still to be named. @param {Object|null} tenant */
function edit(tenant) {
  const dialog = byId("quota");
  const form = dialog.querySelector("form");
  const tiers = Object.keys((tenant ?? view.shown?.tenants[0])?.tiers ?? {});
  byId("quota-title").textContent = tenant ? `Quota of ${tenant.cache_salt}` : "Quota of a tenant";
  const own = (tier, key) => tenant?.tiers[tier]?.[key];
  form.querySelector(".fields").replaceChildren(...[
    !tenant && field("quota-name", "Tenant (cache salt)", "", "_default for requests without one"),
    field("quota-limit", "Limit in each tier", tenant?.exists ? limitText(tenant.limit_gb) : "", "GiB, or 512MiB, or unlimited"),
    field("quota-reserved", "Reserved in each tier", limitText(tenant?.reserved_gb), "GiB, or 512MiB; empty for none"),
    tiers.length > 0 && element("details", { open: tiers.some((tier) => own(tier, "limit_gb") !== undefined || own(tier, "reserved_gb") !== undefined) },
      element("summary", {}, "Other values for single tiers"),
      tiers.map((tier, at) => element("div", { class: "pair" },
        field(`quota-limit-${at}`, `Limit in ${tier}`, limitText(own(tier, "limit_gb")), "as above"),
        field(`quota-reserved-${at}`, `Reserved in ${tier}`, limitText(own(tier, "reserved_gb")), "as above")))),
  ].filter(Boolean));
  const failed = form.querySelector(".error");
  failed.textContent = "";
  form.querySelector("[value=remove]").hidden = !tenant?.exists;
  form.querySelector("[value=remove]").onclick = () => attempt(dialog, failed, async () => {
    // The browser would resolve these two as parts of a path, encoded or not.
    const name = [".", ".."].includes(tenant.cache_salt) ? `@${tenant.cache_salt}` : tenant.cache_salt;
    const answer = await ask("DELETE", `quota/${encodeURIComponent(name)}`);
    return `Removed the quota of ${tenant.cache_salt}.${notes(answer)}`;
  });
  form.querySelector("[value=cancel]").onclick = () => dialog.close();
  form.onsubmit = (event) => {
    event.preventDefault();
    const text = (id) => form.elements[id]?.value.trim() ?? "";
    const name = tenant?.cache_salt ?? text("quota-name");
    const quota = { limit_gb: number(text("quota-limit")) };
    if (text("quota-reserved")) quota.reserved_gb = number(text("quota-reserved"));
    const single = tiers.map((tier, at) => [tier, {
      ...(text(`quota-limit-${at}`) && { limit_gb: number(text(`quota-limit-${at}`)) }),
      ...(text(`quota-reserved-${at}`) && { reserved_gb: number(text(`quota-reserved-${at}`)) }),
    }]).filter(([, values]) => Object.keys(values).length > 0);
    if (single.length > 0) quota.tiers = Object.fromEntries(single);
    attempt(dialog, failed, async () => {
      if (name === "") throw new Error("Name the tenant; _default for requests without a salt.");
      if (quota.limit_gb === "") throw new Error("Give a limit: GiB, a size such as 512MiB, or unlimited.");
      // In the body, where any name is itself.
      const answer = await ask("PUT", "quota", { users: { [name]: quota } });
      return `Set the quota of ${name}.${notes(answer)}`;
    });
  };
  // The button that opened it may have been replaced meanwhile.
  dialog.onclose = () => (tenant ? keyed(byId("tenant-table"), opener(tenant)) : byId("tenant-add"))?.focus();
  dialog.showModal();
}

/** A number as a number, other texts as they are. */
function number(text) {
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function notes({ persisted, enforced }) {
  return (persisted === false ? " A restart loses it: there is no state directory." : "")
    + (enforced === false ? " It has no effect: no tier has the policy IsolatedLRU." : "");
}

async function attempt(dialog, failed, change) {
  failed.textContent = "";
  try {
    const done = await change();
    dialog.close();
    toast(done);
    schedule(0);
  } catch (error) {
    failed.textContent = error.message;
  }
}

// -- what starts it ------------------------------------------------------------------------------

byId("tenant-add").addEventListener("click", () => edit(null));
byId("tenant-previous").addEventListener("click", () => turn(-LIMIT));
byId("tenant-next").addEventListener("click", () => turn(LIMIT));
byId("tenant-search").addEventListener("input", (event) => {
  view.search = event.target.value;
  view.offset = 0;
  schedule(TYPING);
});

function turn(by) {
  view.offset = Math.max(0, view.offset + by);
  schedule(0);
}

new IntersectionObserver(([entry]) => {
  isVisible = entry.isIntersecting;
  if (isVisible && view.shown) schedule(0);
}).observe(byId("tenants"));
