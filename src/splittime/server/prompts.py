"""The prompts of one request: how long they are, as far as can be said before, and where they are tokenised.

A text has a least number of tokens, which is proved (`text.foreign_code`): what cannot fit by it is refused at once.
It has a likely number, learnt from the texts before it (`Admission.estimate_tokens`), which counts in the queue until
the true one is known. A long text counts as nothing until then: it waits among its like (`text.workers`).

A text is tokenised here if that surely takes a short time (`InlineTokenizing`), else in a worker process. The request's
account says which part of the time is waiting for a worker (`tokenize_queue`, with its cause) and which is work
(`tokenize`). A request that ends first, because its client went away or its deadline passed, takes its text back.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from splittime.api.choice import Choice, Echo
from splittime.api.embeddings import pooling_notices
from splittime.api.limits import ModelInfo
from splittime.api.params import Ask, numbered
from splittime.api.ranking import ANSWERS, OPTIONS, RankAsk
from splittime.core.errors import DeadlineExceeded, RequestError
from splittime.core.request import Request
from splittime.ledger.account import Account
from splittime.ledger.prompt_parts import PromptHashes, prompt_hashes
from splittime.ledger.stages import Stage
from splittime.scheduler.admission import Place
from splittime.server.endpoints import ENDPOINTS
from splittime.server.service import Service
from splittime.text.foreign_code import num_bytes, require_at_most
from splittime.text.output import OutputText, make_detokenizer
from splittime.text.process import Encode, Render, RenderEach, TextDone, TextWork, carry_out
from splittime.text.tokenizer import Tokenizer
from splittime.text.workers import SHORT_CHARS, FramedWork, TextTask, framed
from splittime.web.http import Disconnected
from splittime.web.tenants import Sharer

ENDING_TOKENS = 24  # of a prompt, in which a mark and line breaks have room, be it by bytes
MOST_LOGPROBS = 2**21  # that are kept of one request: 50 MB, and two or three times that as they are rendered
now_ns = time.monotonic_ns


class TokenizedPrompt(NamedTuple):
    """given: as the client sent it; a chat's as token ids, and one that may have been cut. whole_len: its tokens
    before that. render_ns, left_out: as in `TextDone`."""

    token_ids: tuple[int, ...]
    hashes: PromptHashes
    given: str | tuple[int, ...]
    whole_len: int
    render_ns: int = 0
    left_out: tuple[str, ...] = ()

    def choice(
        self, index: int, request: Request, account: Account, ask: Ask, tokenizer: Tokenizer, echo: Echo | None
    ) -> Choice:
        """Returns one answer to this prompt, as far as it is: with no token yet."""
        sampling = request.sampling
        stop, least = sampling.stop, sampling.min_tokens
        text = OutputText(tokenizer, self.token_ids, stop=stop, min_tokens=least, shown_ids=ask.shown_ids)
        reasoning = None if ask.reasoning is None else ask.reasoning.parser()
        return Choice(index, request, account, text, echo, ask.echo_only, self.hashes, self.render_ns, reasoning)

    def echo(self, ask: Ask, tokenizer: Tokenizer) -> Echo | None:
        """Returns the prompt as it was given, and where each of its tokens begins, if that is asked for."""
        if not ask.echo:
            return None
        text = self.given if isinstance(self.given, str) else tokenizer.decode(self.token_ids)
        if ask.sampling.prompt_logprobs is None:
            return Echo(text)
        detokenizer, offsets, length = make_detokenizer(tokenizer), [], 0
        for token_id in self.token_ids:
            offsets.append(min(length, len(text)))
            length += len(detokenizer.push(token_id))
        return Echo(text, offsets)


class Prompts:
    """work: what makes token ids of the texts; None if the prompts are token ids already. account: the request's own,
    in which the stages are entered. To make one takes long where there are many messages, and may be done in a thread.
    Raises `RequestError` if a text can never fit."""

    def __init__(self, ask: Ask, model: ModelInfo, service: Service, account: Account, sharer: Sharer) -> None:
        self._whose: dict[str, Any] = {"tenant": sharer.name, "weight": sharer.weight}
        self._service, self._account, self._field = service, account, ENDPOINTS[ask.endpoint].prompts_field
        self._most_tokens = max(0, model.max_model_len - ask.sampling.least_tokens)
        self._task: TextTask | None = None  # the text that a worker has, or will have
        self._first_token_by_ns: int | None = None
        self._keep_last = ask.keep_last
        texts = tuple(prompt for prompt in ask.prompts if isinstance(prompt, str))
        self._whole_texts: tuple[str | tuple[int, ...], ...] = texts if ask.keep_last is None else ()
        self._kept = tuple(prompt for prompt in ask.prompts if not isinstance(prompt, str))
        self.work = _work_of(ask, self._most_tokens)
        self._require_possible()
        self._size = 0 if self.work is None else self.work.size
        may_be_inline = isinstance(self.work, Encode) and self._size <= service.config.inline_tokenize_chars
        self._framed = None if self.work is None or may_be_inline else framed(self.work, self._size)

    @property
    def _is_long(self) -> bool:
        return self._size > SHORT_CHARS

    def take_place(self, ask: Ask, deadline_ns: int | None, first_token_by_ns: int | None) -> Place:
        """Takes places in the queue, by what is known of the texts now. Raises `Refused` if there is no room for them,
        or no time."""
        self._first_token_by_ns = first_token_by_ns
        return self._service.admission.enter(
            now_ns(),
            count=ask.num_choices,
            as_one=bool(ask.sampling.pooling),
            tokens=self._estimate_tokens() * ask.n,
            deadline_ns=deadline_ns,
            first_token_by_ns=first_token_by_ns,
            **self._whose,
        )

    def correct(self, place: Place, lengths: list[int]) -> None:
        """Has the place count the true lengths. Raises `Refused` where nothing was known of them when it was taken, and
        there is no room for so many tokens, or no time."""
        if self._is_long:
            place.require_room(sum(lengths))
            if self._first_token_by_ns is not None:
                self._service.admission.require_first_token(now_ns(), lengths[0], place, self._first_token_by_ns)
        place.correct(lengths)

    def _require_possible(self) -> None:
        """Raise `RequestError` if a text cannot fit the model's context. A chat passes: its template decides how
        long it becomes."""
        bound = self._service.tokenizer.bound
        if isinstance(self.work, Encode) and bound is not None and self._keep_last is None:
            texts = self.work.texts
            for index, text in enumerate(texts):
                param = numbered(self._field, index, len(texts))
                require_at_most(bound.least_tokens(text), self._most_tokens, param)

    def _estimate_tokens(self) -> int:
        """Returns the tokens of all prompts together, as far as they are known now."""
        if self.work is None:
            return sum(len(kept.ids) for kept in self._kept)
        if self._is_long:
            return 0
        sizes = [num_bytes(text) for text in self.work.texts] if isinstance(self.work, Encode) else [self._size]
        most = self._most_tokens if self._keep_last is None else min(self._most_tokens, self._keep_last)
        return sum(min(self._service.admission.estimate_tokens(size), most) for size in sizes)

    async def tokenize(self, deadline_ns: int | None) -> list[TokenizedPrompt]:
        """Raises what the client must be told, or `Disconnected` after `drop`."""
        done = await self._tokenized(deadline_ns)
        each = zip(done.ids, self._whole_texts or done.ids, done.whole_lens, strict=True)
        made = done.render_ns, done.left_out
        return [TokenizedPrompt(ids, prompt_hashes(ids), given, whole_len, *made) for ids, given, whole_len in each]

    async def _tokenized(self, deadline_ns: int | None) -> TextDone:
        if self.work is None:
            self._account.enter(Stage.TOKENIZE, now_ns())
            return TextDone(tuple(one.ids for one in self._kept), tuple(one.whole_len for one in self._kept))
        try:
            done = await self._carried_out(self.work, deadline_ns, self._framed)
        except RequestError as error:
            name, bracket, index = (error.info.param or "").partition("[")
            if name == "prompt":  # or one of several: named as the body of this endpoint names it
                error.info = msgspec.structs.replace(error.info, param=self._field + bracket + index)
            raise
        self._service.admission.learn_ratio(done.num_bytes, sum(done.whole_lens))
        return done

    async def _carried_out(
        self, work: TextWork, deadline_ns: int | None, framed_work: FramedWork | None = None
    ) -> TextDone:
        if framed_work is None and self._service.takes_inline(work):
            return self._inline(work)
        return await self._in_worker(framed_work or framed(work), deadline_ns)

    async def with_words_tokenized(self, ask: Ask, deadline_ns: int | None) -> Ask:
        """Returns the ask with its words as token ids: of each bad one, as a text begins and behind a space; and of the
        answers by which texts are ranked. Raises what `tokenize` does."""
        if isinstance(ask, RankAsk) and not ask.judged_by:
            done = await self._carried_out(Encode(ANSWERS, add_special_tokens=False), deadline_ns)
            return ask.answered_by(done.ids)
        if not ask.bad_words:
            return ask
        spelled = tuple(before + word.lstrip() for word in ask.bad_words for before in ("", " "))
        work = Encode(spelled, add_special_tokens=False)
        done = await self._carried_out(work, deadline_ns)
        runs = tuple(dict.fromkeys(filter(None, map(tuple, done.ids))))
        sampling = msgspec.structs.replace(ask.sampling, bad_token_ids=runs)
        sampling.validate()
        return replace(ask, sampling=sampling)

    def drop(self) -> None:
        """Nobody wants the ids any more: end the work on them, if there is any."""
        if self._task is not None and not self._task.done.done():
            self._service.texts.drop(self._task, Disconnected())

    def _inline(self, work: TextWork) -> TextDone:
        begin_ns = now_ns()
        self._account.enter(Stage.TOKENIZE, begin_ns)
        done = carry_out(work, self._service.tokenizer)
        self._service.inline.learn(work.size, now_ns() - begin_ns)
        return done

    async def _in_worker(self, work: FramedWork, deadline_ns: int | None) -> TextDone:
        texts, account = self._service.texts, self._account
        self._task = texts.submit(work, lambda: account.enter(Stage.TOKENIZE, now_ns()), **self._whose)
        if self._task.cause is not None:
            account.enter(Stage.TOKENIZE_QUEUE, now_ns(), self._task.cause)
        alarm = None
        if deadline_ns is not None:
            left_s = (deadline_ns - now_ns()) / 1e9
            alarm = asyncio.get_running_loop().call_later(left_s, texts.drop, self._task, too_late())
        try:
            return await self._task.done
        finally:
            self._task = None  # the error that it may hold knows this frame: a circle, left to the collector
            if alarm is not None:
                alarm.cancel()


def _work_of(ask: Ask, most_tokens: int) -> TextWork | None:
    """Returns what makes token ids of an ask's texts; None where it has none."""
    if ask.is_chat:
        return Render(ask.messages, ask.template_options, most_tokens=most_tokens, keep_last=ask.keep_last)
    if isinstance(ask, RankAsk) and ask.judged_by:
        queries, texts = zip(*ask.pairs, strict=True)
        return Encode(texts, firsts=queries, most_tokens=most_tokens, keep_last=ask.keep_last)
    if isinstance(ask, RankAsk):
        return RenderEach(ask.chats(), OPTIONS, most_tokens)
    texts = tuple(prompt for prompt in ask.prompts if isinstance(prompt, str))
    return Encode(texts, most_tokens=most_tokens, keep_last=ask.keep_last) if texts else None


def reasoning_begun(ask: Ask, token_ids: Sequence[int], tokenizer: Tokenizer) -> Ask:
    """Returns the ask of a model that reasons as its prompt leaves it: in the reasoning, before it or behind it. A form
    is that of what follows the reasoning, and a bound that of what is left of it."""
    if ask.reasoning is None:
        return ask
    ending = tokenizer.decode(token_ids[-ENDING_TOKENS:], skip_special_tokens=False)
    reasoning = ask.reasoning.begun(ending)
    sampling = msgspec.structs.replace(ask.sampling, reasoning_limit=reasoning.limit_here)
    if sampling.grammar:
        sampling = msgspec.structs.replace(sampling, grammar=reasoning.held(sampling.grammar))
        sampling.validate()
    return replace(ask, reasoning=reasoning, sampling=sampling)


def too_late() -> DeadlineExceeded:
    return DeadlineExceeded.before("it reached the engine")


def output_budgets(
    prompts: Sequence[TokenizedPrompt], ask: Ask, model: ModelInfo, *, is_strict: bool = False
) -> list[int]:
    """Returns the output tokens that each prompt may get: those it asks for, but no more than the context has left.

    Raises `RequestError` if a prompt is empty or leaves no room; `is_strict`: also if less is left than is asked.
    """
    field, count, most = ENDPOINTS[ask.endpoint].prompts_field, len(prompts), _most_scored(prompts, ask)
    params = [numbered(field, index, count) for index in range(count)]
    each = zip(prompts, params, strict=True)
    budgets = [_output_budget(prompt.token_ids, ask, model, param, is_strict) for prompt, param in each]
    if most < ((ask.sampling.max_tokens or 1) if is_strict else max(1, ask.sampling.least_tokens)):
        told = f"{ask.num_choices} answers with {ask.sampling.logprobs} logprobs beside each token have too many in all"
        hint = "stream it without echo, or ask for fewer logprobs or choices"
        raise RequestError(told, param="logprobs", value=ask.sampling.logprobs, limit=MOST_LOGPROBS, hint=hint)
    return [min(budget, most) for budget in budgets]


def _most_scored(prompts: Sequence[TokenizedPrompt], ask: Ask) -> int:
    """Returns the tokens that each answer may have with its logprobs. What is no stream is kept until its end, as are
    the logprobs of a prompt until its answer begins."""
    echoed = ask.n * sum(len(prompt.token_ids) for prompt in prompts) if ask.echo else 0
    left = MOST_LOGPROBS // (1 + (ask.sampling.logprobs or 0)) - echoed
    is_free = ask.sampling.logprobs is None or (ask.stream and left > 0)
    return 1 << 40 if is_free else left // ask.num_choices


def _output_budget(prompt_ids: Sequence[int], ask: Ask, model: ModelInfo, param: str, is_strict: bool) -> int:
    room, least = model.max_model_len - len(prompt_ids), ask.sampling.least_tokens
    wanted = ask.sampling.max_tokens
    asked = max(wanted or 0, least)
    if not prompt_ids:
        raise RequestError("the prompt has no tokens", code="empty_prompt", param=param, value=0)
    if room < least or (is_strict and room < asked):
        raise RequestError(
            f"the model's context is {model.max_model_len} tokens; the prompt has {len(prompt_ids)} and "
            f"{asked} were asked for",
            code="context_length_exceeded",
            param=param if ask.is_chat or room < 1 else "max_tokens",
            value=len(prompt_ids) + asked,
            limit=model.max_model_len,
            hint=f"ask for at most {room} tokens" if room > 0 else "shorten the prompt",
        )
    return int(min(model.default_sampling.get("max_tokens", room) if wanted is None else wanted, room))


def notices_of(ask: Ask, prompts: Sequence[TokenizedPrompt], budgets: Sequence[int], model: ModelInfo) -> list[str]:
    """Returns what a client is told beside its answer: that fewer output tokens are left than it asked for, that texts
    were cut, what of a chat was left out, and that no file says how its embeddings are made."""
    notices = [*pooling_notices(ask), *ask.left_out, *prompts[0].left_out]
    wanted, least = ask.sampling.max_tokens, min(budgets)
    if least == _most_scored(prompts, ask) != wanted:
        notices += [f"max_tokens was clamped to {least}: what is no stream has at most {MOST_LOGPROBS} logprobs"]
    elif wanted is not None and least < wanted:
        notices += [f"max_tokens {wanted} was clamped to {least}: the context has {model.max_model_len} tokens"]
    cut = [(prompt.whole_len, len(prompt.token_ids)) for prompt in prompts if prompt.whole_len > len(prompt.token_ids)]
    if not cut:
        return notices
    who = "the prompt was" if len(prompts) == 1 else f"{len(cut)} of {len(prompts)} prompts were"
    whole, kept = map(sum, zip(*cut, strict=True))
    return [*notices, f"{who} cut from {whole} to {kept} tokens"]
