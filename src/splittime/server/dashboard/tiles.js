/** How things are now: a few figures, each with what it is measured against. A model that only encodes writes no tokens. */

import { el, say } from "./dom.js";
import { DASH, amount, count, duration, percent } from "./format.js";
import { stageBar } from "./bar.js";
import { percentile } from "./store.js";
import { rank, shortLabel } from "./words.js";

const RECENT_S = 60;
const MOST_OPEN = 256; // that the page is told of

export class Tiles {
  constructor(host) {
    const tile = (title, hint, of = "") => {
      const value = el("b", { class: "value" }, DASH);
      const unit = el("span", { class: "unit" });
      const note = el("p", { class: "note" }, " ");
      const gauge = el("div", { class: "gauge" });
      host.append(el("div", { class: `tile ${of}`, title: hint }, el("h3", {}, title), el("p", {}, value, unit), gauge, note));
      return { value, unit, note, gauge };
    };
    this.running = tile("Running", "Requests in the batch, of as many as max_num_seqs allows");
    this.waiting = tile("Waiting", "Requests in the engine's queue now; the bar and the words: what they wait for");
    this.blocks = tile("KV blocks", "Blocks of the KV cache that requests hold, of all there are", "writes");
    this.tokens = tile("Output tokens/s", "Since the last look; below: prompt tokens, and how many of them the prefix cache had", "writes");
    this.prompts = tile("Prompt tokens/s", "Since the last look", "encodes");
    this.ttft = tile("First token p50", `From arrival until the first token was ready, of the requests that ended in the last ${RECENT_S} s: of streams and of whole answers`, "writes");
    this.tpot = tile("Per token p50", `From the first token to the last, each as it was ready, of the requests that ended in the last ${RECENT_S} s`, "writes");
    this.e2e = tile("Answer p50", `From first byte to last, of the requests that ended in the last ${RECENT_S} s`, "encodes");
  }

  update(store) {
    const { engine, server } = store.answer;
    this.#level(this.running, engine.num_running, engine.knobs.max_num_seqs, "slots");
    this.#level(this.blocks, engine.blocks_used, engine.blocks_total, "blocks");
    this.#queue(engine, server);
    say(this.tokens.value, amount(store.rate("output_tokens")));
    say(this.tokens.note, this.#prompts(store));
    say(this.prompts.value, amount(store.rate("prompt_tokens")));
    this.#latency(store);
  }

  #level(tile, used, total, word) {
    say(tile.value, count(used));
    say(tile.unit, total ? ` / ${count(total)}` : "");
    const share = total ? Math.min(1, used / total) : 0;
    say(tile.note, total ? `${percent(share)} of the ${word}` : " ");
    if (!tile.fill) tile.gauge.append((tile.fill = el("i", { class: "fill" })));
    tile.fill.style.width = `${share * 100}%`;
  }

  #queue(engine, server) {
    say(this.waiting.value, count(engine.num_waiting));
    const causes = Object.entries(engine.waiting_for).map(([cause, number]) => [`queue:${cause}`, number]);
    causes.sort(([a], [b]) => rank(a) - rank(b));
    this.waiting.gauge.replaceChildren(...(causes.length ? [stageBar(causes)] : []));
    const wait = server.predicted_wait_ms;
    const words = causesInWords(causes);
    say(this.waiting.note, causes.length && wait !== null ? `${words} · the next would wait ≈ ${duration(wait * 1e6)}` : words);
    this.waiting.note.title = whoSaysSo(server);
  }

  #prompts(store) {
    const prompts = store.rate("prompt_tokens");
    const [asked, hit] = [store.rate("prefix_query_tokens"), store.rate("prefix_hit_tokens")];
    const saved = asked ? `, ${percent(hit / asked)} hit` : "";
    return prompts === null ? " " : `prompt ${amount(prompts)}/s${saved}`;
  }

  #latency(store) {
    const seconds = Math.max(1, Math.min(RECENT_S, store.nowAt - store.rowsFrom));
    const rows = store.recent(seconds);
    for (const [tile, field] of [[this.ttft, "first_ready_ns"], [this.tpot, "per_token_ns"], [this.e2e, "e2e_ns"]]) {
      const values = rows.map((row) => row[field]);
      say(tile.value, duration(percentile(values, 50)));
      const told = values.filter((value) => value !== null).length;
      const words = [told ? `${highest(values, told)} · ${count(told)} in ${seconds} s` : `none ended in ${seconds} s`];
      if (tile === this.ttft) words.push(...stillWaiting(store, percentile(values, 99) ?? 0));
      say(tile.note, words.join(" · "));
    }
  }
}

/** Of fewer than 100 the 99th percentile is the longest, and is called so. */
function highest(values, told) {
  return `${told < 100 ? "longest" : "p99"} ${duration(percentile(values, 99))}`;
}

/** Under overload nobody ends, or only who came early: what those without a first token have waited is told then. */
function stillWaiting({ open }, endedNs) {
  const waiting = open.filter((row) => !row.output_tokens);
  const longestNs = Math.max(0, ...waiting.map((row) => row.e2e_ns));
  const most = open.length < MOST_OPEN ? count(waiting.length) : `${count(waiting.length)} or more`;
  return longestNs > endedNs ? [`${most} still without, for up to ${duration(longestNs)}`] : [];
}

/** Who predicts the wait, and how far off that model has been. */
function whoSaysSo(server) {
  const errors = Object.entries(server.step_error_ratio).filter(([, ratio]) => ratio !== null);
  const off = errors.map(([kind, ratio]) => `${kind} ${percent(ratio)}`).join(", ");
  const who = { model: "The wait is predicted by the model of steps", departures: "The wait is predicted from departures" };
  return [who[server.wait_estimate] ?? "Nothing is known of the wait yet", off && `its steps are off by: ${off}`].filter(Boolean).join("; ");
}

/** `12 batch slots, 1 kv blocks`, the most first; of a single cause its name alone, since the number stands above. */
function causesInWords(causes) {
  if (causes.length < 2) return causes.length ? shortLabel(causes[0][0]) : "nobody";
  const byNumber = [...causes].sort((a, b) => b[1] - a[1]);
  return byNumber.map(([key, number]) => `${count(number)} ${shortLabel(key)}`).join(", ");
}
