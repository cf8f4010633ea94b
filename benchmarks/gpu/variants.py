"""Which launch parameters each kernel should have on this card: those that are chosen beside others, by shape.

    python -m benchmarks.gpu.variants                         all kernels, 4 minutes at the most
    python -m benchmarks.gpu.variants decode linear --seconds 120 --json

What is tried is what the kernels' own benchmarks try with --tiles (`attention`, `linear`, `grouped`, `elementwise`,
`sampling`), at a few shapes of Llama-3.1-8B and Qwen3-30B-A3B. Several processes compile everything first, each a share
of it, into Triton's cache on disk; then one times. `gain` is the time of what is chosen over the best one's: well above
1 says that the kernel's table wants another line.
"""

import argparse
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from rich.table import Table

from benchmarks.gpu import attention, card, elementwise, grouped, linear, sampling
from benchmarks.gpu.card import Found, copy_bytes_per_s, matrix_operations_per_s, parse, parser, telling

KERNELS = ("decode", "prefill", "linear", "experts", "elementwise", "sampling")
DECODES = ((1024, 64), (8192, 16), (32768, 1), (1024, 1), (8192, 1))  # context, rows
PROMPTS = (2048, 8192)
PRODUCTS = (("gate_up", 1), ("gate_up", 16), ("gate_up", 64), ("gate_up", 256), ("down", 1), ("qkv", 1), ("qkv", 16))
SCHEMES = ("int4", "fp8", "int8")
EXPERT_TOKENS = (1, 16, 64, 2048)
SAMPLED = ((1, 128256), (64, 128256))  # rows, vocabulary
SHARE = 0.4  # of the time, for compiling


@dataclass(frozen=True)
class Job:
    kernel: str
    shape: str
    run: Callable[[], tuple[float, dict[str, float]]]  # microseconds of what is chosen, and of the others by name


def jobs(kernels: Sequence[str], tiny: bool) -> list[Job]:
    """Of each kernel in turns, so that what the time does not suffice for is of all kinds."""
    made = {
        "decode": decodes,
        "prefill": prefills,
        "linear": products,
        "experts": experts,
        "elementwise": small_ones,
        "sampling": samplings,
    }
    each = [list(made[name](tiny)) for name in kernels]
    return [job for job in chain.from_iterable(zip_longest(*each)) if job is not None]


def decodes(tiny: bool) -> Iterator[Job]:
    for context, rows in ((20, 1),) if tiny else DECODES:
        yield Job("decode", f"{rows} rows of {context}", lambda c=context, r=rows: _attention("decode", c, r))


def prefills(tiny: bool) -> Iterator[Job]:
    for tokens in (4,) if tiny else PROMPTS:
        yield Job("prefill", f"prompt of {tokens}", lambda t=tokens: _attention("prefill", t, 1))


def _attention(kind: str, tokens: int, rows: int) -> tuple[float, dict[str, float]]:
    options = Namespace(tiles=True, peers=False)
    if kind == "decode":
        found = attention.decode(tokens, rows, torch.bfloat16, options, copy_bytes_per_s())
    else:
        found = attention.prefill(tokens, torch.bfloat16, options, matrix_operations_per_s())
    times = {name: us for name, us in found["us"].items() if us}
    return times.pop("chosen"), times


def products(tiny: bool) -> Iterator[Job]:
    model = "tiny" if tiny else "llama-3.1-8b"
    for scheme in SCHEMES[:1] if tiny else SCHEMES:
        for shape, tokens in (("o", 1),) if tiny else PRODUCTS:
            sizes = linear.MODELS[model][shape]
            name = f"{scheme} {shape} {sizes[0]} x {sizes[1]}, {tokens} tokens"
            yield Job("linear", name, lambda s=scheme, z=sizes, t=tokens: _product(s, z, t))


def _product(scheme: str, sizes: tuple[int, int], tokens: int) -> tuple[float, dict[str, float]]:
    (found,) = linear.measure(scheme, *sizes, (tokens,), _ceilings(), True)
    return found["us"], found["tiles_us"]


def experts(tiny: bool) -> Iterator[Job]:
    for scheme in ("bfloat16",) if tiny else ("bfloat16", "int4"):
        for tokens in (1,) if tiny else EXPERT_TOKENS:
            yield Job("experts", f"{scheme}, {tokens} tokens", lambda s=scheme, t=tokens: _experts(s, t))


def _experts(scheme: str, tokens: int) -> tuple[float, dict[str, float]]:
    (found,) = grouped.measure(scheme, tokens, _ceilings(), True)
    return found["us"], found["tiles_us"]


def small_ones(tiny: bool) -> Iterator[Job]:
    for tokens in (1,) if tiny else (64, 2048):
        for case in elementwise.cases(tokens):
            yield Job("elementwise", f"{case.name}, {tokens} tokens", lambda one=case: _small(one))


def _small(case: elementwise.Case) -> tuple[float, dict[str, float]]:
    found = elementwise.measure(case, copy_bytes_per_s(), True)
    return found["us"], found["tiles_us"]


def samplings(tiny: bool) -> Iterator[Job]:
    for rows, vocabulary in ((1, 1100),) if tiny else SAMPLED:
        for name in ("top_p peaked", "top_p flat")[: 1 if tiny else 2]:
            label = f"{name}, {rows} rows of {vocabulary}"
            yield Job("sampling", label, lambda r=rows, v=vocabulary, n=name: _sampling(r, v, n))


def _sampling(rows: int, vocabulary: int, name: str) -> tuple[float, dict[str, float]]:
    found = sampling.measure(rows, vocabulary, name, copy_bytes_per_s(), True)
    return found["us"], found["chunks_us"]


def _ceilings() -> dict[str, float]:
    """Shares are not looked at here."""
    return {"copy_bytes_per_s": 1e12, **dict.fromkeys(("bfloat16", "int8", "float8"), 1e15)}


def compile_all(options: argparse.Namespace, seconds: float) -> None:
    """By several processes; what they do not get done in time is compiled when it is timed."""
    command = [sys.executable, "-m", "benchmarks.gpu.variants", *options.kernels, *(["--tiny"] if options.tiny else [])]
    count = options.processes
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    workers = [subprocess.Popen([*command, "--share", str(number), str(count)], **quiet) for number in range(count)]
    until = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def compile_share(options: argparse.Namespace) -> None:
    card.compiling.append(card.Share(*options.share))
    for job in jobs(options.kernels, options.tiny):
        try:
            job.run()
        except Exception as error:  # what does not fit the card is told by the process that times
            print(f"{job.kernel} {job.shape}: {type(error).__name__}", file=sys.stderr)


def measure(options: argparse.Namespace, results: list[Found]) -> int:
    """Returns how many jobs the time did not suffice for."""
    until = time.monotonic() + options.seconds
    if options.processes:
        compile_all(options, options.seconds * SHARE)
    todo = jobs(options.kernels, options.tiny)
    for number, job in enumerate(todo):
        if time.monotonic() > until:
            return len(todo) - number
        try:
            chosen_us, others = job.run()
        except Exception as error:  # of one kernel: the others' are worth as much
            results.append(
                {"kernel": job.kernel, "shape": job.shape, "error": f"{type(error).__name__}: {error}"[:300]}
            )
            continue
        best = min(others, key=lambda name: others[name], default=None)
        found: Found = {"kernel": job.kernel, "shape": job.shape, "chosen_us": chosen_us, "tried": len(others)}
        if best is not None:
            found |= {"best": best, "best_us": others[best], "gain": chosen_us / others[best], "us": others}
        results.append(found)
    return 0


def table_of(found: Found) -> Table:
    left = found.get("not_timed", "?")
    table = Table("kernel", "shape", "chosen, us", "best other", "us", "gain", title=f"{left} shapes were not timed")
    for one in found.get("results", ()):
        if "best" not in one:
            table.add_row(one["kernel"], one["shape"], str(one.get("chosen_us", "-")), one.get("error", ""), "", "")
            continue
        times = (f"{one['chosen_us']:.1f}", one["best"], f"{one['best_us']:.1f}", f"{one['gain']:.2f}")
        table.add_row(one["kernel"], one["shape"], *times)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("kernels", nargs="*", help=", ".join(KERNELS))
    made.add_argument("--seconds", type=float, default=240.0)
    made.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="that compile; 0: none")
    made.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parse(made, argv, processes=0)
    options.kernels = options.kernels or list(KERNELS)
    unknown = set(options.kernels) - set(KERNELS)
    if unknown:
        made.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    if options.share:
        compile_share(options)
        return
    with telling(options, table_of) as found:
        results = found["results"] = []
        found["not_timed"] = measure(options, results)


if __name__ == "__main__":
    main()
