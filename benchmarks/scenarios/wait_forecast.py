"""How long a newcomer would wait, as admission says it, beside how long it waited. Over HTTP, the packaged model.

    python -m benchmarks.scenarios.wait_forecast [--bursts 12] [--small] [--json]

Bursts of requests come to a server with few slots and a short queue: some are served at once, most wait, the rest get a
429. One kind of burst has mixed prompts and answers (slots are short), another long prompts and short answers (prefill
is). The server's ledger is gone through in the order of time: at each admission its own `Admission` says the wait that
it predicts, by the model of steps and, on its own, by departures. An admission's prompt counts with its true length.

The error of a wait is |predicted - waited| in ms, and relative to the wait for waits over 50 ms. A refusal for want of
room says when the next one leaves the queue (`retry`): its error is against the next that left. `slo`: with the median
first token as everybody's `x-llm-d-slo-ttft-ms`, how many of those that the model would have refused would have missed
it, and how many of those that it lets in make it. `learn_us`, `ask_us`: what the model costs this process for a step
and for a question.
"""

import argparse
import asyncio
import heapq
import random
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.report import file_result
from benchmarks.scenarios.forecast import read
from benchmarks.server_process import served
from splittime.core.engine import EngineStats
from splittime.ledger.account import ClosedAccount
from splittime.ledger.derive import ttft_ns
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.admission import Admission, Place, QueueLimits
from splittime.simulate.recorded import Recorded, read_ledger
from splittime.simulate.wait import Begun, WaitModel

SETTINGS = {"num_threads": 1, "max_num_seqs": 6, "max_prefill_tokens": 64, "max_queued_requests": 24}
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "enable_chunked_prefill", "batching")
LONG_WAIT_S = 0.05
KINDS = {"slots": ((1, 6, 25), (8, 40, 120)), "prefill": ((25, 65), (1, 4))}  # lines of a prompt, tokens of an answer


class Asked(NamedTuple):
    """What was said of a request when it was admitted, and what came of it. None: nothing was said."""

    waited_s: float
    ttft_s: float
    by_model: tuple[float, float] | None
    by_departures_s: float | None


class Retry(NamedTuple):
    said_s: float
    truly_s: float


class Replay:
    """A server's admission once more, over what its ledger holds, in the order of time."""

    def __init__(self, recorded: Recorded) -> None:
        self.asked: list[Asked] = []
        self.ask_s = self.learn_s = 0.0
        self._now_ns, self._recorded = 0, recorded
        self._begun: dict[str, ClosedAccount] = {}
        self._places: dict[str, Place] = {}
        knobs = {name: recorded.facts.settings.get(name) for name in KNOBS}
        blocks = recorded.facts.settings.get("num_blocks") or 1 << 30
        self._stats = EngineStats(0, knobs=knobs, blocks_total=blocks)
        self.model = WaitModel(self._running, lambda: self._stats)
        self._admission = Admission(QueueLimits(1 << 40, 1 << 40))

    def run(self) -> None:
        for at_ns, _, what, record in heapq.merge(self._steps(), self._accounts()):
            self._now_ns = at_ns
            getattr(self, f"_{what}")(record)

    def _steps(self) -> Iterator[tuple[int, int, str, Any]]:
        yield from ((step.end_ns, step.step_id, "step", step) for step in self._recorded.steps)

    def _accounts(self) -> Iterator[tuple[int, int, str, Any]]:
        ends_ns = [step.end_ns for step in self._recorded.steps]
        events: list[tuple[int, int, str, Any]] = []
        for number, account in enumerate(self._recorded.accounts):
            prefill_ns = begin_ns(account, Stage.PREFILL)
            if prefill_ns is None:
                continue
            begun_ns = ends_ns[min(bisect_right(ends_ns, prefill_ns), len(ends_ns) - 1)]
            events.append((begin_ns(account, Stage.ADMIT) or account.start_ns, number, "enter", account))
            events.append((begun_ns, number, "begin", account))
            events.append((max(begun_ns, account.freed_ns or account.end_ns), number, "end", account))
        yield from sorted(events, key=lambda event: event[:2])

    def _running(self) -> Iterator[Begun]:
        for name, account in self._begun.items():
            num_out = bisect_right(account.token_ready_ns, self._now_ns)
            yield Begun(name, account.prompt_tokens, num_out, account.max_tokens)

    def _step(self, step: StepRecord) -> None:
        begin_s = time.perf_counter()
        self.model.take(step)
        self.learn_s += time.perf_counter() - begin_s
        self._stats = EngineStats(
            0, knobs=self._stats.knobs, blocks_total=self._stats.blocks_total, blocks_used=step.blocks_used
        )

    def _enter(self, account: ClosedAccount) -> None:
        tokens, admission, prefill_ns = account.prompt_tokens, self._admission, begin_ns(account, Stage.PREFILL)
        begin_s = time.perf_counter()
        by_model = self.model.wait_s(admission.queued_requests, admission.queued_prompt_tokens, tokens)
        self.ask_s += time.perf_counter() - begin_s
        by_departures = admission.expected_wait(tokens)
        waited_s = (prefill_ns - self._now_ns) / 1e9
        first_s = (ttft_ns(account) or 0) / 1e9
        self.asked.append(Asked(waited_s, first_s, by_model, by_departures and by_departures.wait_s))
        self._places[account.request_id] = admission.enter(self._now_ns, count=1, tokens=tokens, deadline_ns=None)

    def _begin(self, account: ClosedAccount) -> None:
        self._places.pop(account.request_id).leave(self._now_ns)
        self._begun[account.request_id] = account

    def _end(self, account: ClosedAccount) -> None:
        del self._begun[account.request_id]
        self.model.take(account)


def begin_ns(account: ClosedAccount, stage: Stage) -> int | None:
    return next((each.begin_ns for each in account.intervals if each.stage is stage), None)


def retries(recorded: Recorded) -> list[Retry]:
    """Of the refused for want of room: when the next one left the queue, beside what they were told."""
    left_ns = sorted(at for account in recorded.accounts if (at := begin_ns(account, Stage.PREFILL)) is not None)
    found = []
    for account in recorded.accounts:
        if account.error is not None and account.error.code == "queued_requests":
            place = bisect_right(left_ns, account.end_ns)
            if place < len(left_ns):
                found.append(Retry(account.error.retry_after_s or 0.0, (left_ns[place] - account.end_ns) / 1e9))
    return found


async def send(url: str, kind: str, bursts: int, size: int, seed: int) -> None:
    rng = random.Random(seed)
    lines, lengths = KINDS[kind]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(bursts):
            tasks = []
            for _ in range(rng.randrange(size // 2, size)):
                prompt = f"x = {rng.randrange(10**6)}\n" * rng.choice(lines)
                body = {"prompt": prompt, "max_tokens": rng.choice(lengths), "stream": True, "ignore_eos": True}
                tasks.append(asyncio.create_task(read(session, f"{url}/v1/completions", body)))
                await asyncio.sleep(rng.expovariate(100.0))
            await asyncio.gather(*tasks)


def record(kind: str, bursts: int, size: int, seed: int) -> Recorded:
    """Returns the ledger of a server that was asked so. The first bursts warm the estimates up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        with served(*flags, "--ledger-file", str(path)) as url:
            asyncio.run(send(url, kind, bursts, size, seed))
        return read_ledger(path)


def judged(recorded: Recorded) -> dict[str, Any]:
    replay = Replay(recorded)
    replay.run()
    both = [each for each in replay.asked if each.by_model is not None and each.by_departures_s is not None]
    waits = [each.waited_s for each in both]
    by_model = [each.by_model[0] for each in both if each.by_model]
    by_departures = [each.by_departures_s or 0.0 for each in both]
    again = retries(recorded)
    return {
        "requests": len(replay.asked),
        "both_told": len(both),
        "wait_ms_median": _ms(statistics.median(waits)) if waits else None,
        "model": _errors(by_model, waits),
        "departures": _errors(by_departures, waits),
        "ttft": _errors([each.by_model[1] for each in both if each.by_model], [each.ttft_s for each in both]),
        "retry": {"refused": len(again), **_errors([each.said_s for each in again], [each.truly_s for each in again])},
        "slo": _slo(both),
        "step_error_ratio": replay.model.cost.errors,
        "learn_us": 1e6 * replay.learn_s / max(1, len(recorded.steps)),
        "ask_us": 1e6 * replay.ask_s / max(1, len(replay.asked)),
    }


def _errors(predicted: list[float], truly: list[float]) -> dict[str, float | None]:
    if not truly:
        return {"error_ms": None, "error_ratio": None, "bias_ratio": None}
    pairs = list(zip(predicted, truly, strict=True))
    ratios = [said / took - 1 for said, took in pairs if took > LONG_WAIT_S]
    return {
        "error_ms": _ms(statistics.median(abs(said - took) for said, took in pairs)),
        "error_ratio": statistics.median(map(abs, ratios)) if ratios else None,
        "bias_ratio": statistics.median(ratios) if ratios else None,
    }


def _slo(both: list[Asked]) -> dict[str, float | None]:
    if not both:
        return {"slo_ms": None, "refused_rightly": None, "served_rightly": None}
    slo_s = statistics.median(each.ttft_s for each in both)
    refused = [each.ttft_s > slo_s for each in both if each.by_model and each.by_model[1] > slo_s]
    let_in = [each.ttft_s <= slo_s for each in both if each.by_model and each.by_model[1] <= slo_s]
    return {
        "slo_ms": _ms(slo_s),
        "refused_rightly": statistics.mean(refused) if refused else None,
        "served_rightly": statistics.mean(let_in) if let_in else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def show(figures: dict[str, Any]) -> None:
    for kind, found in figures.items():
        print(f"{kind}: {found['both_told']} of {found['requests']} requests, median wait {found['wait_ms_median']} ms")
        for name in ("model", "departures", "ttft", "retry"):
            print(f"  {name:<11}", "  ".join(f"{key} {_shown(value)}" for key, value in found[name].items()))
        print("  slo        ", "  ".join(f"{key} {_shown(value)}" for key, value in found["slo"].items()))
        print(f"  learn {found['learn_us']:.1f} us a step, ask {found['ask_us']:.1f} us, steps off by", end=" ")
        print("  ".join(f"{key} {_shown(value)}" for key, value in found["step_error_ratio"].items()))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--size", type=int, default=60, help="requests of a burst, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    bursts, size = (2, 16) if given.small else (given.bursts, given.size)
    figures = {kind: judged(record(kind, bursts, size, given.seed)) for kind in KINDS}
    path = file_result("wait_forecast", figures, {**SETTINGS, **vars(given)}, given.json)
    if not given.json:
        show(figures)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
