/**
 * Asks for news once a second while the page is seen, not at all while it is not, and ever more rarely while the server
 * does not answer. Each answer goes to `onAnswer`; what went wrong goes to `onTrouble`, once for each attempt.
 */

import { KeyNeeded, askJson } from "./api.js";

const EVERY_MS = 1000;
const SLOWEST_MS = 8000;
const PATIENCE_MS = 10_000;

export class Poll {
  #cursor = "";
  #timer = 0;
  #delayMs = EVERY_MS;
  #isAsking = false;
  #isKeyNeeded = false;

  constructor(onAnswer, onTrouble) {
    this.onAnswer = onAnswer;
    this.onTrouble = onTrouble;
    document.addEventListener("visibilitychange", () => this.#plan(0));
  }

  /** Ask now, and go on from there; also after a key was given. */
  wake() {
    this.#isKeyNeeded = false;
    this.#plan(0);
  }

  #plan(delayMs) {
    clearTimeout(this.#timer);
    if (document.visibilityState !== "visible" || this.#isKeyNeeded || this.#isAsking) return;
    this.#timer = setTimeout(() => this.#turn(), delayMs);
  }

  async #turn() {
    this.#isAsking = true;
    const answer = await this.#ask();
    this.#isAsking = false;
    this.#plan(this.#delayMs);
    if (answer) this.onAnswer(answer);
  }

  async #ask() {
    try {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const answer = await askJson(`dashboard/data?after=${encodeURIComponent(this.#cursor)}`, { signal });
      this.#cursor = answer.cursor;
      this.#delayMs = EVERY_MS;
      return answer;
    } catch (error) {
      this.#isKeyNeeded = error instanceof KeyNeeded; // until there is one, asking again would be idle
      this.#delayMs = Math.min(SLOWEST_MS, this.#delayMs * 2);
      this.onTrouble(error, this.#delayMs);
      return null;
    }
  }
}
