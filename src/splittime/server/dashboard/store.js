/**
 * What the page knows: the latest requests and the last minutes by the second. `apply` takes in an answer of the server;
 * bins are added up, since later books tell more of the same second.
 */

import { coarse } from "./words.js";

const MAX_ROWS = 2000;
const MOST_BETWEEN_S = 3; // what is seen holds for so long before: the page asks once a second
const NOT_TOLD = "queue:not_told";
const PEAKS = new Set(["running", "waiting", "blocks_used"]);

/** A request may come twice under one id; its start tells the two apart. */
const keyOf = (row) => `${row.id} ${row.start_ns}`;

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.rows = new Map();
    this.open = [];
    this.presence = new Map();
    this.presenceOpen = new Map();
    this.steps = new Map();
    this.answer = null;
    this.before = null;
    this.numLeftOut = 0;
    this.gaps = { steps: [], accounts: [] }; // [from, to) in seconds, of which not all is known
    this.stepsUntil = -Infinity; // the second before which no step has anything to tell any more
    this.waited = new Map(); // second -> how many in the engine's queue waited for what
    this.rowsFrom = -Infinity; // the second from which on all rows are kept
  }

  /** Take in an answer of `dashboard/data`. */
  apply(answer) {
    if (answer.reset) this.clear();
    this.before = this.answer;
    this.answer = answer;
    this.numLeftOut += answer.reset ? 0 : answer.left_out.accounts;
    const lastAt = this.before ? this.nowAt : -Infinity;
    this.nowAt = Math.floor(answer.now_ns / 1e9);
    if (answer.left_out.steps) this.#lack("steps", lastAt, answer.step_bins[0]?.[0]);
    if (answer.left_out.accounts) this.#lack("accounts", lastAt, endAt(answer.rows[0]));
    this.open = answer.open.map((row) => ({ ...row, isOpen: true, key: keyOf(row), end_ns: answer.now_ns }));
    for (const row of answer.rows) this.rows.set(keyOf(row), { ...row, key: keyOf(row) });
    this.#drop();
    addPresence(this.presence, answer.presence);
    this.presenceOpen = addPresence(new Map(), answer.presence_open);
    this.#tellCauses(lastAt, answer.engine);
    this.#addSteps(answer);
    this.#forget(this.nowAt - answer.horizon_s);
  }

  /** What came in between was too much to be told, or is not kept any more. */
  #lack(what, fromAt, firstAt = this.nowAt) {
    this.gaps[what].push([fromAt, firstAt + 1]);
    if (what === "accounts") this.rowsFrom = Math.max(this.rowsFrom, firstAt + 1);
  }

  /**
   * Why an open request waits is told when it leaves the queue; how many wait for what, at once. So the seconds that the
   * page has seen are told by the latter, and what it leaves of them is of who waits for a step that has begun.
   */
  #tellCauses(lastAt, { waiting_for: causes }) {
    for (let at = Math.max(lastAt + 1, this.nowAt - MOST_BETWEEN_S); at <= this.nowAt; at++) this.waited.set(at, causes);
    const untold = this.presenceOpen.get(NOT_TOLD) ?? new Map();
    for (const [at, ns] of untold) {
      const told = Object.entries(this.waited.get(at) ?? {}).filter(([cause]) => cause !== "not_told");
      const scale = Math.min(1e9, ns / told.reduce((sum, [, number]) => sum + number, 0));
      for (const [cause, number] of told) {
        addPresence(this.presenceOpen, { [`queue:${cause}`]: [[at, number * scale]] });
        untold.set(at, Math.max(0, untold.get(at) - number * scale));
      }
    }
  }

  #drop() {
    for (const [key, row] of this.rows) {
      if (this.rows.size <= MAX_ROWS) break;
      this.rows.delete(key);
      this.rowsFrom = Math.max(this.rowsFrom, endAt(row) + 1);
    }
  }

  #addSteps({ step_fields: fields, step_bins: bins, engine, server }) {
    for (const bin of bins) {
      const known = this.steps.get(bin[0]) ?? {};
      fields.forEach((name, i) => {
        if (i > 0) known[name] = PEAKS.has(name) ? Math.max(known[name] ?? 0, bin[i]) : (known[name] ?? 0) + bin[i];
      });
      this.steps.set(bin[0], known);
    }
    const isBusy = engine.num_running > 0 && !engine.is_paused && server.is_ready;
    this.stepsUntil = isBusy ? Math.max(this.stepsUntil, bins.at(-1)?.[0] ?? -Infinity) : this.nowAt;
  }

  #forget(beforeAt) {
    for (const bins of [...this.presence.values(), this.steps, this.waited]) {
      for (const at of bins.keys()) if (at < beforeAt) bins.delete(at);
    }
    for (const [key, bins] of this.presence) if (!bins.size) this.presence.delete(key);
  }

  /** Mean number of requests in a stage during a second. */
  present(key, at) {
    return ((this.presence.get(key)?.get(at) ?? 0) + (this.presenceOpen.get(key)?.get(at) ?? 0)) / 1e9;
  }

  /** The seconds of which steps do not tell all: what is not kept, and those in which one still runs. */
  stepGaps() {
    return Number.isFinite(this.stepsUntil) ? [...this.gaps.steps, [this.stepsUntil, Infinity, "a step runs"]] : this.gaps.steps;
  }

  /** The first second of which anything is known. */
  earliestAt() {
    const firsts = [...this.presence.values(), this.steps].flatMap((bins) => [...bins.keys()]);
    return firsts.reduce((least, at) => Math.min(least, at), this.nowAt);
  }

  presentKeys() {
    return new Set([...this.presence.keys(), ...this.presenceOpen.keys()]);
  }

  hasClosed(id) {
    return [...this.rows.values()].some((row) => row.id === id || row.sent_as === id);
  }

  /** Closed requests that ended in the last seconds. */
  recent(seconds) {
    const sinceNs = this.answer ? this.answer.now_ns - seconds * 1e9 : 0;
    return [...this.rows.values()].filter((row) => row.end_ns >= sinceNs);
  }

  /** A counter's growth per second between the last two answers. */
  rate(name) {
    const [then, now] = [this.before?.engine, this.answer?.engine];
    if (!then || now[name] < then[name]) return null;
    const seconds = (this.answer.now_ns - this.before.now_ns) / 1e9;
    return seconds > 0 ? (now[name] - then[name]) / seconds : null;
  }
}

const endAt = (row) => row && Math.floor(row.end_ns / 1e9);

function addPresence(into, told) {
  for (const [key, bins] of Object.entries(told)) {
    const name = coarse(key);
    if (!into.has(name)) into.set(name, new Map());
    const known = into.get(name);
    for (const [at, ns] of bins) known.set(at, (known.get(at) ?? 0) + ns);
  }
  return into;
}

/** The nearest-rank percentile, as in `ledger/derive.py`; null for no values. */
export function percentile(values, percentOf) {
  const ordered = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!ordered.length) return null;
  return ordered[Math.max(0, Math.ceil((ordered.length * percentOf) / 100) - 1)];
}
