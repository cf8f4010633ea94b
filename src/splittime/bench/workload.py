"""What a request asks, before anything says when (`Content`), and the workloads that draw their prompts.

`Synthetic` prompts are exact in tokens, with shared prefixes where asked for and nothing in common where not.

A prompt of L tokens in a group shares its first floor(L * prefix_share) tokens with the group: a longer prompt has more
of the same. The rest is its own, and begins with a salt of its own, so that exactly what is meant to be shared is. What
a prefix cache should then find is worked out by `draw.EndlessCache`.

`TraceWorkload` makes prompts for a trace that has none: as long as it says, and beginning alike where its block ids do.
A block id stands for fixed tokens (`prompts.BlockIds`), so what the trace's own users had in common is in common again.
With lengths scaled by f, block i of a prompt spans tokens [round(512 f i), round(512 f (i + 1))): the edges depend on
its place alone, so equal ids still give equal beginnings. A trace that is used up begins again with other tokens.
Warm-up takes the rows' lengths and new tokens: it warms every shape and leaves the prefix cache as it was.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.random import Generator

from splittime.bench import traces
from splittime.bench.book.records import Phase
from splittime.bench.distributions import Fitter, LengthRows, check_fixed, draw_lengths, parse_distribution, stream
from splittime.bench.prompts import Alphabet, BlockIds, Ids, Salt
from splittime.bench.schedule import Message
from splittime.bench.spec import LoadSpec
from splittime.bench.traces import BLOCK_TOKENS, Trace


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
