"""What a decode step costs more with `{"method": "suffix"}` than without, where there is nothing to guess.

    python -m benchmarks.micro.speculation_step [--model FOLDER] [--batches 1 8 32] [--steps 640] [--kind random]

Two engines over one model take turns step by step, one of them guesses, and both answer the same texts
(`scenarios.speculation`). What is compared is the time of some steps in a row, `--group` of them, since a search comes
in some steps only; the excess is the median over the groups, and so is the part that guessing itself says it took.
Both engines write to the same blocks of the KV cache: what the model computes means nothing here.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.report import file_result
from benchmarks.scenarios.speculation import MOST_DRAFTS, Replaying
from benchmarks.scenarios.speculation_texts import KINDS, Ask, Lengths
from splittime.assemble import model_source
from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Runner
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.host_time import freeze_heap
from splittime.engine.engine import Engine
from splittime.runner import compose
from splittime.runner.config import RunnerConfig
from splittime.runner.drafting import DraftingRunner
from splittime.runner.suffix_drafter import SuffixDrafter
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer

MODES = ("off", "on")
PROMPT_TOKENS, WARM_STEPS = 64, 64


class Turn(NamedTuple):
    """One step of an engine. draft_ns: of `ns`, what guessing says that it took. num_tokens: of all requests."""

    ns: int
    draft_ns: int
    num_tokens: int


def crank_of(runner: TorchRunner, answering: Runner, batch: int) -> Crank:
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=max(256, 2 * batch),
        max_model_len=runner.resolved.max_model_len,
        num_blocks=runner.resolved.num_blocks,
        block_size=runner.resolved.block_size,
        enable_prefix_caching=False,
    )
    return Crank(EngineParts(Engine(Scheduler(config)), answering), SystemClock())


def submit(crank: Crank, replaying: Replaying, name: str, asks: Sequence[Ask], num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
    for number, ask in enumerate(asks):
        request_id, now_ns = f"{name}/{number}", time.monotonic_ns()
        replaying.answers[request_id] = ask.answer
        fields = {"prompt_token_ids": ask.prompt, "sampling": sampling, "submitted_ns": now_ns}
        crank.submit(Request(request_id=request_id, **fields), now_ns)


def turn(crank: Crank) -> Turn:
    begin_ns = time.perf_counter_ns()
    output = crank.turn()
    ns = time.perf_counter_ns() - begin_ns
    assert output is not None
    assert output.record is not None
    return Turn(ns, output.record.draft_ns, sum(len(one.token_ids) for one in output.outputs))


def turns(cranks: dict[str, Crank], steps: int) -> dict[str, list[Turn]]:
    """Both by turns, who is first by turns as well, from when all requests decode."""
    found: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    for number in range(steps):
        for mode in MODES if number % 2 else reversed(MODES):
            found[mode].append(turn(cranks[mode]))
    return {mode: some[WARM_STEPS:] for mode, some in found.items()}


def compare(found: dict[str, list[Turn]], group: int) -> dict[str, float]:
    """Returns microseconds of a step, and what the guessing one took more, as a share."""
    sums: dict[str, list[float]] = {mode: [] for mode in MODES}
    excesses, drafts = [], []
    for begin in range(0, len(found["off"]) - group + 1, group):
        off, on = (found[mode][begin : begin + group] for mode in MODES)
        for mode, some in (("off", off), ("on", on)):
            sums[mode].append(sum(one.ns for one in some) / len(some))
        excesses.append(sums["on"][-1] / sums["off"][-1] - 1)
        drafts.append(sum(one.draft_ns for one in on) / group)
    row = {f"{mode}_us": statistics.median(sums[mode]) / 1e3 for mode in MODES}
    row |= {"excess": statistics.median(excesses), "draft_us": statistics.median(drafts) / 1e3}
    middle = {mode: statistics.median(one.ns for one in found[mode]) for mode in MODES}
    return row | {"excess_of_middles": middle["on"] / middle["off"] - 1}


def measure(runner: TorchRunner, replaying: Replaying, asks: Sequence[Ask], settings: Any) -> dict[str, float]:
    drafter = SuffixDrafter(MOST_DRAFTS, runner.resolved.max_model_len)
    answering: dict[str, Runner] = {"off": runner, "on": DraftingRunner(runner, drafter)}
    cranks = {mode: crank_of(runner, answering[mode], len(asks)) for mode in MODES}
    for mode, crank in cranks.items():
        submit(crank, replaying, f"{mode}{len(asks)}{time.monotonic_ns()}", asks, settings.steps + WARM_STEPS + 64)
    row = compare(turns(cranks, settings.steps + WARM_STEPS), settings.group)
    for crank in cranks.values():
        for request_id in crank.engine.scheduler.request_ids:
            crank.abort(request_id)
    replaying.answers.clear()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(model_source.locate(None)))
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=1280)
    parser.add_argument("--group", type=int, default=64, help="steps that are compared together")
    parser.add_argument("--kind", choices=list(KINDS), default="random")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    length = arguments.steps + 2 * WARM_STEPS + 64
    config = {"model_path": arguments.model, "quantization": arguments.quantization, "num_threads": arguments.threads}
    lengths = {"max_num_seqs": max(arguments.batches), "max_model_len": PROMPT_TOKENS + length}
    runner = compose.load_torch_runner(RunnerConfig(**config, **lengths))
    runner.warm_up()
    freeze_heap()  # as a server does
    replaying = Replaying(runner.execution, {})
    runner.execution = replaying  # type: ignore[assignment]
    tokenizer, rows = Tokenizer.load(model_source.locate(None)), []
    for batch in arguments.batches:
        asks = KINDS[arguments.kind](tokenizer, batch, Lengths(PROMPT_TOKENS, length))
        rows.append({"requests": batch, **measure(runner, replaying, asks, arguments)})
        if not arguments.json:
            print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    file_result("speculation_step", {"rows": rows}, vars(arguments), arguments.json)


if __name__ == "__main__":
    main()
