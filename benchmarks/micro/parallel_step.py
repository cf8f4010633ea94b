"""What it costs to share a model among ranks: the same steps by one process and by several, in turn.

    python -m benchmarks.micro.parallel_step                    a random Llama of 50 MB, by 1 rank and by 2
    python -m benchmarks.micro.parallel_step --ranks 1 2 4      on cards, one for each rank
    python -m benchmarks.micro.parallel_step --model FOLDER     another model
    python -m benchmarks.micro.parallel_step --json             the same as one JSON line

On a CPU every rank has one thread, so that two ranks have the arithmetic of two threads and half of the weights each;
`sums` is the first rank's time in collectives. (On cards the host does not wait for them, so they are not told apart.)
Rounds go through all contenders, so that a burst of other load meets each of them. A figure is the median.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.micro.model_step import LLAMA_1B, Steps, spread, timed, write_random_llama
from benchmarks.report import file_result
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.ranks.group import RankGroup

SMALL = {
    **LLAMA_1B,
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
CONTEXT_TOKENS, PROMPT_TOKENS = 64, 256
BATCHES = (1, 8)
ROUNDS, STEPS = 5, 10


class Contender:
    """A runner over so many ranks, and what it was timed at, by name of the work."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        config = RunnerConfig(
            model_path=str(folder), num_threads=ranks, tensor_parallel_size=ranks, max_num_seqs=16, packed_cache="off"
        )
        begin_ns = time.monotonic_ns()
        self.runner = load_torch_runner(config)
        self.load_s = (time.monotonic_ns() - begin_ns) / 1e9
        self.sums_s = 0.0
        lead = self.runner.lead
        if lead is not None and lead.group.device.type == "cpu":
            self._watch_sums(lead.group)
        self.runner.warm_up()
        self.steps_s: dict[str, list[float]] = {}
        self.shares_s: dict[str, list[float]] = {}

    def _watch_sums(self, group: RankGroup) -> None:
        for name in ("sum", "join"):
            setattr(group, name, self._timing(getattr(group, name)))

    def _timing(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            found = collective(*arguments)
            self.sums_s += (time.perf_counter_ns() - begin_ns) / 1e9
            return found

        return call

    def round(self) -> None:
        for batch in BATCHES:
            steps = Steps(self.runner, batch, CONTEXT_TOKENS, STEPS)
            steps.prefill()
            for _ in range(STEPS):
                self._time(f"decode of {batch}", steps.decode)
            steps.release()
        steps = Steps(self.runner, 1, PROMPT_TOKENS, 1)
        self._time(f"prompt of {PROMPT_TOKENS}", steps.prefill)
        steps.release()

    def _time(self, name: str, step: Callable[[], None]) -> None:
        self.sums_s = 0.0
        self.steps_s.setdefault(name, []).append(timed(step))
        self.shares_s.setdefault(name, []).append(self.sums_s)

    def figures(self) -> dict[str, Any]:
        resolved = self.runner.resolved
        steps = {
            name: {**spread(samples), "sums_ms": spread(self.shares_s[name])["median_ms"]}
            for name, samples in self.steps_s.items()
        }
        facts = {"ranks": self.ranks, "load_s": self.load_s, "weights_mb_a_rank": resolved.weights_bytes / 1e6}
        return {**facts, "kernels": resolved.kernels, "steps": steps}


def measure(model: Path | None, counts: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        if model is None:
            write_random_llama(Path(name), SMALL)
        contenders = [Contender(model or Path(name), ranks) for ranks in counts]
        for _ in range(ROUNDS):
            for contender in contenders:
                contender.round()
    return {"contenders": [contender.figures() for contender in contenders]}


def show(result: dict[str, Any]) -> None:
    table = Table("ranks", "work", "median ms", "in sums ms", "lower quartile ms")
    for contender in result["contenders"]:
        for name, one in contender["steps"].items():
            figures = (f"{one[key]:.2f}" for key in ("median_ms", "sums_ms", "p25_ms"))
            table.add_row(str(contender["ranks"]), name, *figures)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: a random Llama of 50 MB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.model, options.ranks)
    file_result("parallel_step", result, vars(options), options.json)
    if not options.json:
        show(result)


if __name__ == "__main__":
    main()
