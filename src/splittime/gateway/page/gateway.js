/** The gateway's page: what is asked for once a second, and what is made of it. */

import { byId, say } from "./dom.js";
import { count, plural } from "./format.js";
import { GatewayTiles } from "./gateway_tiles.js";
import { showRefusals, showSlowest, showTenants, showUpstreams } from "./gateway_tables.js";
import { Poll } from "./poll.js";
import { onKey, onTrouble, state } from "./standing.js";
import { showTime } from "./where_time_goes.js";
import { learnWords } from "./words.js";

const tiles = new GatewayTiles(byId("tiles"));
const poll = new Poll(onAnswer, onTrouble);

function onAnswer({ now, recent, words }) {
  learnWords(words);
  tiles.update(now, recent);
  showTime(byId("time"), recent);
  showUpstreams(byId("upstream-rows"), now, recent);
  showTenants(byId("tenant-rows"), now, recent);
  showRefusals(byId("refusal-rows"), now);
  showSlowest(byId("slowest-rows"), recent);
  say(byId("time-note"), recent.is_cut ? `of the latest ${count(recent.requests)} requests` : `${plural(recent.requests, "request")} that ended in the last ${recent.seconds} s`);
  say(byId("model"), `${plural(now.upstreams.length, "upstream")}, ${plural(now.models, "model")}${now.config ? ` · config ${now.config}` : ""}`);
  document.title = `${now.open_requests} open · splittime gateway`;
  showState(now);
}

function showState(now) {
  if (now.is_draining) state("wait", "shutting down", "The gateway is shutting down: it finishes what is open and admits nobody.");
  else if (!now.is_ready) state("down", "no upstream", "No upstream may be asked now: requests get 503, or 429 where an upstream asked for a pause.");
  else if (now.degradation.length) state("wait", "degraded", `Answers are lesser ones while the queue is long: ${now.degradation.join(", ")}.`);
  else state("live", "live", "");
}

onKey(() => poll.wake());
poll.wake();
