/**
 * What the doctor finds in the latest books: a claim each, with its evidence, its cure, and what would refute it. It is
 * asked only while its list is on the screen.
 */

import { askJson } from "./api.js";
import { byId, el, say } from "./dom.js";
import { amount, count, percent, plural } from "./format.js";

const EVERY_MS = 10_000;

export class Findings {
  #timer = 0;
  #told = "";
  #isSeen = false;

  constructor(onRequest) {
    this.onRequest = onRequest;
    this.list = byId("findings");
    document.addEventListener("visibilitychange", () => this.wake());
    const look = ([entry]) => {
      this.#isSeen = entry.isIntersecting;
      this.wake();
    };
    new IntersectionObserver(look, { rootMargin: "200px" }).observe(this.list);
  }

  /** Ask now, then every few seconds while the page is seen. */
  wake() {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible" && this.#isSeen) this.#timer = setTimeout(() => this.#turn(), 0);
  }

  async #turn() {
    try {
      this.#show(await askJson("dashboard/findings"));
    } catch (error) {
      say(byId("findings-note"), `not known: ${error.message}`);
    }
    this.#timer = setTimeout(() => this.wake(), EVERY_MS);
  }

  /** News of the store: how many are open, which no finding tells. */
  update({ answer }) {
    this.now = answer;
  }

  #show(told) {
    const words = told.thin ? tooLittle(told, this.now) : told.withheld ? "Withheld: too much of the requests' time is unexplained." : "Nothing found that a change would cure.";
    const text = JSON.stringify([told.findings, told.abstentions, words]);
    say(byId("findings-note"), `from the latest ${plural(told.num_requests, "ended request")} and ${plural(told.num_steps, "step")}`);
    say(byId("time-went"), timeWent(told.spent));
    const isRead = this.list.matches(":hover") || this.list.contains(document.activeElement);
    if (text === this.#told || (isRead && this.#told)) return; // what is being read stays as it is
    this.#told = text;
    const open = new Set([...this.list.querySelectorAll("details[open]")].map((details) => details.dataset.name));
    const items = told.findings.map((finding) => this.#item(finding));
    const abstained = told.abstentions.map(({ name, why }) => `${spoken(name)}: ${why}`);
    const healthy = el("li", { class: "empty" }, words);
    this.list.replaceChildren(...(items.length ? items : [healthy]), ...(told.thin ? [] : abstentions(abstained)));
    for (const details of this.list.querySelectorAll("details")) details.open = open.has(details.dataset.name);
  }

  #item(finding) {
    const head = el("summary", {},
      el("span", { class: `badge ${finding.is_limit ? "limit" : "illness"}` }, finding.is_limit ? "limit" : "illness"),
      el("b", {}, spoken(finding.name)),
      el("span", { class: "claim" }, finding.claim),
      el("span", { class: "share" }, `${percent(finding.share_of_time)} of ${finding.share_of}`),
    );
    return el("li", {}, el("details", { "data-name": finding.name }, head, this.#more(finding)));
  }

  #more(finding) {
    const evidence = finding.evidence.map(({ what, value, unit }) => `${what}: ${number(value)} ${unit}`.trim());
    const pairs = [
      ["Evidence", el("ul", {}, ...evidence.map((line) => el("li", {}, line)))],
      ["Look at", this.#requests(finding.request_ids)],
      ["Cure", el("span", {}, finding.cure.sentence, " ", command(finding.cure))],
      ["Cost", finding.cost],
      ["Refuted by", finding.counter_check],
      ["Holds for", finding.regime],
      ["Confidence", `${percent(finding.confidence)}: ${finding.confidence_from}`],
    ];
    return el("dl", { class: "finding" }, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  #requests(ids) {
    if (!ids.length) return "–";
    return el("span", { class: "ids" }, ...ids.slice(0, 5).map((id) =>
      el("button", { type: "button", class: "link", onclick: (event) => this.onRequest(id, event.currentTarget) }, id)));
  }
}

const MIN_TOLD = 0.05; // as `splittime doctor` tells it in its first lines

function timeWent(spent) {
  const told = spent.filter(({ share }) => share >= MIN_TOLD).map(({ owner, share }) => `${percent(share)} ${owner}`);
  return told.length ? `Where the requests' time went: ${told.join(", ")}` : "";
}

/** What is said where no rule has enough to go by: under overload those that are open say most. */
function tooLittle(told, now) {
  const open = now?.server.open_requests ?? 0;
  const causes = Object.entries(now?.engine.waiting_for ?? {}).sort((a, b) => b[1] - a[1]).map(([cause, number]) => `${count(number)} for ${spoken(cause)}`);
  if (!open && !told.num_requests) return "Nobody has asked yet. Once requests have ended, it says here where their time went, and what would cure it.";
  const waits = causes.length ? `, of which ${count(now.engine.num_waiting)} wait: ${causes.join(", ")}` : "";
  return `Too few requests have ended to say more${open ? `; ${plural(open, "request")} ${open === 1 ? "is" : "are"} open${waits}` : ""}.`;
}

const spoken = (name) => name.replaceAll("_", " ");
const number = (value) => (typeof value === "number" ? (value >= 100 ? count(value) : amount(value)) : value);

function command({ program, flags }) {
  return flags.length ? el("code", {}, `${program} ${flags.join(" ")}`) : null;
}

function abstentions(lines) {
  if (!lines.length) return [];
  const body = el("ul", {}, ...lines.map((line) => el("li", {}, line)));
  return [el("li", { class: "abstained" }, el("details", { "data-name": "abstained" }, el("summary", {}, `${plural(lines.length, "rule")} could not tell`), body))];
}
