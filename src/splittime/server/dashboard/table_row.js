/** One line of the table: an element that is used again for another request as the table scrolls. */

import { barWords, fillBar } from "./bar.js";
import { el, say } from "./dom.js";
import { DASH, clock, count, duration } from "./format.js";

/** field: what sorting looks at. text: what the cell says. */
export const COLUMNS = [
  { name: "when", title: "Ended", field: "end_ns", text: (row) => (row.isOpen ? "open" : clock(row.started_unix_ms + row.e2e_ns / 1e6)) },
  { name: "id", title: "Request", text: (row) => row.id },
  { name: "end", title: "End", field: "finish_reason", hint: "Why it ended", text: (row) => endOf(row) },
  { name: "prompt", title: "Prompt", field: "prompt_tokens", hint: "Tokens of the prompt; those the prefix cache had, behind +", text: promptOf },
  { name: "output", title: "Output", of: "writes", field: "output_tokens", hint: "Tokens of the answer", text: (row) => count(row.output_tokens) },
  { name: "ttft", title: "TTFT", of: "writes", field: "ttft_ns", hint: "Time until the client had the first token: of an answer that is not streamed, until all of it", text: (row) => duration(row.ttft_ns) },
  { name: "tpot", title: "TPOT", of: "writes", field: "tpot_ns", hint: "Time per output token after the first", text: (row) => duration(row.tpot_ns) },
  { name: "total", title: "Total", field: "e2e_ns", hint: "From first byte to last", text: (row) => duration(row.e2e_ns) },
  { name: "stages", title: "Time by stage" },
];

let numLines = 0;

export class TableRow {
  constructor(parent) {
    this.cells = COLUMNS.map(({ name, of = "" }) => el("span", { role: "gridcell", class: `cell ${name} ${of}` }));
    this.bar = this.cells.at(-1).appendChild(el("span", { class: "bar" }));
    this.element = el("div", { role: "row", class: "line", id: `line-${numLines++}` }, ...this.cells);
    parent.append(this.element);
  }

  get isActive() {
    return !this.element.hidden && this.element.classList.contains("active");
  }

  hide() {
    this.element.hidden = true;
  }

  show(row, index, heightPx, activeKey, longestNs) {
    const { element } = this;
    element.hidden = false;
    element.style.transform = `translateY(${index * heightPx}px)`;
    element.dataset.index = index;
    element.setAttribute("aria-rowindex", index + 2);
    element.classList.toggle("active", row.key === activeKey);
    element.setAttribute("aria-selected", row.key === activeKey);
    if (this.row === row && this.longestNs === longestNs) return;
    Object.assign(this, { row, longestNs });
    this.#fill(row, longestNs);
  }

  #fill(row, longestNs) {
    this.element.classList.toggle("open", Boolean(row.isOpen));
    this.element.classList.toggle("failed", hasFailed(row));
    COLUMNS.forEach(({ text }, i) => text && say(this.cells[i], text(row)));
    this.cells[2].title = row.error ?? "";
    fillBar(this.bar, row.stages, longestNs ?? Math.max(1, row.e2e_ns));
    this.bar.setAttribute("title", barWords(row.stages));
    this.bar.setAttribute("role", "img");
    this.bar.setAttribute("aria-label", barWords(row.stages));
  }
}

export function hasFailed(row) {
  return Boolean(row.error) || ["error", "refused", "deadline"].includes(row.finish_reason);
}

function endOf(row) {
  if (row.isOpen) return row.output_tokens ? "answering" : "no token yet";
  return row.preemptions ? `${row.finish_reason} · ${row.preemptions}×` : (row.finish_reason ?? DASH);
}

function promptOf(row) {
  if (!row.cached_tokens) return count(row.prompt_tokens);
  return `${count(row.prompt_tokens - row.cached_tokens)} + ${count(row.cached_tokens)}`;
}
