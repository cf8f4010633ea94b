"""So many streams that decode at once, over an engine in this process: what a step of them takes, from the step's own
record."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.scenarios.engine_driver import crank_over, load_runner
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, InlineDriver
from splittime.ledger.steps import StepRecord
from splittime.runner.config import Resolved
from splittime.scheduler.config import SchedulerConfig

KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Decoded:
    """Consecutive steps, and the bytes of weights that their products read."""

    records: list[StepRecord]
    weight_bytes: int

    @property
    def wall_s(self) -> float:
        return (self.records[-1].end_ns - self.records[0].begin_ns) / 1e9

    @property
    def tokens_per_s(self) -> float:
        return sum(record.decode_tokens for record in self.records) / self.wall_s

    def windows(self, count: int) -> "list[Decoded]":
        """So many parts one after the other, of as many steps each; what is left over is left out."""
        size = len(self.records) // count
        weight_bytes = self.weight_bytes * size // len(self.records)
        return [Decoded(self.records[at * size : (at + 1) * size], weight_bytes) for at in range(count)]


class Streams:
    """`most`: streams at once. settings: of `RunnerConfig`. step_tokens: of a step, while prompts are computed.

    runner: may be changed between two calls of `decode` if `begin_anew` is called then. adapters: ids that the streams
    use, by turns.
    """

    adapters: tuple[str, ...] = ("",)

    def __init__(
        self, model: str, settings: dict[str, object], most: int, prompt_tokens: int, step_tokens: int = 512
    ) -> None:
        self.settings = settings
        self._scheduler = SchedulerConfig(
            enable_prefix_caching=False, max_num_seqs=most, max_num_batched_tokens=max(most, step_tokens)
        )
        self.runner, self._asked = load_runner(
            model, self._scheduler, **{"kv_cache_memory_bytes": KV_BYTES, **settings}
        )
        self._prompt_tokens, self._count = prompt_tokens, 0
        self.begin_anew(self._asked.async_scheduling)

    @property
    def resolved(self) -> Resolved:
        return self.runner.resolved

    def begin_anew(self, is_ahead: bool) -> None:
        """Over the same runner, planning ahead or not."""
        asked = msgspec.structs.replace(self._asked, async_scheduling=is_ahead)
        self.crank: Crank = crank_over(self.runner, self._scheduler, asked)

    def decode(self, streams: int, steps: int, around: AbstractContextManager[Any] | None = None) -> Decoded:
        """`steps` steps in which all of them decode, within `around`."""
        spare = streams + -(-streams * self._prompt_tokens // max(1, self._scheduler.max_num_batched_tokens - streams))
        names = [self._submit(steps + spare + 2) for _ in range(streams)]
        begun: set[str] = set()
        while len(begun) < streams:
            output = self.crank.turn()
            begun |= {news.request_id for news in output.outputs if news.token_ids} if output else set()
        before = self._weight_bytes()
        with around or nullcontext():
            outputs = [self.crank.turn() for _ in range(steps)]
        records = [output.record for output in outputs if output and output.record]
        weight_bytes = self._weight_bytes() - before
        for name in names:
            self.crank.abort(name)
        InlineDriver(self.crank).run_dry()
        if any(record.decode_tokens != streams for record in records) or len(records) != steps:
            raise RuntimeError(f"not all of {streams} streams decoded in each of {steps} steps")
        return Decoded(records, weight_bytes)

    def _weight_bytes(self) -> int:
        return sum(count for name, count in self.runner.decoder.ops.bytes_read().items() if name.startswith("weights."))

    def _submit(self, max_tokens: int) -> str:
        self._count += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        prompt = tuple((7 * self._count + i) % 90 + 5 for i in range(self._prompt_tokens))
        now_ns = time.monotonic_ns()
        name = f"stream-{self._count}"
        adapter = self.adapters[self._count % len(self.adapters)]
        given = {"prompt_token_ids": prompt, "sampling": sampling, "submitted_ns": now_ns, "adapter": adapter}
        request = Request(request_id=name, **given)
        self.crank.submit(request, now_ns)
        return name
