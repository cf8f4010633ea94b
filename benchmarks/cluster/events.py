"""What users feel when the load triples, and when something is killed or changed under load.

    python -m benchmarks.cluster.events [--runner ray] [--only triple kill-replica ...] [--json]
    python -m benchmarks.cluster.events --small          a trial: short and slow, no figures to be quoted

Each event has a cluster of its own, in front of which an open loop asks for streams at a constant rate; so many seconds
after its begin the event happens: the rate triples (from cold, and with a warm pool), or `kill -9` of a replica, a
gateway, the controller, a worker of Ray, or another revision is applied. In each result:

* lost: requests without an answer, of which nothing had come; the goal is 0. broken: answers that began and broke off.
* ttft_ms: from the intended start to the first chunk read, of requests before the event, in the seconds after, and
  later; p99_ratio: of after to before
* decided_s, ready_s: from the event until the controller orders a start or a waking, and until as many serve as it
  wants, as `status.json` tells, which is written twice a second

A gateway that is killed takes its connections with it: what was open there is lost, and counted.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.running import MODEL, RunningCluster, cluster_of, command_of, processes_with
from benchmarks.report import file_result
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.ledger.derive import percentiles
from splittime.wire.target import RunOptions, Target

S, MS = 1_000_000_000, 1_000_000
AFTER_S = 10.0
REPLICA = "[serve]\nmax_num_seqs = 4\nkv_cache_memory_bytes = 16777216\nnum_threads = 1\n[replica]\ncpus = 0.2\n"
PROMPT = tuple(range(16))


class Load(NamedTuple):
    """rate: requests in a second, before the event. at_s: when that happens. tokens: of each answer."""

    rate: float
    at_s: float
    length_s: float
    tokens: int

    def schedule(self, factor: int) -> Schedule:
        """Returns the requests; from the event on, so many times as often."""
        instants, now_s = [], 0.0
        while now_s < self.length_s:
            instants.append(int(now_s * S))
            now_s += 1 / (self.rate * (factor if now_s >= self.at_s else 1))
        requests = tuple(
            Planned(index=n, at_ns=at_ns, output_tokens=self.tokens, prompt=PROMPT) for n, at_ns in enumerate(instants)
        )
        return Schedule(seed=0, requests=requests)


class Happening(NamedTuple):
    """What happens. scale: of the cluster. factor: of the rate, from then on."""

    scale: str
    do: Callable[[RunningCluster], None] = lambda cluster: None
    factor: int = 1
    runners: tuple[str, ...] = ("local", "ray")


def kill(name: str) -> Callable[[RunningCluster], None]:
    return lambda cluster: os.kill(cluster.pid_of(name), signal.SIGKILL)


def kill_replica(cluster: RunningCluster) -> None:
    """The server itself, whoever started it."""
    url = cluster.status()["replicas"][0]["url"]
    port = url.rpartition(":")[2]
    os.kill(pid_listening_on(int(port)), signal.SIGKILL)


def kill_ray_worker(cluster: RunningCluster) -> None:
    """Ray's process that a replica is a child of."""
    os.kill(processes_with("ray::ReplicaActor")[0], signal.SIGKILL)


def pid_listening_on(port: int) -> int:
    """Returns the process of this machine that listens on a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(row[9] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "0A")
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path) == f"socket:[{inode}]" and b"serve" in command_of(int(path.parts[2])):
                return int(path.parts[2])
        except OSError:
            continue
    raise LookupError(f"nobody listens on {port}")


ONE_TO_FOUR = "[scale]\nmin_replicas = 1\nmax_replicas = 4\nspare = 0\n"
TWO = "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"
EVENTS = {
    "nothing": Happening(TWO),
    "triple-cold": Happening(ONE_TO_FOUR, factor=3),
    "triple-warm": Happening(ONE_TO_FOUR + "warm_pool = 2\n", factor=3),
    "kill-replica": Happening(TWO, kill_replica),
    "kill-gateway": Happening(TWO, kill("gateway-0")),
    "kill-controller": Happening(TWO, lambda cluster: os.kill(cluster.controller_pid(), signal.SIGKILL)),
    "kill-ray-worker": Happening(TWO, kill_ray_worker, runners=("ray",)),
    "roll": Happening(TWO, lambda cluster: cluster.apply("max_num_seqs = 4", "max_num_seqs = 5")),
}


def measure(happening: Happening, runner: str, load: Load, wait_s: float) -> dict[str, Any]:
    text = f'runner = "{runner}"\n{REPLICA}{happening.scale}'
    with tempfile.TemporaryDirectory() as folder, cluster_of(Path(folder), text) as cluster:
        cluster.until(lambda: is_complete(cluster), wait_s)
        watched = Watched(cluster)
        timer = threading.Timer(load.at_s, watched.happen, [happening])
        timer.start()
        target, options = Target(url=cluster.url, model=MODEL), RunOptions(timeout_s=120)
        outcomes = list(run_loop(run_schedule(load.schedule(happening.factor), [target], options)).outcomes)
        timer.join()
        watched.wait_until_served(wait_s)
        return {**felt(outcomes, int(load.at_s * S)), **watched.told()}


def is_complete(cluster: RunningCluster) -> bool:
    """Whether as many serve as are wanted, and as many sleep as may."""
    status = cluster.status()
    phases = [one["phase"] for one in status["replicas"]]
    return bool(phases) and phases.count("serving") == status["wanted"] and set(phases) <= {"serving", "sleeping"}


class Watched:
    """A cluster from the event on."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._happened_unix_s = self._happened_s = 0.0
        self._served_s: float | None = None

    def happen(self, happening: Happening) -> None:
        self._happened_unix_s, self._happened_s = time.time(), time.monotonic()
        happening.do(self._cluster)

    def wait_until_served(self, limit_s: float) -> None:
        self._cluster.until(lambda: is_complete(self._cluster), limit_s)

    def told(self) -> dict[str, Any]:
        """Returns what the controller ordered since, and when the last replica that serves began to."""
        status = self._cluster.status()
        orders = [one for one in status["events"] if one["at_unix_s"] >= self._happened_unix_s]
        begun = [one["at_unix_s"] for one in orders if one["what"] in ("start", "wake")]
        serving = [status["at_unix_s"] - one["since_s"] for one in status["replicas"] if one["phase"] == "serving"]
        decided_s = begun[0] - self._happened_unix_s if begun else None
        ready_s = max(serving, default=0.0) - self._happened_unix_s
        return {
            "decided_s": decided_s,
            "ready_s": ready_s if begun and ready_s > 0 else None,
            "orders": [f"{one['what']} {one['name']}: {one['why'][:80]}" for one in orders],
        }


def felt(outcomes: Sequence[Outcome], event_ns: int) -> dict[str, Any]:
    """Returns what became of the requests, and their first tokens before and after the event. event_ns: on the run's
    clock, as all instants of outcomes."""
    failed = [one for one in outcomes if one.ending is not Ending.COMPLETE]
    spans = {"before": (0, event_ns), "after": (event_ns, event_ns + int(AFTER_S * S)), "later": (event_ns, 2**63)}
    ttft = {name: first_tokens_ms(outcomes, *span) for name, span in spans.items()}
    before, after = ttft["before"].get("p99"), ttft["after"].get("p99")
    return {
        "requests": len(outcomes),
        "lost": sum(not one.chunk_ns for one in failed),
        "broken": sum(bool(one.chunk_ns) for one in failed),
        "errors": sorted({f"{one.ending} {one.status} {(one.error or '')[:120]}" for one in failed})[:5],
        "ttft_ms": ttft,
        "p99_ratio": after / before if before and after else None,
    }


def first_tokens_ms(outcomes: Sequence[Outcome], begin_ns: int, end_ns: int) -> dict[str, float]:
    found = [
        (one.chunk_ns[0] - one.intended_ns) / MS
        for one in outcomes
        if one.ending is Ending.COMPLETE and one.chunk_ns and begin_ns <= one.intended_ns < end_ns
    ]
    return percentiles(found, (50, 99)) if found else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=("local", "ray"), default="local")
    parser.add_argument("--only", nargs="*", choices=list(EVENTS), default=list(EVENTS))
    parser.add_argument("--rate", type=float, default=4.0, help="requests in a second, before the event")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = Load(1.0, 4.0, 12.0, 4) if args.small else Load(args.rate, 20.0, 80.0, args.tokens)
    rows = {}
    for name in args.only:
        if args.runner in EVENTS[name].runners:
            rows[name] = measure(EVENTS[name], args.runner, load, 300.0)
            print(f"{name}: {summary(rows[name])}", file=sys.stderr, flush=True)
    settings = {**load._asdict(), "runner": args.runner, "small": args.small}
    file_result(f"cluster_events_{args.runner}", {"rows": rows}, settings, args.json)
    return int(any(row["lost"] for name, row in rows.items() if name != "kill-gateway"))


def summary(row: dict[str, Any]) -> str:
    shown = {name: {key: round(value) for key, value in told.items()} for name, told in row["ttft_ms"].items()}
    seconds = {name: None if row[name] is None else round(row[name], 1) for name in ("decided_s", "ready_s")}
    return f"{row['requests']} requests, {row['lost']} lost, {row['broken']} broken; TTFT in ms {shown}; {seconds}"


if __name__ == "__main__":
    sys.exit(main())
