"""What the benchmarks of single kernels share: the card, its copy bandwidth, times of captured launches, the output."""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

COPY_BYTES = 2 << 30
ROUNDS = 15
LAUNCHES = 20  # captured in one graph, so that what the host takes for a launch is not measured


def require_card() -> None:
    """End the program with status 2 where there is no card."""
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        raise SystemExit(2)


def median_us(run: Callable[[], Any], launches: int = LAUNCHES) -> float:
    """Of one run, without the host: `launches` of them are captured in a graph, which is replayed. What cannot be
    captured (it waits for the host) fails here."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return median_event_us(graph.replay) / launches


def median_event_us(run: Callable[[], Any]) -> float:
    """Of one run as it is, host and all, by CUDA events."""
    times = []
    for _ in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def copy_bytes_per_s() -> float:
    """Read and written, of a copy from the device to itself that no cache holds."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (median_us(lambda: target.copy_(source), launches=3) * 1e-6)


def print_results(found: dict[str, Any], table: Table, as_json: bool, console: Console) -> None:
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__} | found
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        console.print(table)
