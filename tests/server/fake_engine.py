"""A scripted engine in memory: no model, declared tokens, real steps, real marks.

Every step takes `step_s`; each running request gets one token of its script a step; a prompt takes one step for each
`prefill_chunk` tokens. `max_running` slots, then a queue. `die()` does what a crashed engine process does.
"""

import asyncio
import time
from array import array
from collections.abc import Callable

from splittime.core.engine import (
    ASLEEP,
    AWAKE,
    FALLING_ASLEEP,
    BlocksAsk,
    BlocksTold,
    EngineStats,
    Rest,
    SleepAsk,
    SleepReport,
)
from splittime.core.errors import Conflict, ErrorInfo, Overloaded
from splittime.core.request import FinishReason, Request
from splittime.core.step import PAIR, TokenLogprob
from splittime.drive.client import StreamItem
from splittime.drive.residency import refusal
from splittime.ledger.account import Account, Mark
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput

Script = Callable[[Request], list[int]]


class Running:
    def __init__(self, request: Request, script: list[int]) -> None:
        self.request, self.script = request, script
        self.items: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        self.num_marks_sent = 0
        self.num_computed = 0
        self.num_out = 0
        self.aborted_at_step: int | None = None

    @property
    def aborted(self) -> bool:
        return self.aborted_at_step is not None

    def new_marks(self) -> tuple[Mark, ...]:
        new = tuple(self.account.marks[self.num_marks_sent :])
        self.num_marks_sent = len(self.account.marks)
        return new


class FakeEngine:
    def __init__(
        self,
        script: Script,
        *,
        step_s: float = 0.0005,
        max_running: int = 64,
        prefill_chunk: int = 512,
        cached_tokens: int = 0,
    ) -> None:
        self.script, self.step_s, self.max_running, self.prefill_chunk = script, step_s, max_running, prefill_chunk
        self.cached_tokens = cached_tokens
        self.is_ready = True
        self.paused = False
        self.rest_now = Rest()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.streams: dict[str, Running] = {}
        self.submitted: list[Request] = []
        self.aborts: list[str] = []
        self.steps_to_abort: list[int] = []  # of each that was aborted, from the call to its end
        self.adapters: dict[str, str] = {}
        self.adapter_fault: Exception | None = None
        self.knobs_now: dict[str, object] = {"max_num_seqs": max_running}
        self._step_id = 0
        self._task: asyncio.Task | None = None

    # ---- EngineClient

    def submit(self, request: Request) -> None:
        if self.rest_now.state != AWAKE:
            raise refusal(self.rest_now)
        if not self.is_ready:
            raise Overloaded("no engine", status=503, code="engine_not_ready", retry_after_s=2.0)
        if request.request_id in self.streams:
            raise Conflict(f"{request.request_id} is in flight")
        self.submitted.append(request)
        state = Running(request, self.script(request))
        state.account.enter(Stage.QUEUE, time.monotonic_ns(), Cause.BATCH_SLOTS)
        self.streams[request.request_id] = state
        self.waiting.append(state)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stream(self, request_id: str):
        state = self.streams[request_id]
        try:
            while True:
                item = await state.items.get()
                yield item
                if item.output.finish_reason is not None:
                    return
        finally:
            self.streams.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if request_id in self.streams and not self.streams[request_id].aborted:
            self.streams[request_id].aborted_at_step = self._step_id

    def stats(self) -> EngineStats:
        return EngineStats(
            now_ns=time.monotonic_ns(),
            num_waiting=len(self.waiting),
            waiting_for={"batch_slots": len(self.waiting)} if self.waiting else {},
            num_running=len(self.running),
            blocks_used=len(self.running),
            blocks_total=100,
            rest=self.rest_now,
            knobs=dict(self.knobs_now),
        )

    def facts(self) -> ServerFacts | None:
        return None

    async def configure(self, knobs, *, lasts=True):
        from splittime.core.errors import ConfigError
        from splittime.core.settings import settings_of
        from splittime.scheduler.config import SchedulerConfig

        for name in knobs:
            if name not in self.knobs_now:
                raise ConfigError(f"no knob {name!r}", param=name)
            if type(knobs[name]) is not type(self.knobs_now[name]):
                raise ConfigError(f"{name} is of another type", param=name)
            bound = next((one for one in settings_of(SchedulerConfig) if one.name == name), None)
            if bound is not None and bound.fault(knobs[name]) is not None:  # as the scheduler says
                raise ConfigError(f"{name} {bound.fault(knobs[name])}", param=name)
        self.knobs_now.update(knobs)
        return dict(self.knobs_now)

    async def load_adapter(self, adapter_id: str, folder: str) -> int:
        await asyncio.sleep(self.step_s)
        if self.adapter_fault is not None:
            raise self.adapter_fault
        self.adapters[adapter_id] = folder
        return 1

    def unload_adapter(self, adapter_id: str) -> None:
        del self.adapters[adapter_id]

    @property
    def rest(self) -> Rest:
        return self.rest_now

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        """As soon as nothing runs."""
        if self.rest_now.state != AWAKE:
            raise Conflict("it is not awake", code=self.rest_now.state)
        self.rest_now = Rest(FALLING_ASLEEP)
        while self.waiting or self.running:
            await asyncio.sleep(self.step_s)
        self.rest_now = Rest(ASLEEP, ask.level)
        return SleepReport(action="sleep", level=ask.level, begin_ns=5, end_ns=9_000_005, parts=(("kv", 5, 2_000_005),))

    async def wake(self) -> SleepReport:
        level, self.rest_now = self.rest_now.level, Rest()
        return SleepReport(action="wake", level=level, changed=level > 0, slept_ns=7_000_000_000)

    async def export(self, ask: BlocksAsk) -> BlocksTold | None:
        """Has one block, of the layout "fake"."""
        has = ask.layout == "fake"
        return BlocksTold((b"n" * 16,), (b"content",)) if has else None

    # ---- the steps

    async def _run(self) -> None:
        while self.waiting or self.running:
            if self.paused:
                await asyncio.sleep(self.step_s)
                self._reap(time.monotonic_ns())
                continue
            self._admit(time.monotonic_ns())
            await asyncio.sleep(self.step_s)
            self._step_id += 1
            now_ns = time.monotonic_ns()
            for state in list(self.running):
                if not state.aborted:
                    self._advance(state, now_ns)
            self._reap(now_ns)

    def _admit(self, now_ns: int) -> None:
        while self.waiting and len(self.running) < self.max_running:
            state = self.waiting.pop(0)
            state.account.enter(Stage.PREFILL, now_ns)
            self.running.append(state)

    def _advance(self, state: Running, now_ns: int) -> None:
        request, sampling = state.request, state.request.sampling
        state.num_computed += self.prefill_chunk
        if state.num_computed < len(request.prompt_token_ids):
            self._put(state, now_ns, RequestOutput(request.request_id, marks=state.new_marks()))
            return
        if sampling.pooling:
            self._embed(state, now_ns)
            return
        state.account.enter(Stage.DECODE, now_ns)
        token_id = state.script[state.num_out % len(state.script)]
        state.num_out += 1
        stop = (set(request.eos_token_ids) if not sampling.ignore_eos else set()) | set(sampling.stop_token_ids)
        reason = None
        if token_id in stop and state.num_out > sampling.min_tokens:
            reason = FinishReason.STOP
        elif state.num_out >= (sampling.max_tokens or 1):
            reason = FinishReason.LENGTH
        self._emit(state, token_id, reason, now_ns)

    def _emit(self, state: Running, token_id: int, reason: FinishReason | None, now_ns: int) -> None:
        request, sampling = state.request, state.request.sampling
        first = state.num_out == 1
        if reason is not None:
            state.account.enter(Stage.DELIVER, now_ns)
            self.running.remove(state)
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            top = b"".join(PAIR.pack(token_id + i, -0.5 - i) for i in range(sampling.logprobs))
            logprobs = (TokenLogprob(token_id, -0.5, 1, top),)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if first and sampling.prompt_logprobs is not None:
            others = b"".join(PAIR.pack(1 + i, -1.5 - i) for i in range(sampling.prompt_logprobs - 1))
            each = ((t, PAIR.pack(t, -1.0) + others) for t in request.prompt_token_ids[1:])
            prompt_logprobs = tuple(TokenLogprob(t, -1.0, 1, top) for t, top in each)
        output = RequestOutput(
            request.request_id,
            token_ids=(token_id,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            marks=state.new_marks(),
            finish_reason=reason,
            num_cached_tokens=self.cached_tokens if first else None,
            freed_ns=now_ns if reason is not None else None,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
        )
        self._put(state, now_ns, output)

    def _embed(self, state: Running, now_ns: int) -> None:
        """Eight values, of which the first two tell the prompt apart; of logits two, and of a score the latter of them,
        by the prompt's length."""
        request = state.request
        ids = request.prompt_token_ids
        scores = {"logits": [3, len(ids) / 100], "score": [len(ids) / 100]}
        values = scores.get(request.sampling.pooling, [len(ids), sum(ids) + 1, 3, 4, 0, 0, 0, 12])
        state.account.enter(Stage.DELIVER, now_ns)
        self.running.remove(state)
        output = RequestOutput(
            request.request_id,
            marks=state.new_marks(),
            finish_reason=FinishReason.STOP,
            num_cached_tokens=self.cached_tokens,
            freed_ns=now_ns,
            pooled=array("f", values).tobytes(),
        )
        self._put(state, now_ns, output)

    def _put(self, state: Running, now_ns: int, output: RequestOutput) -> None:
        state.items.put_nowait(StreamItem(self._step_id, now_ns, output))

    def _reap(self, now_ns: int) -> None:
        """End what was aborted and what is past its deadline."""
        for group in (self.waiting, self.running):
            for state in list(group):
                deadline_ns = state.request.deadline_ns
                if state.aborted:
                    self._end(group, state, FinishReason.ABORT, now_ns)
                elif deadline_ns is not None and now_ns >= deadline_ns:
                    self._end(group, state, FinishReason.DEADLINE, now_ns)

    def _end(self, group: list[Running], state: Running, reason: FinishReason, now_ns: int) -> None:
        group.remove(state)
        if state.aborted_at_step is not None:
            self.steps_to_abort.append(self._step_id - state.aborted_at_step)
        state.account.enter(Stage.DELIVER, now_ns)
        marks = state.new_marks()
        self._put(
            state, now_ns, RequestOutput(state.request.request_id, marks=marks, finish_reason=reason, freed_ns=now_ns)
        )

    def die(self) -> None:
        """What a crashed process looks like from here."""
        self.is_ready = False
        error = ErrorInfo("engine_error", "the engine process died", "engine_died", 500, retry_after_s=2.0)
        now_ns = time.monotonic_ns()
        for state in self.waiting + self.running:
            unknown = Mark(Stage.UNATTRIBUTED, Cause.ENGINE_DIED, state.account.marks[-1].begin_ns)
            marks = (*state.new_marks(), unknown, Mark(Stage.DELIVER, None, now_ns))
            output = RequestOutput(state.request.request_id, marks=marks, finish_reason=FinishReason.ERROR, error=error)
            self._put(state, now_ns, output)
        self.waiting, self.running = [], []

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running and not self.streams
