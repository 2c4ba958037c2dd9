// Requests to the server. The token stays in this tab's session storage and travels in a header, never in an address.

const KEY = "kvtier-token";
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15000;

/** The answer that a request got instead of what it wanted. */
export class Refused extends Error {
  /** @param {number} status @param {string} text */
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

/** @param {string|null} token */
export function setToken(token) {
  if (token === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, token);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token === null ? more : { ...more, authorization: `Bearer ${token}` };
}

/** What a refusal says, in any of the shapes of the API. */
async function refusal(answer) {
  const text = await answer.text();
  try {
    const { detail, error } = JSON.parse(text);
    const first = Array.isArray(detail) ? detail.map((it) => `${it.loc.slice(1).join(".")}: ${it.msg}`).join("; ") : detail;
    return new Refused(answer.status, error ?? first ?? text);
  } catch {
    return new Refused(answer.status, text || answer.statusText);
  }
}

/** @param {string} method @param {string} path @param {any} [body] */
export async function ask(method, path, body) {
  const json = body === undefined ? {} : { "content-type": "application/json" };
  const answer = await fetch(path, {
    method,
    headers: headers(json),
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
  });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/** Reads events until they end. */
async function read(signal, take) {
  const answer = await fetch("ui/events", { headers: headers(), cache: "no-store", credentials: "omit", signal });
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = /^event: (\w+)\ndata: (.*)$/s.exec(text.slice(0, end));
      text = text.slice(end + 2);
      if (event) take(event[1], JSON.parse(event[2]));
    }
  }
}

/** One stream of events, connected again after a pause that grows while it fails. */
export class Stream {
  #aborter = null;
  #skip = null;
  #take;
  #lost;

  /** @param {(name: string, data: any) => void} take
   * @param {(error: Error|null, pause: number) => void} lost  the pause is 0 for one that is not tried again */
  constructor(take, lost) {
    this.#take = take;
    this.#lost = lost;
  }

  async start() {
    this.stop();
    const aborter = new AbortController();
    this.#aborter = aborter;
    let pause = FIRST_PAUSE;
    while (!aborter.signal.aborted) {
      let error = null;
      try {
        await read(aborter.signal, (name, data) => {
          pause = FIRST_PAUSE;
          this.#take(name, data);
        });
      } catch (failed) {
        error = failed;
      }
      if (aborter.signal.aborted) return;
      if (error instanceof Refused && error.status === 401) {
        this.#lost(error, 0);
        return;
      }
      const wait = pause * (0.75 + Math.random() / 2);
      this.#lost(error, wait);
      await new Promise((resolve) => {
        this.#skip = resolve;
        setTimeout(resolve, wait);
      });
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }

  /** Tries again without the rest of the pause. */
  hurry() {
    this.#skip?.();
  }

  stop() {
    this.#aborter?.abort();
  }
}
