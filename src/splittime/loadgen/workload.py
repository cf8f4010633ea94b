"""Synthetic prompts: exact in tokens, shared prefixes where asked for, nothing in common where not.

A prompt of L tokens in a group shares its first floor(L * prefix_share) tokens with the group: a longer prompt has more
of the same. The rest is its own, and begins with a salt of its own, so that exactly what is meant to be shared is. What
a prefix cache should then find is worked out in `prefix_hits`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator

from splittime.ledger.client_book import Phase
from splittime.loadgen import traces
from splittime.loadgen.content import Content, Conversation
from splittime.loadgen.distributions import parse_distribution
from splittime.loadgen.lengths import Fitter, Rows, check_fixed, draw_lengths
from splittime.loadgen.prompts import Alphabet, Ids, Salt
from splittime.loadgen.randomness import stream
from splittime.loadgen.schedule import Message
from splittime.loadgen.spec import LoadSpec

DEFAULT_INPUT_TOKENS = "512"
DEFAULT_OUTPUT_TOKENS = "128"
ROLES = ("user", "assistant")


class Opening(NamedTuple):
    """A first prompt before it is rendered."""

    ids: Ids
    output_tokens: int
    tags: dict[str, str]


class Synthetic:
    """One turn each; `sessions` builds on the same openings."""

    def __init__(self, spec: LoadSpec, alphabet: Alphabet, salt: Salt, fitter: Fitter) -> None:
        self.spec, self.alphabet, self.salt, self.fitter = spec, alphabet, salt, fitter
        self.inputs = parse_distribution(spec.input_tokens or DEFAULT_INPUT_TOKENS, "input_tokens", 1)
        self.outputs = parse_distribution(spec.output_tokens or DEFAULT_OUTPUT_TOKENS, "output_tokens", 1)
        self._file_rows: Rows | None = None
        if spec.lengths_file is None:
            check_fixed(self.inputs, self.outputs, fitter.max_model_len)
        else:
            self._file_rows = traces.read_lengths(spec)
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

    def draw_rows(self, rng: Generator, count: int, evenly: bool) -> Rows:
        """Lengths before they are fitted."""
        if self._file_rows is not None:
            return self._file_rows.draw(rng, count, evenly)
        return draw_lengths(self.inputs, self.outputs, rng, count, evenly)

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
