/**
 * Stages and causes: their order on the page, their names, their colours (CSS classes), and what they mean.
 * A key is `stage` or `stage:cause`. Meanings are the server's own sentences; it sends them with its first answer.
 */

const ORDER = [
  "receive", "tokenize_queue", "tokenize", "admit", "cache", "route", "upstream", "network", "handoff", "queue", "prefill", "prefill_stall", "preempted",
  "recompute", "decode", "decode_stall", "deliver", "client_wait", "unattributed", "cpu_wait", "engine_stopped", "garbage_collection",
];
const CAUSES = [
  "texts_before", "worker_start", "batch_slots", "kv_blocks", "token_budget", "policy", "grammar", "kv_export", "kv_transfer", "kv_import", "paused", "step_in_flight",
  "engine_loop", "measuring", "engine_died", "upstream_slots", "retry_pause", "same_request", "replay_pace", "not_told",
];
const BEFORE = new Set(["receive", "tokenize", "admit", "handoff"]);
const OURS = {
  before: "The server reads, tokenises and admits it, and hands it to the engine.",
  not_told: "why it waits is told once it leaves the queue",
};
const meanings = { stages: {}, causes: {}, before: "before the engine" };

export const WAITS = new Set(["tokenize_queue", "queue", "prefill_stall", "decode_stall", "preempted"]);

/** Keep what the server says of its words. */
export function learnWords(words) {
  Object.assign(meanings, words);
}

export function parts(key) {
  const [stage, cause = ""] = key.split(":");
  return { stage, cause };
}

/** Stages in the order of a request's life, causes in their own. */
export function rank(key) {
  const { stage, cause } = parts(key);
  if (stage === "before") return -1;
  return ORDER.indexOf(stage) * 100 + CAUSES.indexOf(cause) + 1;
}

/** The stages before the engine are short; where there is no room they are one. */
export function coarse(key) {
  return BEFORE.has(parts(key).stage) ? "before" : key;
}

const spoken = (word) => word.replaceAll("_", " ");

/** `queue · batch slots` */
export function label(key) {
  const { stage, cause } = parts(key);
  if (stage === "before") return meanings.before;
  if (cause === "not_told") return "waiting";
  return cause ? `${spoken(stage)} · ${spoken(cause)}` : spoken(stage);
}

/** The same where there is little room: who queues is told by the cause alone. */
export function shortLabel(key) {
  const { stage, cause } = parts(key);
  return stage === "queue" && cause && cause !== "not_told" ? spoken(cause) : label(key);
}

/** A sentence: the stage's meaning, and the cause's. */
export function meaning(key) {
  const { stage, cause } = parts(key);
  const first = meanings.stages[stage] ?? OURS[stage] ?? "";
  const second = cause ? (meanings.causes[cause] ?? OURS[cause] ?? "") : "";
  return second ? `${first} Here: ${second}.` : first;
}

const plain = (word) => (/^[a-z_]+$/.test(word) ? word : "unknown");

/** The classes that give a key its colour (`--ink`) and its pattern. */
export function classOf(key) {
  const { stage, cause } = parts(key);
  return `ink stage-${plain(stage)}${cause ? ` cause-${plain(cause)}` : ""}`;
}
