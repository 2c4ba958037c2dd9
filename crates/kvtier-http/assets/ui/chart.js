// Lines over time, drawn from the history that the server keeps.

import { clock, known, NONE } from "./format.js";
import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const HEIGHT = 240;
const COLUMNS = 300;

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** The least round number that is no less. @param {number} value @param {boolean} isBytes */
export function ceiling(value, isBytes) {
  if (!(value > 0)) return 1;
  const base = isBytes ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(value / base));
  return base * power * [1, 2, 2.5, 5, 10].find((step) => value / base <= power * step * 1.0001);
}

/** The history of the server's series, as far as this page has received it. */
export class History {
  /** @param {Object} history  the data of the event `history` */
  constructor(history) {
    this.interval = history.interval_seconds;
    this.capacity = history.capacity;
    this.sequence = history.sequence;
    this.series = history.series;
    this.at = Date.now();
  }

  /** Adds the point of a tick, and a gap for each one that was missed. @param {Object} tick */
  add(tick) {
    this.at = tick.at;
    const missed = Math.min(tick.sequence - this.sequence, this.capacity);
    if (missed <= 0) return;
    this.sequence = tick.sequence;
    for (const [name, values] of Object.entries(this.series)) {
      for (let gap = 1; gap < missed; gap += 1) values.push(null);
      values.push(tick.point[name] ?? null);
      if (values.length > this.capacity) values.splice(0, values.length - this.capacity);
    }
  }
}

/** One value per column, from the newest points. Of several points in a column it is their mean, or the largest. */
function columns(values, points, largest) {
  const size = Math.ceil(points / COLUMNS);
  const count = Math.ceil(points / size);
  const made = [];
  for (let column = 0; column < count; column += 1) {
    const end = values.length - (count - 1 - column) * size;
    const part = values.slice(Math.max(0, end - size), Math.max(0, end)).filter(known);
    if (part.length === 0) made.push(null);
    else made.push(largest ? Math.max(...part) : part.reduce((sum, value) => sum + value, 0) / part.length);
  }
  return made;
}

/** @param {Array<number|null>} values @param {number} top @param {number} [least]  the lower end of a logarithmic axis */
function line(values, top, least) {
  const x = (at) => ((WIDTH * at) / Math.max(1, values.length - 1)).toFixed(1);
  const part = (value) => (least ? Math.log(Math.max(value, least) / least) / Math.log(top / least) : value / top);
  const y = (value) => (HEIGHT * (1 - Math.min(1, part(value)))).toFixed(1);
  let path = "";
  let area = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const isFirst = at === 0 || values[at - 1] === null;
    const isLast = at === values.length - 1 || values[at + 1] === null;
    path += isFirst ? `M${x(at)} ${y(value)}` : `L${x(at)} ${y(value)}`;
    area += isFirst ? `M${x(at)} ${HEIGHT}L${x(at)} ${y(value)}` : `L${x(at)} ${y(value)}`;
    // A point between two gaps.
    if (isFirst && isLast) path += "h.1";
    if (isLast) area += `L${x(at)} ${HEIGHT}Z`;
  });
  return { path, area };
}

/** A chart of some series. */
export class Chart {
  /** @param {Object} options
   * @param {string} options.title
   * @param {Array<{name: string, label: string}>} options.series
   * @param {(value: number) => string} options.format
   * @param {number} [options.top]  a fixed upper end
   * @param {boolean} [options.bytes]
   * @param {number} [options.least]  the lower end, of a logarithmic axis
   * @param {boolean} [options.largest]  of several points in a column */
  constructor(options) {
    this.options = options;
    this.at = null;
    this.values = options.series.map(() => element("b", {}, NONE));
    this.when = element("span", { class: "quiet" });
    this.top = element("span", { class: "top" });
    this.start = element("span");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
    for (const part of [0.25, 0.5, 0.75, 1]) {
      this.picture.append(svg("path", { class: "grid", d: `M0 ${HEIGHT * part}H${WIDTH}` }));
    }
    this.areas = options.series.map((_, at) => svg("path", { class: `area s${at}` }));
    this.lines = options.series.map((_, at) => svg("path", { class: `line s${at}` }));
    this.cursor = svg("path", { class: "cursor" });
    this.picture.append(...(options.series.length === 1 ? this.areas : []), ...this.lines, this.cursor);
    const legend = options.series.map(({ label }, at) =>
      element("li", {}, element("i", { class: `s${at}` }), `${label} `, this.values[at]));
    this.plot = element("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": options.title, "aria-readonly": "true", "aria-valuemin": "0" }, this.picture, this.top, element("span", { class: "zero" }, options.format(options.least ?? 0)));
    this.element = element("figure", { class: "card chart" },
      element("figcaption", {}, element("h3", {}, options.title, " ", this.when), element("ul", { class: "legend" }, legend)),
      this.plot,
      element("p", { class: "times quiet" }, this.start, element("span", {}, "now")));
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerdown", (event) => this.#point(event));
    this.plot.addEventListener("keydown", (event) => this.#step(event));
    for (const name of ["pointerleave", "blur"]) {
      this.plot.addEventListener(name, () => {
        this.at = null;
        this.#show();
      });
    }
  }

  /** @param {History} history @param {number} seconds */
  draw(history, seconds) {
    const { series, top, largest, bytes, least } = this.options;
    const points = Math.round(seconds / history.interval);
    this.drawn = series.map(({ name }) => columns(history.series[name] ?? [], points, largest));
    this.history = history;
    this.seconds = seconds;
    const most = Math.max(0, ...this.drawn.flat().filter(known));
    const end = top ?? (least ? 10 ** Math.ceil(Math.log10(Math.max(most, 100 * least)) - 1e-6) : ceiling(most, bytes));
    this.top.textContent = this.options.format(end);
    this.start.textContent = `${seconds / 60} min ago`;
    this.drawn.forEach((values, at) => {
      const { path, area } = line(values, end, least);
      this.lines[at].setAttribute("d", path);
      this.areas[at].setAttribute("d", area);
    });
    this.#show();
  }

  #point(event) {
    const place = this.plot.getBoundingClientRect();
    this.at = Math.min(1, Math.max(0, (event.clientX - place.left) / place.width));
    this.#show();
  }

  /** Moves the cursor by keys; behind the last column it is now. */
  #step(event) {
    if (!this.drawn || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this.drawn[0].length - 1;
    const at = this.at === null ? last : Math.round(this.at * last);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last, Escape: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.at = next >= last ? null : Math.max(0, next) / last;
    this.#show(true);
  }

  /** The values at the cursor, or the latest ones. @param {boolean} [isAsked]  else nothing is announced of a focused chart */
  #show(isAsked) {
    if (!this.drawn) return;
    const { series, format } = this.options;
    const last = this.drawn[0].length - 1;
    const at = this.at === null ? last : Math.round(this.at * last);
    this.drawn.forEach((values, number) => {
      this.values[number].textContent = format(values[at]);
    });
    const isNow = this.at === null;
    this.cursor.setAttribute("d", isNow ? "" : `M${(WIDTH * at) / Math.max(1, last)} 0V${HEIGHT}`);
    this.when.textContent = isNow ? "" : clock(this.history.at - ((last - at) / Math.max(1, last)) * this.seconds * 1000);
    if (!isAsked && document.activeElement === this.plot) return;
    const values = series.map(({ label }, number) => `${label} ${format(this.drawn[number][at])}`);
    this.plot.setAttribute("aria-valuemax", last);
    this.plot.setAttribute("aria-valuenow", at);
    this.plot.setAttribute("aria-valuetext", `${isNow ? "now" : this.when.textContent}: ${values.join(", ")}`);
  }
}
