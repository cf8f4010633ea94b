/** How the server started: for each process a bar of its parts, on one time axis, and the parts in words. */

import { askJson } from "./api.js";
import { byId, el } from "./dom.js";
import { duration } from "./format.js";

const INKS = ["stage-prefill", "stage-deliver", "stage-before"]; // of neighbours: which part is which, the list says

export class Start {
  constructor(onTrouble) {
    this.onTrouble = onTrouble;
    this.details = byId("start");
    this.details.addEventListener("toggle", () => this.wake());
  }

  /** Ask, while it is open. */
  async wake() {
    if (!this.details.open) return;
    try {
      const told = (await askJson("ledger/facts")).processes.filter((process) => process.start?.length);
      byId("start-parts").replaceChildren(...this.#lines(told));
    } catch (error) {
      this.onTrouble(error);
    }
  }

  #lines(processes) {
    if (!processes.length) return [el("p", { class: "empty" }, "Not known: the engine is not ready, or it does not tell.")];
    const begin = Math.min(...processes.map((process) => process.started_ns));
    const whole = Math.max(...processes.map((process) => process.ready_ns)) - begin;
    return processes.flatMap((process) => [
      el("p", { class: "note" }, `${process.name}: ready after ${duration(process.ready_ns - process.started_ns)}`),
      this.#bar(process, begin, whole),
      el("p", { class: "note" }, process.start.map(words).join(", ")),
    ]);
  }

  #bar({ name, started_ns: started, start }, begin, whole) {
    const width = (ns) => (element) => ((element.style.width = `${(ns / whole) * 100}%`), element);
    const segments = start.map((part, i) => width(part[2] - part[1])(el("i", { class: `ink ${ink(part[0], i)} thin`, title: words(part) })));
    const before = width(started - begin)(el("span"));
    return el("span", { class: "bar", role: "img", "aria-label": `start of ${name}: ${start.map(words).join(", ")}` }, before, ...segments);
  }
}

const ink = (name, i) => (name === "unattributed" ? "stage-unattributed" : INKS[i % INKS.length]);
const words = ([name, begin, end]) => `${name} ${duration(end - begin)}`;
