"""From what is asked (`LoadSpec`) to what is sent (`Schedule`), whole, before the first byte leaves.

    starts (when) + workload (what) -> turns on the clock -> manners (who hangs up, who reads slowly) -> expected hits

The same spec, vocabulary, limits and salt draw the same schedule, to the digest: all chance comes from
`distributions.stream`, and `tests/bench/test_draw.py` keeps a digest. Two runs that are not to find each other's
prompts in the server's cache are drawn with different salts; the shape of the load does not change with the salt.

`EndlessCache` works out from the prompts alone what a prefix cache should find. The law is `kv/cache.py`'s, and vLLM's:
full blocks only, named by their own tokens and all before them, and never the whole prompt, since its last token must
be computed. The cache is taken as endless, and each prompt as done before the next comes; what a server finds is at
most this, and the difference is its evictions and what was still being computed.

In a session a user asks, reads, thinks, and asks again; each turn's prompt is the whole talk so far.
The answers cannot be known before the run, and a schedule that waited for them would depend on the server. So drawn
tokens, as many as were asked for, stand in for each answer (conversations from a file have their own). The server finds
the blocks of the turn before's *prompt* again, and not those of the answer it gave: `expected_cached_tokens` says so.

A later turn is intended at: the turn before's intended start + its expected length + the user's thinking, where the
expected length is `expected_ttft_ms` + (n - 1) * `expected_tpot_ms` for n tokens; `schedule` says how that counts.
"""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splittime.bench.book.records import Phase
from splittime.bench.distributions import (
    Alphabet,
    Fitter,
    Ids,
    LengthRows,
    Salt,
    parse_distribution,
    stream,
    token_ids,
    words,
)
from splittime.bench.schedule import Planned, Schedule, load_schedule, save
from splittime.bench.spec import LoadSpec, spec_of
from splittime.bench.spec_rules import MAX_REQUESTS, check
from splittime.bench.starts import Starts, draw_starts
from splittime.bench.traces import Trace, read_trace
from splittime.bench.workload import (
    Content,
    Conversation,
    Conversations,
    FileRequests,
    Opening,
    Synthetic,
    TraceWorkload,
    Workload,
)
from splittime.core.errors import ConfigError
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import Target

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


class EndlessCache:
    """The names of all blocks seen so far."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError("a block holds a token or more", param="block_size", value=block_size, limit=1)
        self._block_size = block_size
        self._names: set[int] = set()

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Notes a prompt. Returns how many of its first tokens were there before it."""
        size, names = self._block_size, self._names
        name = num_hits = 0
        is_hit = True
        for end in range(size, len(prompt) + 1, size):
            name = hash((name, *prompt[end - size : end]))
            is_hit = is_hit and name in names
            num_hits += is_hit
            names.add(name)
        return min(num_hits, (len(prompt) - 1) // size) * size


Placed = tuple[Phase, Turn]
FIRST_LOOK = {"concurrency": 4, "duration_s": 20.0, "warm_up_requests": 8}
FIRST_LOOK_BY_NUMBER = {"concurrency": 4, "warm_up_requests": 8}
SAYS_HOW_MUCH = {"rate", "concurrency", "trace", "arrivals", "cv", "rate_end", "ramp_s", "warm_up_s", "cool_down_s"}
USUAL_VOCAB_SIZE = 32_000


def draw(
    spec: LoadSpec,
    *,
    vocab_size: int | None,
    max_model_len: int | None,
    block_size: int | None = None,
    salt: str | None = None,
    usual: LengthRows | None = None,
) -> Schedule:
    """The whole schedule. `vocab_size` may be None where no token ids are sent; `block_size` is the prefix cache's, and
    without it only "nothing shared" can be expected. usual: as of `Synthetic`. Raises `ConfigError` and `NotFound`."""
    check(spec)
    trace = read_trace(spec) if spec.trace is not None else None
    workload = _workload(spec, trace, vocab_size, max_model_len, Salt(spec.seed, salt, spec.reuse_prompts), usual)
    starts = draw_starts(spec, trace)
    placed, notes = _placed(spec, workload, starts)
    if not any(phase is Phase.MEASURED for phase, _ in placed):
        hint = "Make the window longer, or the rate higher."
        raise ConfigError("no request falls into the measured window", param="duration_s", hint=hint)
    server = {"vocab_size": vocab_size, "max_model_len": max_model_len, "block_size": block_size, "salt": salt}
    return Schedule(
        seed=spec.seed,
        concurrency=spec.concurrency,
        duration_ns=starts.end_ns,
        measured_from_ns=starts.from_ns,
        measured_until_ns=starts.until_ns,
        settings={**_asked(spec), **server},
        notes=(*workload.notes(), *notes),
        requests=tuple(_planned(spec, placed, block_size)),
    )


def draw_for(load: dict[str, Any], limits: ServerLimits, salt: str | None = None) -> Schedule:
    """Returns a schedule for one server: `load` has the fields of `LoadSpec` that were given, `limits` what the server
    says of itself. The schedule's notes say what was assumed. Raises `ConfigError`."""
    spec = spec_of(load)
    if spec.prompt_form is None and not limits.takes_ids:
        spec = msgspec.structs.replace(spec, prompt_form="text")
    schedule = draw(
        spec,
        vocab_size=USUAL_VOCAB_SIZE if limits.vocab_size is None else limits.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        salt=None if spec.reuse_prompts else salt or secrets.token_hex(6),
    )
    if limits.vocab_size is not None or spec.prompt_form not in (None, "ids"):
        return schedule
    note = f"the server does not tell its vocabulary: ids below {USUAL_VOCAB_SIZE:,} are used (--vocab-size)"
    return msgspec.structs.replace(schedule, notes=(*schedule.notes, note))


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. load: the fields of `LoadSpec` that were given, or schedule: the file of a saved one. keep_as:
    where the schedule is saved. vocab_size, max_model_len: of the server's model, where the server does not say. salt:
    before all prompts; None: by chance."""

    load: dict[str, Any] = {}
    schedule: Path | None = None
    keep_as: Path | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    salt: str | None = None


async def planned(asked: LoadRequest, target: Target) -> Schedule:
    """Returns the schedule, and saves it if asked. Raises `ConfigError`, and `EngineError` for a server that is not
    there to say its limits."""
    if asked.schedule is not None and asked.load:
        name = next(iter(asked.load)).replace("_", "-")
        what = f"--schedule says everything, also what --{name} would"
        raise ConfigError(what, param="schedule", value=str(asked.schedule), hint=f"leave out --{name}")
    schedule = load_schedule(asked.schedule) if asked.schedule is not None else await _drawn(asked, target)
    if asked.keep_as is not None:
        save(schedule, asked.keep_as)
    return schedule


async def _drawn(asked: LoadRequest, target: Target) -> Schedule:
    load = asked.load
    if not SAYS_HOW_MUCH & set(load):
        load = {**(FIRST_LOOK_BY_NUMBER if "num_requests" in load else FIRST_LOOK), **load}
    check(spec_of(load))  # before anything is asked of the server
    limits = await server_limits(target)
    return draw_for(load, limits.corrected(asked.vocab_size, asked.max_model_len), asked.salt)


def _asked(spec: LoadSpec) -> dict[str, Any]:
    """Returns what differs from the defaults, and what the defaults came to."""
    plain: dict[str, Any] = msgspec.to_builtins(LoadSpec())
    asked = {name: value for name, value in msgspec.to_builtins(spec).items() if value != plain[name]}
    arrivals = {} if spec.is_closed else {"arrivals": spec.arrival_kind}
    return {**asked, "seed": spec.seed, "workload": spec.workload_kind, **arrivals}


def _workload(
    spec: LoadSpec,
    trace: Trace | None,
    vocab_size: int | None,
    max_model_len: int | None,
    salt: Salt,
    usual: LengthRows | None,
) -> Workload:
    kind = spec.workload_kind
    if kind == "sharegpt":
        return Conversations(spec, salt)
    if kind == "jsonl":
        return FileRequests(spec, salt, vocab_size)
    fitter, alphabet = Fitter(max_model_len), _alphabet(spec, vocab_size)
    if kind == "trace":
        assert trace is not None
        return TraceWorkload(spec, trace, alphabet, salt, fitter)
    synthetic = Synthetic(spec, alphabet, salt, fitter, usual)
    return SyntheticSessions(spec, synthetic) if spec.has_sessions else synthetic


def _alphabet(spec: LoadSpec, vocab_size: int | None) -> Alphabet:
    return token_ids(vocab_size) if spec.prompt_form in (None, "ids") else words()


def _placed(spec: LoadSpec, workload: Workload, starts: Starts) -> tuple[list[Placed], list[str]]:
    """All turns in the order in which they are to start; what would start after the end is left out."""
    placed: list[Placed] = []
    num_sessions = num_before = 0
    for phase in Phase:
        instants = starts.at_ns[phase]
        clock = SessionClock(spec, phase)
        conversations = workload.draw(phase, len(instants), num_before)
        for at_ns, conversation in zip(instants, conversations, strict=True):
            placed += _in_phase(clock.turns(conversation, num_sessions, at_ns), phase, starts)
            num_sessions += 1
        num_before = len(instants) if phase is Phase.MEASURED else 0
    if spec.is_closed:
        return placed, []
    end_ns = starts.end_ns or 0
    kept = [(phase, turn) for phase, turn in placed if (turn.at_ns or 0) < end_ns]
    kept.sort(key=lambda one: one[1].at_ns or 0)  # stable: at the same instant, as drawn
    left_out = len(placed) - len(kept)
    return kept, [f"{left_out} later turns would start after the end and are left out"] if left_out else []


def _in_phase(turns: Sequence[Turn], phase: Phase, starts: Starts) -> list[Placed]:
    """A session begins in its phase and goes on into the next ones."""
    first, *later = turns
    return [(phase, first)] + [(phase if turn.at_ns is None else starts.phase_at(turn.at_ns), turn) for turn in later]


def _planned(spec: LoadSpec, placed: Sequence[Placed], block_size: int | None) -> list[Planned]:
    cache = None if block_size is None else EndlessCache(block_size)
    manners = zip(_cancel_after_ns(spec, len(placed)), _read_delays_ns(spec, len(placed)), strict=True)
    return [
        _one(index, phase, turn, _expected_hit(spec, turn, cache), *manner)
        for index, ((phase, turn), manner) in enumerate(zip(placed, manners, strict=True))
    ]


def _one(
    index: int, phase: Phase, turn: Turn, cached_tokens: int | None, cancel_after_ns: int | None, read_delay_ns: int
) -> Planned:
    asked = msgspec.structs.asdict(turn.content)
    asked.pop("may_hit")  # for the expectation only
    return Planned(
        **asked,
        index=index,
        at_ns=turn.at_ns,
        phase=phase,
        expected_cached_tokens=cached_tokens,
        session=turn.session,
        turn=turn.number,
        think_ns=turn.think_ns,
        expected_ns=turn.expected_ns,
        cancel_after_ns=cancel_after_ns,
        read_delay_ns=read_delay_ns,
    )


def _expected_hit(spec: LoadSpec, turn: Turn, cache: EndlessCache | None) -> int | None:
    """Known for token ids and a known block; for anything else only if nothing is shared. A chat's template may be."""
    content = turn.content
    if spec.reuse_prompts:
        return None  # it depends on the runs before
    if cache is not None and isinstance(content.prompt, tuple) and content.prompt:
        return cache.cached_tokens(content.prompt)
    return None if content.may_hit or content.messages is not None else 0


def _cancel_after_ns(spec: LoadSpec, count: int) -> list[int | None]:
    rng = stream(spec.seed, "cancel")
    chosen = (rng.random(count) < spec.cancel_probability).tolist()
    after_s = parse_distribution(spec.cancel_after_s, "cancel_after_s").at(rng.random(count)).tolist()
    return [round(one_s * NS_PER_S) if is_chosen else None for is_chosen, one_s in zip(chosen, after_s, strict=True)]


def _read_delays_ns(spec: LoadSpec, count: int) -> list[int]:
    chosen = stream(spec.seed, "slow readers").random(count) < spec.slow_reader_share
    return [round(spec.slow_reader_delay_ms * NS_PER_MS) if one else 0 for one in chosen.tolist()]
