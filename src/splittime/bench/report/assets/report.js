// What the drawn page cannot do by itself: look closer in time, and say which request a dot is. It draws nothing new.
"use strict";

const NEAR_PX = 14, LEAST_SPAN = 0.002, WIDTH = 100000, LAST = 0.97;
const LABEL = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });

for (const article of document.querySelectorAll(".arm")) {
  const requests = JSON.parse(article.querySelector(".requests").textContent);
  const stack = article.querySelector(".stack");
  const view = zoomable(stack);
  for (const place of article.querySelectorAll("[data-fields]")) {
    readable(place, requests, stack.contains(place) ? view : { from: 0, span: 1 });
  }
}

/** All panels of a stack show the same part, from and span as shares of the whole. */
function zoomable(stack) {
  const until = Number(stack.dataset.until);
  const view = { from: 0, span: 1 };
  const axis = [...stack.querySelectorAll(".x")].at(-1);
  const show = (from, span) => {
    view.span = Math.min(1, Math.max(LEAST_SPAN, span));
    view.from = Math.min(1 - view.span, Math.max(0, from));
    for (const svg of stack.querySelectorAll("svg")) {
      svg.setAttribute("viewBox", `${view.from * WIDTH} 0 ${view.span * WIDTH} 1000`);
    }
    for (const note of stack.querySelectorAll(".note[data-x]")) {
      const left = (note.dataset.x - view.from) / view.span;
      note.hidden = left < 0 || left > 1;
      note.style.left = `${100 * left}%`;
    }
    axis.replaceChildren(...ticks(view.from * until, (view.from + view.span) * until).map(([left, text]) => {
      const tick = document.createElement("span");
      tick.className = left > LAST ? "last" : "";
      tick.style.left = `${100 * left}%`;
      tick.textContent = text;
      return tick;
    }));
  };
  stack.addEventListener("dblclick", () => show(0, 1));
  stack.addEventListener("keydown", (event) => {
    const { from, span } = view, middle = from + span / 2;
    const moves = {
      "+": [middle - span / 4, span / 2], "=": [middle - span / 4, span / 2], "-": [middle - span, span * 2],
      ArrowLeft: [from - span / 5, span], ArrowRight: [from + span / 5, span], Escape: [0, 1],
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(...moves[event.key]);
  });
  for (const room of stack.querySelectorAll(".room")) draggable(room, view, show);
  return view;
}

function draggable(room, view, show) {
  const share = (event) => {
    const box = room.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  room.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    event.preventDefault();
    room.closest(".stack").focus({ preventScroll: true });
    const begin = share(event), chosen = document.createElement("div");
    chosen.className = "chosen";
    room.setPointerCapture(event.pointerId);
    room.append(chosen);
    const move = (now) => {
      const [low, high] = [begin, share(now)].sort((a, b) => a - b);
      chosen.style.left = `${100 * low}%`;
      chosen.style.width = `${100 * (high - low)}%`;
      return [low, high];
    };
    const end = (now) => {
      const [low, high] = move(now);
      chosen.remove();
      room.removeEventListener("pointermove", move);
      if (now.type === "pointerup" && high - low > 0.01) show(view.from + low * view.span, (high - low) * view.span);
    };
    room.addEventListener("pointermove", move);
    room.addEventListener("pointerup", end, { once: true });
    room.addEventListener("pointercancel", () => chosen.remove(), { once: true });
  });
}

/** Round numbers between two, as [share, text]. */
function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) {
    found.push([(n * step - low) / (high - low), `${LABEL.format(n * step)} s`]);
  }
  return found;
}

/** Says which request the pointer is at. */
function readable(place, requests, view) {
  const [xField, ...yFields] = place.dataset.fields.split(" ");
  const [xLow, xHigh, xLog, yLow, yHigh, yLog] = place.dataset.scales.split(" ").map(Number);
  const at = (value, low, high, isLog) => value === null ? NaN : isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const answer = place.parentElement.querySelector(".answer");
  const room = place.querySelector(".room");
  const nearest = (px, py, box) => {
    let best = -1, least = NEAR_PX ** 2;
    for (let i = 0; i < requests.t.length; i++) {
      if (requests.ending[i] !== "complete") continue;
      const x = (at(requests[xField][i], xLow, xHigh, xLog) - view.from) / view.span * box.width - px;
      if (x > NEAR_PX || x < -NEAR_PX) continue;
      for (const field of yFields) {
        const y = (1 - at(requests[field][i], yLow, yHigh, yLog)) * box.height - py;
        if (x * x + y * y < least) [best, least] = [i, x * x + y * y];
      }
    }
    return best;
  };
  room.addEventListener("pointerleave", () => { answer.hidden = true; });
  room.addEventListener("pointermove", (event) => {
    const box = room.getBoundingClientRect(), outer = place.parentElement.getBoundingClientRect();
    const found = event.buttons ? -1 : nearest(event.clientX - box.left, event.clientY - box.top, box);
    answer.hidden = found < 0;
    if (found < 0) return;
    answer.textContent = said(requests, found);
    const left = event.clientX - outer.left;
    answer.style.left = left > outer.width / 2 ? "" : `${left + 16}px`;
    answer.style.right = left > outer.width / 2 ? `${outer.width - left + 16}px` : "";
    answer.style.top = `${event.clientY - outer.top + 12}px`;
  });
}

function said(requests, i) {
  const ms = (ns) => ns === null ? "–" : `${LABEL.format(ns / 1e6)} ms`;
  return [
    `#${requests.index[i]} at ${LABEL.format(requests.t[i])} s${requests.phase[i] === "measured" ? "" : ", not measured"}`,
    `${requests.prompt[i] ?? "?"} → ${requests.output[i] ?? "?"} tokens`,
    `TTFT ${ms(requests.ttft[i])}, E2E ${ms(requests.e2e[i])}`,
    `from the send ${ms(requests.sttft[i])}, ${ms(requests.se2e[i])}`,
    requests.id[i],
  ].join("\n");
}
