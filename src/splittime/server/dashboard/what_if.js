/**
 * What another setting, or another load, would have made of the latest requests. The server simulates it beside itself
 * and changes nothing; a setting that it can change while it serves can then be applied from here.
 */

import { KeyNeeded, askJson } from "./api.js";
import { byId, el, say } from "./dom.js";
import { DASH, count, duration, plural } from "./format.js";

const LOAD = "load (times)";
const DOUBLED = ["max_num_seqs", LOAD];
const ELSEWHERE = "This server does not simulate itself. Ask its ledger's file: splittime simulate FILE --max-num-seqs 16.";
const FIGURES = [
  ["ttft_ms_p50", "first token, p50"],
  ["ttft_ms_p99", "first token, p99"],
  ["itl_ms_p50", "between tokens, p50"],
  ["itl_ms_p99", "between tokens, p99"],
  ["e2e_ms_mean", "whole request, mean"],
  ["refused", "refused"],
];

export class WhatIf {
  #schemas = null;
  #knobs = {};
  #isBusy = false;

  /** onTrouble: what `ask` raised where it is not this panel's to show. */
  constructor(onTrouble) {
    this.onTrouble = onTrouble;
    this.form = byId("what-if");
    this.select = byId("what-if-name");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.select.addEventListener("change", () => this.#showValue());
    byId("what-if-value").addEventListener("input", () => this.#offer());
    this.seen = new IntersectionObserver(([entry]) => entry.isIntersecting && this.wake(), { rootMargin: "200px" });
    this.seen.observe(this.form);
  }

  /** Learn what can be asked, when the panel is first seen, and when there is a key at last. */
  async wake() {
    if (this.#schemas) return;
    try {
      const described = (await askJson("openapi.json")).paths["/ledger/what-if"];
      if (!described) {
        this.seen.disconnect();
        this.form.hidden = true;
        say(byId("what-if-note"), ELSEWHERE);
        return;
      }
      const asked = described.post.requestBody.content["application/json"].schema;
      this.#knobs = await askJson("knobs");
      this.#schemas = { ...asked.properties.settings.properties, [LOAD]: asked.properties.speed };
    } catch (error) {
      this.#fail(error);
      return;
    }
    this.seen.disconnect();
    this.select.replaceChildren(...Object.keys(this.#schemas).map((name) => el("option", { value: name }, name)));
    this.#showValue();
  }

  #now() {
    const name = this.select.value;
    return name === LOAD ? 1 : this.#knobs[name];
  }

  /** Preset the double of the slots and of the load: a question that is worth asking. */
  #showValue() {
    const [name, now] = [this.select.value, this.#now()];
    const preset = DOUBLED.includes(name) && now ? 2 * now : now;
    byId("what-if-value").replaceChildren(control(this.#schemas[name], preset));
    this.#offer();
  }

  /** What is as it is now needs no simulation: say so in place of the button. */
  #offer() {
    const now = this.#now();
    const isSame = this.#wanted().value === (now ?? null);
    byId("what-if-ask").disabled = this.#isBusy || isSame;
    const told = now === undefined ? [] : [`now ${now ?? "no bound"}`];
    say(byId("what-if-now"), [...told, ...(isSame ? ["give another value to simulate"] : [])].join("; "));
  }

  #wanted() {
    const [name, input] = [this.select.value, byId("what-if-value").firstElementChild];
    const isWord = input.tagName === "SELECT" && !["true", "false"].includes(input.value);
    const value = isWord ? input.value : input.value === "" ? null : JSON.parse(input.value);
    return { name, value, body: name === LOAD ? { speed: value } : { settings: { [name]: value } } };
  }

  async #ask() {
    if (this.#isBusy) return;
    const wanted = this.#wanted();
    this.#busy(true, "Simulating …");
    try {
      this.#show(await send("POST", "ledger/what-if", wanted.body), wanted);
    } catch (error) {
      this.#fail(error);
    }
    this.#busy(false);
  }

  #show(found, wanted) {
    const figures = new Map(found.figures.map((figure) => [figure.name, figure]));
    const rows = FIGURES.map(([name, words]) => row(words, figures.get(name), name !== "refused"));
    const heads = ["", `change (${Math.round(100 * found.share)} %)`, "recorded", "simulated", "changed"].map((word) => el("th", { scope: "col" }, word));
    byId("what-if-answer").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)), ...this.#apply(wanted));
    const leftOut = found.num_left_out ? `, without ${count(found.num_left_out)} in flight at their begin` : "";
    say(byId("what-if-note"),
      `The latest ${plural(found.num_requests, "request")} (${duration(found.span_s * 1e9)}${leftOut}), simulated ${count(found.draws)} times as it was and with ${wanted.name} ${wanted.value ?? "without a bound"}. ${errorOf(found.miss)}`);
  }

  #apply({ name, value }) {
    if (!(name in this.#knobs)) return []; // not to be changed while it serves
    const apply = async () => {
      try {
        this.#knobs = await send("PATCH", "knobs", { [name]: value });
      } catch (error) {
        this.#fail(error);
        return;
      }
      byId("what-if-apply").remove();
      say(byId("what-if-note"), `${name} is ${this.#knobs[name] ?? "without a bound"} now. The next question is about requests from now on.`);
      this.#showValue();
    };
    return [el("button", { type: "button", id: "what-if-apply", onclick: apply }, `Apply: ${name} ${value ?? "without a bound"}`)];
  }

  #busy(isBusy, words) {
    this.#isBusy = isBusy;
    this.#offer();
    this.form.setAttribute("aria-busy", isBusy);
    if (!isBusy) return;
    byId("what-if-answer").replaceChildren();
    say(byId("what-if-note"), words);
  }

  #fail(error) {
    if (error instanceof KeyNeeded) this.onTrouble(error);
    this.form.closest("section").hidden = error.status === 404; // a vLLM that describes nothing
    say(byId("what-if-note"), error.message);
  }
}

const send = (method, path, body) => askJson(path, { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** The field for a value of this JSON schema. */
function control(schema, now) {
  const kinds = schema.anyOf ?? [schema];
  const words = kinds.flatMap((kind) => kind.enum ?? (kind.type === "boolean" ? [true, false] : []));
  if (words.length) return el("select", { "aria-label": "Value" }, ...words.map((word) => el("option", { value: String(word), selected: word === now }, String(word))));
  const isWhole = kinds.some((kind) => kind.type === "integer");
  const number = kinds.find((kind) => ["integer", "number"].includes(kind.type)) ?? {};
  const mayBeEmpty = kinds.some((kind) => kind.type === "null");
  return el("input", { type: "number", "aria-label": "Value", value: now ?? "", min: number.minimum, max: number.maximum, step: isWhole ? 1 : "any", required: !mayBeEmpty, placeholder: mayBeEmpty ? "no bound" : null });
}

function row(words, figure, isTime) {
  if (!figure) return el("tr", {}, el("th", { scope: "row" }, words), ...Array.from({ length: 4 }, () => el("td", {}, DASH)));
  const told = (value) => (value === null ? DASH : isTime ? duration(value * 1e6) : count(value));
  const change = figure.ratio === null ? DASH : `${times(figure.ratio)} (${times(figure.low)} to ${times(figure.high)})`;
  const ends = figure.ratio === null ? "" : ` (${told(figure.after_low)} to ${told(figure.after_high)})`;
  const cells = [told(figure.recorded), told(figure.before), told(figure.after) + ends].map((text) => el("td", {}, text));
  return el("tr", {}, el("th", { scope: "row" }, words), el("td", { class: kindOf(figure) }, change), ...cells);
}

const SAME = 0.005; // less is told as 1.00x

/** Whether the change itself is better, or worse, in the very hour, throughout. */
function kindOf({ own_low: low, own_high: high }) {
  if (low === null) return null;
  return high < 1 - SAME ? "better" : low > 1 + SAME ? "worse" : null;
}

const times = (ratio) => `${ratio < 10 ? ratio.toFixed(2) : ratio.toPrecision(3)}x`;

const FAR = 0.1; // of the record: `simulate.what_if.FAR`

/** How well the simulation of the settings as they were agrees with what was recorded. */
function errorOf(miss) {
  if (!miss || Math.abs(miss.ratio - 1) <= FAR) return "How far “simulated” is from “recorded” is the simulator's error.";
  const [words] = FIGURES.filter(([name]) => name === miss.name).map(([, told]) => told);
  return `Simulated as it was, it has ${words ?? miss.name} at ${times(miss.ratio)} of the recorded: the changed figures are corrected by that, and their intervals wider.`;
}
