/** Stages as one bar: a segment a stage, its width its share, its colour and pattern its stage and cause. */

import { el } from "./dom.js";
import { duration, percent } from "./format.js";
import { classOf, coarse, label } from "./words.js";

const THIN = 0.01; // of the bar: too little for an edge

/** A bar of [key, amount] pairs; shorter than its place if `whole` is more than their sum. */
export function stageBar(pairs, whole = null) {
  const total = whole ?? pairs.reduce((sum, [, value]) => sum + value, 0);
  const bar = el("span", { class: "bar" });
  fillBar(bar, pairs, total);
  return bar;
}

/** Make an existing bar show other stages; its segments are used again. */
export function fillBar(bar, pairs, total) {
  const segments = merged(pairs).filter(([, value]) => value / total > 0.001);
  while (bar.children.length > segments.length) bar.lastChild.remove();
  segments.forEach(([key, value], i) => {
    const segment = bar.children[i] ?? bar.appendChild(el("i"));
    segment.className = value / total < THIN ? `${classOf(key)} thin` : classOf(key);
    segment.style.width = `${(value / total) * 100}%`;
  });
}

/** What a bar says, for who cannot see it and for the pointer. */
export function barWords(pairs) {
  const total = pairs.reduce((sum, [, ns]) => sum + ns, 0);
  return merged(pairs).map(([key, ns]) => `${label(key)} ${duration(ns)} (${percent(ns / total)})`).join(", ");
}

function merged(pairs) {
  const sums = new Map();
  for (const [key, value] of pairs) sums.set(coarse(key), (sums.get(coarse(key)) ?? 0) + value);
  return [...sums];
}
