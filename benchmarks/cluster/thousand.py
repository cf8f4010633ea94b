"""A thousand servers on paper: what the gateway's routing and the controller give, beside what they are compared with.

    python -m benchmarks.cluster.thousand [--traces FOLDER] [--only NAME] [--json]
    python -m benchmarks.cluster.thousand --small        a trial: ten servers, a drawn trace; no figures to be quoted

Real traces, compressed in time and repeated for as many users (`cluster.simulated.load`), on servers of a data sheet: a
model of 32 billion weights in int8 on an L40S. Nothing of the servers is measured; each is a `simulate.coarse` replica,
which tells what the full simulation tells while nobody is preempted (`coarse`: one server's figures over the full
one's, of the same requests). Routing, queue, breakers, retries and affinity are the gateway's own code, the scaling is
the controller's. The figures are those of the simulation and the same on any machine; `cpu_s` is not, and the machine
may have been busy (`load_1min`).

* routing: DeepSeek-R1's trace in three regions 60 ms apart, twelve failures an hour of each server (nodes that fall
  silent among them): the gateway's choice, and one after the other
* prefixes: Mooncake's conversations: with affinity, without it, one after the other
* scaling: Azure's conversations, which double, and come three times as often for a minute: the controller with
  sleeping servers, without them, and autoscaling on waiting alone
"""

import argparse
import csv
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.report import file_result
from splittime.bench.spec import spec_of
from splittime.bench.traces import Trace, read_trace
from splittime.cluster.scaling import ScaleSettings
from splittime.cluster.simulated.figures import figures_of
from splittime.cluster.simulated.fleet import FleetRun
from splittime.cluster.simulated.load import FleetLoadSpec, load_of_trace
from splittime.cluster.simulated.settings import FailureSettings, FleetSettings
from splittime.core.facts import TokenCost
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.coarse import CoarseReplica, CoarseRequest
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.data_sheet import replica_of_data_sheet
from splittime.simulate.replica import Replica

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
COST = TokenCost(  # of 32 billion weights in int8; 64 layers, 8 KV heads of 128
    weight_bytes=32_000_000_000,
    kv_bytes_per_token=262_144,
    operations_per_token=64_000_000_000,
    operations_per_sample=1_600_000_000,
    operations_per_context_token=1_310_720,
)
REGIONS = ("europe", "america", "asia")
TOLD = ("good", "endings", "lost", "retried", "resumed", "cached", "replica_hours", "asleep_hours", "most_ready")


class FleetScenario(NamedTuple):
    """arms: by name, what differs of `settings`."""

    trace: str
    load: FleetLoadSpec
    settings: FleetSettings
    arms: dict[str, dict[str, Any]]


def scenarios(size: float) -> dict[str, FleetScenario]:
    """Returns what is compared. size: of the fleets, 1 for a thousand servers."""

    def many(count: int) -> int:
        return max(1, round(count * size))

    failing = FailureSettings(per_replica_hour=12.0)
    growing = ScaleSettings(min_replicas=3, max_replicas=many(1000), spare=many(10), down_delay_s=60.0)
    asleep = msgspec.structs.replace(growing, warm_pool=many(300))
    fixed = FleetSettings(replicas=max(3, many(1000)), scaling="none", ttft_s=5.0, tpot_s=0.15)
    return {
        "routing": FleetScenario(
            "servegen_deepseek_r1.csv.gz",
            FleetLoadSpec(speed_up=18.0, copies=many(4)),
            msgspec.structs.replace(fixed, regions=REGIONS, failures=failing),
            {"gateway": {}, "round robin": {"routing": "round_robin"}},
        ),
        "prefixes": FleetScenario(
            "mooncake_conversation.csv.gz",
            FleetLoadSpec(speed_up=8.0, copies=many(2)),
            msgspec.structs.replace(fixed, ttft_s=10.0),
            {"affinity": {}, "no affinity": {"affinity": False}, "round robin": {"routing": "round_robin"}},
        ),
        "scaling": FleetScenario(
            "azure_2023_conv.csv.gz",
            FleetLoadSpec(speed_up=8.0, copies=many(4), surge_at_s=150.0, surge_s=60.0),
            msgspec.structs.replace(fixed, replicas=max(3, many(300)), scaling="tokens", scale=growing, affinity=False),
            {"controller, 300 asleep": {"scale": asleep}, "controller": {}, "waiting alone": {"scaling": "waiting"}},
        ),
    }


def server() -> Replica:
    config = SchedulerConfig(max_model_len=32_768, max_num_batched_tokens=2048, max_num_seqs=64, max_prefill_tokens=512)
    return replica_of_data_sheet("L40S", COST, config, precision="int8")


def run_arm(like: Replica, scenario: FleetScenario, trace: Trace, arm: dict[str, Any]) -> dict[str, Any]:
    settings = msgspec.structs.replace(scenario.settings, **arm)
    load = load_of_trace(trace, scenario.load, len(settings.regions), like.config.max_model_len)
    begin_s = time.process_time()
    run = FleetRun(like, settings, load)
    run.run()
    cpu_s = time.process_time() - begin_s
    return {"cpu_s": round(cpu_s, 1), **msgspec.to_builtins(figures_of(run, scenario.load))}


def coarse_beside_full(like: Replica, trace: Trace, count: int, rate: float) -> dict[str, float]:
    """Returns the coarse figures of one server over the full one's, of the same requests."""
    rng, at_s, asked = random.Random(0), 0.0, []
    lengths = zip(trace.rows.inputs.tolist(), trace.rows.outputs.tolist(), strict=True)
    for prompt, output in [pair for pair in lengths if sum(pair) <= like.config.max_model_len][:count]:
        at_s += rng.expovariate(rate)
        asked.append((round(at_s * 1e9), max(1, prompt), max(1, output)))
    told = [Asked(at, tuple(mixed_tokens(n + 1, 0, prompt)), output) for n, (at, prompt, output) in enumerate(asked)]
    requests = list(asked_requests(told, like.approach, like.config.max_model_len))
    books = {account.request_id: account for account in like.run(requests, Change(), seed=0).accounts}
    full = [books[one.request.request_id].token_ready_ns for one in requests]
    coarse = _coarse_times(like, asked)
    ratios = {}
    for name, which in (("ttft", 0), ("e2e", -1)):
        pairs = [
            (ours[which] - one[0], theirs[which] - one[0])
            for ours, theirs, one in zip(coarse, full, asked, strict=True)
        ]
        ratios[f"{name}_mean"] = statistics.mean(a for a, _ in pairs) / statistics.mean(b for _, b in pairs)
        ratios[f"{name}_p50"] = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return {name: round(ratio, 4) for name, ratio in ratios.items()}


def _coarse_times(like: Replica, asked: list[tuple[int, int, int]]) -> list[list[int]]:
    replica, times = CoarseReplica(like), {}

    def turns(until_ns: float) -> None:
        while replica.next_ns <= until_ns and replica.next_ns < float("inf"):
            for news in replica.turn():
                times.setdefault(news.request, []).append(news.at_ns)

    for at_ns, prompt, output in asked:
        turns(at_ns)
        request = CoarseRequest(prompt, output)
        times[request] = []
        replica.add(request, at_ns)
    turns(float("inf"))
    return list(times.values())


def drawn_trace(path: Path) -> Trace:
    """Returns a trace of requests at random, for a trial."""
    rng, at_s = random.Random(1), 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens", "prefix_blocks"))
        for number in range(300):
            at_s += rng.expovariate(0.4)
            writer.writerow((round(at_s, 3), rng.randint(600, 3000), rng.randint(1, 200), f"{number % 20 + 1}"))
    return read_trace(spec_of({"trace": str(path)}))


def measured(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what each arm of each scenario came to."""
    like = server()
    with tempfile.TemporaryDirectory() as folder:
        for name, scenario in scenarios(0.01 if args.small else 1.0).items():
            if args.only not in (None, name):
                continue
            path = args.traces / scenario.trace
            trace = drawn_trace(Path(folder) / "drawn.csv") if args.small else read_trace(spec_of({"trace": str(path)}))
            few = (40, 0.2) if args.small else (400, 0.25)
            yield f"{name}: coarse", coarse_beside_full(like, trace, *few)
            for arm, differs in scenario.arms.items():
                yield f"{name}: {arm}", run_arm(like, scenario, trace, differs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--only", choices=list(scenarios(1.0)))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.small and not args.traces.is_dir():
        print(f"there are no traces in {args.traces}: nothing was run")
        return
    figures = {}
    for name, came in measured(args):
        figures[name] = came
        told = {key: came[key] for key in TOLD if key in came} or came
        times = [came[key].get("p99") for key in ("ttft_ms", "tpot_ms") if key in came]
        print(
            name, told, "p99 of ttft, tpot, ms:", times, came.get("reaction"), "cpu_s:", came.get("cpu_s"), flush=True
        )
    if not args.small:
        suffix = "" if args.only is None else f"_{args.only}"
        file_result(f"thousand_replicas{suffix}", figures, vars(args), args.json)


if __name__ == "__main__":
    main()
