"""One generation as the server sees it: its tokens, its text, and its account from first byte to last.

The server writes the account's `receive, tokenize, admit, handoff` before the engine has it and `deliver, client_wait`
after; between are the engine's own marks. A stop string is found here, not in the engine: then the engine's part ends
at the instant that token was ready, and later marks are left out. If the engine dies, all that follows the last thing
heard from it is `unattributed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason, Request
from splittime.core.step import TokenLogprob
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.prompt_parts import NO_HASHES, PromptHashes, answer_hashes, salt_hash, sampled_lookup
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput
from splittime.text.marks import HarmonyParser
from splittime.text.output import OutputText
from splittime.text.reasoning import ReasoningParser

CLIENT_WAIT_NS = 1_000_000  # a send that blocks longer than this after the last token is the client's doing


class Scored(NamedTuple):
    """A token with its place in the text, for logprobs. The very first token of a prompt has none."""

    token_id: int
    text_offset: int
    logprob: TokenLogprob | None


class NewOutput(NamedTuple):
    """What is new since the last chunk."""

    text: str
    token_ids: Sequence[int]
    scored: Sequence[Scored]
    reasoning: str = ""


@dataclass(slots=True)
class Echo:
    """The prompt as part of the answer: its text, and where in it each token begins."""

    text: str
    offsets: Sequence[int] = ()


@dataclass(slots=True)
class Choice:
    """`index` is its number in the response. `is_done` once it will get no more tokens, whoever ended it. `heard_ns`:
    when the engine last said something of it before that; when it was submitted, if it has said nothing."""

    index: int
    request: Request
    account: Account
    text: OutputText
    echo: Echo | None = None
    hides_output: bool = False  # echo with max_tokens 0
    prompt_hashes: PromptHashes = NO_HASHES
    render_ns: int = 0
    reasoning: ReasoningParser | HarmonyParser | None = None  # of a model that reasons
    pooled: bytes = b""  # of an embedding, as `RowResult` has it
    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ready_ns: list[int] = field(default_factory=list)
    written_ns: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    first_chunk_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    host_tokens: int = 0
    num_preemptions: int = 0
    cancelled_ns: int | None = None
    freed_ns: int | None = None
    has_started: bool = False  # a step has computed part of it: it left the queue
    is_closed: bool = False
    _new_text: list[str] = field(default_factory=list)
    _new_reasoning: list[str] = field(default_factory=list)
    _num_taken: int = 0
    heard_ns: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.heard_ns = self.request.submitted_ns
        if self.echo is not None:
            self._new_text.append(self.echo.text)
            self._score_prompt([None])

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_untaken(self) -> int:
        """Tokens that no chunk holds yet."""
        return len(self.token_ids) - self._num_taken

    # ---- what the engine says

    def absorb(self, step_id: int, ready_ns: int, output: RequestOutput) -> int:
        """Take over one output; returns roughly how many bytes it adds to the answer."""
        if output.freed_ns is not None:
            self.freed_ns = output.freed_ns
        if self.is_done:
            return 0
        num_bytes = self._take_tokens(step_id, ready_ns, output)
        if self.text.stop_string is not None:
            self._end_at_stop_string(ready_ns, output)
        else:
            self._end_as_said(ready_ns, output)
        self._note_facts(ready_ns, output)
        return num_bytes

    def _take_tokens(self, step_id: int, ready_ns: int, output: RequestOutput) -> int:
        """Append the tokens up to a stop string; a stop id has no text."""
        if output.prompt_logprobs:
            self._score_prompt(output.prompt_logprobs)
        if not output.token_ids:
            return 0
        last = len(output.token_ids) - 1
        num_bytes = 0
        for i, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self.steps.append(step_id)
            self.ready_ns.append(ready_ns)
            if output.logprobs and not self.hides_output:
                self.scored.append(Scored(token_id, self._offset(), output.logprobs[i]))
                num_bytes += 100 + 10 * len(output.logprobs[i].packed)
            if self.hides_output or (i == last and output.stop_token_id is not None):
                continue
            if self.reasoning is not None:
                self.reasoning.note_token(self.text.num_chars)
            text = self.text.push(token_id)
            if text:
                self._say(text)
                num_bytes += len(text)
            if self.text.stop_string is not None:
                break
        return num_bytes

    def _say(self, text: str, *, is_end: bool = False) -> None:
        """The answer's text goes on, or ends: with content, or with reasoning."""
        if self.reasoning is None:
            self._new_text.append(text)
            return
        reasoning, content = self.reasoning.push(text, is_end=is_end)
        self._new_reasoning.append(reasoning)
        self._new_text.append(content)

    def _offset(self) -> int:
        return self.text.num_chars + (len(self.echo.text) if self.echo is not None else 0)

    def _score_prompt(self, new: Sequence[TokenLogprob | None]) -> None:
        """Echoed prompts carry their own logprobs, the first token's unknown."""
        at = len(self.scored)
        self.prompt_logprobs.extend(one for one in new if one is not None)
        if self.echo is not None and self.request.sampling.prompt_logprobs is not None:
            ids, offsets = self.request.prompt_token_ids[at:], self.echo.offsets[at:]
            self.scored.extend(map(Scored, ids, offsets, new))

    def _end_at_stop_string(self, ready_ns: int, output: RequestOutput) -> None:
        self.account.extend(mark for mark in output.marks if mark.begin_ns <= ready_ns)
        self.account.enter(Stage.DELIVER, ready_ns)
        self._say("", is_end=True)
        self.finish_reason = FinishReason.STOP

    def _end_as_said(self, ready_ns: int, output: RequestOutput) -> None:
        self.account.extend(output.marks)
        if output.finish_reason is None:
            return
        if not self.hides_output:
            self._say(self.text.flush(), is_end=True)
        self.finish_reason = FinishReason.STOP if self.text.stop_string is not None else output.finish_reason
        self.error = self.error or output.error
        self.pooled = output.pooled
        if self.account.stage is not Stage.DELIVER:
            self.lose_track()

    def lose_track(self) -> None:
        """The engine died: from what was last heard of it on, nobody knows."""
        begin_ns = max(self.heard_ns, self.account.marks[-1].begin_ns)
        self.account.enter(Stage.UNATTRIBUTED, begin_ns, Cause.ENGINE_DIED)

    def _note_facts(self, ready_ns: int, output: RequestOutput) -> None:
        self.heard_ns = ready_ns
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if output.num_cached_tokens is not None:
            self.cached_tokens, self.host_tokens = output.num_cached_tokens, output.num_host_tokens
        if not self.has_started and (output.token_ids or any(m.stage is Stage.PREFILL for m in output.marks)):
            self.has_started = True

    # ---- what the client gets

    def take(self, most_scored: int | None = None) -> NewOutput:
        """All that no chunk holds yet; it counts as taken from now on. most_scored: so many logprobs go before it."""
        if most_scored is not None:
            scored, self.scored = self.scored[:most_scored], self.scored[most_scored:]
            return NewOutput("", (), scored)
        text, reasoning = "".join(self._new_text), "".join(self._new_reasoning)
        self._new_text.clear()
        self._new_reasoning.clear()
        token_ids, self._num_taken = self.token_ids[self._num_taken :], len(self.token_ids)
        scored, self.scored = self.scored, []
        if self.hides_output:
            return NewOutput(text, (), scored)
        return NewOutput(text, token_ids, scored, reasoning)

    @property
    def has_new_text(self) -> bool:
        return any(self._new_text) or any(self._new_reasoning)

    def note_written(self, num_tokens: int, now_ns: int) -> None:
        """The next `num_tokens` tokens have been given to the socket."""
        if num_tokens and not self.written_ns:
            self.first_chunk_tokens = num_tokens
        self.written_ns.extend([now_ns] * num_tokens)

    def note_client_wait(self, since_ns: int, until_ns: int) -> None:
        """A send was blocked; what of it came after the last token is the client's."""
        last = self.account.marks[-1]
        if not self.is_done or self.is_closed or last.stage is not Stage.DELIVER:
            return
        begin_ns = max(since_ns, last.begin_ns)
        if until_ns - begin_ns > CLIENT_WAIT_NS:
            self.account.enter(Stage.CLIENT_WAIT, begin_ns)
            self.account.enter(Stage.DELIVER, until_ns)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hides_output else len(self.token_ids)

    def close(self, now_ns: int, **about: Any) -> ClosedAccount:
        """Close the book. Only once. about: fields of the account that its owner knows (`group_id`, `model`, ...)."""
        self.is_closed = True
        self.account.close(now_ns)
        limit = self.request.sampling.reasoning_limit
        looked_up = sampled_lookup(self.request.request_id, self.request.prompt_token_ids, self.token_ids)
        return ClosedAccount(
            request_id=self.request.request_id,
            start_ns=self.account.start_ns,
            end_ns=now_ns,
            intervals=tuple(self.account.intervals()),
            finish_reason=str(self.finish_reason or FinishReason.ERROR),
            error=self.error,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            host_tokens=self.host_tokens,
            output_tokens=len(self.token_ids),
            reasoning_tokens=0 if self.reasoning is None else self.reasoning.num_tokens,
            most_reasoning_tokens=None if limit is None else limit.max_tokens,
            num_preemptions=self.num_preemptions,
            first_chunk_tokens=self.first_chunk_tokens,
            token_steps=tuple(self.steps),
            token_ready_ns=tuple(self.ready_ns),
            token_written_ns=tuple(self.written_ns),
            cancelled_ns=self.cancelled_ns,
            freed_ns=self.freed_ns,
            prompt_parts=self.prompt_hashes.parts,
            prefixes=self.prompt_hashes.prefixes,
            answer_prefixes=answer_hashes(self.request.prompt_token_ids, self.token_ids, self.prompt_hashes),
            cache_salt=salt_hash(self.request.cache_salt),
            render_ns=self.render_ns,
            computes_prompt=self.request.sampling.computes_prompt,
            max_tokens=self.request.sampling.max_tokens or 0,
            priority=self.request.priority,
            weight=self.request.weight,
            deadline_ns=self.request.deadline_ns,
            lookup_guesses=looked_up.guesses,
            lookup_right=looked_up.right,
            **about,
        )
