/** The shapes of a chart as SVG paths: one path for each series, however many seconds there are. */

import { svg } from "./dom.js";

const HATCHED = /_stall|not_told|preempted|recompute/;
const round = (value) => Math.round(value * 10) / 10;

/** About four ticks from 0 to at least `top`, at 1, 2 or 5 times a power of ten. */
export function niceTicks(top) {
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const ticks = [];
  for (let i = 0; i * step < top * 0.999; i++) ticks.push(i * step);
  return [...ticks, ticks.length * step];
}

/** Stacked areas, the first series at the bottom; each second is a step. */
export function areas(series, from, x, y) {
  const base = new Array(Math.max(0, ...series.map(({ values }) => values.length))).fill(0);
  return series.flatMap(({ values, className }) => {
    const lower = [...base];
    values.forEach((value, i) => (base[i] += value ?? 0));
    const d = outline(lower, base, from, x, y);
    const area = svg("path", { class: `area ${className}`, d });
    return HATCHED.test(className) ? [area, svg("path", { class: "hatching", d })] : [area];
  });
}

/** Along the upper edge, and back along the lower, leaving out runs where the two are one. */
function outline(lower, upper, from, x, y) {
  let path = "";
  for (let begin = 0; begin < upper.length; begin++) {
    if (upper[begin] <= lower[begin]) continue;
    let end = begin;
    while (end < upper.length && upper[end] > lower[end]) end++;
    path += run(lower, upper, begin, end, from, x, y);
    begin = end;
  }
  return path;
}

function run(lower, upper, begin, end, from, x, y) {
  let path = `M${round(x(from + begin))} ${round(y(lower[begin]))}`;
  for (let i = begin; i < end; i++) path += `V${round(y(upper[i]))}H${round(x(from + i + 1))}`;
  for (let i = end - 1; i >= begin; i--) path += `V${round(y(lower[i]))}H${round(x(from + i))}`;
  return `${path}Z`;
}

/** A line through the middle of each second; it breaks where there is no value. */
export function line({ values, className }, from, x, y) {
  let path = "";
  let isDown = false;
  values.forEach((value, i) => {
    const has = value !== null && value !== undefined;
    if (has) path += `${isDown ? "L" : "M"}${round(x(from + i + 0.5))} ${round(y(value))}`;
    isDown = has;
  });
  return svg("path", { class: `curve ${className}`, d: path });
}

/** Many dots as one path: lines of no length with round ends. */
export function dots(points, x, y) {
  return svg("path", { class: "dots", d: points.map(([at, value]) => `M${round(x(at))} ${round(y(value))}h0`).join("") });
}
