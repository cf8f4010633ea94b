/**
 * The latest requests, one a line. Only the lines in view exist, so 2,000 cost what 20 do. While the pointer or the focus
 * is in it, or it is scrolled down, the table holds still and counts what is new; what was there stays where it was.
 *
 * Keys: up, down, page up, page down, home, end move; Enter or space opens; the focus stays on the grid itself.
 */

import { byId, el, say, show } from "./dom.js";
import { plural } from "./format.js";
import { COLUMNS, TableRow } from "./table_row.js";

const LINE_PX = 30;
const MARGIN_LINES = 4;
const DEFAULT_SORT = { field: "end_ns", sign: -1 };

export class Table {
  #lines = [];
  #pool = [];
  #active = null; // key of the line that the keys are on
  #sort = DEFAULT_SORT;

  constructor(store, onOpen) {
    Object.assign(this, { store, onOpen, isHeld: false, filter: (row) => !row.isOpen, isByTime: false });
    this.grid = byId("grid");
    this.body = byId("grid-lines");
    this.held = byId("held");
    this.#makeHead();
    this.#listen();
  }

  #makeHead() {
    const head = byId("grid-head");
    COLUMNS.forEach(({ title, field, hint, name, of = "" }) => {
      const button = field
        ? el("button", { type: "button", onclick: () => this.#sortBy(field) }, title)
        : el("span", {}, title);
      head.append(el("span", { role: "columnheader", class: `cell ${name} ${of}`, title: hint, "data-field": field }, button));
    });
    this.#showSort();
  }

  #listen() {
    const frame = this.grid.parentElement;
    frame.addEventListener("pointerenter", () => this.#hold());
    for (const event of ["pointerleave", "focusout"]) frame.addEventListener(event, () => setTimeout(() => this.#release()));
    frame.addEventListener("focusin", () => this.#hold());
    this.grid.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.grid.addEventListener("keydown", (event) => this.#onKey(event));
    this.body.addEventListener("click", (event) => this.#onClick(event));
    this.held.addEventListener("click", () => this.refresh(true));
    new ResizeObserver(() => this.#draw()).observe(this.grid);
  }

  // ---- what is in it

  /** New things are known: take them in, or count them. */
  update() {
    if (this.isHeld || this.grid.scrollTop > 0) {
      const known = new Set(this.#lines.map((row) => row.key));
      const news = this.#wanted().filter((row) => !known.has(row.key)).length;
      say(this.held, news ? `held · show ${plural(news, "new request")}` : "held");
      this.held.disabled = !news;
      this.held.classList.toggle("is-held", true);
      this.#freshen();
    } else {
      this.refresh(false);
    }
  }

  /** Show all there is, from the top if asked. */
  refresh(fromTop) {
    this.#lines = this.#wanted().sort((a, b) => this.#compare(a, b));
    say(this.held, "live");
    this.held.disabled = true;
    this.held.classList.toggle("is-held", false);
    if (fromTop) this.grid.scrollTop = 0;
    this.#draw();
  }

  #wanted() {
    return [...this.store.rows.values(), ...this.store.open].filter(this.filter);
  }

  /** A line that was open may be closed by now; it stays where it is. */
  #freshen() {
    const open = new Map(this.store.open.map((row) => [row.key, row]));
    this.#lines = this.#lines.map((row) => (row.isOpen ? this.store.rows.get(row.key) ?? open.get(row.key) ?? row : row));
    this.#draw();
  }

  #compare(a, b) {
    const { field, sign } = this.#sort;
    const [first, second] = [a[field] ?? null, b[field] ?? null];
    if (first === null || second === null) return (first === null) - (second === null);
    return first < second ? -sign : first > second ? sign : b.start_ns - a.start_ns;
  }

  #sortBy(field) {
    const isSame = this.#sort.field === field;
    this.#sort = { field, sign: isSame ? -this.#sort.sign : -1 };
    this.#showSort();
    this.refresh(true);
  }

  #showSort() {
    for (const cell of byId("grid-head").children) {
      const isIt = cell.dataset.field === this.#sort.field;
      const order = this.#sort.sign < 0 ? "descending" : "ascending";
      if (isIt) cell.setAttribute("aria-sort", order);
      else cell.removeAttribute("aria-sort");
    }
  }

  // ---- drawing

  #draw() {
    const first = Math.max(0, Math.floor(this.grid.scrollTop / LINE_PX) - MARGIN_LINES);
    const count = Math.min(this.#lines.length - first, Math.ceil(this.grid.clientHeight / LINE_PX) + 2 * MARGIN_LINES);
    this.body.style.height = `${Math.max(1, this.#lines.length) * LINE_PX}px`;
    this.grid.setAttribute("aria-rowcount", this.#lines.length + 1);
    while (this.#pool.length < count) this.#pool.push(new TableRow(this.body));
    const longestNs = this.isByTime ? Math.max(1, ...this.#lines.map((row) => row.e2e_ns)) : null;
    this.#pool.forEach((line, i) => {
      if (i < count) line.show(this.#lines[first + i], first + i, LINE_PX, this.#active, longestNs);
      else line.hide();
    });
    show(byId("grid-empty"), !this.#lines.length);
    this.grid.classList.toggle("is-empty", !this.#lines.length);
    this.#pointAtActive();
  }

  #pointAtActive() {
    const line = this.#pool.find((one) => one.isActive);
    if (line) this.grid.setAttribute("aria-activedescendant", line.element.id);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  // ---- hands

  #hold() {
    this.isHeld = true;
  }

  #release() {
    const frame = this.grid.parentElement;
    const isHeld = frame.matches(":hover") || frame.contains(document.activeElement);
    if (isHeld === this.isHeld) return;
    this.isHeld = isHeld;
    this.update();
  }

  #onClick(event) {
    const line = event.target.closest("[data-index]");
    if (line) this.#open(Number(line.dataset.index));
  }

  #open(index) {
    const row = this.#lines[index];
    if (!row) return;
    this.#active = row.key;
    this.#draw();
    this.onOpen(row, this.grid);
  }

  #onKey(event) {
    const page = Math.max(1, Math.floor(this.grid.clientHeight / LINE_PX) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const now = this.#lines.findIndex((row) => row.key === this.#active);
    if (event.key in moves) this.#move(now, moves[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && now >= 0) this.#open(now);
    else return;
    event.preventDefault();
  }

  #move(now, by) {
    const next = now < 0 ? 0 : Math.min(this.#lines.length - 1, Math.max(0, now + by));
    if (!this.#lines[next]) return;
    this.#active = this.#lines[next].key;
    const top = next * LINE_PX;
    const { scrollTop, clientHeight } = this.grid;
    if (top < scrollTop) this.grid.scrollTop = top;
    else if (top + LINE_PX > scrollTop + clientHeight) this.grid.scrollTop = top + LINE_PX - clientHeight;
    this.#draw();
  }
}
