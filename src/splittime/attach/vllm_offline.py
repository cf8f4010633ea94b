"""vLLM's own scheduler and KV cache manager without weights, workers or an engine core, under a virtual clock.

    scheduler = offline_scheduler(settings, clock, time_of)
    scheduler.add_request(offline_request(traced, settings))
    planned = plan_step(scheduler)                               the plan's own time passes
    clock.advance(...)                                           the device's, which `scheduler.books.planned` tells
    scheduler.update_from_output(planned.plan, sampled(scheduler, planned, answers))

Its books are those of a live server: the same `Bookkeeping` over the same class. Its model is a `config.json` of one
tiny layer in a temporary folder: the scheduler asks a model for its length alone.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from splittime.attach.engine_books import BegunStep, DecidedPlan, EngineBooks
from splittime.attach.request_book import EndedBook, FirstTokenBook
from splittime.attach.settings import VllmSettings
from splittime.attach.vllm_scheduler import RECEIVED_NS, Bookkeeping
from splittime.core.clock import VirtualClock
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.costed import Answers
from splittime.simulate.shape import StepTime
from splittime.simulate.trace import TracedRequest

TimeOf = Callable[[DecidedPlan, int], StepTime]

TINY_LAYER = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8}


class OfflineBooks(EngineBooks):
    """The books of an engine for whose planning and committing time passes. time_of: what a step takes. planned, ended:
    what that step takes which was planned, or has ended, last."""

    def __init__(self, clock: VirtualClock, time_of: TimeOf, plans_ahead: bool) -> None:
        super().__init__(plans_ahead, name=str)  # a ledger's names, whatever wrote it
        self.planned = self.ended = StepTime()
        self._times: dict[int, StepTime] = {}  # of the steps that run, by their numbers
        self._clock, self._time_of = clock, time_of

    def begin(self, plan: DecidedPlan, begin_ns: int, planned_ns: int) -> BegunStep | None:
        if plan.rows:
            self.planned = self._times[self.num_steps + 1] = self._time_of(plan, begin_ns)
            self._clock.advance(self.planned.plan_ns)
        return super().begin(plan, begin_ns, self._clock.now_ns())

    def end_step(self, flight: BegunStep, accepted: dict[str, int], ready_ns: int, end_ns: int) -> StepRecord:
        self.ended = self._times.pop(flight.step_id)
        self._clock.advance(self.ended.commit_ns)
        return super().end_step(flight, accepted, ready_ns, self._clock.now_ns())


class Kept:
    """What the books have told since it was last asked."""

    def __init__(self) -> None:
        self._ended: list[EndedBook] = []
        self._record: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        self._record = record

    def book(self, client: int, book: FirstTokenBook | EndedBook) -> None:
        if isinstance(book, EndedBook):
            self._ended.append(book)

    def stop(self, why: str) -> None:
        raise RuntimeError(why)

    def close(self) -> None:
        """Nothing is open."""

    def take(self) -> tuple[list[EndedBook], StepRecord | None]:
        taken = self._ended, self._record
        self._ended, self._record = [], None
        return taken


class OfflineScheduler(Bookkeeping, Scheduler):
    """vLLM's scheduler with books under a virtual clock."""

    def __init__(self, clock: VirtualClock, time_of: TimeOf, **kwargs: Any) -> None:
        self._st_now = clock.now_ns
        self.told = Kept()
        super().__init__(**kwargs)
        plans_ahead = bool(self.vllm_config.scheduler_config.async_scheduling)
        self.books = self._st_books = OfflineBooks(clock, time_of, plans_ahead)

    def _st_open_mail(self) -> Kept:
        return self.told

    def _st_fail(self, error: Exception) -> None:
        raise error


class OfflineAsyncScheduler(OfflineScheduler, AsyncScheduler):
    """The one that vLLM takes where it plans a step while another runs."""


def offline_scheduler(settings: VllmSettings, clock: VirtualClock, time_of: TimeOf) -> OfflineScheduler:
    """Returns the scheduler that a server of these settings has, with nothing in it. time_of: what a step takes that
    has this plan and begins at this instant."""
    config = _vllm_config(settings)
    spec = FullAttentionSpec(settings.block_size, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
    num_blocks = settings.num_blocks + 1  # one is the null block
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = settings.async_scheduling  # which vLLM takes back on a CPU
    return (OfflineAsyncScheduler if settings.async_scheduling else OfflineScheduler)(
        clock,
        time_of,
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_size,
    )


def _vllm_config(settings: VllmSettings) -> VllmConfig:
    length = settings.max_model_len
    with tempfile.TemporaryDirectory() as folder:
        told = {**TINY, **TINY_LAYER, "max_position_embeddings": length}
        (Path(folder) / "config.json").write_text(json.dumps(told))
        return VllmConfig(
            model_config=ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=length
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=length, is_encoder_decoder=False, async_scheduling=False, **_scheduling(settings)
            ),
            cache_config=CacheConfig(
                block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
            ),
            device_config=DeviceConfig(device="cpu"),
        )


def _scheduling(settings: VllmSettings) -> dict[str, Any]:
    """Returns the settings that this release has: no release has all."""
    known = {field.name for field in fields(SchedulerConfig)}
    return {
        name: value
        for name, value in msgspec.structs.asdict(settings).items()
        if name in known - {"max_model_len", "async_scheduling"}
    }


@lru_cache(4)
def _hasher(block_size: int) -> Callable[[Request], Any]:
    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    return get_request_block_hasher(block_size, hash_of)


def offline_request(traced: TracedRequest, settings: VllmSettings) -> Request:
    """Returns the request as vLLM's engine has it. Of one priority, it goes by when the API process had read it."""
    asked = traced.request
    read = next((mark.begin_ns for mark in traced.marks if mark.stage is Stage.TOKENIZE), traced.arrived_ns)
    request = Request(
        request_id=asked.request_id,
        prompt_token_ids=list(asked.prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=asked.sampling.max_tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=asked.sampling.prompt_logprobs,
            stop_token_ids=list(asked.sampling.stop_token_ids),
        ),
        pooling_params=None,
        arrival_time=read,
        cache_salt=asked.cache_salt or None,
        priority=asked.priority,
        block_hasher=_hasher(settings.block_size) if settings.enable_prefix_caching else None,
    )
    setattr(request, RECEIVED_NS, traced.received_ns)
    return request


class PlannedStep(NamedTuple):
    """vLLM's plan. samples: the requests whose tokens are all computed with it: each samples one."""

    plan: Any
    samples: frozenset[str]


def plan_step(scheduler: OfflineScheduler) -> PlannedStep:
    """Returns the next step; it may have no rows."""
    plan = scheduler.schedule()
    rows = plan.num_scheduled_tokens
    return PlannedStep(plan, frozenset(name for name in rows if not scheduler.requests[name].is_prefill_chunk))


def sampled(scheduler: OfflineScheduler, planned: PlannedStep, answers: Answers) -> ModelRunnerOutput:
    """Returns what a model would return. A request that has ended meanwhile gets nothing."""
    names = list(planned.plan.num_scheduled_tokens)
    requests = [scheduler.requests.get(name) for name in names]
    tokens = [
        [] if each is None or name not in planned.samples else answers.tokens(name, each.num_tokens, 1)
        for name, each in zip(names, requests, strict=True)
    ]
    return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)
