"""What a gateway adds to a request: through ours, and through others, against direct, at 1, 8, 64 and 256 streams.

    python -m benchmarks.gateway.overhead [--litellm PYTHON] [--sglang-router PYTHON] [--json]
    python -m benchmarks.gateway.overhead --small        a trial: few requests, no figures to be quoted

PYTHON is the interpreter of an environment in which `litellm[proxy]` or `sglang-router` is installed.

The upstream is the mock server with declared timings (`splittime bench mock-server`: 20 ms to the first token, 50 ms
between tokens), in a process of its own; each gateway is another; the load is `bench`'s, in a third. Requests arrive at
random (a Poisson process), as many as keep so many streams open on average: all at once, as a closed loop begins, would
measure how long a burst queues for two cores. Each turn of all contenders is followed by one in the opposite order, so
that a slow drift of the machine cancels. In each figure:

* ttft_ms: from the last byte given to the socket to the first chunk read, by the client's clock; added: the difference
  of an arm's percentiles and those of the direct one
* tokens_per_s: of all streams, over the time of the run
* cpu_ms_per_1000_tokens: processor time of the gateway's process and its children

All processes share the machine's cores, the mock server's own work included, which the same load pays direct too. Who
does not answer all requests of a row, or adds more than a second at the median, is not asked for more streams.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu_seconds import cpu_seconds_of_children
from benchmarks.report import file_result
from benchmarks.server_process import free_port, wait_until_ready
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.book.requests import service_ttft_ns
from splittime.bench.event_loop import run_loop
from splittime.bench.mock_server import MODEL
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.ledger.derive import percentiles
from splittime.wire.target import RunOptions, Target

TTFT_MS, ITL_MS = 20, 50
ROWS = ((1, 8), (8, 32), (64, 64), (256, 64))  # streams, and tokens of each
TURN_S = 10.0
MS = 1_000_000
PROMPT = "how much is it " * 4  # a text: not every gateway knows token ids
KEY = "sk-0123456789abcdef0123456789abcdef"
DIRECT, OURS = "direct", "splittime"
SLOW_MS = 1000.0  # added at the median
LITELLM = """
model_list:
  - {{model_name: {model}, litellm_params: {{model: openai/{model}, api_base: {upstream}/v1, api_key: none}}}}
"""


class Arm(NamedTuple):
    """pid: of the shell whose children are the gateway's processes; None: nobody stands between."""

    url: str
    pid: int | None


@contextmanager
def started(key: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Yields the URL that one of our commands says that it listens on, and its process id."""
    command = [sys.executable, "-m", "splittime.cli.main", *arguments, "--json"]
    with _ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())[key], process.pid


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def ours(upstream: str, folder: Path) -> Iterator[Arm]:
    config = folder / "gateway.toml"
    config.write_text(
        f'port = 0\n[[upstream]]\nname = "mock"\nurl = "{upstream}"\nmodels = ["{MODEL}"]\nmax_in_flight = 1024\n'
    )
    with started("gateway", "gateway", "--config", str(config)) as (url, pid):
        yield Arm(url, pid)


@contextmanager
def litellm(python: str, upstream: str, folder: Path) -> Iterator[Arm]:
    config, port = folder / "litellm.yaml", free_port()
    config.write_text(LITELLM.format(model=MODEL, upstream=upstream))
    command = [str(Path(python).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port"]
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY, "LITELLM_LOG": "ERROR"}
    with _other([*command, str(port)], port, "/health/liveliness", own) as arm:
        yield arm


@contextmanager
def sglang_router(python: str, upstream: str, folder: Path) -> Iterator[Arm]:
    port = free_port()
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", upstream, "--log-level", "error"]
    flags = ["--prometheus-port", str(free_port()), "--host", "127.0.0.1", "--port", str(port)]
    with _other([*command, *flags], port, "/health", {}) as arm:
        yield arm


@contextmanager
def _other(command: list[str], port: int, path: str, own: dict[str, str]) -> Iterator[Arm]:
    url, environment = f"http://127.0.0.1:{port}", {**os.environ, **own}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with _ended(subprocess.Popen(command, env=environment, **quiet)) as process:
        wait_until_ready(url, process, 120, path)
        yield Arm(url, process.pid)


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, with its threads and children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + cpu_seconds_of_children(pid)


def load(url: str, streams: int, tokens: int, turn_s: float, seed: int) -> tuple[list[Outcome], float]:
    """Returns what became of each request, and the seconds from the first sent to the last end."""
    rate, draw, at_s = streams / ((TTFT_MS + (tokens - 1) * ITL_MS) / 1e3), random.Random(seed), 0.0
    requests: list[Planned] = []
    while at_s < turn_s:
        requests.append(Planned(index=len(requests), at_ns=int(at_s * 1e9), output_tokens=tokens, prompt=PROMPT))
        at_s += draw.expovariate(rate)
    target = Target(url=url, model=MODEL, api_key=KEY)
    options = RunOptions(workers=1, timeout_s=30)
    outcomes = list(run_loop(run_schedule(Schedule(seed=seed, requests=tuple(requests)), [target], options)).outcomes)
    ends = [outcome.end_ns or 0 for outcome in outcomes]
    return outcomes, (max(ends) - min(outcome.sent_ns or 0 for outcome in outcomes)) / 1e9


def measure(arms: dict[str, Arm], streams: int, tokens: int, turn_s: float) -> dict[str, Any]:
    """Returns a row: the figures of each arm."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arms}
    seconds, cpu = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    for arm in arms.values():  # connections are opened, code is warm
        load(arm.url, streams, tokens, turn_s / 4, seed=0)
    for turn, name in enumerate((*arms, *reversed(arms))):
        arm = arms[name]
        before_s = cpu_s(arm.pid) if arm.pid else 0.0
        found, lasted_s = load(arm.url, streams, tokens, turn_s, seed=1 + turn // len(arms))
        cpu[name] += cpu_s(arm.pid) - before_s if arm.pid else 0.0
        outcomes[name] += found
        seconds[name] += lasted_s
        print(f"{streams} streams, {name}: {len(found)} requests in {lasted_s:.0f} s", file=sys.stderr)
    figures = {name: figures_of(found, seconds[name], tokens, cpu[name]) for name, found in outcomes.items()}
    for found in figures.values():
        base = figures[DIRECT]["ttft_ms"]
        found["added_ttft_ms"] = {name: value - base[name] for name, value in found["ttft_ms"].items() if name in base}
    return {"streams": streams, "tokens": tokens, "arms": figures}


def figures_of(outcomes: Sequence[Outcome], seconds: float, tokens: int, cpu: float) -> dict[str, Any]:
    whole = [one for one in outcomes if one.ending is Ending.COMPLETE]
    ttft_ms = [ns / MS for one in whole if (ns := service_ttft_ns(one)) is not None]
    num_tokens = max(1, len(whole) * tokens)
    return {
        "requests": len(outcomes),
        "complete": len(whole),
        "ttft_ms": percentiles(ttft_ms, (50, 99)),
        "tokens_per_s": num_tokens / seconds,
        "cpu_ms_per_1000_tokens": cpu * 1e6 / num_tokens,
    }


def keeps_up(found: dict[str, Any]) -> bool:
    return 0 < found["complete"] == found["requests"] and found["added_ttft_ms"]["p50"] < SLOW_MS


def told(row: dict[str, Any]) -> Iterator[str]:
    for name, found in row["arms"].items():
        added = " ".join(f"{ms:+.2f} ms {which}" for which, ms in found["added_ttft_ms"].items())
        yield (
            f"{row['streams']:>3} streams, {name}: TTFT {added or 'of no answer'}; "
            f"{found['tokens_per_s']:.0f} tokens/s; {found['cpu_ms_per_1000_tokens']:.0f} ms of processor for "
            f"1,000 tokens; {found['complete']} of {found['requests']} answered"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", metavar="PYTHON")
    parser.add_argument("--sglang-router", metavar="PYTHON")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    turn_s, rows = (1.0 if args.small else TURN_S), list[dict[str, Any]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock = ("bench", "mock-server", "--port", "0", "--ttft", f"{TTFT_MS}ms", "--itl", f"{ITL_MS}ms")
        upstream, _ = stack.enter_context(started("url", *mock))
        arms = {DIRECT: Arm(upstream, None), OURS: stack.enter_context(ours(upstream, folder))}
        for name, start, python in (
            ("litellm", litellm, args.litellm),
            ("sglang-router", sglang_router, args.sglang_router),
        ):
            if python is not None:
                arms[name] = stack.enter_context(start(python, upstream, folder))
        for streams, tokens in ROWS[:2] if args.small else ROWS:
            rows.append(measure(arms, streams, tokens, turn_s))
            arms = {name: arm for name, arm in arms.items() if name == DIRECT or keeps_up(rows[-1]["arms"][name])}
    settings = {"ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "small": args.small, "turn_s": turn_s}
    file_result("gateway_overhead", {"rows": rows}, settings, args.json)
    for row in rows:
        print(*told(row), sep="\n", file=sys.stderr)
    return int(any(not keeps_up(row["arms"][OURS]) for row in rows if OURS in row["arms"]))


if __name__ == "__main__":
    sys.exit(main())
