/**
 * A request's account over its time: a lane for each stage and cause, one for its tokens, and three for the steps it was
 * in: what they computed for it, for others' answers and for others' prompts. Times in ns from its start.
 */

import { el, svg } from "./dom.js";
import { count, duration, percent, tickDuration } from "./format.js";
import { niceTicks } from "./shapes.js";
import { classOf, label, meaning } from "./words.js";

const UNITS = 1000; // of the drawings inside lanes, over the whole width
const STRIP = 20;
const SHARED = [
  ["own_tokens", "this request", "part-own", "Tokens that each step computed for this request"],
  ["other_decode_tokens", "others' answers", "stage-decode", "Tokens of others' answers in the steps of its time"],
  ["other_prefill_tokens", "others' prompts", "stage-prefill", "Tokens of others' prompts in the steps of its time"],
];

/** The whole drawing. account: as `dashboard/requests/ID` tells it. extra: lanes of another book, put on top. */
export function waterfall(account, extra = []) {
  const endNs = Math.max(1, account.end_ns - account.start_ns);
  const lanes = [...extra.map((lane) => plainLane(lane, endNs)), ...stageLanes(account.stages, endNs)];
  const tokens = account.tokens.length ? [tokenLane(account.tokens, endNs)] : [];
  return el("div", { class: "waterfall" }, axis(endNs), ...lanes, ...tokens, ...stepLanes(account, endNs));
}

function lane(name, title, track, value, className = "") {
  return el("div", { class: `lane ${className}`, title }, el("span", { class: "name" }, name), track, el("span", { class: "took" }, value));
}

function axis(endNs) {
  const track = el("span", { class: "track axis" });
  for (const ns of niceTicks(endNs).filter((tick) => tick <= endNs * 0.93)) {
    const mark = el("span", { class: "mark" }, tickDuration(ns));
    mark.style.left = `${(ns / endNs) * 100}%`;
    track.append(mark);
  }
  return lane("", null, track, duration(endNs), "head");
}

function stageLanes(stages, endNs) {
  const byKey = new Map();
  for (const { stage, cause, begin_ns: begin, end_ns: end } of stages) {
    if (end <= begin) continue;
    const key = cause ? `${stage}:${cause}` : stage;
    if (!byKey.has(key)) byKey.set(key, []);
    byKey.get(key).push([begin, end]);
  }
  return [...byKey].map(([key, intervals]) => stageLane(key, intervals, endNs));
}

function stageLane(key, intervals, endNs) {
  const sum = intervals.reduce((total, [begin, end]) => total + end - begin, 0);
  const track = el("span", { class: "track" }, ...joined(intervals, endNs / UNITS).map((one) => piece(one, endNs, classOf(key))));
  const took = el("span", {}, duration(sum), el("small", {}, percent(sum / endNs)));
  return lane(label(key), meaning(key), track, took);
}

/** Intervals with gaps that nobody could see between them, as one. */
function joined(intervals, leastGapNs) {
  const found = [];
  for (const [begin, end] of intervals) {
    const last = found.at(-1);
    if (last && begin - last[1] < leastGapNs) last[1] = end;
    else found.push([begin, end]);
  }
  return found;
}

function piece([begin, end], endNs, className) {
  const element = el("i", { class: className });
  element.style.left = `${(begin / endNs) * 100}%`;
  element.style.width = `${((end - begin) / endNs) * 100}%`;
  return element;
}

function plainLane({ name, title, className, begin_ns: begin, end_ns: end, value }, endNs) {
  return lane(name, title, el("span", { class: "track" }, piece([begin, end], endNs, className)), value);
}

function strip(path, className) {
  const box = `0 0 ${UNITS} ${STRIP}`;
  return svg("svg", { class: "track strip", viewBox: box, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { class: className, d: path }));
}

function tokenLane(tokens, endNs) {
  const at = (ns) => Math.round((ns / endNs) * UNITS * 10) / 10;
  const path = tokens.map(({ ready_ns: ready }) => `M${at(ready)} 3v14`).join("");
  return lane("tokens ready", "Each mark is an output token, at the end of its step", strip(path, "ticks"), count(tokens.length), "first-of-group");
}

function stepLanes({ steps, num_steps: numSteps }, endNs) {
  if (!steps.length) return [];
  const title = steps.length < numSteps ? ` (the first ${count(steps.length)} of ${count(numSteps)} steps)` : "";
  return SHARED.map(([field, name, part, hint], i) => {
    const most = Math.max(...steps.map((step) => step[field]));
    const track = strip(bars(steps, field, most, endNs), `ink ${part}`);
    return lane(name, hint + title, track, most ? `≤ ${count(most)} / step` : "none", i ? "" : "first-of-group");
  });
}

function bars(steps, field, most, endNs) {
  const x = (ns) => Math.round((Math.max(0, Math.min(ns, endNs)) / endNs) * UNITS * 100) / 100;
  return steps.filter((step) => step[field]).map((step) => {
    const [left, right] = [x(step.begin_ns), x(step.end_ns)];
    const height = Math.max(1.5, Math.round((step[field] / most) * STRIP * 10) / 10);
    return `M${left} ${STRIP}v-${height}H${right}v${height}Z`;
  }).join("");
}
