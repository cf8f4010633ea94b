/** Numbers as people read them. What is missing is a dash, never a zero. */

export const DASH = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** Three digits that matter: 1.24, 12.4, 124. */
function threeDigits(value) {
  if (value >= 99.95) return grouped.format(value);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** A duration: `340 µs`, `12.4 ms`, `1.24 s`, `3 min 05 s`. */
export function duration(ns) {
  if (ns === null || ns === undefined) return DASH;
  if (ns < 999_500) return `${Math.round(ns / 1e3)} µs`;
  if (ns < 999_500_000) return `${threeDigits(ns / 1e6)} ms`;
  if (ns < 99.95e9) return `${threeDigits(ns / 1e9)} s`;
  const seconds = Math.round(ns / 1e9);
  return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
}

/** A duration on an axis: without digits that say nothing. */
export function tickDuration(ns) {
  return ns ? duration(ns).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ") : "0";
}

/** A number on an axis: half a request is no whole one. */
export function tickNumber(value) {
  return value < 10 ? String(Number(value.toPrecision(2))) : count(value);
}

/** A whole number with thousands apart. */
export function count(value) {
  return value === null || value === undefined ? DASH : grouped.format(value);
}

/** A rate or a mean: one decimal below ten. */
export function amount(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  return value > 0 && value < 9.95 ? value.toFixed(1) : grouped.format(value);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return DASH;
  return share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`;
}

/** The time of day. */
export function clock(unixMs) {
  return unixMs ? clockFormat.format(unixMs) : DASH;
}

/** How many, with the right word: `1 request`, `3 requests`. */
export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}
