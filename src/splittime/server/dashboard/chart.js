/**
 * One chart over time, drawn as SVG: areas stacked by the second, or lines over dots. Its legend is its readout: it says
 * the values of the latest second of which all is known, or of the one under the pointer (or reached by the arrow keys). All charts of the page
 * share that second (`instant`), so that one look compares them.
 */

import { el, say, svg } from "./dom.js";
import { DASH } from "./format.js";
import { areas, dots, line, niceTicks } from "./shapes.js";

const HEIGHT = 148;
const PAD = { left: 50, right: 6, top: 6, bottom: 18 };

/** The second that is looked at: null is the latest of which all is known. */
export const instant = {
  at: null,
  charts: new Set(),
  set(at) {
    this.at = at;
    for (const chart of this.charts) chart.point();
  },
};

export class Chart {
  /** kind: "areas" or "lines". format: of a value in the legend. */
  constructor(host, { title, hint, kind, format, tick = format }) {
    Object.assign(this, { kind, format, tick, width: 0, view: null, legend: new Map() });
    this.plot = svg("svg", { class: "plot", height: HEIGHT, "aria-hidden": "true" });
    this.list = el("ul", { class: "legend" });
    this.when = el("span", { class: "when" });
    const caption = el("figcaption", { title: hint }, el("h3", {}, title), this.when);
    const label = `${title}. ${hint} Left and right arrows move through time.`;
    this.figure = el("figure", { class: "chart", tabindex: 0, role: "group", "aria-label": label }, caption, this.plot, this.list);
    host.append(this.figure);
    this.#listen();
    instant.charts.add(this);
  }

  #listen() {
    this.plot.addEventListener("pointermove", (event) => instant.set(this.#atPixel(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => instant.set(null));
    this.figure.addEventListener("blur", () => instant.set(null));
    this.figure.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.#draw();
    }).observe(this.plot);
  }

  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") instant.set(null);
    if (!step || !this.view) return;
    event.preventDefault();
    const { from, to } = this.view;
    instant.set(Math.min(to - 1, Math.max(from, (instant.at ?? to - 1) + step)));
  }

  #atPixel(x) {
    if (!this.view) return null;
    const { from, to } = this.view;
    const at = from + Math.floor(((x - PAD.left) / (this.width - PAD.left - PAD.right)) * (to - from));
    return at >= from && at < to ? at : null;
  }

  /**
   * Show seconds [from, to). series: [{key, label, className, values, title}], values by second, null for none.
   * max: of the axis, if it is known. least: it reaches at least so far. points: [[second, value], ...] under the
   * lines. gaps: [[from, to, why], ...] in seconds, of which not all is known. nothing: what an empty chart says.
   */
  update(view) {
    this.view = view;
    this.#draw();
    this.#fillLegend();
    this.point();
  }

  #draw() {
    if (!this.view || this.width < PAD.left + PAD.right + 20) return;
    const { from, to, series } = this.view;
    const top = this.#top();
    const { max: known, least = 0, nothing = "nothing in this time" } = this.view;
    const ticks = known ? [0, known / 2, known] : top ? niceTicks(Math.max(top, least)) : [0];
    const max = ticks.at(-1) || 1;
    const x = (at) => PAD.left + ((at - from) / (to - from)) * (this.width - PAD.left - PAD.right);
    const y = (value) => HEIGHT - PAD.bottom - (Math.min(value, max) / max) * (HEIGHT - PAD.top - PAD.bottom);
    const shapes = this.kind === "areas" ? areas(series, from, x, y) : this.#lines(x, y);
    const veils = this.#gaps(x);
    const said = top || known || veils.length ? [] : [svg("text", { class: "tick middle", x: this.width / 2, y: HEIGHT / 2 }, nothing)];
    this.cursor = svg("line", { class: "cursor", y1: PAD.top, y2: HEIGHT - PAD.bottom, x1: -9, x2: -9 });
    this.x = x;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren(...this.#axes(ticks, x, y), ...shapes, ...veils, ...said, this.cursor);
  }

  /** A veil over seconds of which not all is known, with a word where it fits: what is not kept is not zero. */
  #gaps(x) {
    const { from, to, gaps } = this.view;
    const seen = gaps.map(([begin, end, why = "not kept"]) => [Math.max(begin, from), Math.min(end, to), why]).filter(([begin, end]) => begin < end);
    return seen.flatMap(([begin, end, why]) => {
      const width = x(end) - x(begin);
      const veil = svg("rect", { class: "veil", x: x(begin), y: PAD.top, width, height: HEIGHT - PAD.top - PAD.bottom });
      const words = svg("text", { class: "tick middle", x: x(begin) + width / 2, y: HEIGHT / 2 }, why);
      return width > 60 ? [veil, words] : [veil];
    });
  }

  /** The latest second of which all is known: in the last ones a step may still run. */
  #latest() {
    const { from, to } = this.view;
    let at = to - 1;
    while (at > from && !this.#isKept(at)) at--;
    return this.#isKept(at) ? at : to - 1;
  }

  #isKept(at) {
    return !this.view.gaps.some(([begin, end]) => at >= begin && at < end);
  }

  #lines(x, y) {
    const { series, from, points } = this.view;
    const lines = series.map((one) => line(one, from, x, y)); // where all are one, the first lies on the broader last
    return [dots(points ?? [], x, y), ...lines.reverse()];
  }

  /** The largest value of the areas together, or of the lines: a dot may lie above its second's line, and is cut off. */
  #top() {
    const { series, from, to } = this.view;
    let top = 0;
    for (let i = 0; i < to - from; i++) {
      const values = series.map((one) => one.values[i] ?? 0);
      top = Math.max(top, this.kind === "areas" ? values.reduce((a, b) => a + b, 0) : Math.max(0, ...values));
    }
    return top;
  }

  #axes(ticks, x, y) {
    const { from, to } = this.view;
    const right = this.width - PAD.right;
    const rows = ticks.flatMap((value) => [
      svg("line", { class: "grid", x1: PAD.left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick end", x: PAD.left - 6, y: y(value) + 4 }, this.tick(value)),
    ]);
    const span = to - from;
    const every = span > 120 ? 60 : 15;
    const columns = [];
    for (let ago = every; ago < span; ago += every) {
      const words = ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
      columns.push(svg("text", { class: "tick middle", x: x(to - ago), y: HEIGHT - 4 }, words));
    }
    return [...rows, ...columns, svg("text", { class: "tick end", x: right, y: HEIGHT - 4 }, "now")];
  }

  #fillLegend() {
    const keys = this.view.series.map((one) => one.key);
    if (keys.join() !== [...this.legend.keys()].join()) {
      const items = this.view.series.map((one) => [one.key, this.#legendItem(one)]);
      this.legend = new Map(items);
      this.list.replaceChildren(...items.map(([, { item }]) => item));
    }
  }

  #legendItem({ label, className, title }) {
    const value = el("b", {}, DASH);
    const swatch = el("i", { class: `swatch ${this.kind} ${className}` });
    return { value, item: el("li", { title }, swatch, label, value) };
  }

  /** Show the values of the second that is looked at. */
  point() {
    if (!this.view) return;
    const { from, to, series } = this.view;
    const isPast = instant.at !== null && instant.at >= from && instant.at < to;
    const at = isPast ? instant.at : this.#latest();
    for (const { key, values } of series) {
      const value = values[at - from];
      say(this.legend.get(key).value, value === null || value === undefined || !this.#isKept(at) ? DASH : this.format(value));
    }
    say(this.when, isPast || at < to - 1 ? `${to - at} s ago` : "");
    const x = isPast && this.x ? this.x(at + 0.5) : -9;
    this.cursor?.setAttribute("x1", x);
    this.cursor?.setAttribute("x2", x);
  }
}
