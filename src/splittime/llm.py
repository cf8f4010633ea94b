"""`LLM`: generation in the caller's process, by the same scheduler, loop and runner as the server's.

    llm = LLM()                                   # the model in the package; or a folder, or a Hugging Face id
    outputs = llm.generate(["def f(x):"], SamplingParams(max_tokens=32))
    outputs[0].text, outputs[0].account

The account of an output begins when its prompt is taken up (`tokenize`) and ends when its text is in the caller's hands;
it is verified before it is given out. In `generate` a token counts as written when its text is ready. In `stream` the
engine runs in a thread of its own, so a slow consumer's time is not charged to the engine; its pieces count as written
when the consumer takes them.
"""

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import Progress

from splittime.cli import model_source, settings
from splittime.cli.worker_settings import worker_settings
from splittime.core.errors import EngineError, ErrorInfo, RequestError, SplittimeError
from splittime.core.plan import TokenLogprob
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.engine.messages import StepOutput
from splittime.engine.output import OutputText
from splittime.engine.tokenizer import Tokenizer
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.store import Ledger
from splittime.scheduler.events import RequestOutput

Prompt = str | Sequence[int]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt. `error` says why, where `finish_reason` is `error`; the other outputs are unharmed."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    account: ClosedAccount
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None


class Piece(msgspec.Struct, frozen=True):
    """News of one prompt while streaming; the last one has the whole `output`."""

    index: int
    text: str
    output: Output | None = None


class LLM:
    """A model and its engine. `settings` are those of `splittime config show`, by name. Not thread-safe."""

    def __init__(self, model: str | Path | None = None, *, ledger: Ledger | None = None, **arguments: Any) -> None:
        from splittime.cli.worker import build_engine  # torch: two seconds, paid by those who generate

        chosen = settings.from_arguments({**arguments, "model": None if model is None else str(model)})
        folder = model_source.locate(chosen["model"])
        self.timeline: list[tuple[str, int, int]] = []
        engine, self.resolved = build_engine(worker_settings(chosen, folder), self.timeline)
        tokenizer = Tokenizer.load(folder)
        eos_token_ids = model_source.eos_token_ids(folder, tokenizer.eos_token_id)
        self._assemble(engine, tokenizer, eos_token_ids, model_source.default_name(chosen["model"], folder), ledger)

    @classmethod
    def from_parts(
        cls, engine: Engine, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...] = (), ledger: Ledger | None = None
    ) -> "LLM":
        """Over an engine that stands already, whatever its runner."""
        llm = cls.__new__(cls)
        llm.timeline, llm.resolved = [], {}
        llm._assemble(engine, tokenizer, eos_token_ids, "model", ledger)
        return llm

    def _assemble(
        self, engine: Engine, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], name: str, ledger: Ledger | None
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.ledger = ledger if ledger is not None else Ledger()
        self._eos_token_ids = eos_token_ids
        self._max_model_len = engine.scheduler.config.max_model_len
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """One output for each prompt, in their order. A single text, or a single list of token ids, is one prompt."""
        tasks = self._submit_all(prompts, sampling)
        with Progress(disable=not progress, transient=True) as bars:
            bar = bars.add_task("generating", total=len(tasks))
            for piece in self._pieces(tasks, self._steps(), self.engine.abort):
                bars.advance(bar, piece.output is not None)
        return [task.output for task in tasks.values() if task.output is not None]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Piece]:
        """Pieces of text as they come. Leaving the loop early ends the requests."""
        tasks = self._submit_all(prompts, sampling)
        pump = _Pump(self.engine)
        try:
            yield from self._pieces(tasks, pump.outputs(), pump.abort)
        finally:
            pump.stop()
            self._abort_open(tasks)

    def _steps(self) -> Iterator[StepOutput]:
        while self.engine.has_work:
            output = self.engine.step()
            if output is not None:
                yield output

    def _pieces(
        self, tasks: "dict[str, _Task]", steps: Iterator[StepOutput], abort: Callable[[str], None]
    ) -> Iterator[Piece]:
        num_open = len(tasks)
        for step in steps:
            if step.record is not None:
                self.ledger.add_step(step.record)
            for news in step.outputs:
                task = tasks[news.request_id]
                text = task.take(step, news)
                if task.stop_found and news.finish_reason is None:
                    abort(news.request_id)
                if news.finish_reason is not None:
                    self._finish(task, news)
                    num_open -= 1
                if text or task.output is not None:
                    yield Piece(task.index, text, task.output)
            if num_open == 0:
                return

    def _finish(self, task: "_Task", news: RequestOutput) -> None:
        account = task.close(news, self.name)
        self.ledger.add_account(account)
        account.verify()
        task.output = Output(
            text="".join(task.pieces),
            token_ids=tuple(task.token_ids),
            prompt_token_ids=task.prompt_token_ids,
            finish_reason=account.finish_reason,
            account=account,
            logprobs=tuple(task.logprobs),
            prompt_logprobs=tuple(task.prompt_logprobs),
            error=news.error,
        )

    def _submit_all(self, prompts: Any, sampling: Any) -> "dict[str, _Task]":
        listed = _as_list(prompts)
        params = sampling if isinstance(sampling, list | tuple) else [sampling or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise RequestError(f"{len(listed)} prompts and {len(params)} sampling parameters", param="sampling")
        for one in params:
            one.validate()
        tasks: dict[str, _Task] = {}
        for index, (prompt, one) in enumerate(zip(listed, params, strict=True)):
            request_id = f"llm-{next(self._numbers)}"
            tasks[request_id] = self._submit(request_id, index, prompt, one)
        return tasks

    def _submit(self, request_id: str, index: int, prompt: Prompt, sampling: SamplingParams) -> "_Task":
        account = Account(request_id, time.monotonic_ns(), Stage.TOKENIZE)
        started_at_unix_ns = time.time_ns()
        token_ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not token_ids:
            raise RequestError(f"prompt {index} is empty", param="prompts", value=index)
        room = max(1, self._max_model_len - len(token_ids))
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens or room,
            seed=secrets.randbits(62) if sampling.seed is None else sampling.seed,
        )
        submitted_ns = time.monotonic_ns()
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            eos_token_ids=self._eos_token_ids,
            submitted_ns=submitted_ns,
        )
        account.enter(Stage.HANDOFF, submitted_ns)
        self.engine.submit(request, time.monotonic_ns())
        text = OutputText(self.tokenizer, token_ids, stop=sampling.stop)
        return _Task(index, token_ids, account, text, started_at_unix_ns)

    def _abort_open(self, tasks: "dict[str, _Task]") -> None:
        """End what is still in flight and clear its news, so that the next call finds a clean engine."""
        open_ids = [request_id for request_id, task in tasks.items() if task.output is None]
        for request_id in open_ids:
            self.engine.abort(request_id)
        if open_ids:
            self.engine.step()


class _Task:
    """One prompt in flight: its text so far and its open account."""

    def __init__(
        self, index: int, prompt_token_ids: tuple[int, ...], account: Account, text: OutputText, started_at_unix_ns: int
    ) -> None:
        self.index, self.prompt_token_ids = index, prompt_token_ids
        self.account, self.started_at_unix_ns = account, started_at_unix_ns
        self._text = text
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self._token_steps: list[int] = []
        self._token_ready_ns: list[int] = []
        self._token_written_ns: list[int] = []
        self._first_chunk_tokens = self._cached_tokens = self._num_preemptions = 0
        self.output: Output | None = None

    @property
    def stop_found(self) -> bool:
        return self._text.stop_string is not None

    def take(self, step: StepOutput, news: RequestOutput) -> str:
        """Book this news; the text it makes safe to show. Tokens after a stop string are not looked at."""
        self.account.extend(news.marks)
        self.prompt_logprobs += news.prompt_logprobs
        self._cached_tokens = self._cached_tokens if news.num_cached_tokens is None else news.num_cached_tokens
        self._num_preemptions = max(self._num_preemptions, news.num_preemptions)
        text = "".join(self._take_token(step, news, i) for i in range(len(news.token_ids)) if not self.stop_found)
        if news.finish_reason is not None and not self.stop_found:
            text += self._text.flush()
        self.pieces.append(text)
        now_ns = time.monotonic_ns()
        self._first_chunk_tokens = self._first_chunk_tokens or len(self.token_ids)
        self._token_written_ns += [now_ns] * (len(self.token_ids) - len(self._token_written_ns))
        return text

    def _take_token(self, step: StepOutput, news: RequestOutput, i: int) -> str:
        self.token_ids.append(news.token_ids[i])
        if news.logprobs:
            self.logprobs.append(news.logprobs[i])
        self._token_steps.append(step.step_id)
        self._token_ready_ns.append(step.ready_ns)
        return "" if news.token_ids[i] == news.stop_token_id else self._text.push(news.token_ids[i])

    def close(self, news: RequestOutput, model: str) -> ClosedAccount:
        self.account.close(time.monotonic_ns())
        assert self.account.end_ns is not None
        reason = FinishReason.STOP if self.stop_found else news.finish_reason
        return ClosedAccount(
            request_id=self.account.request_id,
            group_id=self.account.request_id,
            model=model,
            endpoint="offline",
            started_at_unix_ns=self.started_at_unix_ns,
            start_ns=self.account.start_ns,
            end_ns=self.account.end_ns,
            intervals=tuple(self.account.intervals()),
            finish_reason=str(reason),
            error=news.error,
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self._cached_tokens,
            output_tokens=len(self.token_ids),
            num_preemptions=self._num_preemptions,
            first_chunk_tokens=self._first_chunk_tokens,
            token_steps=tuple(self._token_steps),
            token_ready_ns=tuple(self._token_ready_ns),
            token_written_ns=tuple(self._token_written_ns),
            freed_ns=news.freed_ns,
        )


class _Pump:
    """Runs an engine in a thread until it has no more work; what its steps say comes out of `outputs`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def outputs(self) -> Iterator[StepOutput]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item if isinstance(item, SplittimeError) else EngineError(str(item)) from item
            yield item

    def abort(self, request_id: str) -> None:
        """Before the next step, and in the engine's thread: an engine is not thread-safe."""
        self._aborts.put(request_id)

    def stop(self) -> None:
        """Returns when the step in flight is done."""
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._engine.has_work and not self._is_stopping:
                while not self._aborts.empty():
                    self._engine.abort(self._aborts.get())
                output = self._engine.step()
                if output is not None:
                    self._queue.put(output)
        except Exception as error:  # handed to the consumer, who is the caller
            self._queue.put(error)
        self._queue.put(None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(entry, int) for entry in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]
