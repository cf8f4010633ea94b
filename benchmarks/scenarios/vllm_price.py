"""What our books cost a vLLM server: tokens/s and TTFT with them over without, by turns.

    python -m benchmarks.scenarios.vllm_price --vllm FOLDER [--model MODEL] [--rounds 5] [--requests 200] [--json]

FOLDER is the environment that vLLM and splittime are installed in. Both servers are up all the time, and each round is
sent to one after the other, in an order that changes. A closed loop of 16 measures what a step costs (tokens a second);
requests one by one measure TTFT. A ratio is of one round; told are their median and range. Goal: within 1 %.

The CPU time that vLLM's processes took for each token, from the system, is beside it: wall time on a shared machine
moves by more than the books cost.
"""

import argparse
import statistics
from typing import Any

from benchmarks.cpu_seconds import cpu_seconds_of_children
from benchmarks.report import file_result
from benchmarks.scenarios.both_books import MAX_MODEL_LEN, VOCAB_SIZE
from benchmarks.server_process import served_vllm
from splittime.assemble import model_source
from splittime.bench.book.requests import response_ttft_ns
from splittime.bench.draw import draw
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.bench.spec import LoadSpec
from splittime.wire.target import RunOptions, Target

LENGTHS = {"input_tokens": "uniform:16:400", "output_tokens": "uniform:16:64"}
OPTIONS = RunOptions(workers=0, timeout_s=300.0)


def crowd(url: str, requests: int, seed: int) -> dict[str, float]:
    """Returns tokens a second of a closed loop, and CPU milliseconds a token."""
    spec = LoadSpec(concurrency=16, num_requests=requests, warm_up_requests=16, seed=seed, **LENGTHS)
    before_s = cpu_seconds_of_children()
    run = run_loop(
        run_schedule(
            draw(spec, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, salt=f"crowd{seed}"),
            [Target(url=url)],
            OPTIONS,
        )
    )
    took_s = cpu_seconds_of_children() - before_s
    tokens = sum(outcome.output_tokens or 0 for outcome in run.measured())
    all_tokens = sum(outcome.output_tokens or 0 for outcome in run.outcomes)
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    return {"tokens_per_s": tokens / seconds, "cpu_ms_per_token": took_s * 1e3 / all_tokens}


def alone(url: str, requests: int, seed: int) -> dict[str, float]:
    """Returns the median TTFT of requests one by one, in ms."""
    spec = LoadSpec(
        concurrency=1, num_requests=requests, warm_up_requests=3, seed=seed, input_tokens="200", output_tokens="4"
    )
    run = run_loop(
        run_schedule(
            draw(spec, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, salt=f"alone{seed}"),
            [Target(url=url)],
            OPTIONS,
        )
    )
    found = [ns / 1e6 for ns in map(response_ttft_ns, run.measured()) if ns is not None]
    return {"ttft_ms": statistics.median(found)}


def compared(urls: dict[str, str], rounds: int, requests: int) -> list[dict[str, dict[str, float]]]:
    """Returns the figures of each round, by arm."""
    found = []
    for number in range(rounds):
        arms = list(urls) if number % 2 else list(reversed(urls))
        found.append(
            {arm: crowd(urls[arm], requests, number) | alone(urls[arm], requests // 4, number) for arm in arms}
        )
    return found


def ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns with over without, by figure: median, least and most of the rounds."""
    told = {}
    for name in rounds[0]["with"]:
        of_rounds = [each["with"][name] / each["without"][name] for each in rounds]
        told[name] = {"median": statistics.median(of_rounds), "least": min(of_rounds), "most": max(of_rounds)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the environment of vLLM and splittime")
    parser.add_argument("--model", help="its folder; default: the packaged one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    served = (arguments.model or str(model_source.locate(None)), "--max-num-seqs", "16", "--max-model-len", "2048")
    with served_vllm(arguments.vllm, *served) as url, served_vllm(arguments.vllm, *served, with_books=False) as plain:
        rounds = compared({"with": url, "without": plain}, arguments.rounds, arguments.requests)
    told: dict[str, Any] = {"ratios": ratios(rounds), "rounds": rounds}
    path = file_result("vllm_price", told, vars(arguments), arguments.json)
    if not arguments.json:
        for name, of_rounds in told["ratios"].items():
            print(f"{name:<18} with / without: " + "  ".join(f"{key} {value:.3f}" for key, value in of_rounds.items()))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
