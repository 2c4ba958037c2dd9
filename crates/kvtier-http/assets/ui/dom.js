// Elements. Text is set as text and never parsed: names of tenants and models are chosen by clients.

/** @param {string} id */
export function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes and children; a child that is no element is text.
 * @param {string} tag @param {Object} [attributes] @param {...any} children */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Sets a text unless it is there already: what is announced is announced once. @param {Element} place @param {string} text */
export function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** The element below a place that has this `data-key`. @param {Element} place @param {string} key */
export function keyed(place, key) {
  return [...place.querySelectorAll("[data-key]")].find((it) => it.dataset.key === key);
}

const shown = new WeakMap();

/** Replaces the children of a place if what they are made of has changed, so that selections and focus stay. Focus also stays
 * on an element whose successor has the same `data-key`.
 * @param {Element} place @param {any} data @param {() => any} make */
export function replace(place, data, make) {
  const key = JSON.stringify(data);
  if (shown.get(place) === key) return;
  shown.set(place, key);
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...[make()].flat());
  if (focused !== undefined) keyed(place, focused)?.focus({ preventScroll: true });
}

/** A table. A column is {title, cell, number, narrow}: `narrow` is false for one that phones leave out.
 * @param {string} caption @param {Object[]} columns @param {any[]} rows @param {string} empty */
export function table(caption, columns, rows, empty) {
  if (rows.length === 0) return element("p", { class: "empty" }, empty);
  const names = (column) => [column.number && "number", column.narrow === false && "wide"].filter(Boolean).join(" ") || null;
  const head = columns.map((column) =>
    element("th", { scope: "col", class: names(column), "aria-sort": column.sorted ?? null }, column.head?.() ?? column.title));
  const line = (row) => element("tr", {}, columns.map((column, at) =>
    element(at === 0 ? "th" : "td", { class: names(column), scope: at === 0 ? "row" : null }, column.cell(row))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, "data-key": caption },
    element("table", {},
      element("caption", { class: "hidden" }, caption),
      element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, rows.map(line))));
}

/** Names and values. @param {Array<[string, any, string?]>} pairs */
export function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.map(([name, value, kind]) =>
    element("div", { class: kind ?? null }, element("dt", {}, name), element("dd", {}, value))));
}

/** A bar for the used part of something. @param {number} part of 1 @param {string} label */
export function meter(part, label) {
  const full = Math.min(1, Math.max(0, part));
  const fill = element("span", { class: full >= 0.97 ? "full" : full >= 0.85 ? "high" : null });
  fill.style.width = `${(100 * full).toFixed(1)}%`;
  return element("span", { class: "meter", role: "img", "aria-label": label }, fill);
}

/** @param {string} text @param {"good"|"warn"|"bad"|"quiet"} kind */
export function pill(text, kind) {
  return element("span", { class: `pill ${kind}` }, text);
}

let hiding = 0;

/** Shows a message for some seconds. @param {string} text */
export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { place.hidden = true; }, 6000);
}
