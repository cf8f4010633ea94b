"""What the benchmarks of a card share: where they run, how much they measure, times, ceilings, and what they tell.

Without a card they end with status 2, but for `--tiny`: that runs a script to its end with the smallest sizes in
Triton's interpreter (TRITON_INTERPRET=1), so that a mistake in it shows before a card's minutes are spent. What is
timed there means nothing, and says so.

A script tells what it found even if it is ended early (SIGTERM, which `timeout` sends) or fails: `telling`.
"""

import argparse
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

INTERPRETED = "no card: times mean nothing"
ENDED_EARLY = 124  # as `timeout` has it
Found = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """copy_bytes: of the copy that gives the bandwidth. matrix: rows and columns of the product that gives the rate.
    cold_bytes, buffers: of inputs that launches go round, so that none is still in the cache (an H200's L2 holds 50
    MiB). rounds: timed. launches: captured in one graph, so that what the host takes for a launch is not measured."""

    copy_bytes: int
    matrix: int
    cold_bytes: int
    buffers: int
    rounds: int
    launches: int


CARD = Scale(copy_bytes=2 << 30, matrix=8192, cold_bytes=256 << 20, buffers=64, rounds=15, launches=20)
INTERPRETER = Scale(copy_bytes=1 << 16, matrix=32, cold_bytes=1, buffers=2, rounds=1, launches=1)


def scale() -> Scale:
    return CARD if torch.cuda.is_available() else INTERPRETER


def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some(variants: Iterable[Any]) -> list[Any]:
    """All of them on a card, two in the interpreter."""
    return list(variants)[: None if torch.cuda.is_available() else 2]


# ---- options


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that all have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    made.add_argument(
        "--tiny", action="store_true", help="the smallest sizes, to try the script; without a card in the interpreter"
    )
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None, **tiny: Any) -> argparse.Namespace:
    """The options; with --tiny, `tiny` in the place of those that were not given. Ends the program with status 2 where
    there is no card and --tiny was not asked for."""
    if "--tiny" in (sys.argv[1:] if argv is None else argv):
        made.set_defaults(**tiny)
    options = made.parse_args(argv)
    if not torch.cuda.is_available() and not options.tiny:
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        raise SystemExit(2)
    return options


# ---- times


@dataclass
class Share:
    """Of several processes that only compile what will be timed: this one runs each `of`-th run, once."""

    number: int
    of: int
    seen: int = 0

    def run(self, run: Callable[[], Any]) -> float:
        if self.seen % self.of == self.number:
            run()
        self.seen += 1
        return 1.0


compiling: list[Share] = []  # one, in a process that only compiles


def median_us(run: Callable[[], Any], launches: int | None = None) -> float:
    """Of one run, without the host: `launches` of them are captured in a graph, which is replayed. What cannot be
    captured (it waits for the host) fails here."""
    if compiling:
        return compiling[0].run(run)
    if not torch.cuda.is_available():
        return median_event_us(run)
    launches = launches or scale().launches
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return median_event_us(graph.replay) / launches


def median_event_us(run: Callable[[], Any]) -> float:
    """Of one run as it is, host and all: by CUDA events, or by the clock where there is no card."""
    if compiling:
        return compiling[0].run(run)
    timed = _event_us if torch.cuda.is_available() else _clock_us
    warm = 3 if torch.cuda.is_available() else 0
    return statistics.median([timed(run) for _ in range(scale().rounds + warm)][warm:])


def _event_us(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _clock_us(run: Callable[[], Any]) -> float:
    begin_ns = time.perf_counter_ns()
    run()
    return max(1, time.perf_counter_ns() - begin_ns) / 1e3


# ---- ceilings


@cache
def copy_bytes_per_s() -> float:
    """Read and written, of a copy from the device to itself that no cache holds."""
    if compiling:
        return 1.0
    source = torch.empty(scale().copy_bytes, dtype=torch.uint8, device=place())
    target = torch.empty_like(source)
    return 2 * scale().copy_bytes / (median_us(lambda: target.copy_(source), launches=3) * 1e-6)


@cache
def matrix_operations_per_s() -> float:
    """Of a bfloat16 product by cuBLAS, of random values (zeros would let the clock rise)."""
    if compiling:
        return 1.0
    size = scale().matrix
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=place()) for _ in range(2))
    return 2 * size**3 / (median_us(lambda: a @ b, launches=5) * 1e-6)


def ceilings() -> dict[str, float]:
    return {"bytes_per_s": copy_bytes_per_s(), "operations_per_s": matrix_operations_per_s()}


def forget() -> None:
    """What nobody holds any more: engines refer to themselves, and torch keeps what they had of the card's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- what is told


@contextmanager
def telling(options: argparse.Namespace, table_of: Callable[[Found], Table]) -> Iterator[Found]:
    """What is put into the dictionary is printed at the end, as JSON or as a table, also if the end came early;
    "is_complete" tells whether it did not."""
    found: Found = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else INTERPRETED,
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "is_complete": False,
    }
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield found
        found["is_complete"] = True
    finally:
        signal.signal(signal.SIGTERM, before)
        if options.json:
            print(json.dumps(found, indent=1, default=str), flush=True)
        else:
            Console().print(table_of(found))


def _end(number: int, frame: object) -> None:
    raise SystemExit(ENDED_EARLY)
