"""How many refusals a second one gateway process makes, and how late they are: a part of `benchmarks.gateway.overload`.

Nothing but refusals, beside nobody but who asks: the upstream is held (`max_in_flight = 0`), one request fills the
queue, and an open loop asks for more, at each of `RATES` for some seconds, of a new process each. The load's process is
the second of two. A rate is kept where what was asked for was asked and refused, and its p99 is within the goal.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gateway.overhead import cpu_s
from benchmarks.gateway.watched_gateway import Watched, watched
from benchmarks.overload_client import request_bytes

RATES = (250, 500, 1000, 1500, 2000, 3000)
WARM_UP_S = 1.0
KEPT_UP = 0.95  # of what was asked for
HOPELESS = 10.0  # times the goal: higher rates are not tried
KIND: dict[str, Any] = {"name": "any", "body": {"model": "held", "prompt": "one two"}, "least": 8, "most": 8}
CONFIG = """
port = 0
grace_s = 0.1
[queue]
max_requests = 1
max_wait_s = 600.0
shed_from = 1.0
[[upstream]]
name = "held"
url = "http://127.0.0.1:9"
models = ["held"]
max_in_flight = 0
"""
Load = Callable[..., dict[str, Any]]  # of `overload.load`


@contextmanager
def full_gateway() -> Iterator[Watched]:
    with watched(CONFIG) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(request_bytes(KIND, 8))
            yield gateway


def refusal_rates(load: Load, seconds: float, goal_ms: float, rates: tuple[int, ...] = RATES) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for rate in rates:
        rows.append(_at(load, rate, seconds))
        if rows[-1]["refusal_ms"].get("p99", 0) > HOPELESS * goal_ms:
            break
    kept = [row["refusals_per_s"] for row in rows if row["is_kept_up"] and row["refusal_ms"]["p99"] <= goal_ms]
    return {"rows": rows, "most_per_s_within_goal": max(kept, default=0.0)}


def _at(load: Load, rate: int, seconds: float) -> dict[str, Any]:
    with full_gateway() as gateway:
        before_s = cpu_s(gateway.pid)
        timed = ("--seconds", seconds + WARM_UP_S, "--warm-up", WARM_UP_S)
        told = load(gateway.url, [KIND], "--per-s", rate, *timed)
        used_s = cpu_s(gateway.pid) - before_s
    refused = sum(count for status, count in told["statuses"].items() if status.startswith("429"))
    return {
        "asked_per_s": rate,
        "sent_per_s": told["sent_per_s"],
        "refusals_per_s": told["refusals_per_s"],
        "is_kept_up": told["refusals_per_s"] >= KEPT_UP * rate,
        "statuses": told["statuses"],
        "refusal_ms": told["refusal_ms"],
        "sent_late_ms": told["sent_late_ms"],
        "cpu_us_each": 1e6 * used_s / max(1, refused),
        "loop": gateway.loop,
    }


def show_row(row: dict[str, Any]) -> str:
    refusal = row["refusal_ms"]
    told = f"{row['refusals_per_s']:.0f}/s of {row['asked_per_s']} asked for, in {refusal.get('p50', 0):.2f} ms p50"
    return f"  {told}, {refusal.get('p99', 0):.2f} p99, {row['cpu_us_each']:.0f} us of processor each; {show_loop(row)}"


def show_loop(figures: dict[str, Any]) -> str:
    """Returns how late the loop was, and whose fault, in words."""
    late, by = figures["loop"]["late_ms"], figures["loop"]["late_ms_by"]
    total, pause = sum(by.values()) or 1.0, figures["loop"]["collector"]["longest_ms"]
    whose = f"{by['ran'] / total:.0%} its own turns, {by['no_processor'] / total:.0%} without a processor"
    longest = f"longest turn {figures['loop']['longest_ran_ms']:.1f} ms, longest collection {pause:.1f} ms"
    return f"its loop was late by {late.get('p99', 0):.2f} ms p99, {late.get('max', 0):.1f} max ({whose}; {longest})"
