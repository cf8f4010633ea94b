"""Tokens a second with speculation over without, by kind of text and number of requests. The engine alone, no HTTP.

    python -m benchmarks.scenarios.speculation [--model FOLDER] [--quantization int8] [--threads 2] [--repeats 3]
        [--modes adaptive self ...] [--sizes 1 4 16 64] [--kinds code ...] [--right 0.8] [--small] [--json]

All requests of a run come at once, and what counts is the time from when the last has its first token until all have
ended. `off` and the modes take turns:

    adaptive     what `{"method": "suffix"}` does
    fixed        eight drafts from the text a row, whatever they cost
    self         what `{"method": "self"}` does
    draft_model  what `{"method": "draft_model"}` does with the packaged draft model
    mtp          what `{"method": "mtp"}` does with the head in `--head`

Answers are replayed: the model computes every row, drafts included, and then what it chose is replaced by the next
token of a text (`speculation_texts`). So acceptance is that of real text on any weights, also on random ones. A draft
model guesses these texts as well as it can. With random weights it cannot, so `--right` says which share of its tokens
is replaced by the right one, and the others by a wrong one.
"""

import argparse
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.report import file_result
from benchmarks.scenarios.speculation_texts import KINDS, Ask, Lengths
from splittime.assemble import model_source
from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Runner, StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.host_time import freeze_heap
from splittime.engine.engine import Engine
from splittime.runner import compose, draft_sources
from splittime.runner.config import RunnerConfig, SpeculativeConfig
from splittime.runner.drafting import Draft, Drafter, DraftingRunner, Look
from splittime.runner.suffix_drafter import DraftedText, SuffixDrafter
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer

MOST_DRAFTS, FIXED_DRAFTS = 16, 8
MODES = ("adaptive", "fixed", "self", "draft_model", "mtp")
BY_A_MODEL = {
    "self": SpeculativeConfig(method="self"),
    "draft_model": SpeculativeConfig(method="draft_model", model="code-draft"),
}


class Replaying:
    """An `Execution` whose choices are replaced by the next token of its request's answer; by a wrong one, where fewer
    than all are to be right."""

    def __init__(self, execution: Any, answers: dict[str, tuple[int, ...]], right: float = 1.0) -> None:
        self._execution, self.answers, self._right = execution, answers, right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._execution, name)

    def choose(self, slots: Sequence[Any], counts: Sequence[int], raw: Any, logits: Any, allowed: Any) -> Any:
        chosen = self._execution.choose(slots, counts, raw, logits, allowed)
        tokens = chosen.tokens()
        for line, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            answer = self.answers.get(slot.admitted.request_id, ())
            if count < len(answer):
                drawn = zlib.crc32(f"{slot.admitted.request_id} {count}".encode()) / 2**32
                tokens[line] = answer[count] ^ (drawn >= self._right)
        return chosen._replace(tokens=lambda: tokens)


class Fixed(SuffixDrafter):
    """Looks in each step, and says of no draft how likely it is, so that all are verified."""

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        return super().draft(msgspec.structs.replace(plan, least_survival=0.0), result, Look.EVERYWHERE)

    def _draft(self, line: int, request: DraftedText, least_survival: float, explores: bool) -> Draft | None:
        found = self._follower.drafts(line)[:FIXED_DRAFTS]
        return Draft(tuple(found), ()) if found else None


class Bench:
    """right: which share of a draft model's tokens is right; None: what it guesses itself counts. head: its folder."""

    def __init__(
        self, runner: TorchRunner, lengths: Lengths, right: float | None = None, head: str | None = None
    ) -> None:
        self.replaying = Replaying(runner.execution, {})
        runner.execution = self.replaying  # type: ignore[assignment]
        self._runner, self._lengths, self._right, self._num_runs = runner, lengths, right, 0
        self._head, self._told = head, {id(runner): runner.on_hidden}  # what each mode wants to be told of steps

    def drafting(self, mode: str) -> Runner:
        if mode == "off":
            return self._runner
        if mode in BY_A_MODEL or mode == "mtp":
            asked = BY_A_MODEL.get(mode) or SpeculativeConfig(method="mtp", model=self._head)
            drafting = DraftingRunner(self._runner, self._model(asked))
            self._told[id(drafting)] = self._runner.on_hidden
            return drafting
        made = {"adaptive": SuffixDrafter, "fixed": Fixed}
        return DraftingRunner(self._runner, made[mode](MOST_DRAFTS, self._runner.resolved.max_model_len))

    def _model(self, asked: SpeculativeConfig) -> Drafter:
        path = None if asked.model is None else str(model_source.locate(asked.model))
        self._runner.config = msgspec.structs.replace(
            self._runner.config, speculative_config=msgspec.json.encode(asked).decode(), draft_model_path=path
        )
        make = draft_sources.head_drafter if asked.method == "mtp" else draft_sources.model_drafter
        drafter = make(self._runner, asked)
        if self._right is not None:
            drafter.runner.execution = Replaying(drafter.runner.execution, self.replaying.answers, self._right)  # type: ignore[assignment]
        return drafter

    def run(self, runner: Runner, asks: Sequence[Ask]) -> dict[str, float]:
        """Returns tokens a second from when all had their first token, and how many drafts were verified and right."""
        resolved, lengths = self._runner.resolved, self._lengths
        config = SchedulerConfig(
            max_num_seqs=len(asks),
            max_num_batched_tokens=max(256, 2 * len(asks)),
            max_model_len=resolved.max_model_len,
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            enable_prefix_caching=False,
        )
        scheduler = Scheduler(config)
        self._runner.on_hidden = self._told.get(id(runner))
        crank, self._num_runs = Crank(EngineParts(Engine(scheduler), runner), SystemClock()), self._num_runs + 1
        sampling = SamplingParams(max_tokens=lengths.answer, temperature=0.0, ignore_eos=True, seed=0)
        for number, ask in enumerate(asks):
            name = f"{self._num_runs}/{number}"
            self.replaying.answers[name] = ask.answer
            now_ns = time.monotonic_ns()
            asked = Request(request_id=name, prompt_token_ids=ask.prompt, sampling=sampling, submitted_ns=now_ns)
            crank.submit(asked, now_ns)
        waiting = {f"{self._num_runs}/{number}" for number in range(len(asks))}
        num_tokens, begin_ns = 0, 0
        while crank.has_work:
            output = crank.turn()
            for one in output.outputs if output is not None else ():
                num_tokens += len(one.token_ids) if begin_ns else 0
                waiting.discard(one.request_id) if one.token_ids else None
            if not waiting and not begin_ns:
                begin_ns = time.monotonic_ns()
        self.replaying.answers.clear()
        counts = scheduler.counts
        rate = num_tokens / (time.monotonic_ns() - begin_ns) * 1e9
        return {"tokens_per_s": rate, "drafts": counts.draft_tokens, "right": counts.accepted_draft_tokens}


def cell(bench: Bench, modes: Sequence[str], asks: Sequence[Ask], size: int, repeats: int) -> dict[str, Any]:
    """One kind of text with so many requests at once: the modes by turns, each with other requests in each round. What
    learns has answered one round before."""
    runners = {mode: bench.drafting(mode) for mode in modes}
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number in range(repeats + 1):
        some = asks[number * size : (number + 1) * size]
        for mode in modes if number % 2 == 0 else reversed(modes):
            told = bench.run(runners[mode], some)
            if number:
                found[mode].append(told)
    rates = {mode: [one["tokens_per_s"] for one in runs] for mode, runs in found.items()}
    row: dict[str, Any] = {"tokens_per_s_off": statistics.median(rates["off"])}
    for mode in modes[1:]:
        ratios = [one / off for one, off in zip(rates[mode], rates["off"], strict=True)]
        drafts, right = (sum(one[name] for one in found[mode]) for name in ("drafts", "right"))
        row |= {f"{mode}_ratio": statistics.median(ratios), f"{mode}_from": min(ratios), f"{mode}_to": max(ratios)}
        row |= {f"{mode}_drafts": drafts, f"{mode}_right": right / drafts if drafts else None}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(model_source.locate(None)))
    parser.add_argument("--quantization")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["adaptive", "fixed"], metavar="MODE")
    parser.add_argument("--head", help="the folder of a head, for mtp")
    parser.add_argument("--right", type=float, help="share of a draft model's tokens that are right")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--answer", type=int, default=192, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes, lengths, repeats = arguments.sizes, Lengths(arguments.prompt, arguments.answer), arguments.repeats
    if arguments.small:
        sizes, lengths, repeats = [2], Lengths(32, 12), 1
    settings = {
        "model_path": arguments.model,
        "quantization": arguments.quantization,
        "num_threads": arguments.threads,
        "load_format": arguments.load_format,
        "max_num_seqs": max(sizes),
        "max_model_len": sum(lengths) + MOST_DRAFTS,
    }
    runner = compose.load_torch_runner(RunnerConfig(**settings))
    runner.warm_up()
    freeze_heap()  # as a server does
    tokenizer = Tokenizer.load(model_source.locate(None))
    bench = Bench(runner, lengths, arguments.right, arguments.head)
    rows = []
    for kind in arguments.kinds:
        asks = KINDS[kind](tokenizer, (repeats + 1) * max(sizes), lengths)
        for size in sizes:
            rows.append({"kind": kind, "requests": size, **cell(bench, ["off", *arguments.modes], asks, size, repeats)})
            if not arguments.json:
                print(_line(rows[-1], arguments.modes), flush=True)
    path = file_result("speculation", {"rows": rows}, vars(arguments), arguments.json)
    if not arguments.json:
        print(f"written to {path}")


def _line(row: Mapping[str, Any], modes: Sequence[str]) -> str:
    told = [f"{row['kind']:<10} {row['requests']:>3} at once {row['tokens_per_s_off']:7.0f}/s"]
    for mode in modes:
        right = row[f"{mode}_right"]
        spread = f"({row[f'{mode}_from']:.2f} to {row[f'{mode}_to']:.2f})"
        share = "no drafts" if right is None else f"{row[f'{mode}_drafts']:.0f} drafts, {right:.0%} right"
        told.append(f"{mode} {row[f'{mode}_ratio']:.2f} {spread}, {share}")
    return "; ".join(told)


if __name__ == "__main__":
    main()
