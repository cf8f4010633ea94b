"""Sessions: a user asks, reads, thinks, and asks again; each turn's prompt is the whole talk so far.

The answers cannot be known before the run, and a schedule that waited for them would depend on the server. So drawn
tokens, as many as were asked for, stand in for each answer (conversations from a file have their own). The server finds
the blocks of the turn before's *prompt* again, and not those of the answer it gave: `expected_cached_tokens` says so.

A later turn is intended at: the turn before's intended start + its expected length + the user's thinking, where the
expected length is `expected_ttft_ms` + (n - 1) * `expected_tpot_ms` for n tokens; `schedule` says how that counts.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from splittime.bench.book.records import Phase
from splittime.bench.distributions import LengthRows, parse_distribution, stream
from splittime.bench.prompts import Ids
from splittime.bench.spec import LoadSpec
from splittime.bench.spec_rules import MAX_REQUESTS
from splittime.bench.workload import Content, Conversation, Opening, Synthetic
from splittime.core.errors import ConfigError

NS_PER_MS = 1e6
NS_PER_S = 1e9


class Turn(msgspec.Struct, frozen=True):
    """A content with its place in a session and in time; `at_ns` is None in a closed loop."""

    content: Content
    session: int | None
    number: int
    at_ns: int | None
    think_ns: int = 0
    expected_ns: int = 0


class SyntheticSessions:
    """Drawn conversations. One that outgrows the model ends before, and is counted."""

    def __init__(self, spec: LoadSpec, synthetic: Synthetic) -> None:
        self._spec, self._synthetic = spec, synthetic
        self._turns = parse_distribution(spec.turns, "turns", 1)
        self._num_ended = 0

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        num_turns = self._turns.whole_at(stream(self._spec.seed, "turns", phase).random(count)).tolist()
        _require_drawable(self._spec, count, sum(num_turns))
        openings = self._synthetic.openings(phase, count)
        later = self._later(phase, sum(num_turns) - count)
        stand_in = stream(self._spec.seed, "answers", phase)
        return [self._conversation(*one, later, stand_in) for one in zip(openings, num_turns, strict=True)]

    def notes(self) -> list[str]:
        limit = self._synthetic.fitter.max_model_len
        ended = [f"{self._num_ended} sessions ended early: the next turn would not fit max_model_len {limit}"]
        return self._synthetic.notes() + (ended if self._num_ended else [])

    def _conversation(
        self, opening: Opening, num_turns: int, later: Iterator[tuple[Ids, int]], stand_in: np.random.Generator
    ) -> Conversation:
        pieces, output_tokens = [opening.ids], opening.output_tokens
        conversation = [self._synthetic.content(pieces, output_tokens, opening.tags)]
        following = [next(later) for _ in range(num_turns - 1)]
        for ids, next_output_tokens in following:
            pieces += [self._synthetic.alphabet.draw(stand_in, output_tokens), ids]
            output_tokens = next_output_tokens
            if not self._fits(sum(map(len, pieces)) + output_tokens):
                self._num_ended += 1
                break
            conversation.append(self._synthetic.content(pieces, output_tokens, opening.tags))
        return conversation

    def _fits(self, num_tokens: int) -> bool:
        limit = self._synthetic.fitter.max_model_len
        return limit is None or num_tokens <= limit

    def _later(self, phase: Phase, count: int) -> Iterator[tuple[Ids, int]]:
        """Returns what users add in later turns, and how long the answers are."""
        rng = stream(self._spec.seed, "later turns", phase)
        rows = self._synthetic.draw_rows(rng, count, evenly=False)
        if self._spec.turn_input_tokens is not None:
            added = parse_distribution(self._spec.turn_input_tokens, "turn_input_tokens", 1)
            rows = LengthRows(added.whole_at(rng.random(count)), rows.outputs)
        every = self._synthetic.alphabet.draw(rng, int(rows.inputs.sum()))
        return zip(np.split(every, np.cumsum(rows.inputs)[:-1]), rows.outputs.tolist(), strict=bool(count))


def _require_drawable(spec: LoadSpec, num_sessions: int, num_turns: int) -> None:
    if num_turns > MAX_REQUESTS:
        words = f"{num_sessions:,} sessions of {spec.turns} turns are {num_turns:,} requests, too many to be drawn"
        hint = f"Make --turns smaller, or the run shorter: {MAX_REQUESTS:,} requests are drawn at most."
        raise ConfigError(words, param="turns", value=spec.turns, limit=MAX_REQUESTS, hint=hint)


class SessionClock:
    """Puts conversations on the clock. Thinking is drawn in the order in which they are given."""

    def __init__(self, spec: LoadSpec, phase: Phase) -> None:
        self._spec = spec
        self._think_s = parse_distribution(spec.think_s, "think_s")
        self._rng = stream(spec.seed, "thinking", phase)

    def turns(self, conversation: Conversation, session: int, at_ns: int | None) -> list[Turn]:
        if not self._spec.has_sessions:
            return [Turn(conversation[0], None, 0, at_ns)]
        thinking = (self._think_s.at(self._rng.random(len(conversation) - 1)) * NS_PER_S).astype(np.int64).tolist()
        turns: list[Turn] = []
        for number, content in enumerate(conversation):
            think_ns = thinking[number - 1] if number else 0
            if turns and at_ns is not None:
                at_ns += turns[-1].expected_ns + think_ns
            turns.append(Turn(content, session, number, at_ns, think_ns, self._expected_ns(content)))
        return turns

    def _expected_ns(self, content: Content) -> int:
        later_ms = (content.output_tokens - 1) * self._spec.expected_tpot_ms
        return round((self._spec.expected_ttft_ms + later_ms) * NS_PER_MS)
