/**
 * Ask for an answer, see it come, and see its account beside it: the server's book, and this browser's own clock, each
 * by its own measure. The two clocks are never subtracted; their durations are.
 */

import { ask, askRequest } from "./api.js";
import { accountParts, soFarParts } from "./detail.js";
import { byId, el, say } from "./dom.js";
import { DASH, count, duration } from "./format.js";
import { events } from "./sse.js";

export class Playground {
  #abort = null;
  #watch = null;

  /** onOther: open another request's waterfall. onTrouble: what `ask` raised. onEnd: an account is about to close. */
  constructor(onOther, onTrouble, onEnd) {
    Object.assign(this, { onOther, onTrouble, onEnd });
    this.form = byId("play");
    this.output = byId("play-output");
    this.account = byId("play-account");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("play-stop").addEventListener("click", () => this.#abort?.abort());
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  async #run() {
    if (this.#abort) return;
    this.#abort = new AbortController();
    this.#busy(true);
    const watch = (this.#watch = new Watch());
    try {
      await this.#stream(watch);
    } catch (error) {
      watch.hasFailed = error.name !== "AbortError";
      if (watch.hasFailed) this.#fail(error);
    }
    watch.end();
    this.#abort = null;
    this.#busy(false);
    this.#showSeen(watch);
    this.onEnd();
  }

  /** News of the store: how far the request is by the server's book, or that its account is closed. */
  update(store) {
    const watch = this.#watch;
    if (!watch || watch.hasAccount) return;
    const open = store.open.find((row) => row.id === watch.id || row.sent_as === watch.id);
    if (open) this.account.replaceChildren(...soFarParts(open));
    watch.hasAccount = watch.endNs !== null && !watch.hasFailed && store.hasClosed(watch.id);
    if (watch.hasAccount) this.#showAccount(watch);
  }

  #busy(isBusy) {
    byId("play-send").disabled = isBusy;
    byId("play-stop").disabled = !isBusy;
    this.output.setAttribute("aria-busy", isBusy);
    if (!isBusy) return;
    this.account.setAttribute("aria-busy", true); // read out once, when it is there
    this.output.replaceChildren();
    this.account.replaceChildren(el("p", { class: "empty" }, "Waiting for its account …"));
  }

  #body() {
    const fields = new FormData(this.form);
    const prompt = fields.get("prompt");
    const isChat = fields.get("kind") === "chat";
    const input = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    return [isChat ? "v1/chat/completions" : "v1/completions", {
      ...input,
      max_tokens: Number(fields.get("max_tokens")),
      ...(fields.get("temperature") && { temperature: Number(fields.get("temperature")) }),
      stream: true,
      stream_options: { include_usage: true },
    }];
  }

  async #stream(watch) {
    const [path, body] = this.#body();
    const headers = { "content-type": "application/json", "x-request-id": watch.id };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: this.#abort.signal };
    for await (const data of events(await ask(path, options))) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      this.#take(event, watch);
    }
  }

  #take(event, watch) {
    if (event.usage) watch.tokens = event.usage.completion_tokens;
    const choice = event.choices[0];
    const text = choice?.text ?? choice?.delta?.content;
    if (!text) return;
    watch.chunk();
    this.output.append(text);
    this.output.scrollTop = this.output.scrollHeight;
    this.#showSeen(watch);
  }

  #showSeen(watch) {
    const words = `Seen here: first text after ${duration(watch.firstNs)}, ${count(watch.chunks)} chunks, longest gap ${duration(watch.longestGapNs)}`;
    say(byId("play-seen"), words + (watch.endNs ? `, all after ${duration(watch.endNs)}.` : " …"));
  }

  #fail(error) {
    this.output.append(el("span", { class: "trouble" }, error.message));
    this.account.replaceChildren();
    this.onTrouble(error);
  }

  async #showAccount(watch) {
    try {
      const account = await askRequest(watch.id);
      this.account.setAttribute("aria-busy", false);
      this.account.replaceChildren(bothBooks(account, watch), ...accountParts(account, this.onOther));
    } catch (error) {
      this.#fail(error);
    }
  }
}

/** What the server's book does not hold: the way there and back, and this browser. */
function bothBooks(account, watch) {
  const serverNs = account.derived.ttft_ns;
  const outside = watch.firstNs === null || serverNs === null ? null : Math.max(0, watch.firstNs - serverNs);
  return el("p", { class: "books" }, `First text: ${duration(watch.firstNs)} here = ${duration(serverNs)} in the server + ${outside === null ? DASH : duration(outside)} on the way and in the browser.`);
}

/** Not of crypto.randomUUID, which a page that came over plain HTTP from another host has not. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** This browser's own clock over one answer. */
class Watch {
  constructor() {
    Object.assign(this, { startMs: performance.now(), id: newId(), hasFailed: false, hasAccount: false, chunks: 0, firstNs: null, longestGapNs: null, endNs: null, lastNs: 0 });
  }

  #nowNs() {
    return (performance.now() - this.startMs) * 1e6;
  }

  chunk() {
    const nowNs = this.#nowNs();
    if (this.chunks++ === 0) this.firstNs = nowNs;
    else this.longestGapNs = Math.max(this.longestGapNs ?? 0, nowNs - this.lastNs);
    this.lastNs = nowNs;
  }

  end() {
    this.endNs = this.#nowNs();
  }
}
