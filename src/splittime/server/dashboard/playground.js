/**
 * Ask for an answer, see it come, and see its account beside it: the server's book, and this browser's own clock, each
 * by its own measure. The two clocks are never subtracted; their durations are. A chat is kept here and sent whole with
 * each message; a completion stands alone.
 */

import { ask, askRequest, storedKey } from "./api.js";
import { accountParts, soFarParts } from "./detail.js";
import { byId, el, say, show } from "./dom.js";
import { DASH, count, duration } from "./format.js";
import { events } from "./sse.js";

const WRITES_CODE = "splittime-code"; // the packaged model: it goes on with code, and has no answers
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

export class Playground {
  #abort = null;
  #watch = null;
  #messages = []; // of the chat so far
  #answer = null; // the element that it comes into

  /** onOther: open another request's waterfall. onTrouble: what `ask` raised. onEnd: an account is about to close. */
  constructor(onOther, onTrouble, onEnd) {
    Object.assign(this, { onOther, onTrouble, onEnd });
    this.form = byId("play");
    this.prompt = byId("play-prompt");
    this.output = byId("play-output");
    this.account = byId("play-account");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("play-stop").addEventListener("click", () => this.#abort?.abort());
    byId("play-new").addEventListener("click", () => this.#forget());
    byId("curl-copy").addEventListener("click", () => this.#copy());
    this.form.kind.addEventListener("change", () => this.#forget());
    this.form.addEventListener("input", () => this.#showCurl());
    this.form.addEventListener("keydown", (event) => this.#onKey(event));
    this.#forget();
  }

  /** plays: what the model can be asked for: `chat`, `completion`, or null for nothing. */
  begin(plays, model) {
    show(byId("playground"), plays !== null);
    const isCode = model.startsWith(WRITES_CODE);
    this.form.kind.value = isCode ? "completion" : (plays ?? "chat");
    if (isCode) this.prompt.value = "def read_json(path):";
    this.#forget();
  }

  get #isChat() {
    return this.form.kind.value === "chat";
  }

  /** In a chat Enter sends, and Shift with it begins a line; elsewhere Ctrl and Enter send. */
  #onKey(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const sends = this.#isChat && event.target === this.prompt ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (!sends) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  #forget() {
    if (this.#abort) return;
    this.#messages = [];
    this.output.replaceChildren(el("p", { class: "empty" }, this.#isChat ? "Say something to the model: Enter sends. Where the time of its answer went, with causes, stands beside it then." : "The model goes on with your text: Ctrl and Enter send."));
    this.output.classList.toggle("code", !this.#isChat);
    say(byId("play-label"), this.#isChat ? "Message" : "Text");
    show(byId("play-new"), this.#isChat);
    byId("play-new").disabled = true;
    this.#showCurl();
  }

  async #run() {
    if (this.#abort) return;
    this.#abort = new AbortController();
    const body = this.#body();
    this.#busy(true);
    const watch = (this.#watch = new Watch());
    try {
      await this.#stream(watch, body);
    } catch (error) {
      watch.hasFailed = error.name !== "AbortError";
      if (watch.hasFailed) this.#fail(error);
    }
    watch.end();
    this.#abort = null;
    this.#busy(false);
    this.#keep(watch, body);
    this.#showSeen(watch);
    this.onEnd();
  }

  /** What was said is part of the chat; of a failure the message is given back, to be sent again. */
  #keep(watch, { messages }) {
    if (!messages) return;
    if (watch.hasFailed) this.prompt.value ||= messages.at(-1).content;
    else this.#messages = [...messages, { role: "assistant", content: this.#answer.textContent }];
    byId("play-new").disabled = false;
    this.#showCurl();
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
    this.form.kind.disabled = isBusy;
    this.output.setAttribute("aria-busy", isBusy);
    if (!isBusy) return;
    byId("play-new").disabled = true;
    this.account.setAttribute("aria-busy", true); // read out once, when it is there
    this.account.replaceChildren(el("p", { class: "empty" }, "Waiting for its account …"));
    this.#answer = el("p", { class: "told" });
    if (!this.#isChat || !this.#messages.length) this.output.replaceChildren();
    if (this.#isChat) this.output.append(el("p", { class: "asked" }, this.prompt.value));
    if (this.#isChat) this.prompt.value = "";
    this.output.append(this.#answer);
    this.output.scrollTop = this.output.scrollHeight;
  }

  #body() {
    const fields = new FormData(this.form);
    const prompt = fields.get("prompt");
    const input = this.#isChat ? { messages: [...this.#messages, { role: "user", content: prompt }] } : { prompt };
    return { ...input, max_tokens: Number(fields.get("max_tokens")), ...(fields.get("temperature") && { temperature: Number(fields.get("temperature")) }) };
  }

  async #stream(watch, body) {
    const headers = { "content-type": "application/json", "x-request-id": watch.id };
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const options = { method: "POST", headers, body: JSON.stringify(whole), signal: this.#abort.signal };
    for await (const data of events(await ask(PATHS[this.form.kind.value], options))) {
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
    this.#answer.append(text);
    this.output.scrollTop = this.output.scrollHeight;
    this.#showSeen(watch);
  }

  #showSeen(watch) {
    const words = `Seen here: first text after ${duration(watch.firstNs)}, ${count(watch.chunks)} chunks, longest gap ${duration(watch.longestGapNs)}`;
    say(byId("play-seen"), words + (watch.endNs ? `, all after ${duration(watch.endNs)}.` : " …"));
  }

  /** What the form would send, to paste into a shell; while nothing is written, what it sent. */
  #showCurl() {
    if (!this.prompt.value && this.#messages.length) return;
    const key = storedKey() ? " \\\n    -H 'Authorization: Bearer YOUR_KEY'" : "";
    const body = JSON.stringify(this.#body()).replaceAll("'", "'\\''");
    const url = new URL(PATHS[this.form.kind.value], document.baseURI);
    say(byId("curl"), `curl ${url} \\\n    -H 'Content-Type: application/json'${key} \\\n    -d '${body}'`);
  }

  /** A page that came over plain HTTP from another host may not write to the clipboard: its text is selected then. */
  async #copy() {
    document.getSelection().selectAllChildren(byId("curl"));
    await navigator.clipboard?.writeText(byId("curl").textContent).then(() => say(byId("curl-copy"), "Copied"), () => {});
    setTimeout(() => say(byId("curl-copy"), "Copy"), 2000);
  }

  #fail(error) {
    this.#answer.append(el("span", { class: "trouble" }, error.message));
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
