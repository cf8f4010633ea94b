"""So many streams that decode at once, over an engine in this process: what a step of them takes, from the step's own
record."""

import time
from dataclasses import dataclass

from benchmarks.scenarios.engine_driver import build_engine
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.ledger.steps import StepRecord
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


class Streams:
    """`most`: streams at once. settings: of `RunnerConfig`. step_tokens: of a step, while prompts are computed."""

    def __init__(
        self, model: str, settings: dict[str, object], most: int, prompt_tokens: int, step_tokens: int = 512
    ) -> None:
        self.settings = settings
        scheduler = SchedulerConfig(enable_prefix_caching=False, max_num_seqs=most, max_num_batched_tokens=step_tokens)
        self.engine: Engine = build_engine(model, scheduler, **{"kv_cache_memory_bytes": KV_BYTES, **settings})  # type: ignore[arg-type]
        self.resolved = self.engine._runner.resolved  # type: ignore[attr-defined]
        self._ops = self.engine._runner.decoder.ops  # type: ignore[attr-defined]
        self._most, self._prompt_tokens, self._count = most, prompt_tokens, 0

    def decode(self, streams: int, steps: int) -> Decoded:
        """`steps` steps in which all of them decode."""
        names = [self._submit(steps) for _ in range(streams)]
        begun: set[str] = set()
        while len(begun) < streams:
            output = self.engine.step()
            begun |= {news.request_id for news in output.outputs if news.token_ids} if output else set()
        before = self._weight_bytes()
        records = [output.record for output in (self.engine.step() for _ in range(steps)) if output and output.record]
        weight_bytes = self._weight_bytes() - before
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()
        if any(record.decode_tokens != streams for record in records) or len(records) != steps:
            raise RuntimeError(f"not all of {streams} streams decoded in each of {steps} steps")
        return Decoded(records, weight_bytes)

    def _weight_bytes(self) -> int:
        return sum(count for name, count in self._ops.bytes_read().items() if name.startswith("weights."))

    def _submit(self, new_tokens: int) -> str:
        self._count += 1
        sampling = SamplingParams(max_tokens=new_tokens + self._most + 1, temperature=0.0, ignore_eos=True, seed=0)
        prompt = tuple((7 * self._count + i) % 90 + 5 for i in range(self._prompt_tokens))
        now_ns = time.monotonic_ns()
        name = f"stream-{self._count}"
        request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=now_ns)
        self.engine.submit(request, now_ns)
        return name
