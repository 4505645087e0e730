// Shows the snapshots of GET /events, and talks to a model.

import { bars, dots, lines, shown } from "./charts.js";

const HISTORY_S = 300, TIMELINE_S = 60, LANES_MAX = 64, PROGRAM_ROWS_MAX = 200, LEDGERS_MAX = 8, DOTS_MAX = 1000, AGAIN_S = 2;
const $ = (id) => document.getElementById(id);

const history = { tokens: [], median: [], high: [], running: [], waiting: [] };
const requests = new Map(); // id -> its last report, with its lane
const occupied = new Map(); // engine -> [share of its slots, ...], one a second
const prompts = new Map(); // engine -> [[tokens of prompts, those of them in its cache], ...], one a second
const programs = new Map(); // program -> { step, spans: [[from, to, state], ...] }, in the order in which they came
const ledgers = new Map(); // engine -> [share of its cache that is taken, ...], one a second
const points = []; // [forecast, real]
let last = null;

// ---- what happens ----

async function follow() {
  for (;;) {
    const key = sessionStorage.getItem("admin-key");
    let ended = "the server does not answer";
    try {
      const response = await fetch("events", { headers: key ? { authorization: `Bearer ${key}` } : {} });
      if (response.status === 401) return ask(key ? "The server refuses this key." : "");
      if (response.status === 404) return ask("The server has no admin key: start it with --admin-key-file FILE.");
      if (response.ok) {
        $("admin").hidden = true;
        $("live").hidden = false;
        await read(response.body, (data) => show(JSON.parse(data)));
        ended = "the server has closed the connection";
      }
    } catch { /* no connection */ }
    state(`${ended}; trying again. The figures are from before`, true);
    document.body.classList.add("past");
    await new Promise((resolve) => setTimeout(resolve, 1000 * AGAIN_S));
  }
}

// Calls `take` with the data of each event of a stream, and `hear` with each comment.
async function read(body, take, hear = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) hear(line.slice(1).trim());
      else if (line.startsWith("data:")) data.push(line.slice(5).trim());
      else if (line === "" && data.length) {
        take(data.join("\n"));
        data = [];
      }
    }
  }
}

function ask(note) {
  $("admin").hidden = false;
  $("live").hidden = true;
  $("admin-note").textContent = note;
  state("the admin key is needed", false);
}

$("admin").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("admin-key", $("admin-key").value);
  follow();
});

function state(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

function show(now) {
  document.body.classList.remove("past");
  const restarted = last !== null && now.now_s < last.now_s;
  if (restarted) { requests.clear(); occupied.clear(); prompts.clear(); programs.clear(); ledgers.clear(); last = null; }
  const passed = Math.max(0.2, now.now_s - now.since_s);
  push(history.tokens, now.tokens / passed);
  push(history.median, now.latency_s ? now.latency_s[0] : null);
  push(history.high, now.latency_s ? now.latency_s[1] : null);
  push(history.running, now.running);
  push(history.waiting, now.waiting);
  for (const engine of now.engines) {
    if (!occupied.has(engine.name)) occupied.set(engine.name, []);
    push(occupied.get(engine.name), engine.slots ? Math.min(1, engine.running / engine.slots) : 0, TIMELINE_S);
    if (!prompts.has(engine.name)) prompts.set(engine.name, []);
    push(prompts.get(engine.name), [engine.prompt_tokens, engine.cached_tokens], TIMELINE_S);
    if (!ledgers.has(engine.name)) ledgers.set(engine.name, []);
    push(ledgers.get(engine.name), engine.tokens_max ? Math.min(1, engine.ledger_tokens / engine.tokens_max) : 0, TIMELINE_S);
  }
  now.requests.forEach((request) => note(request));
  forget(now);
  notePrograms(now);
  tiles(now, passed);
  tables(now);
  jobs(now);
  draw(now);
  const up = now.engines.filter((engine) => engine.state === "ready").length;
  const count = now.engines_in_all > now.engines.length ? `${now.engines_in_all} engines` : `${up} of ${now.engines.length} engines ready`;
  state(`${now.draining ? "draining, " : ""}${count}, order ${now.order}`, now.draining || up === 0);
  last = now;
}

function push(values, value, most = HISTORY_S) {
  values.push(value);
  if (values.length > most) values.shift();
}

// Remembers a request, in the first lane of its engine that was free at its start.
function note(request) {
  const known = requests.get(request.id);
  if (known && known.engine === request.engine && known.started_s === request.started_s) {
    Object.assign(known, request);
  } else {
    const taken = new Set();
    for (const other of requests.values()) {
      if (other.engine === request.engine && (other.ended_s === null || other.ended_s > request.started_s + 0.001)) taken.add(other.lane);
    }
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    requests.set(request.id, { ...request, lane });
  }
  if (request.ended_s !== null && request.predicted !== null && request.tokens > 0) {
    push(points, [request.predicted, request.tokens], DOTS_MAX);
  }
}

// Drops what has left the picture, and what was running without being reported again.
function forget(now) {
  const reported = new Set(now.requests.map((request) => request.id));
  for (const [id, request] of requests) {
    if (request.ended_s === null && !reported.has(id)) request.ended_s = now.now_s;
    if (request.ended_s !== null && request.ended_s < now.now_s - TIMELINE_S) requests.delete(id);
  }
}

// Remembers since when each program has been in its state, and drops those that have left the picture.
function notePrograms(now) {
  for (const seen of now.programs.programs) {
    if (!programs.has(seen.program)) programs.set(seen.program, { spans: [] });
    const known = programs.get(seen.program), span = known.spans.at(-1), from = now.now_s - seen.since_s;
    known.step = seen.step;
    if (span && span[2] === seen.state && from < span[1] + 0.001) span[1] = now.now_s;
    else known.spans.push([Math.max(from, span?.[1] ?? from), now.now_s, seen.state]);
  }
  for (const [program, known] of programs) {
    known.spans = known.spans.filter(([, to]) => to > now.now_s - TIMELINE_S);
    if (!known.spans.length) programs.delete(program);
  }
}

function tiles(now, passed) {
  const refused = Object.values(now.refused).reduce((sum, count) => sum + count, 0);
  const watts = last && now.joules !== null && last.joules !== null ? (now.joules - last.joules) / (now.now_s - last.now_s) : null;
  const values = [
    ["running, of slots", `${now.running.toLocaleString("en")} / ${now.slots.toLocaleString("en")}`],
    ["waiting", now.waiting.toLocaleString("en")],
    ["requests/s", shown(now.arrived / passed)],
    ["tokens/s", shown(now.tokens / passed)],
    ["latency, p50 / p99", now.latency_s ? now.latency_s.map((value) => `${shown(value)}`).join(" / ") + " s" : "–"],
    ["queue, p50 / p99", now.queue_s ? now.queue_s.map((value) => `${shown(value)}`).join(" / ") + " s" : "–"],
    ["refused/s", shown(refused / passed)],
    ["power", watts === null ? "–" : `${shown(watts)} W`],
  ];
  $("tiles").replaceChildren(...values.map(([name, value]) => element("div", element("dt", name), element("dd", value))));
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function number(value) {
  const cell = element("td", value.toLocaleString("en"));
  cell.className = "number";
  return cell;
}

function tables(now) {
  const rows = now.engines.map((engine) => {
    const condition = element("td", engine.circuit ? engine.state : `${engine.state}, fails requests`);
    if (engine.state !== "ready" || !engine.circuit) condition.className = "bad";
    const more = engine.models.length === 10 ? " …" : "";
    return element("tr", element("td", engine.name), element("td", engine.kind), condition, element("td", `${engine.running} / ${engine.slots}`), element("td", hits(engine.name)), element("td", memory(engine)), element("td", engine.models.join(", ") + more));
  });
  if (now.engines_in_all > now.engines.length) rows.push(element("tr", element("td", `… and ${now.engines_in_all - now.engines.length} more`)));
  $("engines").tBodies[0].replaceChildren(...rows);
  $("sources").hidden = now.sources.length === 0;
  $("sources").textContent = now.sources.map((source) => `${source.name}: ${source.engines} engines${source.trouble && ` (${source.trouble})`}`).join("; ");
  for (const [id, waiting, nobody] of [["models", now.models, "any model"], ["shares", now.shares, "without a key"]]) {
    const lines = waiting.map((entry) => element("tr", element("td", entry.name || nobody), number(entry.requests)));
    $(id).tBodies[0].replaceChildren(...(lines.length ? lines : [element("tr", element("td", "nobody"))]));
  }
}

function memory({ tokens_max, ledger_tokens }) {
  return tokens_max && ledger_tokens ? `${Math.round(100 * ledger_tokens / tokens_max)} % of ${tokens_max.toLocaleString("en")}` : "–";
}

// The share of its prompts that an engine had in its cache, as far as it tells.
function hits(name) {
  const [tokens, cached] = prompts.get(name).reduce(([tokens, cached], [more, found]) => [tokens + more, cached + found], [0, 0]);
  return tokens ? `${Math.round(100 * cached / tokens)} %` : "–";
}

const STATUSES = ["validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"];

function jobs(now) {
  $("jobs-panel").hidden = !now.jobs;
  if (!now.jobs) return;
  const { batches, lines_waiting, lines_in_flight, tokens_waiting } = now.jobs;
  const known = STATUSES.filter((status) => batches?.[status]);
  const rows = known.map((status) => element("tr", element("td", status.replace("_", " ")), number(batches[status])));
  const none = element("tr", element("td", batches ? "no batches" : "the store does not answer"));
  if (!batches) none.className = "bad";
  $("jobs").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  const lines = `${lines_waiting.toLocaleString("en")} lines wait`;
  const tokens = `about ${Math.round(tokens_waiting).toLocaleString("en")} tokens`;
  $("jobs-note").textContent = `${lines}, ${tokens}; ${lines_in_flight.toLocaleString("en")} in the queue or running`;
}

function draw(now) {
  const seconds = 60 * Math.ceil(history.tokens.length / 60);
  lines($("tokens"), [["first", history.tokens]], seconds);
  lines($("latency"), [["second", history.high], ["first", history.median]], seconds);
  lines($("requests"), [["second", history.waiting], ["first", history.running]], seconds);
  dots($("forecast"), points);
  describe("tokens", `${shown(history.tokens.at(-1))} tokens per second now`);
  describe("latency", now.latency_s ? `median ${shown(now.latency_s[0])} s now` : "no answer in the last second");
  describe("requests", `${now.running} running, ${now.waiting} waiting now`);
  describe("forecast", `${points.length} answers`);
  timeline(now);
  programTimeline(now);
}

function describe(id, text) {
  $(id).setAttribute("aria-label", text);
}

function timeline(now) {
  const lanes = now.engines.reduce((sum, engine) => sum + engine.slots, 0);
  const single = lanes <= LANES_MAX && now.engines_in_all === now.engines.length;
  const rows = single ? lanesOf(now) : now.engines.map((engine) => [engine.name, shares(engine.name)]);
  $("timeline-note").textContent = single ? "each bar a request; green: runs; orange: 1.5 times its forecast or longer" : "height: share of the slots in use";
  $("timeline").style.height = `${Math.min(640, Math.max(120, 24 + rows.length * (single ? 11 : 14)))}px`;
  bars($("timeline"), rows, TIMELINE_S, true);
  describe("timeline", `${now.running} requests on ${now.engines.length} engines`);
}

const SHADES = { running: "third", held: "first", waiting: "second" };

function programTimeline(now) {
  const { running = 0, held = 0, waiting = 0 } = now.programs.counts;
  $("programs-panel").hidden = !programs.size;
  if (!programs.size) return;
  const counts = `${running} run, ${held} held, ${waiting} wait now`;
  const present = new Set(now.programs.programs.map((seen) => seen.program));
  const chosen = [...programs].sort(([one], [other]) => present.has(other) - present.has(one)).slice(0, PROGRAM_ROWS_MAX);
  const memories = [...ledgers].filter(([, values]) => values.some((value) => value > 0)).slice(0, LEDGERS_MAX);
  const rows = chosen.map(([program, { step, spans }]) => [
    `${program.slice(0, 6)} step ${step}`, spans.map(([from, to, state]) => [now.now_s - from, now.now_s - to, SHADES[state], 1]),
  ]);
  const hidden = running + held + waiting - Math.min(present.size, PROGRAM_ROWS_MAX);
  $("programs-note").textContent = counts + (hidden > 0 ? `, of which ${hidden} are not shown` : "") + (memories.length ? "; grey: the memory that they take of each engine" : "");
  $("programs").style.height = `${Math.min(640, Math.max(60, 24 + rows.length * 13))}px`;
  bars($("programs"), rows, TIMELINE_S, true);
  $("ledgers").hidden = !memories.length;
  $("ledgers").style.height = `${24 + memories.length * 28}px`;
  if (memories.length) bars($("ledgers"), memories.map(([name, values]) => [name, spansOf(values, "faint")]), TIMELINE_S, true);
  describe("ledgers", memories.map(([name, values]) => `${name}: ${Math.round(100 * values.at(-1))} % of its memory`).join(", "));
  describe("programs", counts);
  $("program-list").tBodies[0].replaceChildren(...now.programs.programs.map((seen) => element(
    "tr", element("td", seen.program.slice(0, 6)), number(seen.step), element("td", seen.state), element("td", `${shown(seen.since_s)} s`), element("td", seen.engine),
    number(seen.tokens), element("td", seen.tools.join(", ")), element("td", seen.starts_s === null ? "" : `${shown(seen.starts_s)} s`),
  )));
}

function lanesOf(now) {
  const rows = new Map();
  for (const engine of now.engines) {
    for (let lane = 0; lane < engine.slots; lane += 1) rows.set(`${engine.name} ${lane}`, [lane === 0 ? engine.name : "", []]);
  }
  for (const request of requests.values()) {
    const row = rows.get(`${request.engine} ${request.lane}`);
    if (!row) continue;
    const longer = request.predicted !== null && request.tokens > 1.5 * request.predicted;
    const shade = longer ? "second" : request.ended_s === null ? "third" : "first";
    row[1].push([now.now_s - request.started_s, now.now_s - (request.ended_s ?? now.now_s), shade, 1]);
  }
  return [...rows.values()];
}

function shares(name) {
  return spansOf(occupied.get(name) ?? [], "first");
}

// One value a second, as bars of that height.
function spansOf(values, shade) {
  return values.map((value, index) => [values.length - index, values.length - index - 1, shade, value]).filter(([, , , high]) => high > 0);
}

// ---- a chat ----

let stopping = null;

async function models() {
  const key = sessionStorage.getItem("api-key");
  const response = await fetch("v1/models", { headers: key ? { authorization: `Bearer ${key}` } : {} }).catch(() => null);
  if (response && response.status === 401) needKey();
  if (!response || !response.ok) return;
  await choose((await response.json()).data.map((model) => model.id));
}

async function choose(names) {
  const none = names.length === 0;
  $("no-model").hidden = !none;
  $("no-model").textContent = none && last ? `no engine has been up: ${last.engines.map((engine) => engine.name).join(", ")}` : "no engine has been up";
  if (!stopping) $("send").disabled = none;
  if (names.join() !== [...$("model").options].map((option) => option.value).join()) {
    const chosen = $("model").value;
    $("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }
}

function needKey() {
  $("api-key").hidden = $("api-key-label").hidden = false;
}

$("api-key").addEventListener("change", () => {
  sessionStorage.setItem("api-key", $("api-key").value);
  models();
});

$("stop").addEventListener("click", () => stopping?.abort());

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("chat").requestSubmit();
});

$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  stopping = new AbortController();
  $("receipt").className = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").textContent = $("receipt").textContent = "";
  const began = performance.now();
  try {
    await chat(began);
  } catch (error) {
    if (error.name !== "AbortError") failed(`The answer broke off: ${error.message}`);
    else if (!$("answer").textContent) $("receipt").textContent = "";
  }
  stopping = null;
  $("send").disabled = false;
  $("stop").disabled = true;
});

async function chat(began) {
  const key = sessionStorage.getItem("api-key");
  const headers = { "content-type": "application/json", "x-llmserve-receipt": "true" };
  if (key) headers.authorization = `Bearer ${key}`;
  const body = { model: $("model").value, stream: true, stream_options: { include_usage: true }, messages: [{ role: "user", content: $("prompt").value }] };
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: stopping.signal });
  if (response.status === 401) needKey();
  if (!response.ok) {
    const error = (await response.json().catch(() => ({}))).error;
    return failed(`${response.status}: ${error ? error.message : response.statusText}`);
  }
  let first = null, tokens = null, receipt = null, broken = false;
  await read(response.body, (data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    receipt = chunk.llmserve ?? receipt;
    tokens = chunk.usage?.completion_tokens ?? tokens;
    if (chunk.error) { broken = true; failed(chunk.error.message); return; }
    const delta = chunk.choices?.[0]?.delta ?? {}, text = (delta.reasoning_content ?? "") + (delta.content ?? "");
    if (!text) return;
    first ??= performance.now();
    $("answer").append(text);
  }, (comment) => { if (first === null) $("receipt").textContent = comment; });
  const parts = [];
  if (receipt) parts.push(`${shown(receipt.queue_ms / 1000)} s in the queue`, `engine ${receipt.engine}`, `bin ${receipt.bin}`, `batch ${receipt.batch}`);
  if (first !== null) parts.push(`first token after ${shown((first - began) / 1000)} s`);
  parts.push(`whole answer after ${shown((performance.now() - began) / 1000)} s`);
  if (tokens !== null) parts.push(`${tokens} tokens`);
  if (receipt?.predicted_tokens !== undefined) parts.push(`${receipt.predicted_tokens} were forecast`);
  if (receipt?.cached_tokens !== undefined) parts.push(`${receipt.cached_tokens} of the prompt were in the cache`);
  if (!broken) $("receipt").textContent = parts.join(", ");
}

function failed(text) {
  $("receipt").textContent = text;
  $("receipt").className = "bad";
}

models();
setInterval(models, 5000);
follow();
