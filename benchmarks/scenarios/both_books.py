"""Both books of the same requests: 500 of them at a rate that queues, each joined with the server's account of it.

    python -m benchmarks.scenarios.both_books [--requests 500] [--over 1.1] [--run-file FILE] [--vllm FOLDER] [--json]

`splittime serve` (the packaged model, few slots, so that requests queue for one) gets a short closed loop that finds
what it can do, then an open loop with Poisson arrivals at `--over` times that. The client's TTFT and E2E become lines
that sum to them; what neither book explains is the residual. The goal: at most 1 ms or 1 % in the mean.

The engine gets one thread, because server and client need the other core of two: on more, more is fair.

With `--vllm FOLDER`, the environment that vLLM and splittime are installed in, the server is vLLM with our books.
"""

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import file_result
from benchmarks.server_process import served, served_vllm
from splittime.assemble import model_source
from splittime.bench.book.records import Run, save
from splittime.bench.draw import draw
from splittime.bench.event_loop import run_loop
from splittime.bench.join import Book, JoinedBooks, join
from splittime.bench.join_view import render_books
from splittime.bench.run import run_schedule
from splittime.bench.spec import LoadSpec
from splittime.wire.target import RunOptions, Target

VOCAB_SIZE, MAX_MODEL_LEN = 4096, 2048  # of the packaged model
LENGTHS = {"input_tokens": "uniform:16:600", "output_tokens": "uniform:8:64"}


def capacity(url: str, slots: int, requests: int = 60) -> float:
    """Requests a second of a closed loop that keeps every slot busy."""
    spec = LoadSpec(concurrency=slots, num_requests=requests, warm_up_requests=slots, seed=1, **LENGTHS)
    run = carry_out(url, spec)
    return requests / ((run.measured_until_ns - run.measured_from_ns) / 1e9)


def carry_out(url: str, spec: LoadSpec) -> Run:
    schedule = draw(spec, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, salt="both_books")
    return run_loop(run_schedule(schedule, [Target(url=url)], RunOptions(workers=1)))


def figures_of(run: Run, joined: JoinedBooks) -> dict[str, Any]:
    arm = run.arms[0]
    return {
        "requests": joined.intended,
        "joined": len(joined.requests),
        "left_out": joined.left_out,
        "accounts": len(arm.accounts),
        "steps": len(arm.steps),
        "probed_round_trip_ms": None if joined.round_trip_ns is None else joined.round_trip_ns / 1e6,
        "void": run.is_void,
        "failed_checks": [check.sentence for check in run.checks if not check.ok],
        "notes": list(arm.notes),
        "books": [book_figures(book) for book in joined.books],
    }


def book_figures(book: Book) -> dict[str, Any]:
    lines = {
        f"{line.stage}({line.cause})" if line.cause else line.stage: {
            "mean_ms": line.mean_ns / 1e6,
            "p50_ms": line.p50_ns / 1e6,
            "p99_ms": line.p99_ns / 1e6,
            "share": line.share,
        }
        for line in book.lines
    }
    return {
        "figure": book.figure,
        "bucket": book.bucket,
        "requests": book.count,
        "mean_ms": book.mean_ns / 1e6,
        "p50_ms": book.p50_ns / 1e6,
        "p99_ms": book.p99_ns / 1e6,
        "residual_abs_mean_ms": book.residual_abs_mean_ns / 1e6,
        "residual_abs_p99_ms": book.residual_abs_p99_ns / 1e6,
        "is_within_goal": book.is_within_goal,
        "share_of_requests_within_goal": book.share_within_goal,
        "lines": lines,
    }


def server(arguments: argparse.Namespace) -> AbstractContextManager[str]:
    slots = ("--max-num-seqs", str(arguments.slots))
    if arguments.vllm is None:
        return served(*slots, "--num-threads", str(arguments.threads), "--max-queued-requests", "100000")
    return served_vllm(arguments.vllm, str(model_source.locate(None)), *slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--over", type=float, default=1.1, help="times the rate that a closed loop reached")
    parser.add_argument("--slots", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--run-file", type=Path, help="keep the whole run here")
    parser.add_argument("--vllm", help="the environment of a vLLM to serve with instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with server(arguments) as url:
        rate = capacity(url, arguments.slots) * arguments.over
        print(f"{rate:.1f} requests a second", file=sys.stderr)
        spec = LoadSpec(
            rate=rate, num_requests=arguments.requests, warm_up_requests=20, cool_down_s=2.0, seed=2, **LENGTHS
        )
        run = carry_out(url, spec)
    joined = join(run)
    if arguments.run_file is not None:
        save(run, arguments.run_file)
    figures = {"rate_per_s": rate, **figures_of(run, joined)}
    path = file_result("both_books_vllm" if arguments.vllm else "both_books", figures, vars(arguments), arguments.json)
    if not arguments.json:
        Console(width=140).print(render_books(joined))
        print(*figures["failed_checks"], *figures["notes"], f"written to {path}", sep="\n")


if __name__ == "__main__":
    main()
