/** The tables of the gateway's page. Each is drawn anew with each answer; text is set as text. */

import { barWords, stageBar } from "./bar.js";
import { el } from "./dom.js";
import { DASH, count, duration, percent } from "./format.js";
import { sum } from "./gateway_tiles.js";

export function showUpstreams(table, { upstreams, attempts }, { first_byte_ns: firstByteNs }) {
  const rows = upstreams.map((one) => {
    const [kind, words] = standing(one);
    const results = attempts.filter(([upstream]) => upstream === one.name);
    const answered = sum(results.filter(([, result]) => result === "answered").map(([, , number]) => number));
    const failed = results.filter(([, result]) => !["answered", "cancelled"].includes(result));
    return [
      text(one.name), el("td", { class: `state-${kind}` }, words), el("td", { class: "wide" }, gauge(one.requests / one.limit)),
      number(`${count(one.requests)} / ${count(one.limit)}`), number(count(one.tokens)), number(duration(firstByteNs[one.name])),
      number(count(answered)), failures(failed),
    ];
  });
  fill(table, ["Upstream", "State", "Of its cap", "In flight", "Tokens", "First byte p50", "Answered", "Failed"], rows, "No upstream.");
}

/** How an upstream stands, and whether that is good. */
function standing(one) {
  const again = one.asked_again_in_s ? `, asked again in ${duration(one.asked_again_in_s * 1e9)}` : ", asked again now";
  if (one.is_open) return ["bad", `breaker open${again}${one.failing ? `: ${one.failing}` : ""}`];
  if (one.is_busy) return ["wait", `asked for a pause${again}`];
  if (one.requests >= one.limit) return ["wait", "full"];
  return ["good", "takes requests"];
}

function failures(failed) {
  const total = sum(failed.map(([, , number]) => number));
  const words = failed.map(([, result, number]) => `${count(number)} ${result}`).join(", ");
  return el("td", { class: "number", title: words || null }, count(total));
}

export function showTenants(table, { tenants }, { tokens }) {
  const total = sum(Object.values(tokens));
  const weights = sum(tenants.map((one) => one.weight));
  const rows = tenants.map((one) => {
    const used = tokens[one.name] ?? 0;
    return [
      text(one.name || "anybody"), el("td", { class: "wide" }, gauge(total ? used / total : 0)), number(total ? percent(used / total) : DASH),
      number(percent(one.weight / weights)), number(count(used)), number(count(one.in_flight)), number(count(one.waiting)),
    ];
  });
  fill(table, ["Tenant", "Share", "", "By weight", "Tokens", "In flight", "Waiting"], rows, "No tenant.");
}

export function showRefusals(table, { refusals }) {
  const total = sum(Object.values(refusals));
  const sorted = Object.entries(refusals).sort((a, b) => b[1] - a[1]);
  const rows = sorted.map(([reason, refused]) => [text(reason), el("td", { class: "wide" }, gauge(refused / total)), number(count(refused))]);
  fill(table, ["Reason", "", "Requests"], rows, "Nobody was refused.");
}

export function showSlowest(table, { slowest }) {
  const longest = Math.max(1, ...slowest.map((one) => one.e2e_ns));
  const rows = slowest.map((one) => [
    el("td", { class: "code", title: one.id }, one.id), text(one.model), text(one.upstreams.join(" → ") || DASH),
    text(one.degraded ? `${one.finish_reason} · ${one.degraded}` : one.finish_reason), number(duration(one.e2e_ns)),
    el("td", { class: "wide" }, el("div", { class: "cell-bar", role: "img", title: barWords(one.stages), "aria-label": barWords(one.stages) }, stageBar(one.stages, longest))),
  ]);
  fill(table, ["Request", "Model", "Upstreams", "End", "Total", "Time by stage"], rows, "No request has ended in the last minute.");
}

const text = (words) => el("td", {}, words);
const number = (words) => el("td", { class: "number" }, words);
const gauge = (share) => el("div", { class: "gauge" }, widthOf(el("i", { class: "fill" }), share));

function widthOf(element, share) {
  element.style.width = `${Math.min(1, share || 0) * 100}%`; // by script: the page's policy allows no style attribute
  return element;
}

function fill(table, titles, rows, nothing) {
  const selection = document.getSelection();
  if (!selection.isCollapsed && table.contains(selection.anchorNode)) return; // somebody copies an id
  if (!rows.length) return table.replaceChildren(el("caption", { class: "empty" }, nothing));
  const isNumber = (i) => rows[0][i].classList.contains("number");
  const head = el("tr", {}, ...titles.map((title, i) => el("th", { scope: "col", class: isNumber(i) ? "number" : null }, title)));
  table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells))));
}
