"""A load of `bench` for a simulated server: the same schedule that would be sent to a real one.

In an open loop requests come when they are meant to come, whatever the answers before. A session's later turns, and
all but the first requests of a closed loop, come when an answer has ended (`simulate.run`).

`Asked` is a request that nobody has sent yet. Two prompts share what their tokens share, as in a real cache.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from splittime.bench.distributions import LengthRows
from splittime.bench.draw import draw
from splittime.bench.schedule import Planned, Schedule
from splittime.bench.spec import spec_of
from splittime.bench.traces import Trace, read_trace
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.simulate.recorded import Mix
from splittime.simulate.replica import AnyReplica, Approach
from splittime.simulate.trace import Follows, TracedRequest

DURATION_S = 60.0  # as of `bench run`
MIN_REQUESTS = 100
MAX_REQUESTS = 200_000  # of a trial: nobody waits for more
VOCAB_SIZE = 32_000  # nobody reads a simulated prompt: its tokens are equal or not


class Asked(NamedTuple):
    """A request that arrives at `at_ns`. prompt: token ids. leaves_ns: when its client goes away, if it does."""

    at_ns: int
    prompt: tuple[int, ...]
    output_tokens: int
    leaves_ns: int | None = None
    tenant: str = ""
    priority: int = 0
    deadline_ns: int | None = None


def requests_for(load: dict[str, Any], replica: AnyReplica) -> list[TracedRequest]:
    """Returns the requests of a load, given by fields of `LoadSpec`, as this replica would meet them. Lengths that it
    does not say are those of the requests that the server served, where these are known. Raises ConfigError for a load
    that cannot be drawn or simulated."""
    config, mix = replica.config, replica.mix
    spec = spec_of({"prompt_form": "ids", **(mix.load(load) if mix else load)})
    schedule = draw(
        spec,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        usual=LengthRows(*np.array(mix.rows).T) if mix and mix.words(load) else None,
    )
    return requests_of_schedule(schedule, replica)


def lengths_words(load: dict[str, Any], replica: AnyReplica) -> str:
    """Returns for people where lengths come from that the load does not say; nothing if it says all."""
    mix = replica.mix or Mix(())
    words = mix.words(load)
    return words if not words or replica.mix else "as `bench` sends by default: nothing is known of its own requests"


def requests_of_schedule(schedule: Schedule, replica: AnyReplica) -> list[TracedRequest]:
    """Returns the requests of a schedule as this replica would meet them. Raises ConfigError as `asked_of` does."""
    traced = list(asked_requests(asked_of(schedule), replica.approach, replica.config.max_model_len))
    follows = _follows(schedule, [one.request.request_id for one in traced])
    return [one._replace(follows=one_follows) for one, one_follows in zip(traced, follows, strict=True)]


def _follows(schedule: Schedule, names: Sequence[str]) -> Iterator[Follows | None]:
    """Returns for each request what it waits for. A closed loop's workers begin with its first sessions, a request
    without one among them."""
    until_ns = None if schedule.concurrency is None else schedule.duration_ns
    num_at_once = sys.maxsize if schedule.concurrency is None else schedule.concurrency
    latest: dict[int, str] = {}  # by session, its turn before
    num_begun = 0
    for planned, name in zip(schedule.requests, names, strict=True):
        if planned.session is not None and planned.turn:
            yield Follows(latest[planned.session], planned.think_ns, until_ns)
        else:
            num_begun += 1
            yield Follows(None, until_ns=until_ns) if num_begun > num_at_once else None
        if planned.session is not None:
            latest[planned.session] = name


def load_at(load: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Returns the load at so many requests a second in the mean; a trace with its own times is replayed so much
    faster. It lasts long enough for `MIN_REQUESTS`. Raises ConfigError for a closed loop, for sessions of turns, and
    for a trace that cannot be replayed whole."""
    if load.get("concurrency"):
        hint = "Give --rate or --trace; splittime simulate takes --concurrency."
        raise ConfigError("a load with --concurrency has no rate to look for", param="concurrency", hint=hint)
    turns = load.get("turns", "1")
    if turns != "1":
        hint = "Give the rate and the lengths of all turns, and --prefix-share; splittime simulate takes --turns."
        raise ConfigError("the rate of a load with --turns is one of sessions", param="turns", value=turns, hint=hint)
    if not load.get("trace") or load.get("rate"):
        return {**load, "rate": rate, "duration_s": max(load.get("duration_s") or DURATION_S, MIN_REQUESTS / rate)}
    return {**load, "speed_up": rate / _whole_trace(load).mean_rate}


def _whole_trace(load: Mapping[str, Any]) -> Trace:
    """Returns the trace, whose times are replayed from the first to the last: its mean rate is that of the whole."""
    hint = "Cut the trace, or give --rate, at which its lengths are drawn."
    if load.get("duration_s"):
        words = "a trace is replayed whole, not for a --duration"
        raise ConfigError(words, param="duration_s", value=load["duration_s"], hint=hint)
    trace = read_trace(spec_of(dict(load)))
    if trace.at_s is None:
        raise ConfigError("the trace has no times", param="trace", hint="Give --rate.")
    if len(trace) > MAX_REQUESTS:
        words = f"the trace has {len(trace):,} requests; a plan simulates at most {MAX_REQUESTS:,}"
        raise ConfigError(words, param="trace", value=len(trace), limit=MAX_REQUESTS, hint=hint)
    return trace


def rate_of(load: Mapping[str, Any]) -> float | None:
    """Returns the requests a second that this load has in the mean; None if it does not say. Those of a trace with its
    own times are its mean: each trial replays its bursts."""
    if load.get("rate") or not load.get("trace"):
        return load.get("rate")
    trace = read_trace(spec_of(dict(load)))
    return None if trace.at_s is None else trace.mean_rate


def asked_of(schedule: Schedule) -> Iterator[Asked]:
    """Returns what is asked, by those that warm up too; what has no time of its own, at the begin. Raises ConfigError
    for prompts that are texts."""
    for planned in schedule.requests:
        if not isinstance(planned.prompt, tuple):
            hint = "Draw it with --prompt-form ids."
            raise ConfigError("only prompts of token ids can be simulated", param="schedule", hint=hint)
        yield _asked(planned, planned.prompt, planned.at_ns or 0)


def _asked(planned: Planned, prompt: tuple[int, ...], at_ns: int) -> Asked:
    leaves_ns = None if planned.cancel_after_ns is None else at_ns + planned.cancel_after_ns
    return Asked(at_ns, prompt, planned.output_tokens, leaves_ns)


def asked_requests(asked: Iterable[Asked], approach: Approach, max_model_len: int) -> Iterator[TracedRequest]:
    """Returns the requests in the order given. An answer ends where the context does."""
    for number, one in enumerate(asked):
        yield _traced(f"asked-{number}", one, approach, max_model_len)


def _traced(name: str, asked: Asked, approach: Approach, max_model_len: int) -> TracedRequest:
    prompt_tokens = len(asked.prompt)
    admitted_ns = asked.at_ns + approach.to_admission_ns + round(approach.per_prompt_token_ns * prompt_tokens)
    received_ns = admitted_ns + approach.to_engine_ns
    max_tokens = max(1, min(asked.output_tokens, max_model_len - prompt_tokens))
    request, account = _request(name, asked, max_tokens, admitted_ns), _account(name, asked, max_tokens)
    marks = (Mark(Stage.RECEIVE, None, asked.at_ns), Mark(Stage.ADMIT, None, admitted_ns))
    return TracedRequest(request, account, marks, received_ns, leaves_ns=asked.leaves_ns)


def _request(name: str, asked: Asked, max_tokens: int, admitted_ns: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=asked.prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
        submitted_ns=admitted_ns,
        priority=asked.priority,
        deadline_ns=asked.deadline_ns,
        cache_salt=asked.tenant,
        tenant=asked.tenant,
    )


def _account(name: str, asked: Asked, max_tokens: int) -> ClosedAccount:
    """Returns what the server would know of it when it came."""
    return ClosedAccount(
        request_id=name,
        group_id=name,
        model="",
        endpoint="",
        started_at_unix_ns=asked.at_ns,
        start_ns=asked.at_ns,
        end_ns=asked.at_ns,
        intervals=(),
        finish_reason="length",
        prompt_tokens=len(asked.prompt),
        max_tokens=max_tokens,
        priority=asked.priority,
        tenant=asked.tenant,
        cache_salt=asked.tenant,
    )
