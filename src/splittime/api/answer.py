"""How an answer is rendered: OpenAI's two forms, whole and in chunks, with what it says of its own time.

A chunk without extras (no logprobs, no token ids, no usage so far) is a few preformatted bytes around the text: that is
the hot path. Everything else goes through a dict. Each entry of logprobs stands for one output token, also for the stop
token.

An answer's timing is the account so far, sealed at the instant the last bytes are made. The account itself closes a
little later, when those bytes have been given to the socket, and `/ledger/requests/ID` has it.
"""

import secrets
import string
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from msgspec import UNSET

from splittime.api import answer_structs
from splittime.api.answer_structs import FinishReason as FinishWord
from splittime.api.choice import Choice, NewOutput, Scored
from splittime.api.params import Ask
from splittime.core.request import FinishReason
from splittime.core.step import TokenLogprob
from splittime.ledger.account_json import stages_json
from splittime.text.output import token_text
from splittime.text.tokenizer import Tokenizer
from splittime.text.tool_parser import CallDelta, ParsedText, ToolParser

DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity
LETTERS = string.ascii_letters + string.digits


class ToolAnswer:
    """The calls of one choice, as far as they have come."""

    def __init__(self, parser: ToolParser, ids: str) -> None:
        """ids: what a call's id looks like, of the family."""
        self._parser, self._ids = parser, ids
        self.calls: list[answer_structs.ToolCall] = []

    def push(self, text: str, *, is_end: bool) -> ParsedText:
        """Returns what this piece of the answer's text adds."""
        parsed = self._parser.push(text, is_end=is_end)
        for delta in parsed.calls:
            if delta.name is not None:
                function = answer_structs.CalledFunction(name=delta.name, arguments="")
                self.calls.append(answer_structs.ToolCall(id=self._new_id(delta), function=function))
            self.calls[delta.number].function.arguments += delta.arguments
        return parsed

    def _new_id(self, delta: CallDelta) -> str:
        """Returns an id that the model's template takes when the call is sent back."""
        match self._ids:
            case "numbered":
                return f"functions.{delta.name}:{delta.own_number or delta.number}"
            case "nine":
                return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def delta(self, parsed: ParsedText) -> dict[str, Any]:
        """Returns the new part of a message as a chunk has it."""
        made: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
        pieces = []
        for delta in parsed.calls:
            piece: dict[str, Any] = {"index": delta.number, "function": {"arguments": delta.arguments}}
            if delta.name is not None:
                piece |= {"id": self.calls[delta.number].id, "type": "function"}
                piece["function"] = {"name": delta.name, **piece["function"]}
            pieces.append(piece)
        return made | {"tool_calls": pieces} if pieces else made


class Renderer:
    """Renders the answer to one HTTP request, whole or in server-sent events."""

    def __init__(self, ask: Ask, group_id: str, tokenizer: Tokenizer) -> None:
        self.ask = ask
        self._form = ChatForm(ask, tokenizer) if ask.is_chat else CompletionForm(ask, tokenizer)
        self._head: dict[str, Any] = {"id": group_id, "created": int(time.time()), "model": ask.model}
        self.is_plain = not ask.return_token_ids and ask.sampling.logprobs is None
        self._usage_field: dict[str, Any] = {"usage": None} if ask.include_usage else {}
        self._is_told_apart = ask.tool_use is not None or ask.reasoning is not None
        self._is_preformatted = self.is_plain and not ask.continuous_usage and not self._is_told_apart
        self._tool_answers: dict[int, ToolAnswer] = {}
        self._opened: set[int] = set()
        marker = NewOutput("\x00", (), ())
        probe = orjson.dumps(self._chunk([{"index": -1, **self._form.piece(marker), "finish_reason": None}]))
        before, rest = probe.split(b'"index":-1', 1)
        between, after = rest.split(b'"\\u0000"', 1)
        # before the index, between index and text, and after the text of a plain chunk
        self._plain_parts = b"data: " + before + b'"index":', between, after + b"\n\n"

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"object": self._form.object_chunk, **self._head, "choices": choices, **self._usage_field, **more}

    # ---- streamed

    def event(self, choice: Choice, most_scored: int | None = None) -> bytes:
        """A chunk with all that is new of a choice that goes on, or with so many logprobs that go before it."""
        new = choice.take(most_scored)
        if self._is_preformatted and choice.index in self._opened:
            before, between, after = self._plain_parts
            return b"%b%d%b%b%b" % (before, choice.index, between, orjson.dumps(new.text), after)
        piece = {**self._piece(choice, new), "finish_reason": None}
        if self._is_told_apart and self.is_plain and not piece["delta"]:
            return b""  # what came may be a mark's beginning, or is not shown
        return self._opening(choice) + self._event(piece, **self._so_far(choice, choice.num_output_tokens))

    def last_event(self, choice: Choice, own_timing: answer_structs.Timing | None = None, /, **more: Any) -> bytes:
        """The chunk that says why a choice ended; `more` goes beside the choices."""
        piece = {**self._piece(choice, choice.take()), "finish_reason": self._finish_word(choice)}
        if choice.text.stop_string is not None:
            piece["stop_reason"] = choice.text.stop_string
        if own_timing is not None:
            piece["timing"] = own_timing
        so_far = self._so_far(choice, choice.num_output_tokens)
        return self._opening(choice) + self._event(piece, **so_far, **more)

    def usage_event(self, choices: Sequence[Choice], **more: Any) -> bytes:
        return b"data: " + _json({**self._chunk([]), "usage": usage(choices, self.ask.n), **more}) + b"\n\n"

    def _opening(self, choice: Choice) -> bytes:
        """Chats begin with a chunk that names the role."""
        if choice.index in self._opened:
            return b""
        self._opened.add(choice.index)
        opening = self._form.opening()
        if opening is None:
            return b""
        return self._event({"index": choice.index, **opening, "finish_reason": None}, **self._so_far(choice, 0))

    def _so_far(self, choice: Choice, output_tokens: int) -> dict[str, Any]:
        """The tokens of one choice up to this chunk, for whoever asked for them in each."""
        if not self.ask.continuous_usage:
            return {}
        prompt_tokens, reasoning = len(choice.request.prompt_token_ids), _reasoning_tokens([choice])
        return {"usage": _counted(prompt_tokens, output_tokens, choice.cached_tokens, reasoning)}

    def _tool_answer(self, choice: Choice) -> ToolAnswer | None:
        """Returns the calls of a choice that may have some."""
        if self.ask.tool_use is None:
            return None
        if choice.index not in self._tool_answers:
            self._tool_answers[choice.index] = ToolAnswer(self.ask.tool_use.parser(), self.ask.tool_use.family.ids)
        return self._tool_answers[choice.index]

    def _finish_word(self, choice: Choice) -> FinishWord:
        word, found = finish_word(choice), self._tool_answers.get(choice.index)
        return "tool_calls" if word == "stop" and found is not None and found.calls else word

    def _piece(self, choice: Choice, new: NewOutput) -> dict[str, Any]:
        piece = {"index": choice.index, **self._form.piece(new)}
        if self._is_told_apart:
            piece["delta"] = self._delta(choice, new)
        if self.ask.return_token_ids:
            piece["token_ids"] = list(new.token_ids)
            if choice.index not in self._opened:
                piece["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        return piece

    def _delta(self, choice: Choice, new: NewOutput) -> dict[str, Any]:
        """Returns what is new of a message, by what it is."""
        delta = {"reasoning_content": new.reasoning} if new.reasoning and self._shows_reasoning else {}
        if (tools := self._tool_answer(choice)) is not None:
            return delta | tools.delta(tools.push(new.text, is_end=choice.is_done))
        return delta | {"content": new.text} if new.text else delta

    @property
    def _shows_reasoning(self) -> bool:
        return self.ask.reasoning is not None and self.ask.reasoning.is_shown

    def _event(self, piece: dict[str, Any], **more: Any) -> bytes:
        return b"data: " + _json(self._chunk([piece], **more)) + b"\n\n"

    # ---- whole

    def body(self, choices: Sequence[Choice], now_ns: int, notices: Sequence[str]) -> bytes:
        """The whole answer. Its time is that of the choice that ended last; several choices have each their own."""
        has_own = self.ask.include_timing and len(choices) > 1
        written = [self._whole(choice, timing(choice, now_ns) if has_own else None) for choice in choices]
        fields: dict[str, Any] = {**self._head, "choices": written, "usage": usage(choices, self.ask.n)}
        if self.ask.include_timing:
            fields["timing"] = timing(last_ended(choices), now_ns)
        if notices:
            fields["notices"] = list(notices)
        return msgspec.json.encode(self._form.answer(**fields))

    def _whole(
        self, choice: Choice, own_timing: answer_structs.Timing | None
    ) -> answer_structs.CompletionChoice | answer_structs.ChatChoice:
        new, shows_ids = choice.take(), self.ask.return_token_ids
        more: dict[str, Any] = {}
        if (tools := self._tool_answer(choice)) is not None:
            new = new._replace(text=tools.push(new.text, is_end=True).content)
            more = {"calls": tools.calls}
        if not self._shows_reasoning:
            new = new._replace(reasoning="")
        return self._form.whole(
            new,
            **more,
            index=choice.index,
            finish_reason=self._finish_word(choice),
            stop_reason=UNSET if choice.text.stop_string is None else choice.text.stop_string,
            token_ids=list(new.token_ids) if shows_ids else UNSET,
            prompt_token_ids=list(choice.request.prompt_token_ids) if shows_ids else UNSET,
            timing=UNSET if own_timing is None else own_timing,
        )


def _json(chunk: dict[str, Any]) -> bytes:
    return orjson.dumps(chunk, default=_plain)


def _plain(value: Any) -> Any:
    return orjson.Fragment(bytes(value)) if isinstance(value, msgspec.Raw) else msgspec.to_builtins(value)


def _written(value: Any) -> msgspec.Raw:
    """Returns it as JSON: values by the thousand would take much memory, and then the interpreter's lock for long."""
    return msgspec.Raw(msgspec.json.encode(value))


def finish_word(choice: Choice) -> FinishWord:
    return "stop" if choice.finish_reason is FinishReason.STOP else "length"


def usage(choices: Sequence[Choice], n: int) -> answer_structs.TokenUsage:
    """Each prompt counts once, however many answers it got (choices are in the order of the prompts)."""
    prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in choices[::n])
    completion_tokens = sum(choice.num_output_tokens for choice in choices)
    cached_tokens = sum(choice.cached_tokens for choice in choices[::n])
    return _counted(prompt_tokens, completion_tokens, cached_tokens, _reasoning_tokens(choices))


def _reasoning_tokens(choices: Sequence[Choice]) -> int | None:
    """Returns None for a model that does not reason."""
    found = [choice.reasoning.num_tokens for choice in choices if choice.reasoning is not None]
    return sum(found) if found else None


def _counted(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning: int | None
) -> answer_structs.TokenUsage:
    total_tokens, details = prompt_tokens + completion_tokens, answer_structs.PromptTokensDetails(cached_tokens)
    of_completion = UNSET if reasoning is None else answer_structs.CompletionTokensDetails(reasoning)
    return answer_structs.TokenUsage(prompt_tokens, completion_tokens, total_tokens, details, of_completion)


def timing(choice: Choice, now_ns: int) -> answer_structs.Timing:
    """`{start_ns, sealed_ns, ttft_ns, stages}`; begin and end from the start, contiguous, up to `sealed_ns`.

    A first token that is only now being written counts as written at `sealed_ns`.
    """
    account = choice.account
    sealed_ns = now_ns if account.end_ns is None else account.end_ns
    first_written_ns = choice.written_ns[0] if choice.written_ns else sealed_ns if choice.token_ids else None
    return {
        "start_ns": account.start_ns,
        "sealed_ns": sealed_ns,
        "ttft_ns": None if first_written_ns is None else first_written_ns - account.start_ns,
        "first_token_ready_ns": choice.ready_ns[0] - account.start_ns if choice.ready_ns else None,
        "stages": stages_json(account.intervals(sealed_ns), account.start_ns),
    }


def last_ended(choices: Sequence[Choice]) -> Choice:
    """The choice that the response waited for."""
    return max(choices, key=lambda choice: choice.heard_ns)


class WholeRenderer:
    """Renders an answer that is written at once. tokenizer: of no use to it; every renderer is given one."""

    def __init__(self, ask: Any, group_id: str, tokenizer: Tokenizer) -> None:
        self.ask, self._group_id = ask, group_id

    def body(self, choices: Sequence[Choice], now_ns: int, notices: Sequence[str]) -> bytes:
        told = timing(last_ended(choices), now_ns) if self.ask.include_timing else UNSET
        head = {"id": self._group_id, "created": int(time.time()), "model": self.ask.model, "timing": told}
        return msgspec.json.encode(self._answer(choices, **head, notices=list(notices) or UNSET))

    def _answer(self, choices: Sequence[Choice], **head: Any) -> answer_structs.AnyAnswer:
        raise NotImplementedError


class CompletionForm:
    """What is particular to completions: the fields of a choice, whole and in pieces."""

    answer: type[answer_structs.Completion | answer_structs.ChatCompletion] = answer_structs.Completion
    object_chunk = "text_completion"

    def __init__(self, ask: Ask, tokenizer: Tokenizer) -> None:
        self._has_logprobs = ask.sampling.logprobs is not None
        self._num_top = ask.sampling.logprobs or 0
        self._tokenizer = tokenizer

    def opening(self) -> dict[str, Any] | None:
        return None

    def whole(self, new: NewOutput, **more: Any) -> answer_structs.CompletionChoice | answer_structs.ChatChoice:
        return answer_structs.CompletionChoice(text=new.text, logprobs=self._logprobs(new.scored), **more)

    def piece(self, new: NewOutput) -> dict[str, Any]:
        return {"text": new.text, "logprobs": self._logprobs(new.scored)}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {
            "tokens": [token_text(self._tokenizer, entry.token_id) for entry in scored],
            "token_logprobs": [None if e.logprob is None else _finite(e.logprob.logprob) for e in scored],
            "top_logprobs": [None if e.logprob is None else self._top(e.logprob) for e in scored],
            "text_offset": [entry.text_offset for entry in scored],
        }

    def _top(self, logprob: TokenLogprob) -> msgspec.Raw:
        """The likeliest, and the chosen one if it is not among them."""
        pairs = [*logprob.top[: self._num_top], (logprob.token_id, logprob.logprob)]
        return _written({token_text(self._tokenizer, token_id): _finite(value) for token_id, value in pairs})


class ChatForm(CompletionForm):
    """The form of a chat's answer."""

    answer = answer_structs.ChatCompletion
    object_chunk = "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def whole(
        self, new: NewOutput, calls: Sequence[answer_structs.ToolCall] = (), **more: Any
    ) -> answer_structs.ChatChoice:
        message = answer_structs.AssistantMessage(content=new.text, reasoning_content=new.reasoning or UNSET)
        if calls:
            message.content, message.tool_calls = new.text or None, list(calls)
        return answer_structs.ChatChoice(message=message, logprobs=self._logprobs(new.scored), **more)

    def piece(self, new: NewOutput) -> dict[str, Any]:
        return {"delta": {"content": new.text}, "logprobs": self._logprobs(new.scored)}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {"content": [self._entry(e) for e in scored if e.logprob is not None], "refusal": None}

    def _entry(self, entry: Scored) -> msgspec.Raw:
        assert entry.logprob is not None
        top = [self._token(token_id, value) for token_id, value in entry.logprob.top[: self._num_top]]
        return _written({**self._token(entry.token_id, entry.logprob.logprob), "top_logprobs": top})

    def _token(self, token_id: int, value: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(spelled)}


def _finite(value: float) -> float:
    return value if value >= MIN_LOGPROB else MIN_LOGPROB  # a NaN becomes MIN_LOGPROB too
