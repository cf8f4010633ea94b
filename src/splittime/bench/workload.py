"""What a request asks, before anything says when (`Content`), and the workloads that draw their prompts.

`Synthetic` prompts are exact in tokens, with shared prefixes where asked for and nothing in common where not.

A prompt of L tokens in a group shares its first floor(L * prefix_share) tokens with the group: a longer prompt has more
of the same. The rest is its own, and begins with a salt of its own, so that exactly what is meant to be shared is. What
a prefix cache should then find is worked out by `draw.EndlessCache`.

`TraceWorkload` makes prompts for a trace that has none: as long as it says, and beginning alike where its block ids do.
A block id stands for fixed tokens (`distributions.BlockIds`), so what the trace's own users had in common is in common
again. With lengths scaled by f, block i of a prompt spans tokens [round(512 f i), round(512 f (i + 1))): the edges
depend on its place alone, so equal ids still give equal beginnings. A trace that is used up begins again with other
tokens. Warm-up takes the rows' lengths and new tokens: it warms every shape and leaves the prefix cache as it was.

Workloads of what users bring: questions from conversations, or requests as they stand in a file.

Every use of a prompt is salted by itself (`distributions.Salt`): a file of 300 conversations makes 10,000 requests of
which no prefix cache knows the second. A session keeps one salt over its turns: there a prefix is meant to be found
again. Lengths in tokens are not known, so nothing is cut, and answers are asked for at most so long, unless
`exact_output`.

ShareGPT's form is one JSON list of `{"conversations": [{"from": "human" | "gpt" | "system", "value": text}, ...]}`;
with OpenAI's names (`messages`, `role`, `content`) it is read too. A line of JSONL is
`{"prompt": text or ids | "messages": [...], "max_tokens": n, "body": {...}, "tags": {...}}`.
What cannot be used is refused with the line or the place in the list; nothing is left out in silence.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.random import Generator

from splittime.bench import traces
from splittime.bench.book.records import Phase
from splittime.bench.distributions import (
    Alphabet,
    BlockIds,
    Distribution,
    Fitter,
    Ids,
    LengthRows,
    Salt,
    check_fixed,
    draw_lengths,
    parse_distribution,
    stream,
    token_ids,
    uniform,
)
from splittime.bench.schedule import Message
from splittime.bench.spec import LoadSpec
from splittime.bench.traces import BLOCK_TOKENS, Trace, bad_file, bad_line, lines, read_text
from splittime.core.errors import ConfigError


class Content(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Fields as `Planned` has them. `may_hit`: that it shares its beginning with another is meant."""

    output_tokens: int
    prompt: tuple[int, ...] | str = ()
    messages: tuple[Message, ...] | None = None
    exact_output: bool = True
    expected_prompt_tokens: int | None = None
    may_hit: bool = False
    body: dict[str, Any] = {}
    tags: dict[str, str] = {}


Conversation = list[Content]
"""Its turns in order; most have one."""


class Workload(Protocol):
    """Where contents come from. `notes` says, after drawing, what had to be changed."""

    def draw(self, phase: Phase, count: int, begin: int = 0) -> Sequence[Conversation]:
        """A phase's conversations, always the same; warm-up is spread over all lengths. `begin`: where in a file's
        order to begin."""
        ...

    def notes(self) -> list[str]: ...


DEFAULT_INPUT_TOKENS = "512"
DEFAULT_OUTPUT_TOKENS = "128"
ROLES = ("user", "assistant")


class Opening(NamedTuple):
    """A first prompt before it is rendered."""

    ids: Ids
    output_tokens: int
    tags: dict[str, str]


class Synthetic:
    """One turn each; `SyntheticSessions` builds on the same openings."""

    def __init__(
        self, spec: LoadSpec, alphabet: Alphabet, salt: Salt, fitter: Fitter, usual: LengthRows | None = None
    ) -> None:
        """usual: rows from which a length comes that the spec does not say."""
        self.spec, self.alphabet, self.salt, self.fitter = spec, alphabet, salt, fitter
        self.inputs = parse_distribution(spec.input_tokens or DEFAULT_INPUT_TOKENS, "input_tokens", 1)
        self.outputs = parse_distribution(spec.output_tokens or DEFAULT_OUTPUT_TOKENS, "output_tokens", 1)
        self._rows = traces.read_lengths(spec) if spec.lengths_file is not None else usual
        if self._rows is None:
            check_fixed(self.inputs, self.outputs, fitter.max_model_len)
        self._prefixes: dict[int, Ids] = {}

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        openings = self.openings(phase, count)
        return [[self.content([one.ids], one.output_tokens, one.tags)] for one in openings]

    def notes(self) -> list[str]:
        return self.fitter.note()

    def openings(self, phase: Phase, count: int) -> list[Opening]:
        rng = stream(self.spec.seed, "lengths", phase)
        inputs, outputs = self.fitter.fit(*self.draw_rows(rng, count, evenly=phase is Phase.WARM_UP))
        every = self.alphabet.draw(stream(self.spec.seed, "prompts", phase), int(inputs.sum()))
        salts = self.salt.ids(self.alphabet, phase, count=count)
        groups = stream(self.spec.seed, "groups", phase).integers(self.spec.prefix_groups, size=count).tolist()
        prompts = np.split(every, np.cumsum(inputs)[:-1])
        rows = zip(prompts, outputs.tolist(), groups, salts, strict=True)
        return [Opening(self._in_group(*row), row[1], self._tags(row[2])) for row in rows] if count else []

    def content(self, pieces: Sequence[Ids], output_tokens: int, tags: dict[str, str]) -> Content:
        """A prompt of pieces: what the user said, what was answered, what the user said then, ..."""
        form = self.spec.prompt_form or "ids"
        exact = self.spec.exact_output is not False
        may_hit = len(pieces) > 1 or self.spec.prefix_share > 0
        asked = Content(output_tokens=output_tokens, exact_output=exact, may_hit=may_hit, tags=tags)
        return rendered(asked, form, self.alphabet, pieces)

    def draw_rows(self, rng: Generator, count: int, evenly: bool) -> LengthRows:
        """Lengths before they are fitted."""
        if self._rows is None:
            return draw_lengths(self.inputs, self.outputs, rng, count, evenly)
        rows = self._rows.draw(rng, count, evenly)
        if self.spec.input_tokens is None and self.spec.output_tokens is None:
            return rows
        said = draw_lengths(self.inputs, self.outputs, rng, count, evenly)
        return LengthRows(
            rows.inputs if self.spec.input_tokens is None else said.inputs,
            rows.outputs if self.spec.output_tokens is None else said.outputs,
        )

    def _in_group(self, own: Ids, output_tokens: int, group: int, salt_ids: Ids) -> Ids:
        num_shared = int(len(own) * self.spec.prefix_share)
        own[:num_shared] = self._prefix(group, num_shared)
        self.salt.put_on(own, salt_ids, at=num_shared)
        return own

    def _prefix(self, group: int, num_tokens: int) -> Ids:
        """The group's first tokens; a longer prefix begins with a shorter one."""
        known = self._prefixes.get(group)
        if known is None or len(known) < num_tokens:
            known = self.alphabet.draw(stream(self.spec.seed, "prefix", str(group)), 2 * num_tokens)
            self.salt.put_on(known, self.salt.ids(self.alphabet, "prefix", str(group))[0])
            self._prefixes[group] = known
        return known[:num_tokens]

    def _tags(self, group: int) -> dict[str, str]:
        return {"group": str(group)} if self.spec.prefix_share else {}


def rendered(asked: Content, form: str, alphabet: Alphabet, pieces: Sequence[Ids]) -> Content:
    """`asked` with its prompt, in the form that the endpoint takes."""
    if form == "chat":
        return msgspec.structs.replace(asked, messages=_messages(alphabet, pieces))
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    exact_tokens = len(whole) if form == "ids" else None
    return msgspec.structs.replace(asked, prompt=alphabet.prompt(whole), expected_prompt_tokens=exact_tokens)


def _messages(alphabet: Alphabet, pieces: Sequence[Ids]) -> tuple[Message, ...]:
    """User and assistant in turn, the user first and last."""
    assert len(pieces) % 2 == 1, "a chat ends with what the user says"
    return tuple({"role": ROLES[i % 2], "content": alphabet.text(ids)} for i, ids in enumerate(pieces))


class TraceWorkload:
    """The rows in order, from the row `begin`."""

    def __init__(self, spec: LoadSpec, trace: Trace, alphabet: Alphabet, salt: Salt, fitter: Fitter) -> None:
        self._spec, self._trace, self._alphabet, self._salt, self._fitter = spec, trace, alphabet, salt, fitter
        self._rows = trace.rows.scaled(spec.length_scale)
        self._most_rows = 0
        self._blocks: dict[int, BlockIds] = {}

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        if phase is Phase.WARM_UP:
            rows = self._rows.draw(stream(self._spec.seed, "lengths", phase), count, evenly=True)
            places = None
        else:
            places = np.arange(begin, begin + count)
            rows = LengthRows(*(one[places % len(self._trace)] for one in self._rows))
            self._most_rows = max(self._most_rows, begin + count) if phase is Phase.MEASURED else self._most_rows
        rows = LengthRows(*self._fitter.fit(rows.inputs, rows.outputs))
        prompts = self._prompts(phase, rows.inputs, None if places is None else places.tolist())
        return [[self._content(*one)] for one in zip(prompts, rows.outputs.tolist(), strict=True)]

    def notes(self) -> list[str]:
        rows, used = len(self._trace), self._most_rows
        again = [f"{used} requests were measured over the trace's {rows} rows: some rows came again"]
        return self._fitter.note() + (again if used > rows else [])

    def _prompts(self, phase: Phase, inputs: np.ndarray, places: Sequence[int] | None) -> list[Ids]:
        if not len(inputs):
            return []
        every = self._alphabet.draw(stream(self._spec.seed, "prompts", phase), int(inputs.sum()))
        prompts = np.split(every, np.cumsum(inputs)[:-1])
        salts = self._salt.ids(self._alphabet, phase, count=len(prompts))
        for ids, salt_ids in zip(prompts, salts, strict=True):
            self._salt.put_on(ids, salt_ids)
        if places is not None and self._trace.blocks is not None:
            for ids, place in zip(prompts, places, strict=True):
                self._put_blocks(ids, *divmod(place, len(self._trace)))
        return prompts

    def _put_blocks(self, ids: Ids, again: int, row: int) -> None:
        """Over the drawn tokens, as far as the row names blocks."""
        assert self._trace.blocks is not None
        tokens_per_block = BLOCK_TOKENS * self._spec.length_scale
        place = 0
        for first_id, count in runs(self._trace.blocks[row]):
            for block in self._source(again).of(first_id, count):
                room = ids[round(tokens_per_block * place) : round(tokens_per_block * (place + 1))]
                room[:] = block[: len(room)]
                place += 1

    def _source(self, again: int) -> BlockIds:
        if again not in self._blocks:
            most = int(BLOCK_TOKENS * self._spec.length_scale) + 1
            self._blocks[again] = BlockIds(self._alphabet, self._salt, most, str(again))
        return self._blocks[again]

    def _content(self, ids: Ids, output_tokens: int) -> Content:
        exact = self._spec.exact_output is not False
        may_hit = self._trace.blocks is not None
        asked = Content(output_tokens=output_tokens, exact_output=exact, may_hit=may_hit)
        return rendered(asked, self._spec.prompt_form or "ids", self._alphabet, [ids])


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of ids that follow one another."""
    begin = 0
    for i in range(1, len(block_ids) + 1):
        if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1:
            yield block_ids[begin], i - begin
            begin = i


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
    read = [_turns(_read_messages(path, place, entry)) for place, entry in enumerate(listed)]
    found = [turns for turns in read if turns]
    if not found:
        raise bad_file(path, "no conversation in it has a question", PARAM, _CONVERSATION_HINT)
    return found, len(read) - len(found)


def _read_messages(path: str, place: int, entry: dict[str, Any]) -> list[Message]:
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
