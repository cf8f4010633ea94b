"""Workloads of what users bring: questions from conversations, or requests as they stand in a file.

Every use of a prompt is salted by itself (`prompts.Salt`): a file of 300 conversations makes 10,000 requests of which
no prefix cache knows the second. A session keeps one salt over its turns: there a prefix is meant to be found again.
Lengths in tokens are not known, so nothing is cut, and answers are asked for at most so long, unless `exact_output`.

ShareGPT's form is one JSON list of `{"conversations": [{"from": "human" | "gpt" | "system", "value": text}, ...]}`;
with OpenAI's names (`messages`, `role`, `content`) it is read too. A line of JSONL is
`{"prompt": text or ids | "messages": [...], "max_tokens": n, "body": {...}, "tags": {...}}`.
What cannot be used is refused with the line or the place in the list; nothing is left out in silence.
"""

from typing import Any

import msgspec
import numpy as np

from splittime.bench.book.records import Phase
from splittime.bench.distributions import Distribution, parse_distribution, stream, uniform
from splittime.bench.prompts import Alphabet, Salt, token_ids
from splittime.bench.schedule import Message
from splittime.bench.spec import LoadSpec
from splittime.bench.traces import bad_file, bad_line, lines, read_text
from splittime.bench.workload import Content, Conversation
from splittime.core.errors import ConfigError

PARAM = "dataset"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
_CONVERSATION_HINT = "It is a list of {conversations: [{from: human or gpt or system, value: text}, ...]}."
_LINE_HINT = "A line is {prompt or messages, max_tokens, body, tags}, all but the first optional."


class FileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of JSONL, as it is to be sent. `body`: more fields for the request."""

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    body: dict[str, Any] = {}
    tags: dict[str, str] = {}


class PromptTurn(msgspec.Struct, frozen=True):
    """What was said until the user's question, and the answer in the file, if there is one."""

    messages: tuple[Message, ...]
    answer: str | None


def read_requests(path: str) -> list[FileRequest]:
    decoder = msgspec.json.Decoder(FileRequest)
    found = []
    for number, line in lines(read_text(path, PARAM)):
        try:
            request = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise bad_line(path, number, str(error), PARAM, _LINE_HINT) from error
        why = _why_unusable(request)
        if why is not None:
            raise bad_line(path, number, why, PARAM, _LINE_HINT)
        found.append(request)
    if not found:
        raise bad_file(path, "there is no request in it", PARAM, _LINE_HINT)
    return found


def _why_unusable(request: FileRequest) -> str | None:
    if (request.prompt is None) == (request.messages is None):
        return "it needs one of prompt and messages"
    if not (request.prompt or request.messages):
        return "its prompt is empty"
    if request.max_tokens is not None and request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; it must be at least 1"
    if any(not isinstance(message.get("role"), str) for message in request.messages or ()):
        return "a message has no role"
    return None


def read_conversations(path: str) -> tuple[list[list[PromptTurn]], int]:
    """The conversations with a question in them, and how many had none."""
    try:
        listed = msgspec.json.decode(read_text(path, PARAM), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_file(path, str(error), PARAM, _CONVERSATION_HINT) from error
    read = [_turns(_messages(path, place, entry)) for place, entry in enumerate(listed)]
    found = [turns for turns in read if turns]
    if not found:
        raise bad_file(path, "no conversation in it has a question", PARAM, _CONVERSATION_HINT)
    return found, len(read) - len(found)


def _messages(path: str, place: int, entry: dict[str, Any]) -> list[Message]:
    text = entry.get("conversations", entry.get("messages"))
    try:
        return [_message(one) for one in text]  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"conversation {place} cannot be read ({type(error).__name__}: {error})"
        raise bad_file(path, why, PARAM, _CONVERSATION_HINT) from error


def _message(one: dict[str, Any]) -> Message:
    role, text = one.get("from", one.get("role")), one.get("value", one.get("content"))
    if role not in _ROLES:
        raise ValueError(f"{role!r} is not one of {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise TypeError("what was said is no text")
    return {"role": _ROLES[role], "content": text}


def _turns(messages: list[Message]) -> list[PromptTurn]:
    """Cut where the user has spoken and is answered, or where the talk ends. Answers before a question are left out."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    kept = [one for one in messages[:first] if one["role"] == "system"] + messages[first:]
    found = []
    for end, message in enumerate(kept, 1):
        after = kept[end] if end < len(kept) else None
        if message["role"] == "user" and (after is None or after["role"] != "user"):
            is_answered = after is not None and after["role"] == "assistant"
            found.append(PromptTurn(tuple(kept[:end]), after["content"] if after is not None and is_answered else None))
    return found


def as_text(messages: tuple[Message, ...]) -> str:
    """A chat for the completions endpoint: what was said, a line each."""
    if any(not isinstance(message.get("content"), str) for message in messages):
        raise ConfigError("a message that is not text cannot be part of a text prompt", param="prompt_form")
    return "\n".join(message["content"] for message in messages)


CHARS_PER_TOKEN = 4  # of English, about: only for how long an answer may be where nothing else says
DEFAULT_OUTPUT_TOKENS = "128"


def _chosen(seed: int, phase: Phase, sizes: list[int], count: int, begin: int, in_order: bool) -> list[int]:
    """Places in the file: warm-up spread over sizes, others in order or shuffled, again and again."""
    if phase is Phase.WARM_UP:
        order = np.argsort(sizes, kind="stable")
        return order[(uniform(stream(seed, "order", phase), count, True) * len(order)).astype(int)].tolist()
    order = np.arange(len(sizes)) if in_order else stream(seed, "order").permutation(len(sizes))
    return order[np.arange(begin, begin + count) % len(order)].tolist()


def _outputs(dist: Distribution, seed: int, phase: Phase, count: int) -> list[int]:
    return dist.whole_at(uniform(stream(seed, "outputs", phase), count, phase is Phase.WARM_UP)).tolist()


class Conversations:
    """ShareGPT's form: the first question of each, or its first turns as a session, with the file's own answers."""

    def __init__(self, spec: LoadSpec, salt: Salt) -> None:
        assert spec.dataset is not None
        self._spec, self._salt = spec, salt
        self._found, self._num_without = read_conversations(spec.dataset)
        self._turns = parse_distribution(spec.turns, "turns", 1)
        self._outputs = None if spec.output_tokens is None else parse_distribution(spec.output_tokens, "output_tokens")

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        sizes = [len(as_text(turns[0].messages)) for turns in self._found]
        places = _chosen(self._spec.seed, phase, sizes, count, begin, in_order=False)
        num_turns = self._turns.whole_at(stream(self._spec.seed, "turns", phase).random(count)).tolist()
        cut = [self._found[place][:most] for place, most in zip(places, num_turns, strict=True)]
        lengths = iter(self._output_tokens(phase, sum(map(len, cut))))
        salts = [self._salt.text(phase, str(i)) for i in range(count)]
        return [
            [self._content(turn, number, salt, next(lengths)) for number, turn in enumerate(turns)]
            for turns, salt in zip(cut, salts, strict=True)
        ]

    def notes(self) -> list[str]:
        if not self._num_without:
            return []
        return [f"{self._num_without} conversations of {self._spec.dataset} have no question and were left out"]

    def _output_tokens(self, phase: Phase, count: int) -> list[int | None]:
        if self._outputs is None:
            return [None] * count
        return list(_outputs(self._outputs, self._spec.seed, phase, count))

    def _content(self, turn: PromptTurn, number: int, salt: str, output_tokens: int | None) -> Content:
        answer_chars = len(turn.answer) if turn.answer else CHARS_PER_TOKEN * int(DEFAULT_OUTPUT_TOKENS)
        asked = Content(
            output_tokens=output_tokens or max(1, round(answer_chars / CHARS_PER_TOKEN)),
            exact_output=bool(self._spec.exact_output),
            may_hit=number > 0 or self._salt.is_off,
        )
        return with_messages(asked, salted(turn.messages, salt), self._spec.prompt_form or "chat")


class FileRequests:
    """JSONL: the requests in the file's order."""

    def __init__(self, spec: LoadSpec, salt: Salt, vocab_size: int | None) -> None:
        assert spec.dataset is not None
        self._spec, self._salt = spec, salt
        self._found = read_requests(spec.dataset)
        has_ids = any(isinstance(one.prompt, tuple) for one in self._found)
        self._alphabet: Alphabet | None = token_ids(vocab_size) if has_ids else None
        default = parse_distribution(spec.output_tokens or DEFAULT_OUTPUT_TOKENS, "output_tokens", 1)
        self._default_outputs = default

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        sizes = [len(one.prompt or as_text(one.messages or ())) for one in self._found]
        places = _chosen(self._spec.seed, phase, sizes, count, begin, in_order=True)
        outputs = _outputs(self._default_outputs, self._spec.seed, phase, count)
        return [
            [self._content(self._found[place], phase, i, output_tokens)]
            for i, (place, output_tokens) in enumerate(zip(places, outputs, strict=True))
        ]

    def notes(self) -> list[str]:
        return []

    def _content(self, request: FileRequest, phase: Phase, number: int, output_tokens: int) -> Content:
        asked = Content(
            output_tokens=request.max_tokens or output_tokens,
            exact_output=bool(self._spec.exact_output),
            may_hit=self._salt.is_off,
            body=request.body,
            tags=request.tags,
        )
        name, form = (str(phase), str(number)), self._spec.prompt_form
        if request.messages is not None:
            return with_messages(asked, salted(request.messages, self._salt.text(*name)), form or "chat")
        if isinstance(request.prompt, tuple):
            return self._with_ids(asked, request.prompt, name)
        text = self._salt.text(*name) + (request.prompt or "")
        if form == "chat":
            return msgspec.structs.replace(asked, messages=({"role": "user", "content": text},))
        return with_prompt(asked, text, form or "text")

    def _with_ids(self, asked: Content, prompt: tuple[int, ...], name: tuple[str, ...]) -> Content:
        """The salt stands before the prompt, so that all of the prompt is sent."""
        assert self._alphabet is not None
        salt_ids: list[int] = [] if self._salt.is_off else self._salt.ids(self._alphabet, *name)[0].tolist()
        whole = (*salt_ids, *prompt)
        asked = msgspec.structs.replace(asked, expected_prompt_tokens=len(whole))
        return with_prompt(asked, whole, self._spec.prompt_form or "ids")


def salted(messages: tuple[Message, ...], salt: str) -> tuple[Message, ...]:
    """The salt before the first message's text, whose cache entries begin there."""
    first: dict[str, Any] = dict(messages[0])
    content = first.get("content")
    if isinstance(content, list):
        first["content"] = [{"type": "text", "text": salt}, *content] if salt else content
    else:
        first["content"] = salt + (content or "")
    return (first, *messages[1:])


def with_messages(asked: Content, messages: tuple[Message, ...], form: str) -> Content:
    if form == "chat":
        return msgspec.structs.replace(asked, messages=messages)
    return with_prompt(asked, as_text(messages), form)


def with_prompt(asked: Content, prompt: str | tuple[int, ...], form: str) -> Content:
    if isinstance(prompt, tuple) != (form == "ids"):
        has = "token ids" if isinstance(prompt, tuple) else "text"
        hint = f"Give --prompt-form {'ids' if has == 'token ids' else 'text or chat'}, or leave it out."
        raise ConfigError(f"the file holds {has}, not {form}", param="prompt_form", value=form, hint=hint)
    return msgspec.structs.replace(asked, prompt=prompt)
