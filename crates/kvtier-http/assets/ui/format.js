// Values as text, with their units.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export const NONE = "–";

/** @param {number|null|undefined} value */
export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** @param {number} value */
export function count(value) {
  if (!known(value)) return NONE;
  if (Math.abs(value) >= 1e7) return `${tenth.format(value / 1e6)} M`;
  return whole.format(value);
}

/** @param {number} value */
export function rate(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  return value < 10 ? tenth.format(value) : count(value);
}

/** @param {number} value */
export function bytes(value) {
  if (!known(value)) return NONE;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** @param {number} value */
export function byteRate(value) {
  return known(value) ? `${bytes(value)}/s` : NONE;
}

/** @param {number|null} part of 1 */
export function percent(part) {
  if (!known(part)) return NONE;
  const value = 100 * part;
  return `${value === 0 || value >= 99.95 ? whole.format(value) : tenth.format(value)} %`;
}

/** A latency. @param {number} seconds */
export function latency(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds > 10) return "> 10 s";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 2 ? 1 : 0)} s`;
  if (seconds >= 1e-3) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  return `${+(seconds * 1e6).toPrecision(3)} µs`;
}

/** The bound of a histogram below which a part of the answers was; the server sends none for one above the last bound.
 * @param {{per_second: number}} rates @param {"p50"|"p99"} part */
export function bound(rates, part) {
  if (rates[part] === null && rates.p50 === null) return NONE;
  return rates[part] === null ? "> 10 s" : latency(rates[part]);
}

/** A span of time. @param {number} seconds */
export function span(seconds) {
  if (!known(seconds)) return NONE;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => seconds >= size);
  if (at < 0) return "0 s";
  const [name, size] = units[at];
  const rest = units[at + 1];
  const first = Math.floor(seconds / size);
  const second = rest ? Math.floor((seconds - first * size) / rest[1]) : 0;
  return second > 0 && first < 10 ? `${first} ${name} ${second} ${rest[0]}` : `${first} ${name}`;
}

/** @param {number} milliseconds since 1970 */
export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

/** @param {number} milliseconds since 1970 */
export function moment(milliseconds) {
  const date = new Date(milliseconds);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(milliseconds) : `${date.toLocaleDateString("en-CA")} ${clock(milliseconds)}`;
}
