"""Does a plan hold? A server's highest rate within an SLO as `splittime plan` says it, and then as it is.

    python -m benchmarks.scenarios.plan_check [--seconds 20] [--rounds 3] [--draws 8] [--small] [--json]
    python -m benchmarks.scenarios.plan_check --url http://127.0.0.1:8080 --vocab-size 32000 --slo ttft_p99=2s

Without --url it is our own server, with one thread. The server is watched under a rising rate that it cannot keep up
with in the end, and under a fixed number of requests: ours is learnt from its ledger, another from what `bench` saw.
The plan says a rate with its interval. Then the same load is sent, by turns, at the interval's lower end (by which a
plan counts servers), at the rate itself and at 1.25 times it. The plan holds if most runs keep the SLO
at the lower end and most break it at 1.25 times the rate.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import file_result
from benchmarks.server_process import served
from splittime.bench.book.records import Run
from splittime.bench.book.slo import check_slo, parse_slo
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.core.errors import ConfigError
from splittime.plan.capacity import Capacity, capacity
from splittime.plan.sources import replica_in, replica_of_runs
from splittime.simulate.replica import Replica
from splittime.wire.scrape import server_limits
from splittime.wire.target import RunOptions, Target

SETTINGS = ("--num-threads", "1", "--max-num-seqs", "16")
LOAD = {"input_tokens": "lognormal:100:0.7", "output_tokens": "lognormal:50:0.6", "seed": 11}
OPTIONS = RunOptions(workers=1, timeout_s=120.0)
WARM_UP = 0.1

Send = Callable[[dict[str, Any]], Run]


def sender(url: str, seconds: float, vocab_size: int | None) -> Send:
    """Returns what sends a load for so long."""

    async def run(load: dict[str, Any]) -> Run:
        target = Target(url=url)
        limits = (await server_limits(target)).corrected(vocab_size, None)
        load = {**LOAD, "duration_s": seconds, "warm_up_s": WARM_UP * seconds, **load}
        return await run_schedule(draw_for(load, limits), [target], OPTIONS)

    return lambda load: run_loop(run(load))


def learn(send: Send, seconds: float, top: float) -> list[Run]:
    rising = {"rate": top / 15, "rate_end": top, "warm_up_s": 0.0}
    closed = {"concurrency": 24, "duration_s": seconds / 2, "warm_up_s": 0.0}
    return [send(rising), send(closed)]


def checked(
    send: Send, learn_replica: Callable[[], Replica], slo: dict[str, float], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the plan and what was measured beside it, or the words that refuse to plan."""
    try:
        replica = learn_replica()
    except ConfigError as error:
        return {"refused": str(error)}
    found = capacity(replica, {**LOAD, "duration_s": arguments.seconds * (1 + WARM_UP)}, slo, arguments.draws)
    rates = {"low": found.rate.low, "rate": found.rate.middle, "1.25 x rate": 1.25 * found.rate.middle}
    told: dict[str, Any] = {name: {"rate": rate, "kept": 0, "runs": []} for name, rate in rates.items()}
    for number in range(arguments.rounds):
        for name, rate in rates.items():
            results = check_slo(send({"rate": rate, "seed": LOAD["seed"] + number}), slo)
            told[name]["kept"] += all(result.ok for result in results)
            told[name]["runs"].append({result.name: result.value for result in results})
    return {"source": replica.source, "plan": plan_of(found), "measured": told, "rounds": arguments.rounds}


def plan_of(found: Capacity) -> dict[str, Any]:
    kept = {term.name: term.value for term in found.kept.terms}
    return {"rate": found.rate._asdict(), "knee": found.knee, "at the rate": kept, "stopped": found.likeliest.stopped}


def own_server(arguments: argparse.Namespace, slo: dict[str, float]) -> dict[str, Any]:
    """From the ledger, and from outside as if it were another's."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "learnt.sqlite"
        with served("--ledger-file", str(ledger), *SETTINGS) as url:
            runs = learn(sender(url, arguments.seconds, None), arguments.seconds, arguments.top)
        from_ledger, from_outside = partial(replica_in, str(ledger), {}), partial(replica_of_runs, runs)
        learnt = {"from its ledger": from_ledger, "from outside": from_outside}
        with served(*SETTINGS) as url:
            send = sender(url, arguments.seconds, None)
            return {name: checked(send, learn_replica, slo, arguments) for name, learn_replica in learnt.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="another server, that runs already")
    parser.add_argument("--vocab-size", type=int, help="of its model, if it does not say")
    parser.add_argument("--slo", default="ttft_p99=500ms,tpot_p90=20ms")
    parser.add_argument("--top", type=float, default=60.0, help="requests a second that it cannot keep up with")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=8, help="other models that are searched, for the interval")
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.seconds, arguments.rounds, arguments.draws, arguments.slo = 3.0, 1, 1, "ttft_p99=500ms"
    slo = parse_slo(arguments.slo)
    if arguments.url:
        send = sender(arguments.url, arguments.seconds, arguments.vocab_size)
        learnt = partial(replica_of_runs, learn(send, arguments.seconds, arguments.top))
        told = {"from outside": checked(send, learnt, slo, arguments)}
    else:
        told = own_server(arguments, slo)
    name = "plan_check_foreign" if arguments.url else "plan_check"
    path = file_result(name, told, vars(arguments), arguments.json)
    if not arguments.json:
        for way, one in told.items():
            print_way(way, one)
        print(f"written to {path}")


def print_way(way: str, one: dict[str, Any]) -> None:
    if "refused" in one:
        print(f"{way}: {one['refused']}")
        return
    low, middle, high = one["plan"]["rate"].values()
    print(f"{way}: {middle:.3g} requests/s ({low:.3g} to {high:.3g})", one["plan"]["stopped"] or "")
    for at, measured in one["measured"].items():
        print(f"  at {at}, {measured['rate']:.3g}/s: {measured['kept']} of {one['rounds']} runs keep the SLO")


if __name__ == "__main__":
    main()
