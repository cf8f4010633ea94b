/** How things are now: six figures, each with what it is measured against. */

import { el, say } from "./dom.js";
import { DASH, count, duration, percent } from "./format.js";

const REMEMBERED_MS = 60_000;

export class GatewayTiles {
  #seen = []; // refusals and attempts as they were, at most a minute ago

  constructor(host) {
    const tile = (title, hint) => {
      const value = el("b", { class: "value" }, DASH);
      const unit = el("span", { class: "unit" });
      const note = el("p", { class: "note" }, " ");
      const fill = el("i", { class: "fill" });
      host.append(el("div", { class: "tile", title: hint }, el("h3", {}, title), el("p", {}, value, unit), el("div", { class: "gauge" }, fill), note));
      return { value, unit, note, fill };
    };
    this.open = tile("In flight", "Requests at upstreams, of as many as their caps allow; below: the whole time of those that ended");
    this.queue = tile("Waiting", "Requests in the gateway's queue, of as many as may wait");
    this.refused = tile("Refused", "Requests that the gateway refused, since this page began to look, at most a minute");
    this.retries = tile("Retries", "Retries of the window, of as many as the budget allows");
    this.cache = tile("Cache hits", "Of the requests whose answers may be kept, since the gateway's start");
    this.stage = tile("Degradation", "Stages of the ladder that are entered");
  }

  update(now, recent) {
    this.#inFlight(now, recent);
    this.#queue(now);
    this.#refused(now);
    const { used, allowed, window_s: windowS } = now.retry_budget;
    fillTile(this.retries, count(used), ` / ${count(Math.floor(allowed))}`, allowed ? used / allowed : 0, `in ${windowS} s · ${count(now.retries)} since the start`);
    this.#cache(now.cache);
    this.#ladder(now);
  }

  #inFlight(now, recent) {
    const used = sum(now.upstreams.map((one) => one.requests));
    const most = sum(now.upstreams.map((one) => one.limit));
    const { p50, p99 } = recent.e2e_ns;
    fillTile(this.open, count(used), ` / ${count(most)}`, used / most, p50 === undefined ? "none ended in 60 s" : `p50 ${duration(p50)} · p99 ${duration(p99)}`);
  }

  #queue(now) {
    const { requests, tokens } = now.queue;
    const most = now.queue_limits;
    const share = Math.max(requests / most.requests, tokens / most.tokens);
    fillTile(this.queue, count(requests), ` / ${count(most.requests)}`, share, requests ? `${count(tokens)} tokens · longest ${duration(now.longest_wait_ns)}` : "nobody");
  }

  #refused(now) {
    const total = sum(Object.values(now.refusals));
    const at = performance.now();
    if (this.#seen.length && this.#seen.at(-1).total > total) this.#seen = []; // it was started anew
    this.#seen.push({ at, total });
    while (this.#seen[0].at < at - REMEMBERED_MS) this.#seen.shift();
    fillTile(this.refused, count(total - this.#seen[0].total), " in the last minute", 0, `${count(total)} since the start`);
  }

  #cache(cache) {
    if (!cache) return fillTile(this.cache, DASH, "", 0, "off: no [[cache_route]] in the config");
    const results = cache.results;
    const asked = sum(["hit", "shared", "miss"].map((name) => results[name] ?? 0));
    const hits = (results.hit ?? 0) + (results.shared ?? 0);
    fillTile(this.cache, asked ? percent(hits / asked) : DASH, "", asked ? hits / asked : 0, `${count(hits)} of ${count(asked)} · ${count(cache.answers)} kept`);
  }

  #ladder({ ladder, degradation }) {
    if (!ladder.length) return fillTile(this.stage, DASH, "", 0, "off: no [[degradation]] in the config");
    fillTile(this.stage, count(degradation.length), ` / ${count(ladder.length)}`, degradation.length / ladder.length, degradation.at(-1) ?? "whole answers");
  }
}

function fillTile(tile, value, unit, share, note) {
  say(tile.value, value);
  say(tile.unit, unit);
  say(tile.note, note);
  tile.note.title = note;
  tile.fill.style.width = `${Math.min(1, share || 0) * 100}%`;
}

export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
