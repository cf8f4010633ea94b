"""From what is asked (`LoadSpec`) to what is sent (`Schedule`), whole, before the first byte leaves.

    starts (when) + workload (what) -> turns on the clock -> manners (who hangs up, who reads slowly) -> expected hits

The same spec, vocabulary, limits and salt draw the same schedule, to the digest: all chance comes from
`randomness.stream`, and `tests/loadgen/test_draw.py` keeps a digest. Two runs that are not to find each other's prompts
in the server's cache are drawn with different salts; the shape of the load does not change with the salt.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Phase
from splittime.loadgen.content import Workload
from splittime.loadgen.distributions import parse_distribution
from splittime.loadgen.file_workload import Conversations, Requests
from splittime.loadgen.lengths import Fitter
from splittime.loadgen.prefix_hits import EndlessCache
from splittime.loadgen.prompts import Alphabet, Salt, token_ids, words
from splittime.loadgen.randomness import stream
from splittime.loadgen.schedule import Planned, Schedule
from splittime.loadgen.sessions import NS_PER_MS, NS_PER_S, Clock, SyntheticSessions, Turn
from splittime.loadgen.spec import LoadSpec
from splittime.loadgen.starts import Starts, draw_starts
from splittime.loadgen.trace_workload import TraceWorkload
from splittime.loadgen.traces import Trace, read_trace
from splittime.loadgen.workload import Synthetic

__all__ = ["LoadSpec", "draw"]

Placed = tuple[Phase, Turn]


def draw(
    spec: LoadSpec,
    *,
    vocab_size: int | None,
    max_model_len: int | None,
    block_size: int | None = None,
    salt: str | None = None,
) -> Schedule:
    """The whole schedule. `vocab_size` may be None where no token ids are sent; `block_size` is the prefix cache's, and
    without it only "nothing shared" can be expected. Raises `ConfigError` and `NotFound`."""
    spec.validate()
    trace = read_trace(spec) if spec.trace is not None else None
    workload = _workload(spec, trace, vocab_size, max_model_len, Salt(spec.seed, salt, spec.reuse_prompts))
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


def _asked(spec: LoadSpec) -> dict[str, Any]:
    """What differs from the defaults, and what the defaults came to."""
    plain: dict[str, Any] = msgspec.to_builtins(LoadSpec())
    asked = {name: value for name, value in msgspec.to_builtins(spec).items() if value != plain[name]}
    arrivals = {} if spec.is_closed else {"arrivals": spec.arrival_kind}
    return {**asked, "seed": spec.seed, "workload": spec.workload_kind, **arrivals}


def _workload(
    spec: LoadSpec, trace: Trace | None, vocab_size: int | None, max_model_len: int | None, salt: Salt
) -> Workload:
    kind = spec.workload_kind
    if kind == "sharegpt":
        return Conversations(spec, salt)
    if kind == "jsonl":
        return Requests(spec, salt, vocab_size)
    fitter, alphabet = Fitter(max_model_len), _alphabet(spec, vocab_size)
    if kind == "trace":
        assert trace is not None
        return TraceWorkload(spec, trace, alphabet, salt, fitter)
    synthetic = Synthetic(spec, alphabet, salt, fitter)
    return SyntheticSessions(spec, synthetic) if spec.has_sessions else synthetic


def _alphabet(spec: LoadSpec, vocab_size: int | None) -> Alphabet:
    return token_ids(vocab_size) if spec.prompt_form in (None, "ids") else words()


def _placed(spec: LoadSpec, workload: Workload, starts: Starts) -> tuple[list[Placed], list[str]]:
    """All turns in the order in which they are to start; what would start after the end is left out."""
    placed: list[Placed] = []
    num_sessions = num_before = 0
    for phase in Phase:
        instants = starts.at_ns[phase]
        clock = Clock(spec, phase)
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
    content = turn.content
    return Planned(
        index=index,
        at_ns=turn.at_ns,
        output_tokens=content.output_tokens,
        prompt=content.prompt,
        messages=content.messages,
        exact_output=content.exact_output,
        phase=phase,
        expected_prompt_tokens=content.expected_prompt_tokens,
        expected_cached_tokens=cached_tokens,
        session=turn.session,
        turn=turn.number,
        think_ns=turn.think_ns,
        expected_ns=turn.expected_ns,
        cancel_after_ns=cancel_after_ns,
        read_delay_ns=read_delay_ns,
        body=content.body,
        tags=content.tags,
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
