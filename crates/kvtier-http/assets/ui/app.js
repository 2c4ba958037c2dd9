// The page: signs in, follows the stream of events, and passes each one to the panels.

import { History } from "./chart.js";
import { clock, span } from "./format.js";
import { byId, say } from "./dom.js";
import { ask, hasToken, Refused, setToken, Stream } from "./server.js";
import { drawCharts, showFlags, showPanels } from "./panels.js";
import { startTenants, stopTenants } from "./tenants.js";
import { knowModels, makeExplain } from "./explain.js";

/** Time without a tick after which what is shown is old. */
const STALE = 7000;

let history = null;
let tick = null;
let received = 0;
let span_ = Number(document.querySelector("[name=span]:checked").value);
let problem = null;
let isDrawn = false;

function show(state) {
  document.body.dataset.state = state;
  byId("sign-in").hidden = state !== "signed-out";
  byId("dashboard").hidden = tick === null || state === "signed-out";
}

const stream = new Stream(take, lost);

function take(name, data) {
  problem = null;
  received = Date.now();
  if (name === "history") {
    history = new History(data);
    const caller = byId("caller");
    caller.hidden = data.caller === null;
    caller.firstElementChild.textContent = data.caller === null ? "" : `${data.caller} (${data.role})`;
    startTenants(data.role === "admin");
    loadFlags();
  } else if (name === "tick") {
    tick = data;
    history.add(tick);
    show("live");
    draw();
  }
  live();
}

/** Draws once per frame, and not while the page is hidden. */
function draw() {
  if (isDrawn || tick === null) return;
  isDrawn = true;
  requestAnimationFrame(() => {
    isDrawn = false;
    // Signed out meanwhile.
    if (tick === null) return;
    showPanels(tick, history);
    drawCharts(history, tick.status, span_);
    if (tick.status) knowModels(tick.status);
  });
}

/** @param {Error|null} error @param {number} pause */
function lost(error, pause) {
  if (pause === 0) {
    signOut(hasToken() ? error.message : "");
    return;
  }
  const cause = error instanceof Refused ? error.message : "The connection to the server was lost";
  problem = { cause, until: Date.now() + pause };
  live();
}

/** The state of the connection, once per second. */
function live() {
  if (document.body.dataset.state === "signed-out") return;
  const place = byId("live");
  const trouble = byId("trouble");
  const since = received && tick ? ` Values are from ${clock(tick.at)}.` : "";
  const isOld = problem !== null || (received > 0 && Date.now() - received > STALE);
  document.body.classList.toggle("stale", isOld && tick !== null);
  say(place, isOld ? "no connection" : received ? "live" : "connecting");
  trouble.hidden = !isOld;
  const [alert, wait] = trouble.children;
  say(alert, isOld ? `${problem ? problem.cause : "The server sends nothing"}.${since}` : "");
  // Beside what is announced, as it changes each second.
  const seconds = (time) => span(Math.max(0, Math.ceil(time / 1000)));
  if (isOld) say(wait, problem ? `Trying again in ${seconds(problem.until - Date.now())}.` : `Silent for ${seconds(Date.now() - received)}.`);
}

function signOut(reason) {
  stream.stop();
  stopTenants();
  setToken(null);
  tick = null;
  received = 0;
  problem = null;
  byId("caller").hidden = true;
  byId("trouble").hidden = true;
  for (const id of ["instance", "about"]) byId(id).textContent = "";
  byId("live").textContent = "signed out";
  byId("health").textContent = "";
  byId("health").className = "pill";
  byId("flags").replaceChildren();
  show("signed-out");
  document.querySelector("#sign-in .error").textContent = reason;
  byId("token").focus();
}

async function loadFlags() {
  if (!document.querySelector("#configuration details").open) return;
  try {
    showFlags(await ask("GET", "config"));
  } catch (error) {
    byId("flags").textContent = error.message;
  }
}

document.querySelector("#sign-in form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  document.querySelector("#sign-in .error").textContent = "";
  document.body.dataset.state = "connecting";
  stream.start();
});
byId("trouble").querySelector("button").addEventListener("click", () => (problem ? stream.hurry() : stream.start()));
byId("caller").querySelector("button").addEventListener("click", () => signOut(""));
document.querySelector("#configuration details").addEventListener("toggle", loadFlags);
for (const choice of document.querySelectorAll("[name=span]")) {
  choice.addEventListener("change", () => {
    span_ = Number(choice.value);
    draw();
  });
}
document.addEventListener("visibilitychange", draw);
setInterval(live, 1000);
makeExplain();
stream.start();
