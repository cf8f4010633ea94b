/** How it stands with the server: the dot and its word, the banner, and the dialog that asks for the API key. */

import { KeyNeeded, Refused, storeKey } from "./api.js";
import { byId, say, show } from "./dom.js";

/** kind: `live`, `wait` or `down`. word: beside the dot. sentence: in the banner; empty for none. */
export function state(kind, word, sentence) {
  byId("state").dataset.kind = kind;
  say(byId("state-word"), word);
  say(byId("banner"), sentence);
  show(byId("banner"), Boolean(sentence));
}

/** What went wrong with an asking; without `retryMs` whoever asked says it. */
export function onTrouble(error, retryMs) {
  if (error instanceof KeyNeeded) askForKey();
  else if (retryMs && error instanceof Refused) state("down", "trouble", `${error.message}. Asking again in ${retryMs / 1000} s.`);
  else if (retryMs) state("down", "no answer", `The server does not answer. Asking again in ${retryMs / 1000} s; what is shown is the last that was known.`);
}

function askForKey() {
  state("down", "key needed", "");
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
}

/** What is done when a key has been given. */
export function onKey(then) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey(byId("key-input").value.trim());
    byId("key-input").value = "";
    byId("key-dialog").close();
    then();
  });
}
