"""What users feel when the load triples, and when something is killed or changed under load.

    python -m benchmarks.cluster.events [--runner ray] [--only triple-cold kill-replica ...] [--json]
    python -m benchmarks.cluster.events --small          a trial: short and slow, no figures to be quoted

An open loop asks a cluster for streams at a constant rate; so many seconds after its begin the event happens: the rate
triples (from cold, and with a warm pool), or `kill -9` of a replica, a gateway, the controller, a worker of Ray, a node
of Ray (of three on this machine), or another revision is applied. Events of one size of cluster follow each other in
one. In each result:

* lost: requests without an answer, of which nothing had come; broken: answers that began and broke off. The goal is 0;
  a gateway that is killed takes its connections with it, so what was open there is lost, and counted. Of two that
  share a port (`kill-gateway-of-two`, asked by OpenAI's client) the other is the way in: lost_at_first are requests
  that had no answer to their first try, lost those that had none to the third
* ttft_ms: from the intended start to the first chunk read, of requests before the event, in the seconds after, and
  later; p99_ratio: of after to before
* decided_s, ready_s: from the event until the controller orders a start or a waking, and until the last replica that
  serves began to, as `status.json` tells, which is written twice a second; starts find bytecode, whatever
  PYTHONDONTWRITEBYTECODE says, once one has written it
* back_s: until a gateway answers again that was killed, or a controller writes again; failing_s: until the last request
  was meant to be sent that failed

`to-none-cold` and `to-none-warm` ask once where no replica is left (the warm one sleeps): asleep_s is how long that
took from the last answer on; told_s and first_s are when the stream's first word that it waits came, and its first
token.

Each event has 30 seconds of load, or 6; all take at most `LIMIT_S`, then the run fails. It ends with 1 where requests
were lost or broken off that should not be, or an event could not be measured.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.ray_nodes import PLACE, ray_of, raylet_with_a_replica
from benchmarks.cluster.running import (
    MODEL,
    RunningCluster,
    cluster_of,
    command_of,
    ends_within,
    processes_with,
    say,
)
from benchmarks.report import file_result
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.ledger.derive import percentiles
from splittime.wire.target import RunOptions, Target

S, MS = 1_000_000_000, 1_000_000
AFTER_S = 10.0
LIMIT_S = 1500.0
WAIT_S = 240.0  # for what is to become of a cluster
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


Tells = Callable[[RunningCluster], bool]


class Happening(NamedTuple):
    """What happens. scale: of the cluster. factor: of the rate, from then on. replaces: another replica is started.
    is_back: whether what was killed is there again; default: nobody asks. may_have: `lost` or `broken` where there are
    such requests whatever anybody does. gateways: so many, at one port where there are several. tries_again: the load
    is made by a client that does."""

    scale: str
    do: Callable[[RunningCluster], None] = lambda cluster: None
    factor: int = 1
    runners: tuple[str, ...] = ("local", "ray")
    replaces: bool = False
    is_back: Tells | None = None
    may_have: tuple[str, ...] = ()
    gateways: int = 1
    tries_again: bool = False


def kill(name: str) -> Callable[[RunningCluster], None]:
    return lambda cluster: os.kill(cluster.pid_of(name), signal.SIGKILL)


def kill_replica(cluster: RunningCluster) -> None:
    """The server itself, whoever started it."""
    url = cluster.status()["replicas"][0]["url"]
    port = url.rpartition(":")[2]
    os.kill(pid_listening_on(int(port)), signal.SIGKILL)


def kill_controller(cluster: RunningCluster) -> None:
    os.kill(cluster.controller_pid(), signal.SIGKILL)


def kill_ray_worker(cluster: RunningCluster) -> None:
    """Ray's process that a replica is a child of."""
    os.kill(processes_with("ray::ReplicaActor")[0], signal.SIGKILL)


def kill_ray_node(cluster: RunningCluster) -> None:
    """The process of one of Ray's nodes, with which its replica ends."""
    os.kill(raylet_with_a_replica(), signal.SIGKILL)


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


def first_answers(cluster: RunningCluster) -> bool:
    """Whether the first gateway does."""
    try:
        with urllib.request.urlopen(f"{cluster.gateways[0]}/health", timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


ONE_TO_FOUR = "[scale]\nmin_replicas = 1\nmax_replicas = 4\nspare = 0\n"
TWO = "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"
TO_NONE = "[scale]\nmin_replicas = 0\nmax_replicas = 1\nspare = 0\nidle_s = 2.0\ndown_delay_s = 1.0\n"
RAY = ("ray",)
NODES = 3  # of Ray's, where one is killed
ON_NODES = f"resources = {{{PLACE} = 1}}\n"
EVENTS = {
    "nothing": Happening(TWO),
    "kill-replica": Happening(TWO, kill_replica, replaces=True),
    "kill-gateway": Happening(TWO, kill("gateway-0"), is_back=first_answers, may_have=("lost", "broken")),
    "kill-controller": Happening(TWO, kill_controller, is_back=lambda cluster: bool(cluster.status()["replicas"])),
    "kill-ray-worker": Happening(TWO, kill_ray_worker, runners=RAY, replaces=True),
    "roll": Happening(TWO, lambda cluster: cluster.apply("max_num_seqs = 4", "max_num_seqs = 5"), replaces=True),
    "kill-gateway-of-two": Happening(
        TWO, kill("gateway-0"), is_back=first_answers, may_have=("broken",), gateways=2, tries_again=True
    ),
    "kill-ray-node": Happening(ON_NODES + TWO, kill_ray_node, runners=RAY, replaces=True),
    "triple-cold": Happening(ONE_TO_FOUR, factor=3),
    "triple-warm": Happening(ONE_TO_FOUR + "warm_pool = 2\n", factor=3),
    "to-none-cold": Happening(TO_NONE),
    "to-none-warm": Happening(TO_NONE + "warm_pool = 1\n"),
}


def measured(names: Sequence[str], runner: str, load: Load) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what each event came to; those of one size of cluster that follow each other have the same. Where
    something breaks, that is told in the place of the event, and the next cluster is started."""
    for (scale, gateways), some in groupby(names, key=lambda name: (EVENTS[name].scale, EVENTS[name].gateways)):
        name = "the start"
        try:
            with started(runner, scale, gateways) as cluster:
                for name in some:
                    say(f"{name}: waiting for {'no replica' if scale.startswith(TO_NONE) else 'all replicas'}")
                    measure = measure_from_none if scale.startswith(TO_NONE) else measure_under_load
                    yield name, measure(cluster, EVENTS[name], load)
                name = "the end"
        except Exception as error:
            yield f"{name} of {scale!r}", {"failed": f"{type(error).__name__}: {error}"[-2000:]}


@contextmanager
def started(runner: str, scale: str, gateways: int) -> Iterator[RunningCluster]:
    with ExitStack() as stack:
        has_nodes = scale.startswith(ON_NODES)
        where = f'ray_address = "{stack.enter_context(ray_of(NODES))}"\n' if has_nodes else ""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield stack.enter_context(cluster_of(folder, f'runner = "{runner}"\n{where}{REPLICA}{scale}', gateways))


def measure_under_load(cluster: RunningCluster, happening: Happening, load: Load) -> dict[str, Any]:
    cluster.until(lambda: is_complete(cluster), WAIT_S)
    watched = Watched(cluster, happening)
    timer = threading.Timer(load.at_s, watched.happen)
    say(f"{load.length_s:.0f} s of load; it happens after {load.at_s:.0f}")
    timer.start()
    outcomes, more = asked(cluster.url, load.schedule(happening.factor), happening.tries_again)
    timer.join()
    watched.check()
    cluster.until(lambda: is_complete(cluster) and (watched.orders("start") or not happening.replaces), WAIT_S)
    return {**felt(outcomes, int(load.at_s * S)), **more, **watched.told()}


def asked(url: str, schedule: Schedule, tries_again: bool) -> tuple[list[Outcome], dict[str, int]]:
    """Returns what the requests came to, and, of a client that tries again, what first tries did."""
    if tries_again:
        from benchmarks.cluster.trying_again import tried_again  # its client takes a second to import

        outcomes, num_lost = run_loop(tried_again(url, schedule))
        return outcomes, {"lost_at_first": num_lost}
    run = run_schedule(schedule, [Target(url=url, model=MODEL)], RunOptions(timeout_s=120))
    return list(run_loop(run).outcomes), {}


def measure_from_none(cluster: RunningCluster, happening: Happening, load: Load) -> dict[str, Any]:
    """What one stream gets where no replica serves, after another has been answered."""
    first_answer(cluster, load.tokens)
    begin_s = time.monotonic()
    cluster.until(lambda: is_at_rest(cluster), WAIT_S)
    asleep_s = time.monotonic() - begin_s
    told_s, first_s = first_answer(cluster, load.tokens)
    return {"requests": 2, "lost": 0, "broken": 0, "asleep_s": asleep_s, "told_s": told_s, "first_s": first_s}


def first_answer(cluster: RunningCluster, tokens: int) -> tuple[float | None, float]:
    """Returns after how many seconds a stream has its first comment, if any, and its first token. Raises OSError where
    there is no answer."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    asked = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    begin_s, told_s, first_s = time.monotonic(), None, None
    with urllib.request.urlopen(asked, timeout=WAIT_S) as response:
        for line in response:
            told_s = time.monotonic() - begin_s if told_s is None and line.startswith(b":") else told_s
            first_s = time.monotonic() - begin_s if first_s is None and line.startswith(b"data:") else first_s
            if b'"error"' in line:
                raise OSError(f"refused after {time.monotonic() - begin_s:.1f} s: {line.decode()}")
    if first_s is None:
        raise OSError("an answer without a token")
    return told_s, first_s


def is_complete(cluster: RunningCluster) -> bool:
    """Whether as many serve as are wanted, and as many sleep as may."""
    status = cluster.status()
    phases = [one["phase"] for one in status["replicas"]]
    return bool(phases) and phases.count("serving") == status["wanted"] and set(phases) <= {"serving", "sleeping"}


def is_at_rest(cluster: RunningCluster) -> bool:
    """Whether none serves or is to, and as many sleep as may."""
    status = cluster.status()
    return status["wanted"] == 0 and all(one["phase"] == "sleeping" for one in status["replicas"])


class Watched:
    """A cluster from the event on."""

    def __init__(self, cluster: RunningCluster, happening: Happening) -> None:
        self._cluster, self._happening = cluster, happening
        self._happened_unix_s = 0.0
        self._back_s: float | None = None
        self._error: Exception | None = None

    def happen(self) -> None:
        """Let it happen; what goes wrong is kept for `check`: this runs in a timer's thread."""
        try:
            self._let_happen()
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raises what went wrong."""
        if self._error is not None:
            raise self._error

    def _let_happen(self) -> None:
        """What was killed tells no more, so whatever tells that it is there is what came after it."""
        self._happened_unix_s, begin_s = time.time(), time.monotonic()
        is_back = self._happening.is_back
        self._happening.do(self._cluster)
        if is_back is not None:
            (self._cluster.folder / "status.json").unlink(missing_ok=True)
            self._cluster.until(lambda: is_back(self._cluster), WAIT_S)
            self._back_s = time.monotonic() - begin_s

    def orders(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the controller's orders since, of these kinds if any are named."""
        since = [one for one in self._cluster.status()["events"] if one["at_unix_s"] >= self._happened_unix_s]
        return [one for one in since if not kinds or one["what"] in kinds]

    def told(self) -> dict[str, Any]:
        """Returns what the controller ordered since, and when the last replica that serves began to."""
        status, orders = self._cluster.status(), self.orders()
        begun = [one["at_unix_s"] for one in self.orders("start", "wake")]
        serving = [status["at_unix_s"] - one["since_s"] for one in status["replicas"] if one["phase"] == "serving"]
        decided_s = begun[0] - self._happened_unix_s if begun else None
        ready_s = max(serving, default=0.0) - self._happened_unix_s
        return {
            "decided_s": decided_s,
            "ready_s": ready_s if begun and ready_s > 0 else None,
            "back_s": self._back_s,
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
        "failing_s": max(((one.intended_ns - event_ns) / S for one in failed), default=None),
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
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = Load(2.0, 2.0, 6.0, 4) if args.small else Load(args.rate, 8.0, 30.0, args.tokens)
    rows, settings = {}, {**load._asdict(), "runner": args.runner, "small": args.small}
    names = [name for name in EVENTS if name in args.only and args.runner in EVENTS[name].runners]
    try:
        with ends_within(LIMIT_S):
            for name, row in measured(names, args.runner, load):
                rows[name] = row
                say(f"{name}: {row.get('failed') or summary(row)}")
    finally:
        file_result(f"cluster_events_{args.runner}", {"rows": rows}, settings, args.json)
    return int(any(has_failed(name, row) for name, row in rows.items()))


def has_failed(name: str, row: dict[str, Any]) -> bool:
    return "failed" in row or any(row[what] for what in ("lost", "broken") if what not in EVENTS[name].may_have)


def summary(row: dict[str, Any]) -> str:
    ttft = {name: {key: round(value) for key, value in told.items()} for name, told in row.get("ttft_ms", {}).items()}
    told = {key: value for key, value in row.items() if key.endswith("_s") or key == "p99_ratio"}
    seconds = {key: round(value, 2) for key, value in told.items() if value is not None}
    shown = f"; TTFT in ms {ttft}" if ttft else ""
    errors = f"; {row['errors']}" if row.get("errors") else ""
    first = f" ({row['lost_at_first']} at the first try)" if "lost_at_first" in row else ""
    return f"{row['requests']} requests, {row['lost']} lost{first}, {row['broken']} broken{shown}; {seconds}{errors}"


if __name__ == "__main__":
    sys.exit(main())
