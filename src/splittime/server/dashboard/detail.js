/** The panel beside the table: one request's waterfall, its figures, and with whom it shared its steps. */

import { askRequest, storedKey } from "./api.js";
import { stageBar } from "./bar.js";
import { byId, el, say } from "./dom.js";
import { DASH, clock, count, duration, plural } from "./format.js";
import { waterfall } from "./waterfall.js";
import { label } from "./words.js";

const SHOWN_NEIGHBOURS = 8;
const EXPLAINED = "http://127.0.0.1:8000"; // the server that `splittime explain` asks without --url

export class Detail {
  #returnTo = null;
  #asked = 0;
  #open = null; // the row shown, while it is open

  constructor() {
    this.panel = byId("detail");
    this.body = byId("detail-body");
    byId("detail-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.panel.hidden && !document.querySelector("dialog[open]")) this.close();
    });
  }

  /** Open a request of the table; the focus comes back to `returnTo`. */
  open(row, returnTo) {
    this.#returnTo = returnTo;
    this.panel.hidden = false;
    byId("detail-close").focus({ preventScroll: true });
    this.#open = row.isOpen ? row : null;
    if (row.isOpen) this.#soFar(row);
    else this.load(row.id);
  }

  /** News of the store: the request shown may have gone on, or closed. */
  update(store) {
    if (!this.#open || this.panel.hidden) return;
    const { key, id } = this.#open;
    const row = store.open.find((other) => other.key === key);
    if (row) this.#soFar(row);
    else if (store.rows.has(key)) this.load(id);
  }

  #soFar(row) {
    say(byId("detail-title"), row.id);
    this.body.replaceChildren(...soFarParts(row));
  }

  close() {
    this.#open = null;
    this.panel.hidden = true;
    this.#asked++;
    this.#returnTo?.focus({ preventScroll: true });
  }

  async load(id) {
    const asked = ++this.#asked;
    this.#open = null;
    say(byId("detail-title"), id);
    try {
      const account = await askRequest(id);
      if (asked === this.#asked) this.body.replaceChildren(...accountParts(account, (other) => this.load(other)));
    } catch (error) {
      if (asked === this.#asked) this.#tell(id, error.message);
    }
  }

  #tell(id, words) {
    say(byId("detail-title"), id);
    this.body.replaceChildren(el("p", { class: "empty" }, words));
  }
}

/** What is known of a request that is still open. */
export function soFarParts(row) {
  const words = `Open for ${duration(row.e2e_ns)}, ${plural(row.output_tokens, "token")} so far. Its account closes with its last byte, and is shown then.`;
  const list = row.stages.map(([key, ns]) => el("li", {}, `${label(key)}: ${duration(ns)}`));
  return [el("p", { class: "empty" }, words), el("div", { class: "so-far" }, stageBar(row.stages)), el("ul", {}, ...list)];
}

/** All that is shown of a closed account. */
export function accountParts(account, onOther) {
  return [error(account), figures(account), waterfall(account), owners(account), waits(account, onOther), neighbours(account, onOther), more(account)].filter(Boolean);
}

function error(account) {
  return account.error ? el("p", { class: "trouble", role: "alert" }, account.error.message) : null;
}

function figures(account) {
  const { derived } = account;
  const stall = derived.max_stall;
  const pairs = [
    ["Total", duration(derived.e2e_ns)],
    ["TTFT", duration(derived.ttft_ns)],
    ["TPOT", duration(derived.tpot_ns)],
    ["Longest gap", stall ? `${duration(stall.duration_ns)} before token ${stall.token_index + 1}` : DASH],
    ["Prompt", `${plural(account.prompt_tokens, "token")}${cached(account)}`],
    ["Answer", `${plural(account.output_tokens, "token")}, ${account.finish_reason}`],
    ["Preempted", account.num_preemptions ? plural(account.num_preemptions, "time") : "never"],
    ["Arrived", `${clock(account.started_at_unix_ns / 1e6)}, ${account.endpoint}`],
  ];
  return el("dl", { class: "figures" }, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function cached({ cached_tokens, host_tokens }) {
  if (!cached_tokens) return "";
  return `, ${count(cached_tokens)} cached${host_tokens ? ` (${count(host_tokens)} in host memory)` : ""}`;
}

/** Whose the time was, as the doctor counts it. */
function owners({ owners: told }) {
  const items = told.map(([name, ns, meaning]) => el("li", { title: meaning }, el("div", {}, name), el("span", {}, duration(ns))));
  return el("section", { class: "owners" }, el("h4", {}, "Whose its time was"), el("ol", {}, ...items));
}

/** Who had what it waited for. */
function waits({ waited_for: told }, onOther) {
  if (!told.length) return null;
  const items = told.slice(0, SHOWN_NEIGHBOURS).map(([id, why, ns]) => el("li", {}, other(id, onOther), el("span", {}, label(why)), el("span", {}, duration(ns))));
  return el("section", { class: "neighbours waits" }, el("h4", {}, "It waited for"), el("ol", {}, ...items));
}

function other(id, onOther) {
  return el("button", { type: "button", class: "link", onclick: (event) => onOther(id, event.currentTarget) }, id);
}

function neighbours(account, onOther) {
  const shown = account.neighbours.slice(0, SHOWN_NEIGHBOURS);
  if (!shown.length) return el("p", { class: "empty" }, account.steps.length ? "It shared its steps with nobody." : "No step of its time is kept any more.");
  const items = shown.map(({ id, steps, tokens }) => {
    return el("li", {}, other(id, onOther), el("span", {}, plural(steps, "step")), el("span", {}, plural(tokens, "token")));
  });
  const rest = account.neighbours.length - shown.length;
  return el("section", { class: "neighbours" }, el("h4", {}, "Shared its steps with"), el("ol", {}, ...items), rest > 0 ? el("p", { class: "empty" }, `and ${count(rest)} others`) : null);
}

/** Ways to the same account elsewhere. A link cannot carry a key, so there are none where one is needed. */
function more(account) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const asked = base === EXPLAINED ? "" : ` --url ${base}`;
  const explain = el("code", {}, `splittime explain ${account.request_id}${asked}`);
  const link = storedKey() ? null : el("a", { href: `ledger/requests/${encodeURIComponent(account.request_id)}` }, "as JSON");
  return el("p", { class: "more" }, link, " ", explain);
}
