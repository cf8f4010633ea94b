/** The page: what is asked for once a second, and who shows it. */

import { Charts } from "./charts.js";
import { Detail } from "./detail.js";
import { byId, el, say } from "./dom.js";
import { Findings } from "./findings.js";
import { count } from "./format.js";
import { hasFailed } from "./table_row.js";
import { Playground } from "./playground.js";
import { Poll } from "./poll.js";
import { onKey, onTrouble, state } from "./standing.js";
import { Start } from "./start.js";
import { Store } from "./store.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";
import { WhatIf } from "./what_if.js";
import { classOf, learnWords, shortLabel } from "./words.js";

const FILTERS = {
  ended: (row) => !row.isOpen,
  open: (row) => row.isOpen,
  all: () => true,
  queued: (row) => !row.isOpen && row.stages.some(([key, ns]) => key.startsWith("queue") && ns > 1e6),
  preempted: (row) => row.preemptions > 0,
  failed: (row) => hasFailed(row),
};

const store = new Store();
const tiles = new Tiles(byId("tiles"));
const charts = new Charts(byId("charts"));
const detail = new Detail();
const table = new Table(store, (row, from) => detail.open(row, from));
const findings = new Findings((id, from) => detail.open({ id }, from));
const poll = new Poll(onAnswer, onTrouble);
const playground = new Playground((id, from) => detail.open({ id }, from), onTrouble, () => poll.wake());
const whatIf = new WhatIf(onTrouble);
const start = new Start(onTrouble);
let span = 300;
let process = null;
let isArranged = false;

function onAnswer(answer) {
  if (answer.words) learnWords(answer.words);
  const hasRestarted = process !== null && answer.reset;
  process = answer.cursor.split(".")[0];
  store.apply(answer);
  if (!isArranged && answer.server.model) arrange(answer);
  tiles.update(store);
  charts.update(store, span);
  table.update();
  detail.update(store);
  findings.update(store);
  playground.update(store);
  showState(answer, hasRestarted);
}

/** Once, when the model is known: what can be asked of it, and what it has not. */
function arrange({ server }) {
  isArranged = true;
  playground.begin(server.plays, server.model);
  document.body.dataset.model = server.plays ? "writes" : "encodes";
}

function showState({ server, engine }, hasRestarted) {
  say(byId("model"), server.model ?? "");
  document.title = `${engine.num_running} running · splittime`;
  say(byId("total"), `${count(store.rows.size)} kept${store.numLeftOut ? `, ${count(store.numLeftOut)} came too fast to be shown` : ""}`);
  if (server.is_draining) state("wait", "shutting down", "The server is shutting down: it finishes what is open and admits nobody.");
  else if (engine.rest.state !== "awake") state("wait", engine.rest.state.replaceAll("_", " "), `The engine is ${engine.rest.state.replaceAll("_", " ")}${engine.rest.level ? ` at level ${engine.rest.level}` : ""}: requests get 503 until it is woken (POST /wake).`);
  else if (!server.is_ready) state("wait", "not ready", "The engine is not ready: it is starting, or was restarted. Requests get 503 until then.");
  else if (engine.is_paused) state("wait", "paused", "The engine is paused: requests wait until it goes on.");
  else state("live", hasRestarted ? "live again" : "live", "");
}

onKey(() => [poll, findings, whatIf, start].forEach((asker) => asker.wake()));

// ---- what the bars' colours mean

const SHOWN = [
  "before", "queue:batch_slots", "queue:kv_blocks", "queue:token_budget", "queue:policy", "queue:step_in_flight",
  "queue:paused", "queue:not_told", "cpu_wait", "prefill", "recompute", "decode", "decode_stall:policy", "preempted:kv_blocks", "deliver",
  "client_wait", "unattributed",
];
const EXAMPLES = {
  "queue:policy": "policy, or a text that waits to be tokenised", "queue:step_in_flight": "step in flight, or engine loop",
  "queue:paused": "paused, measuring, grammar, or engine died", cpu_wait: "cpu wait, or engine stopped",
  "decode_stall:policy": "stalled, by cause", "preempted:kv_blocks": "preempted, by cause" };
const WRITTEN = /decode|preempted|recompute|kv_blocks/; // what only a request that is answered with tokens meets
byId("colours").append(...SHOWN.map((key) => el("li", { class: WRITTEN.test(key) ? "writes" : null }, el("i", { class: `swatch ${classOf(key)}` }), EXAMPLES[key] ?? shortLabel(key))));

// ---- switches

byId("span").addEventListener("change", (event) => {
  span = Number(event.target.value);
  if (store.answer) charts.update(store, span);
});
byId("filter").addEventListener("change", (event) => {
  table.filter = FILTERS[event.target.value];
  table.refresh(true);
});
byId("by-time").addEventListener("change", (event) => {
  table.isByTime = event.target.checked;
  table.refresh(false);
});

poll.wake();
