"""`LLM`: generation in the caller's process, by the same scheduler, loop and runner as the server's.

    llm = LLM()                                   # the model in the package; or a folder, or a Hugging Face id
    outputs = llm.generate(["def f(x):"], SamplingParams(max_tokens=32))
    outputs[0].text, outputs[0].account

An output's account begins when its prompt is taken up (`tokenize`) and ends when its text is in the caller's hands; it
is verified before it is given out. In `generate` a token counts as written when its text is ready. In `stream` (and
wherever it plans ahead) the engine runs in a thread of its own, so that a slow consumer's time is not charged to the
engine; a piece counts as written when the consumer takes it.

Arguments and outputs of `splittime.LLM`.
"""

import itertools
import operator
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import Progress

from splittime.api.choice import Choice, NewOutput
from splittime.api.embeddings import require_pooling, vector_of
from splittime.api.params import check_lists, check_token_ids
from splittime.assemble import model_source, settings
from splittime.assemble.settings import worker_settings
from splittime.core.clock import SystemClock
from splittime.core.engine import Part, SleepReport
from splittime.core.errors import ConfigError, ErrorInfo, RequestError, error_from_info
from splittime.core.facts import Machine, Pooling
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.drive.crank import Crank, EngineParts, InlineDriver
from splittime.drive.host_time import machine_time
from splittime.drive.known import MAX_SLEEPS
from splittime.drive.messages import StepOutput
from splittime.ledger.account import EMBEDDINGS, Account, ClosedAccount
from splittime.ledger.facts import Process, ServerFacts, start_book
from splittime.ledger.prompt_parts import prompt_hashes
from splittime.ledger.stages import Stage
from splittime.ledger.store import Ledger
from splittime.scheduler.events import RequestOutput
from splittime.text.output import OutputText
from splittime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def checked_pairs(prompts: Any, sampling: Any, vocab_size: int) -> list[tuple[Prompt, SamplingParams]]:
    """Returns each prompt with its parameters; one value of `sampling` is for all of them. Raises RequestError for the
    first mistake in any, before anything is submitted."""
    listed = _as_list(prompts)
    given = sampling if isinstance(sampling, list | tuple) else [sampling] * len(listed)
    if len(given) != len(listed):
        raise RequestError(f"{len(listed)} prompts and {len(given)} sampling parameters", param="sampling")
    params = [_typed(one) for one in given]
    for index, (prompt, one) in enumerate(zip(listed, params, strict=True)):
        if not prompt:
            raise RequestError(f"prompt {index} is empty", param="prompts", value=index)
        _check(prompt, one, vocab_size)
    return list(zip(listed, params, strict=True))


def _check(prompt: Prompt, sampling: SamplingParams, vocab_size: int) -> None:
    """A token id that the model does not have would break the step for everyone in it."""
    sampling.validate()
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompts holds a text that is not Unicode: {error}", param="prompts") from None
    else:
        check_token_ids(prompt, vocab_size, "prompts")
    check_lists(sampling, vocab_size)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Texts and tuples of ids. Arrays of integers count as lists of ids."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
        if listed and all(isinstance(entry, Integral) for entry in listed):
            return [_ids(prompts)]
        return [entry if isinstance(entry, str) else _ids(entry) for entry in listed]
    except (TypeError, ValueError) as error:
        message = f"prompts must be a text, a list of token ids, or a list of such: {error}"
        raise RequestError(message, param="prompts") from None


def _ids(entries: Sequence[Any]) -> tuple[int, ...]:
    if isinstance(entries, bytes):
        raise TypeError("bytes are no text, decode them first")
    return tuple(operator.index(entry) for entry in entries)


def _typed(sampling: Any) -> SamplingParams:
    """With its fields' types checked: msgspec does not check what the constructor is called with."""
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is a {type(sampling).__name__}, must be SamplingParams", param="sampling")
    try:
        return msgspec.convert(msgspec.structs.asdict(sampling), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling: {error}", param="sampling") from None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt. `error` says why, where `finish_reason` is `error`; the other outputs are unharmed.

    pooled: with `SamplingParams.pooling`, the embedding as the engine has it; `LLM.embed` gives it as numbers.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    account: ClosedAccount
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None
    pooled: bytes = b""


class Piece(msgspec.Struct, frozen=True):
    """What is new of one prompt while streaming; its last piece has the whole `output`."""

    index: int
    text: str
    output: Output | None = None


class LLM:
    """A model and its engine. `arguments` are the settings of `splittime config show`, by name. Not thread-safe.

    on_loading: told how far the start has come, in words and as a share of all.
    default_sampling: what the model's makers advise (`generation_config.json`), used where no parameters are given.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        ledger: Ledger | None = None,
        on_loading: Callable[[str, float], None] = lambda progress, share: None,
        **arguments: Any,
    ) -> None:
        from splittime.assemble.worker import build_engine, import_parts

        chosen = settings.from_arguments({**arguments, "model": None if model is None else str(model)})
        for name in ("kv_peers", "kv_export"):
            if chosen[name]:
                raise ConfigError(f"{name} is for servers: an LLM shares no blocks", param=name, hint="leave it out")
        folder = model_source.locate(chosen["model"], chosen["load_format"])
        timeline: list[tuple[str, int, int]] = []
        import_parts(timeline)  # two seconds, paid by those who generate
        parts = build_engine(worker_settings(chosen, folder), timeline, on_loading)
        resolved = parts.resolved
        tokenizer = model_source.load_tokenizer(folder)
        ends = tokenizer.with_own_end(resolved["eos_token_ids"], resolved["vocab_size"])
        self._assemble(parts, tokenizer, ends, ledger)
        self._start_parts += tuple(timeline)
        self._started_ns, self._ready_ns = timeline[0][1], time.monotonic_ns()
        self.resolved |= resolved
        self.default_sampling = msgspec.convert(resolved["default_sampling"], SamplingParams)
        self._pooling = msgspec.convert(resolved["pooling"], Pooling)
        self._vocab_size = resolved["vocab_size"]
        self.name = model_source.default_name(chosen["model"], folder)

    @classmethod
    def from_parts(
        cls, parts: EngineParts, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...] = (), ledger: Ledger | None = None
    ) -> "LLM":
        """Over an engine that stands already, whatever its runner."""
        llm = cls.__new__(cls)
        llm._assemble(parts, tokenizer, eos_token_ids, ledger)
        return llm

    def _assemble(
        self, parts: EngineParts, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], ledger: Ledger | None
    ) -> None:
        self.tokenizer, self.name = tokenizer, "model"
        self.ledger = ledger if ledger is not None else Ledger()
        self.crank = Crank(parts, SystemClock())
        self._driver = InlineDriver(self.crank, self._note)
        self._start_parts: tuple[Part, ...] = ()
        self.resolved: dict[str, Any] = {}
        self.default_sampling = SamplingParams()
        self._pooling = Pooling()
        self._eos_token_ids = eos_token_ids
        self._vocab_size = tokenizer.vocab_size
        self.max_model_len = parts.engine.scheduler.config.max_model_len
        self._started_ns = self._ready_ns = time.monotonic_ns()
        self.ledger.describe_by(self._facts, machine_time())
        self._numbers = itertools.count()
        self._machine: Machine | None = None  # measured by this process
        self._busy = threading.Lock()
        self._sleeps: tuple[SleepReport, ...] = ()

    def facts(self) -> ServerFacts | None:
        """Settings, costs and the machine's ceilings, for a diagnosis; None over a runner that knows none. The first
        call measures the ceilings, a tenth of a second, unless an earlier start has lately."""
        self._machine = self.crank.measuring.finish() or self._machine
        return self._facts()

    def _facts(self) -> ServerFacts | None:
        said = self.crank.facts
        if said is None:
            return None
        begin_ns, ready_ns = self._started_ns, self._ready_ns
        start = start_book(begin_ns, ready_ns, self._start_parts)
        process = Process(name="llm", started_ns=begin_ns, ready_ns=ready_ns, sleeps=self._sleeps, start=start)
        knobs = self.crank.engine.scheduler.config.knobs()
        machine = self._machine or said.machine
        settings = said.settings | knobs
        return msgspec.structs.replace(said, model=self.name, settings=settings, machine=machine, processes=(process,))

    def sleep(self, level: int = 1) -> SleepReport:
        """Give memory back until `wake`: of the KV cache, whose content is forgotten, and of the weights, which are
        kept in host memory (level 1) or dropped (2). Nothing is generated meanwhile. See docs/guides/sleep.md."""
        with self._alone():
            return self._kept(self._driver.sleep(level))

    def wake(self) -> SleepReport:
        """Take the memory again. Raises what keeps it asleep (a folder that is gone, too little memory), and it is."""
        with self._alone():
            return self._kept(self.crank.wake())

    def _kept(self, report: SleepReport) -> SleepReport:
        """For `timeline` and the facts."""
        if report.changed:
            self._sleeps = (*self._sleeps, report)[-MAX_SLEEPS:]
        return report

    @property
    def timeline(self) -> list[Part]:
        """(name, begin_ns, end_ns) of the start's parts, and of those of the latest sleeps and wakings."""
        moved = [(f"{said.action}: {part[0]}", *part[1:]) for said in self._sleeps for part in said.parts]
        return [*self._start_parts, *moved]

    @property
    def is_asleep(self) -> bool:
        return self.crank.residency.level > 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """One output for each prompt, in their order. One text, or one list of token ids, is one prompt."""
        outputs: dict[int, Output] = {}
        with (
            self._submitted(prompts, sampling) as choices,
            closing(self._pieces(choices, self.crank.engine.plans_ahead)) as pieces,
            Progress(disable=not progress, transient=True) as bars,
        ):
            bar = bars.add_task("generating", total=len(choices))
            for piece in pieces:
                if piece.output is not None:
                    outputs[piece.index] = piece.output
                    bars.advance(bar)
        return [outputs[index] for index in sorted(outputs)]

    def embed(self, inputs: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[list[float]]:
        """Returns an embedding of each text, or list of token ids, made as the model's files say. dimensions: so many
        first values, normalised again. Raises `RequestError`, and what kept one from being computed."""
        require_pooling(self._pooling, self.name, dimensions)
        outputs = self.generate(inputs, SamplingParams(pooling=self._pooling.kind))
        for output in outputs:
            if output.error is not None:
                raise error_from_info(output.error)
        return [vector_of(output.pooled, self._pooling, dimensions).tolist() for output in outputs]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Piece]:
        """Pieces of text as they come. Leaving the loop early ends the requests."""
        with self._submitted(prompts, sampling) as choices:
            yield from self._pieces(choices, in_thread=True)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Returns the prompt of a conversation, for `generate` and `stream`: messages with a `role` and a `content`, as
        the model's chat template writes them. Raises `RequestError` if it has none."""
        return tuple(self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False))

    def _pieces(self, choices: dict[str, Choice], in_thread: bool) -> Generator[Piece, None, None]:
        """Until every choice is done; those that are leave `choices`. An engine that plans ahead is not to be
        interrupted between a result and its commit, so it gets a thread."""
        parts: dict[str, list[NewOutput]] = {name: [] for name in choices}
        with closing(self._driver.outputs(in_thread)) as steps:
            for step in steps:
                for output in step.outputs:
                    if output.request_id in choices:  # else a stop string ended it: this is the engine's own last word
                        yield from self._take(choices, parts, step, output)
                if not choices:
                    return

    def _take(
        self, choices: dict[str, Choice], parts: dict[str, list[NewOutput]], step: StepOutput, output: RequestOutput
    ) -> Iterator[Piece]:
        request_id = output.request_id
        choice = choices[request_id]
        choice.absorb(step.step_id, step.ready_ns, output)
        if choice.is_done:
            del choices[request_id]
            if output.finish_reason is None:
                self._driver.abort(request_id)
        delta = choice.take()
        choice.note_written(len(delta.token_ids), time.monotonic_ns())
        parts[request_id].append(delta)
        whole = self._close(choice, parts.pop(request_id)) if choice.is_done else None
        if delta.text or whole is not None:
            yield Piece(choice.index, delta.text, whole)

    @contextmanager
    def _submitted(self, prompts: Any, sampling: Any) -> Iterator[dict[str, Choice]]:
        """Choices by request id, whose requests do not outlive the block, whatever ends it."""
        with self._alone():
            refusal = self.crank.residency.refusal()
            if refusal is not None:
                raise refusal
            pairs = checked_pairs(prompts, self.default_sampling if sampling is None else sampling, self._vocab_size)
            choices: dict[str, Choice] = {}
            try:
                for index, pair in enumerate(pairs):
                    choice = self._choice(index, *pair)
                    choices[choice.request.request_id] = choice
                    self._driver.submit(choice.request)
                yield choices
            finally:
                for request_id in choices:
                    self.crank.abort(request_id)
                self._driver.run_dry()  # so that the next call finds nothing of this one

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time, whichever thread it comes from: an engine is not thread-safe."""
        if not self._busy.acquire(blocking=False):
            message = "an earlier generate or stream of this LLM is not over; finish it, or close() the stream"
            raise RequestError(message, param="prompts")
        try:
            yield
        finally:
            self._busy.release()

    def _choice(self, index: int, prompt: Prompt, sampling: SamplingParams) -> Choice:
        account = Account(f"llm-{next(self._numbers)}", time.monotonic_ns(), Stage.TOKENIZE)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        hashes = prompt_hashes(token_ids)
        submitted_ns = time.monotonic_ns()
        account.enter(Stage.HANDOFF, submitted_ns)
        request = Request(
            request_id=account.request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=self._complete(sampling, len(token_ids)),
            eos_token_ids=self._eos_token_ids,
            submitted_ns=submitted_ns,
        )
        text = OutputText(self.tokenizer, token_ids, stop=sampling.stop, min_tokens=sampling.min_tokens)
        return Choice(index, request, account, text, prompt_hashes=hashes)

    def _complete(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """With a seed and a bound: to the end of the context, if nothing else was said."""
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        room = max(1, self.max_model_len - num_prompt_tokens)
        return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens or room, seed=seed)

    def _close(self, choice: Choice, parts: Sequence[NewOutput]) -> Output:
        end_ns, end_unix_ns = time.monotonic_ns(), time.time_ns()
        started_at_unix_ns = end_unix_ns - (end_ns - choice.account.start_ns)
        account = choice.close(
            end_ns,
            group_id=choice.request.request_id,
            model=self.name,
            endpoint=EMBEDDINGS if choice.request.sampling.pooling else "offline",
            started_at_unix_ns=started_at_unix_ns,
        )
        account.verify()
        self.ledger.add_account(account)
        return Output(
            text="".join(part.text for part in parts),
            token_ids=tuple(choice.token_ids),
            prompt_token_ids=choice.request.prompt_token_ids,
            finish_reason=account.finish_reason,
            account=account,
            logprobs=tuple(one.logprob for part in parts for one in part.scored if one.logprob is not None),
            prompt_logprobs=tuple(choice.prompt_logprobs),
            error=choice.error,
            pooled=choice.pooled,
        )

    def _note(self, step: StepOutput) -> None:
        if step.record is not None:
            self.ledger.add_step(step.record)
