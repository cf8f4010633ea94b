"""Does the paper hold? Two real servers behind the gateway, beside two on paper whose model was fitted on them.

    python -m benchmarks.cluster.two_replicas [--seconds 30] [--rate 30] [--draws 20] [--json]
    python -m benchmarks.cluster.two_replicas --small        a trial: the figures mean nothing

Two of our own servers serve the packaged model, one thread each, and a gateway stands in front of both. First a load
that rises is sent through it, and a model is fitted on the ledger of one of them (`simulate.fit`): steps as they are
with a neighbour on the machine. Then servers and gateway start anew and another load is sent, at a rate of its own;
and the same requests go to two servers on paper (`cluster.simulated`), once for each draw of a model that fits as well,
on a machine that is a little slower or faster (`simulate.draws`), as `splittime simulate` does it.

* measured: by the client's clock, from a request's intended start; low, middle, high: on paper, over the draws
* within: whether the measured figure lies within; an interval is where one more draw would lie nine times of ten

On paper the gateway takes no time, and the way to a server and back `RTT_MS`. It takes at most `LIMIT_S`, then it
fails; and ends with 1 where a request had no whole answer.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster.running import ends_within, say
from benchmarks.gateway.overhead import started
from benchmarks.report import file_result
from benchmarks.server_process import served
from splittime.bench.book.records import Ending, Run
from splittime.bench.book.requests import response_ns, response_ttft_ns, tpot_ns
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Schedule
from splittime.cluster.gateway_files import max_in_flight
from splittime.cluster.simulated import figures
from splittime.cluster.simulated.fleet import FleetRun
from splittime.cluster.simulated.load import FleetLoad, FleetRequest
from splittime.cluster.simulated.settings import FleetSettings
from splittime.ledger.derive import percentiles
from splittime.plan.sources import replica_in
from splittime.simulate.draws import hours, interval
from splittime.simulate.replica import Replica
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import RunOptions, Target

LIMIT_S = 600.0
MAX_NUM_SEQS = 16
SETTINGS = ("--num-threads", "1", "--max-num-seqs", str(MAX_NUM_SEQS), "--served-model-name", "code")
LOAD = {"input_tokens": "lognormal:100:0.7", "output_tokens": "lognormal:50:0.6"}
OPTIONS = RunOptions(workers=1, timeout_s=120.0)
FULL_RATE = 120.0  # requests a second: twice what two such servers answer
RTT_MS = 0.5
TOLD = (50, 90)
FLEET = FleetSettings(replicas=2, scaling="none", affinity=False, local_rtt_ms=RTT_MS)


@contextmanager
def two_servers(folder: Path) -> Iterator[tuple[str, ServerLimits, list[Path]]]:
    """Gives the URL of a gateway with two servers, what these take, and their ledgers."""
    with ExitStack() as stack:
        ledgers = [folder / f"{number}.sqlite" for number in range(2)]
        urls = [stack.enter_context(served("--ledger-file", str(ledger), *SETTINGS)) for ledger in ledgers]
        upstreams = [
            f'[[upstream]]\nname = "r{number}"\nurl = "{url}"\nmodels = ["code"]\nkind = "splittime"\n'
            f"max_in_flight = {max_in_flight(MAX_NUM_SEQS)}\n"
            for number, url in enumerate(urls)
        ]
        config = folder / "gateway.toml"
        config.write_text("port = 0\n" + "".join(upstreams))
        url, _ = stack.enter_context(started("gateway", "gateway", "--config", str(config)))
        yield url, run_loop(server_limits(Target(url=urls[0]))), ledgers


def sent(url: str, limits: ServerLimits, load: dict[str, Any]) -> tuple[Schedule, Run]:
    schedule = draw_for({**LOAD, "prompt_form": "ids", **load}, limits)
    return schedule, run_loop(run_schedule(schedule, [Target(url=url, model="code")], OPTIONS))


def learnt(folder: Path, seconds: float, rate: float) -> Replica:
    """Returns one of two servers, from its ledger of a load that rises until its steps are as full as they may be."""
    say(f"{seconds:.0f} s of a load that rises, to fit a model on")
    with two_servers(folder) as (url, limits, ledgers):
        sent(url, limits, {"rate": rate / 4, "rate_end": FULL_RATE, "duration_s": seconds, "seed": 3})
    found = replica_in(str(ledgers[0]), {})
    assert isinstance(found, Replica), "it is one of ours"
    return found


def measured_figures(run: Run) -> dict[str, float]:
    answered = [outcome for outcome in run.outcomes if outcome.ending is Ending.COMPLETE]
    times: dict[str, list[Any]] = {
        "ttft": [response_ttft_ns(one) for one in answered],
        "tpot": [tpot_ns(one) for one in answered],
        "e2e": [response_ns(one) for one in answered],
    }
    return _percentiles_ms({name: [value for value in some if value is not None] for name, some in times.items()})


def figures_on_paper(like: Replica, schedule: Schedule, seed: int) -> dict[str, float]:
    requests = [
        FleetRequest(planned.at_ns or 0, len(planned.prompt), planned.output_tokens, (), 0)
        for planned in schedule.requests
    ]
    run = FleetRun(like, FLEET, FleetLoad(requests, 0), seed)
    run.run()
    answered = [request for request in requests if request.ending == "answered"]
    times = {
        "ttft": [figures.ttft_ns(one) for one in answered],
        "tpot": [figures.tpot_ns(one) for one in answered if one.output > 1],
        "e2e": [one.end_ns - one.at_ns for one in answered],
    }
    return _percentiles_ms(times)


def _percentiles_ms(times_ns: dict[str, list[Any]]) -> dict[str, float]:
    return {
        f"{name}_ms_{percent}": round(ns / 1e6, 3)
        for name, some in times_ns.items()
        for percent, ns in percentiles(some, TOLD).items()
    }


def beside(measured: dict[str, float], draws: Sequence[dict[str, float]]) -> dict[str, Any]:
    told = {}
    for name, value in measured.items():
        drawn = [draw[name] for draw in draws]
        low, high = interval(drawn)
        told[name] = {
            "measured": value,
            "low": low,
            "middle": round(statistics.median(drawn), 3),
            "high": high,
            "within": low <= value <= high,
        }
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of either load")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second, for both servers")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.seconds, arguments.rate, arguments.draws = 8.0, 8.0, 3
    with ends_within(LIMIT_S):
        like, schedule, run = learnt_and_sent(arguments)
        draws = drawn(like, schedule, arguments.draws)
    told = beside(measured_figures(run), draws)
    for name, one in told.items():
        print(name, one)
    print(f"{sum(one['within'] for one in told.values())} of {len(told)} within")
    lost = sum(outcome.ending is not Ending.COMPLETE for outcome in run.outcomes)
    found = {"source": like.source, "requests": len(schedule.requests), "lost": lost, "figures": told}
    print(f"written to {file_result('two_replicas', found, vars(arguments), arguments.json)}")
    return int(lost > 0)


def learnt_and_sent(arguments: argparse.Namespace) -> tuple[Replica, Schedule, Run]:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        like = learnt(Path(first), arguments.seconds, arguments.rate)
        with two_servers(Path(second)) as (url, limits, _):
            say(f"{arguments.seconds:.0f} s of the load that is compared")
            return like, *sent(url, limits, {"rate": arguments.rate, "duration_s": arguments.seconds, "seed": 7})


def drawn(like: Replica, schedule: Schedule, number: int) -> list[dict[str, float]]:
    rng, draws = random.Random(0), []
    for seed, factor in enumerate(hours(number, like.costs.errors.drift, rng)):
        say(f"on paper, {seed + 1} of {number}")
        draws.append(figures_on_paper(like.drawn(factor, rng), schedule, seed))
    return draws


if __name__ == "__main__":
    sys.exit(main())
