"""How long a model takes to load and to be ready, beside the time in which its file can be read once; and its memory.

    python -m benchmarks.micro.load --model FOLDER --quantization int8 [--rounds 5] [--json]

Four starts, by turns, each in a process of its own: with packed weights in the cache or without (then the checkpoint is
rounded and packed), with the file that is read in the page cache or dropped from it (posix_fadvise). Before each start
the same file is read in the same state by a plain loop, 1 MiB at a time into one buffer: the measure of all else. What
the host of a virtual machine has in its own memory cannot be dropped, so "cold" is cold for this system alone.

    read     the plain loop
    load     the phase "load weights": from the config to the last packed weight
    ready    from before the process is made to after its warm-up, imports and all measurements of a start included
    kept     from then until the packed weights are on the disk, in the background (a first start alone)
    peak     the largest resident set, mapped pages of files included (VmHWM)

Median, and the extremes of the rounds. Without --quantization nothing is packed that is kept, and two starts remain.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.report import file_result

NAME = "load"
READ_BYTES = 1 << 20
STATUS = Path("/proc/self/status")
TIMES = ("read_s", "load_s", "ready_s", "kept_s")


class Case(NamedTuple):
    """is_packed: the weights are in the cache; is_cold: what is read is not in memory."""

    is_packed: bool
    is_cold: bool

    @property
    def name(self) -> str:
        return f"{'packed' if self.is_packed else 'checkpoint'}, {'cold' if self.is_cold else 'warm'}"


class Given(msgspec.Struct, frozen=True):
    model: str
    quantization: str | None
    packed_cache: str
    kv_bytes: int


# ---- one start, in a process of its own


def start(given: Given) -> dict[str, Any]:
    from splittime.assemble.worker import WorkerSettings, build_engine
    from splittime.runner.config import RunnerConfig
    from splittime.scheduler.config import SchedulerConfig

    runner = RunnerConfig(
        model_path=given.model,
        quantization=given.quantization,
        packed_cache=given.packed_cache,
        kv_cache_memory_bytes=given.kv_bytes,
        max_model_len=256,
    )
    timeline: list[tuple[str, int, int]] = []
    parts = build_engine(msgspec.json.encode(WorkerSettings(runner, SchedulerConfig(max_num_seqs=8))), timeline)
    ready_ns = time.monotonic_ns()
    peak_bytes = peak()
    return {
        "ready_ns": ready_ns,
        "phases_s": {name: (end_ns - begin_ns) / 1e9 for name, begin_ns, end_ns in timeline},
        "kept_s": _kept_s(ready_ns),
        "peak_bytes": peak_bytes,
        "weights_bytes": parts.resolved["weights_bytes"],
        "story": str(parts.resolved["packed_cache"]).split()[0],
    }


def _kept_s(ready_ns: int) -> float:
    from splittime.models.weights import keeping

    keeping.finish()
    return (time.monotonic_ns() - ready_ns) / 1e9


def peak() -> int:
    """Returns the largest resident set of this process so far."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def in_process(given: Given) -> dict[str, Any]:
    begin_ns = time.monotonic_ns()
    command = [sys.executable, "-m", "benchmarks.micro.load", "--start", msgspec.json.encode(given).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "ready_s": (found["ready_ns"] - begin_ns) / 1e9, "load_s": found["phases_s"]["load weights"]}


# ---- the file


def drop(paths: list[Path]) -> None:
    """From the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_s(paths: list[Path]) -> float:
    buffer, begin = bytearray(READ_BYTES), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def weight_files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


# ---- rounds


def measure(
    model: Path, quantization: str | None, rounds: int, kv_bytes: int, told: Callable[[Any], Any]
) -> dict[str, Any]:
    cases = [Case(is_packed, is_cold) for is_packed in (False, True) for is_cold in (True, False)]
    cases = [case for case in cases if quantization is not None or not case.is_packed]
    taken: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(dir=model if model.is_dir() else model.parent) as folder:
        given = Given(str(model), quantization, folder if quantization else "off", kv_bytes)
        in_process(given)  # compiles Python's files, and fills the cache
        for number in told(range(rounds * len(cases))):
            case = cases[(number + number // len(cases)) % len(cases)]
            taken[case.name].append(_once(case, model, given))
    return {name: summary(found, kv_bytes) for name, found in taken.items()}


def _once(case: Case, model: Path, given: Given) -> dict[str, Any]:
    cache = Path(given.packed_cache)
    if not case.is_packed and given.quantization is not None:
        shutil.rmtree(cache)
        cache.mkdir()
    paths = sorted(cache.glob("*.packed")) if case.is_packed else weight_files(model)
    _put(paths, case.is_cold)
    seconds = read_s(paths)
    _put(paths, case.is_cold)
    found = in_process(given)
    expected = "mapped" if case.is_packed else "packed" if given.quantization else "off"
    assert found["story"] == expected, f"{case.name}: {found['story']}, not {expected}"
    return {**found, "read_s": seconds, "file_bytes": sum(path.stat().st_size for path in paths)}


def _put(paths: list[Path], is_cold: bool) -> None:
    drop(paths) if is_cold else read_s(paths)


def summary(found: list[dict[str, Any]], kv_bytes: int) -> dict[str, Any]:
    times = {name: spread([one[name] for one in found]) for name in TIMES}
    phases = {name: statistics.median(one["phases_s"][name] for one in found) for name in found[0]["phases_s"]}
    weights = found[0]["weights_bytes"]
    return {
        **times,
        "load_over_read": spread([one["load_s"] / one["read_s"] for one in found]),
        "phases_s": phases,
        "file_bytes": found[0]["file_bytes"],
        "weights_bytes": weights,
        "kv_bytes": kv_bytes,
        "peak_bytes": max(one["peak_bytes"] for one in found),
        "allowed_bytes": 1.15 * weights + kv_bytes + 0.3e9,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(figures: dict[str, Any]) -> None:
    table = Table("start", "read, s", "load, s", "load / read", "ready, s", "kept, s", "peak, GB", "allowed, GB")
    for name, found in figures.items():
        columns = ("read_s", "load_s", "load_over_read", "ready_s", "kept_s")
        shown = [f"{found[one]['median']:.2f} ({found[one]['min']:.2f}-{found[one]['max']:.2f})" for one in columns]
        table.add_row(name, *shown, f"{found['peak_bytes'] / 1e9:.2f}", f"{found['allowed_bytes'] / 1e9:.2f}")
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 28)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(msgspec.json.decode(arguments.start, type=Given))))
        return
    model = arguments.model.resolve()
    console = Console(stderr=True)
    given = (model, arguments.quantization, arguments.rounds, arguments.kv_cache_memory_bytes)
    figures = measure(*given, lambda parts: track(parts, "starts", console=console, disable=not console.is_terminal))
    settings = {name: value for name, value in vars(arguments).items() if name != "start"}
    file_result(f"{NAME}_{model.name}_{arguments.quantization or 'unquantised'}", figures, settings, arguments.json)
    if not arguments.json:
        show(figures)


if __name__ == "__main__":
    main()
