/** The six charts of the last minutes, and what each is made from. */

import { Chart } from "./chart.js";
import { amount, count, duration, percent, tickDuration, tickNumber } from "./format.js";
import { percentile } from "./store.js";
import { classOf, label, meaning, rank, shortLabel } from "./words.js";

const RATE_S = 5; // percentiles over the requests that ended in this many seconds
const LEAST_S = 60;
const SMALL_SHARE = 0.02; // stages with less of the time than this are drawn as one

const TOKENS = [
  { key: "decode_tokens", label: "decode", className: "ink stage-decode", title: "Rows of one token that sample" },
  { key: "prefill_tokens", label: "prefill", className: "ink stage-prefill", title: "Tokens of prompts" },
];
const ENGINE = [
  { key: "device_ns", label: "forward", className: "ink part-device", title: "The model's forward pass" },
  { key: "sample_ns", label: "sample", className: "ink part-sample", title: "Choosing the next tokens" },
  { key: "host_ns", label: "plan and commit", className: "ink part-host", title: "Planning, launching, committing" },
  { key: "host_gap_ns", label: "host gap", className: "ink part-gap", title: "Between steps, while there was work" },
  { key: "kept_ns", label: "no processor", className: "ink part-kept", title: "In steps, while its thread had no processor or was stopped from outside" },
];

const COPIES = { key: "moves_ns", label: "copies", className: "ink part-copies", title: "Blocks of KV cache to host memory, and back" };

export class Charts {
  constructor(host) {
    const add = (title, hint, kind, format, tick) => new Chart(host, { title, hint, kind, format, tick });
    const mean = (value) => amount(value);
    this.presence = add("Requests by stage or cause of waiting", "How many requests were in each, on average in each second.", "areas", mean, tickNumber);
    this.ttft = add("Time to first token", "From arrival until the first token was ready, the queue included: of streams and of whole answers. A dot is a request, at its end.", "lines", duration, tickDuration);
    this.tpot = add("Time per output token", "From the first token to the last, each as it was ready. A dot is a request, at its end.", "lines", duration, tickDuration);
    for (const { figure } of [this.ttft, this.tpot]) figure.classList.add("writes");
    this.tokens = add("Tokens computed per second", "What the steps were made of.", "areas", count, tickNumber);
    this.engine = add("The engine's time", "Shares of each second; what is left was idle.", "areas", percent);
    this.blocks = add("KV blocks in use", "The most in any step of the second; the axis ends at all there are.", "areas", count);
    this.blocks.figure.classList.add("writes");
    this.e2e = add("Time to answer", "From first byte to last. A dot is a request, at its end.", "lines", duration, tickDuration);
    this.e2e.figure.classList.add("encodes");
  }

  /** Draw the last `span` whole seconds, or as many as there is something to show of. */
  update(store, span) {
    const to = store.nowAt;
    const from = to - Math.min(span, Math.max(LEAST_S, to - store.earliestAt()));
    this.#presence(store, from, to);
    this.#latencies(store, from, to);
    const gaps = store.stepGaps();
    this.tokens.update({ from, to, gaps, series: stepSeries(store, store.answer.server.plays ? TOKENS : TOKENS.slice(1), from, to, 1) });
    const parts = store.answer.engine.host_blocks_total ? [...ENGINE, COPIES] : ENGINE;
    this.engine.update({ from, to, gaps, max: 1, series: stepSeries(store, parts, from, to, 1e-9) });
    this.#blocks(store, from, to);
  }

  #presence(store, from, to) {
    const found = [...store.presentKeys()].map((key) => ({ key, values: seconds(from, to, (at) => store.present(key, at)) }));
    const sumOf = ({ values }) => values.reduce((sum, value) => sum + value, 0);
    const least = found.reduce((sum, one) => sum + sumOf(one), 0) * SMALL_SHARE;
    const large = found.filter((one) => sumOf(one) > least).sort((a, b) => rank(a.key) - rank(b.key));
    const small = found.filter((one) => sumOf(one) <= least);
    const series = large.map((one) => ({ ...one, label: shortLabel(one.key), className: classOf(one.key), title: meaning(one.key) }));
    if (small.length) series.push(together(small));
    this.presence.update({ from, to, gaps: store.gaps.accounts, least: 1, series });
  }

  #latencies(store, from, to) {
    const rows = store.recent(to - from + 1);
    const gaps = [[-Infinity, store.rowsFrom]];
    const open = store.answer?.server.open_requests ?? store.open.length;
    const nothing = open ? `none ended in this time, ${count(open)} open` : undefined;
    for (const [chart, field] of [[this.ttft, "first_ready_ns"], [this.tpot, "per_token_ns"], [this.e2e, "e2e_ns"]]) {
      const told = rows.filter((row) => row[field] !== null && row[field] !== undefined);
      const bySecond = new Map();
      for (const row of told) push(bySecond, Math.floor(row.end_ns / 1e9), row[field]);
      const points = told.map((row) => [row.end_ns / 1e9, row[field]]).filter(([at]) => at >= from && at <= to);
      const series = [50, 99].map((p) => ({
        key: `p${p}`,
        label: `p${p}`,
        className: `ink line-p${p}`,
        title: `Of the requests that ended in the last ${RATE_S} s`,
        values: seconds(from, to, (at) => percentile(lastSeconds(bySecond, at), p)),
      }));
      chart.update({ from, to, gaps, points, nothing, series });
    }
  }

  #blocks(store, from, to) {
    const values = seconds(from, to, (at) => store.steps.get(at)?.blocks_used ?? 0);
    const series = [{ key: "blocks", label: "in use", className: "ink part-blocks", values }];
    this.blocks.update({ from, to, gaps: store.stepGaps(), max: store.answer.engine.blocks_total || undefined, series });
  }
}

function stepSeries(store, kinds, from, to, factor) {
  return kinds.map((kind) => ({ ...kind, values: seconds(from, to, (at) => (store.steps.get(at)?.[kind.key] ?? 0) * factor) }));
}

/** Several short stages as one. */
function together(small) {
  const values = small[0].values.map((_, i) => small.reduce((sum, one) => sum + one.values[i], 0));
  return { key: "rest", label: "short stages", className: "ink stage-short", title: small.map(({ key }) => label(key)).join(", "), values };
}

function seconds(from, to, valueAt) {
  return Array.from({ length: to - from }, (_, i) => valueAt(from + i));
}

function push(map, key, value) {
  if (map.has(key)) map.get(key).push(value);
  else map.set(key, [value]);
}

function lastSeconds(bySecond, at) {
  const found = [];
  for (let second = at - RATE_S + 1; second <= at; second++) found.push(...(bySecond.get(second) ?? []));
  return found;
}
