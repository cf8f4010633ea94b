"""A server at ten times its capacity, on two cores that it shares with the client: who waits how long for what.

    python -m benchmarks.scenarios.overload [--seconds 20] [--times 10] [--repeats 3] [--json]

First the capacity: as many streams as there are slots and half as many waiting, in a closed loop. Then an open loop at
`--times` that rate, from a process of its own, with new connections and kept ones; another process knocks at /health
and /metrics twenty times a second. Told are the refusals and the probes as these processes see them, the rate that was
served beside the capacity, and the processor's time that each process took, of each repeat (a new server each), with
the medians and the spread of what has a goal. Goals: refusals p99 20 ms, probes p99 100 ms, the served rate within 3 %
of the capacity. Requests end in waves of as many as there are slots, so short runs tell the served rate coarsely.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import file_result
from benchmarks.server_process import get_json, served

SLOTS = 64
LEAST_S = 3.0  # of the capacity: some requests must end in it
WAITING = 32
WARM_UP_S = 2.0
BUSY = (0, 1, 2, 5, 6)  # of the fields of a processor: user, nice, system, irq, softirq
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start_client(name: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result_of(client: subprocess.Popen[str]) -> dict[str, Any]:
    told, _ = client.communicate(timeout=300)
    if client.returncode:
        raise RuntimeError(f"the client ended with status {client.returncode}")
    return json.loads(told)


def process_cpu_s() -> dict[str, float]:
    """Of the server process and the engine process: children of this one, and theirs, that run splittime; and of all
    there are on the machine, by which a run is seen that others have disturbed."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    found = {"machine": sum(ticks[field] for field in BUSY) / TICKS_PER_S}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = (
            "engine"
            if b"splittime.assemble.worker" in command
            else "server"
            if b"splittime.cli.entry" in command
            else ""
        )
        if name and is_ours(int(folder.name)):
            found[name] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


@contextmanager
def timed(into: dict[str, Any]) -> Iterator[None]:
    """What the server's processes used meanwhile, as shares of one core."""
    before, begin_s = process_cpu_s(), time.monotonic()
    yield
    wall_s, after = time.monotonic() - begin_s, process_cpu_s()
    into["cores_used"] = {name: (after[name] - before[name]) / wall_s for name in after}


def load_of(port: int, seconds: float, tokens: int, *more: object) -> subprocess.Popen[str]:
    """Starts a load of requests of this many tokens, every other on a connection of its own."""
    body = {"prompt": "def read_json(path):\n", "ignore_eos": True}
    kinds = json.dumps([{"name": "any", "body": body, "least": tokens, "most": tokens}])
    timed = ("--seconds", seconds, "--warm-up", WARM_UP_S)
    return start_client("overload_client", port, "--kinds", kinds, "--new-ones", *timed, *more)


def measure(port: int, seconds: float, times: float, tokens: int) -> dict[str, Any]:
    capacity: dict[str, Any] = {}
    with timed(capacity):
        closed = load_of(port, max(LEAST_S, seconds / 2), tokens, "--in-flight", SLOTS + WAITING)
        capacity |= result_of(closed)
    per_s = capacity["served_per_s"] * times
    overload: dict[str, Any] = {}
    with timed(overload):
        load = load_of(port, seconds, tokens, "--per-s", per_s)
        probes = start_client("probe_client", port, "--seconds", seconds, "--warm-up", WARM_UP_S)
        overload["probes"] = result_of(probes)
        overload |= result_of(load)
    ratio = overload["served_per_s"] / capacity["served_per_s"]
    return {"capacity": capacity, "overload": overload, "served_over_capacity": ratio}


def goal_figures(run: dict[str, Any]) -> dict[str, float]:
    probes = run["overload"]["probes"]
    return {
        "refusal_p99_ms": run["overload"]["refusal_since_due_ms"].get("p99", math.nan),
        "health_p99_ms": probes["/health"].get("p99", math.nan),
        "metrics_p99_ms": probes["/metrics"].get("p99", math.nan),
        "served_over_capacity": run["served_over_capacity"],
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median, least and most of each figure that has a goal."""
    rows = [goal_figures(run) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in columns.items()
    }


def run_once(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ledger = ("--ledger-file", str(Path(folder) / "ledger.sqlite"))
        bounds = ("--max-num-seqs", str(SLOTS), "--max-queued-requests", str(arguments.max_queued_requests))
        with served(*ledger, *bounds) as url:
            port = int(url.rpartition(":")[2])
            figures = measure(port, arguments.seconds, arguments.times, arguments.tokens)
            return figures | {"server": get_json(f"{url}/stats")["server"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-queued-requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    runs = [run_once(arguments) for _ in range(arguments.repeats)]
    figures = {"summary": summary(runs), "runs": runs}
    if not arguments.no_file:
        file_result("overload", figures, vars(arguments), arguments.json)
    if not arguments.json:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
