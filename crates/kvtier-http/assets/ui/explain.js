// Why a prompt misses: asks POST /cache/explain.

import { ask } from "./server.js";
import { count } from "./format.js";
import { byId, element, table } from "./dom.js";

/** Token ids from a list, numbers in any form, or the answer of vLLM's /tokenize. @param {string} text */
export function tokenIds(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    value = text.split(/[\s,]+/).filter(Boolean).map(Number);
  }
  const ids = Array.isArray(value) ? value : value?.tokens;
  if (!Array.isArray(ids) || ids.length === 0 || !ids.every((id) => Number.isInteger(id) && id >= 0)) {
    throw new Error("Give token ids: a JSON list, numbers, or the answer of vLLM's /tokenize.");
  }
  return ids;
}

let models = [];

/** @param {Object} status */
export function knowModels(status) {
  const all = [...Object.values(status.cache_context_meta), ...Object.values(status.non_cuda_context_meta)];
  const names = [...new Set(all.map((worker) => worker.model_name))].sort();
  if (JSON.stringify(names) === JSON.stringify(models)) return;
  models = names;
  byId("explain-models")?.replaceChildren(...names.map((name) => element("option", { value: name })));
}

export function makeExplain() {
  const input = (id, more) => element("input", { id, autocomplete: "off", spellcheck: "false", ...more });
  const failed = element("p", { class: "error", role: "alert" });
  const outcome = element("div", { "aria-live": "polite" });
  const form = element("form", {},
    element("p", { class: "field" }, element("label", { for: "explain-model" }, "Model"), input("explain-model", { list: "explain-models", required: true })),
    element("datalist", { id: "explain-models" }, models.map((name) => element("option", { value: name }))),
    element("p", { class: "field" }, element("label", { for: "explain-salt" }, "Tenant (cache salt), empty for none"), input("explain-salt")),
    element("p", { class: "field" }, element("label", { for: "explain-tokens" }, "Token ids, or the answer of vLLM's /tokenize"),
      element("textarea", { id: "explain-tokens", rows: "3", spellcheck: "false", required: true })),
    failed,
    element("button", { type: "submit", class: "primary" }, "Explain"),
    outcome);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    failed.textContent = "";
    const value = (id) => form.elements[id].value;
    try {
      const question = { model_name: value("explain-model").trim(), token_ids: tokenIds(value("explain-tokens")) };
      if (value("explain-salt")) question.cache_salt = value("explain-salt");
      show(outcome, await ask("POST", "cache/explain", question));
    } catch (error) {
      outcome.replaceChildren();
      failed.textContent = error.message;
    }
  });
  byId("explain").replaceChildren(form);
}

function show(place, explanation) {
  const rows = explanation.rows.flatMap((row) => row.runs.map((run) => ({ ...run, row })));
  const several = explanation.rows.length > 1;
  place.replaceChildren(
    element("p", { class: "answer" }, explanation.summary),
    table("Chunks of the prompt", [
      { title: "Chunks", cell: (run) => (run.chunks === 1 ? count(run.first_chunk) : `${count(run.first_chunk)} to ${count(run.first_chunk + run.chunks - 1)}`) },
      ...(several ? [{ title: "Object group, workers", cell: (run) => `${run.row.object_group_id}, ${run.row.workers.join(" ")}` }] : []),
      { title: "Where", cell: (run) => element("span", { class: `state ${run.state}` }, run.text) },
    ], rows, "The prompt is shorter than a chunk."));
}
