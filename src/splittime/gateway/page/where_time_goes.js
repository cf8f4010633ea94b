/** The time of the latest requests by stage, and what upstreams that keep accounts say of their part of it. */

import { barWords, stageBar } from "./bar.js";
import { el } from "./dom.js";
import { duration, percent } from "./format.js";
import { classOf, label, meaning, rank } from "./words.js";

export function showTime(host, { stages, nested }) {
  if (!stages.length) return host.replaceChildren(el("p", { class: "empty" }, "No request has ended in the last minute."));
  const within = nested.length ? [el("h3", { class: "nested" }, "Within upstream, by the accounts of upstreams that keep them"), ...book(nested)] : [];
  host.replaceChildren(...book(stages), ...within);
}

function book(stages) {
  const sorted = [...stages].sort((a, b) => rank(a.key) - rank(b.key));
  const pairs = sorted.map(({ key, ns }) => [key, ns]);
  const total = pairs.reduce((sum, [, ns]) => sum + ns, 0);
  const bar = el("div", { class: "stage-bar", role: "img", "aria-label": barWords(pairs) }, stageBar(pairs));
  return [bar, el("ul", { class: "stage-list" }, ...sorted.map((stage) => line(stage, total)))];
}

function line({ key, ns, requests, p99_ns: p99Ns }, total) {
  return el(
    "li", { title: meaning(key) },
    el("i", { class: `swatch ${classOf(key)}` }), el("span", {}, label(key)),
    el("small", {}, percent(ns / total)), el("small", { title: "mean of those that were in it" }, duration(ns / requests)), el("small", {}, `p99 ${duration(p99Ns)}`),
  );
}
