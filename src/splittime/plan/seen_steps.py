"""The steps of a server as its clients could see them: when tokens came, and what must have been computed meanwhile.

A server that batches continuously gives each decoding request one token a step. So one answer is followed from token to
token, the one that goes on the longest, and then another: between two of its tokens lies one step. In that step were
the tokens of other answers that came meanwhile, at their known lengths, and prompts. Prompts are computed in the order
of arrival: of each as much as the step's token budget leaves, and all of it by the time its first token comes.

Where nobody decodes, prompts take one step for each budget's worth. The time from the first request to an idle server
includes what lies around the engine (`Seen.arrivals`).

Tokens come late by chance: if one step seems longer, the next seems shorter. A sum of steps (`merged`) has the lateness
of its two ends only, and a regression on sums is the same regression.

From outside nobody sees the budget: it is a guess, and `StepsRead.num_beyond` counts the steps that must have had more.
Steps of an answer that does not say all its tokens are left out.

The check of such a server: its runs' own requests are simulated, and the times that a user feels compared with those
that were measured. The error is how much slower or faster all steps would have to be for the two to agree: in an
overload a server that is a tenth slower makes people wait several times as long. The larger of that error and the
regression's own, on steps that it was not made of, widens every interval (`Errors.drift`). Runs that no pace within a
factor of two explains are refused.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from splittime.bench.book.records import Ending, Outcome, Run
from splittime.bench.book.requests import MAX_UNSEEN_SHARE, output_tokens, service_ns, service_ttft_ns, tpot_ns
from splittime.core.errors import ConfigError
from splittime.plan.capacity import run_of
from splittime.plan.load import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.replica import Replica
from splittime.simulate.shape import StepShape
from splittime.simulate.trace import TracedRequest

TOGETHER_SHARE = 0.2  # of the usual time between two tokens: what comes within it comes together
PACES = (1.03, 1.06, 1.12, 1.25, 1.5, 2.0)  # times as slow, or as fast
SHARED = 1  # the seed of what prompts have in common
FELT: dict[str, Callable[[Outcome], float | None]] = {"ttft": service_ttft_ns, "tpot": tpot_ns, "e2e": service_ns}


class Seen(NamedTuple):
    """What was computed between two instants: sums over `num_steps`, of which `with_prompts` had prompts. arrivals: 1
    if the time begins with a request's being sent."""

    begin_ns: int
    taken_ns: int
    num_steps: int
    with_prompts: int
    decode_rows: int
    prompt_tokens: int
    kv_tokens: int
    prompt_pairs: int
    arrivals: int
    rows: int

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.taken_ns

    @property
    def shape(self) -> StepShape:
        """Returns that of the step, or of the mean one."""
        tokens = self.decode_rows + self.prompt_tokens
        sums = (self.rows, tokens, self.decode_rows, self.kv_tokens, self.prompt_pairs)
        rows, tokens, decode_rows, kv_tokens, pairs = (-(-one // self.num_steps) for one in sums)
        return StepShape(rows, tokens, decode_rows, kv_tokens, pairs)


class StepsRead(NamedTuple):
    """num_linked: steps whose beginning and end were both seen; num_beyond: of these, those beyond the budget."""

    seen: list[Seen]
    num_linked: int
    num_beyond: int


class Stream:
    """One answer. token_ns: when each token came. computed: tokens of its prompt so far. is_told: whether these are all
    its tokens, but for a few."""

    def __init__(self, outcome: Outcome) -> None:
        self.sent_ns = outcome.sent_ns or outcome.intended_ns
        counts = outcome.chunk_tokens or (1,) * len(outcome.chunk_ns)
        pairs = zip(outcome.chunk_ns, counts, strict=False)
        self.token_ns = [at_ns for at_ns, count in pairs for _ in range(count)] or [outcome.chunk_ns[0]]
        self.prompt_tokens = prompt_tokens_of(outcome)
        self.computed = min(outcome.cached_tokens or 0, self.prompt_tokens - 1)
        self.is_told = (outcome.output_tokens or 0) - len(self.token_ns) <= MAX_UNSEEN_SHARE * len(self.token_ns)

    @property
    def left(self) -> int:
        return self.prompt_tokens - self.computed


class Together(NamedTuple):
    """Tokens that came together: (stream, which of its tokens). num_steps: that lie between it and the one before, as
    many as tokens of the followed stream are in it; 0 if none was followed, or one whose steps cannot be told."""

    at_ns: int
    tokens: list[tuple[Stream, int]]
    num_steps: int


def prompt_tokens_of(outcome: Outcome) -> int:
    """Raises ConfigError if neither the server nor the schedule says."""
    tokens = outcome.prompt_tokens or outcome.expected_prompt_tokens
    if not tokens:
        hint = "Measure with --prompt-form ids, or a server that tells its usage."
        raise ConfigError("nobody says how many tokens the prompts had", param="runs", hint=hint)
    return tokens


def read_steps(run: Run, budget: int, arm: int = 0) -> StepsRead:
    """Returns the steps of one server of a run, whose steps are thought to compute `budget` tokens at the most."""
    answered = [o for o in run.outcomes if o.arm == arm and o.ending is not Ending.UNSENT and o.chunk_ns]
    streams = sorted(map(Stream, answered), key=lambda stream: stream.sent_ns)
    reader, groups = StepReader(streams, budget), grouped(streams)
    seen = [one for before, group in zip([None, *groups], groups, strict=False) for one in reader.read(before, group)]
    return StepsRead(seen, reader.num_linked, reader.num_beyond)


def grouped(streams: Sequence[Stream]) -> list[Together]:
    """Returns the tokens of all streams, each with those of the followed stream's token that it came with."""
    arrivals = sorted(
        ((at_ns, number, stream) for stream in streams for number, at_ns in enumerate(stream.token_ns)),
        key=lambda each: each[0],
    )
    times_ns = [at_ns for at_ns, _, _ in arrivals]
    within_ns = _within_ns(streams)
    groups: list[Together] = []
    followed: tuple[Stream, int] | None = None
    begin = 0
    while begin < len(arrivals):
        at_ns = arrivals[begin][0] if followed is None else followed[0].token_ns[followed[1]]
        end = bisect_right(times_ns, at_ns + within_ns)
        tokens = [(stream, number) for _, number, stream in arrivals[begin:end]]
        own = [number for stream, number in tokens if followed is not None and stream is followed[0]]
        is_told = followed is not None and followed[0].is_told
        groups.append(Together(at_ns, tokens, len(own) if is_told else 0))
        followed, begin = _next_token(followed, tokens), end
    return groups


def _next_token(followed: tuple[Stream, int] | None, tokens: Sequence[tuple[Stream, int]]) -> tuple[Stream, int] | None:
    """Returns the token whose coming ends the next group: of the stream that is followed, or of the one that goes on
    the longest. None: nobody goes on."""
    longest = max((stream for stream, _ in tokens), key=lambda stream: stream.token_ns[-1])
    for stream in (longest,) if followed is None else (followed[0], longest):
        following = max(number for other, number in tokens if other is stream) + 1
        if following < len(stream.token_ns):
            return stream, following
    return None


def _within_ns(streams: Sequence[Stream]) -> int:
    gaps = sorted(b - a for stream in streams for a, b in zip(stream.token_ns, stream.token_ns[1:], strict=False))
    return int(TOGETHER_SHARE * gaps[len(gaps) // 2]) if gaps else 0


def most_at_once(run: Run, arm: int = 0) -> int:
    """Returns how many answers were on their way together at the most, from the first token to the last."""
    spans = [(o.chunk_ns[0], o.chunk_ns[-1]) for o in run.outcomes if o.arm == arm and len(o.chunk_ns) > 1]
    changes = sorted([*((begin, 1) for begin, _ in spans), *((end, -1) for _, end in spans)])
    return max(accumulate(change for _, change in changes), default=1)


def merged(seen: Iterable[Seen], num_steps: int) -> list[Seen]:
    """Returns so many steps at a time as one, where they follow each other."""
    found: list[Seen] = []
    for one in seen:
        last = found[-1] if found else None
        if last is None or last.end_ns != one.begin_ns or last.num_steps >= num_steps:
            found.append(one)
        else:
            sums = (a + b for a, b in zip(last[1:], one[1:], strict=True))
            found[-1] = Seen(last.begin_ns, *sums)
    return found


class StepReader:
    """Reads one group after the other; remembers how far each prompt is."""

    def __init__(self, streams: Sequence[Stream], budget: int) -> None:
        self._coming, self._budget = list(reversed(streams)), budget
        self._waiting: list[Stream] = []
        self.num_linked = self.num_beyond = 0

    def read(self, before: Together | None, group: Together) -> Iterator[Seen]:
        """Yields what was computed for this group, if that can be told."""
        while self._coming and self._coming[-1].sent_ns < group.at_ns:
            self._waiting.append(self._coming.pop())
        decoding = [(stream, number) for stream, number in group.tokens if number]
        if before is not None and group.num_steps:
            yield self._steps(before.at_ns, group, decoding)
        elif not decoding:
            yield self._prompts_alone(before, group)
        else:
            self._finish(group)

    def _steps(self, begin_ns: int, group: Together, decoding: Sequence[tuple[Stream, int]]) -> Seen:
        self.num_linked += 1
        chunks = list(self._finish(group))
        left = self._budget * group.num_steps - len(decoding) - sum(count for _, count in chunks)
        self.num_beyond += left < 0
        chunks += self._begun(left, begin_ns)
        decode_kv = sum(stream.prompt_tokens + number for stream, number in decoding)
        steps = [chunks, *([] for _ in range(group.num_steps - 1))]
        return _seen(begin_ns, group.at_ns, steps, len(decoding), decode_kv, arrivals=0)

    def _prompts_alone(self, before: Together | None, group: Together) -> Seen:
        """Nobody decoded: as many steps as the prompts take whose first tokens came. The server was at work before if
        somebody waited already."""
        first_ns = min(stream.sent_ns for stream in self._waiting)
        was_busy = before is not None and first_ns < before.at_ns
        begin_ns = before.at_ns if before is not None and was_busy else first_ns
        steps = list(_cut(self._finish(group), self._budget))
        return _seen(begin_ns, group.at_ns, steps, 0, 0, arrivals=int(not was_busy))

    def _finish(self, group: Together) -> list[tuple[int, int]]:
        """Returns (start, count) of what was left of the prompts whose first tokens have come."""
        chunks = []
        for stream, number in group.tokens:
            if number == 0:
                chunks.append((stream.computed, stream.left))
                stream.computed = stream.prompt_tokens
                self._waiting.remove(stream)
        return chunks

    def _begun(self, left: int, begin_ns: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of prompts that were computed without coming to their end. A prompt that would have fitted
        was not there yet, or had no slot, and nobody behind it had."""
        for stream in self._waiting:
            if stream.sent_ns >= begin_ns or stream.left <= left or left <= 0:
                return
            yield stream.computed, left
            stream.computed += left
            left = 0


def _cut(chunks: Iterable[tuple[int, int]], budget: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the chunks of each step."""
    step: list[tuple[int, int]] = []
    left = budget
    for start, count in chunks:
        while count > left:
            step.append((start, left))
            yield step
            start, count, step, left = start + left, count - left, [], budget
        step.append((start, count))
        left -= count
    yield step


def _seen(
    begin_ns: int,
    end_ns: int,
    steps: Sequence[Sequence[tuple[int, int]]],
    decode_rows: int,
    decode_kv: int,
    arrivals: int,
) -> Seen:
    chunks = [chunk for step in steps for chunk in step if chunk[1]]
    prompt_tokens = sum(count for _, count in chunks)
    kv_tokens = decode_kv + sum(start + count for start, count in chunks)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
    return Seen(
        begin_ns=begin_ns,
        taken_ns=end_ns - begin_ns,
        num_steps=len(steps),
        with_prompts=sum(any(count for _, count in step) for step in steps),
        decode_rows=decode_rows,
        prompt_tokens=prompt_tokens,
        kv_tokens=kv_tokens,
        prompt_pairs=pairs,
        arrivals=arrivals,
        rows=decode_rows + len(chunks),
    )


def checked_by_runs(replica: Replica, runs: Sequence[Run], arm: int, regression_error: float) -> Replica:
    """Returns the replica with intervals as wide as the error of a simulation of its own runs, or of the regression."""
    checks = [OwnRunCheck(replica, run, arm) for run in runs]
    off = {name: max((check.off(name) for check in checks), key=abs) for name in FELT}
    error = max(regression_error, *(check.pace_error() for check in checks))
    if error == math.inf:
        raise _unexplained(runs, off)
    costs = replica.costs
    drift = math.hypot(costs.errors.drift, math.log1p(error))
    errors = msgspec.structs.replace(costs.errors, mean_relative=off["e2e"], drift=drift)
    told = {"off": off, "error": error, "arrival_ns": replica.approach.to_admission_ns}
    told |= {"runs": len(runs), "void": sum(run.is_void for run in runs)}
    return msgspec.structs.replace(replica, costs=msgspec.structs.replace(costs, errors=errors, about=told))


def _unexplained(runs: Sequence[Run], off: dict[str, float]) -> ConfigError:
    words = ", ".join(f"{name.upper()} {share:+.0%}" for name, share in off.items())
    hint = "Measure again below saturation, on a client that nothing else uses; give --max-num-seqs if you know it."
    if any(run.is_void for run in runs):
        hint = f"A run is VOID: `splittime bench report` says why. {hint}"
    return ConfigError(f"a simulation of the runs is far from what they measured: {words}", param="runs", hint=hint)


class OwnRunCheck:
    """One run beside its simulation, by the medians of what users feel."""

    def __init__(self, replica: Replica, run: Run, arm: int) -> None:
        self._replica = replica
        self._requests = list(_requests(run, arm, replica))
        self._measured = _medians(answered(run, arm))
        self._usual = self._simulated(1.0)

    def off(self, name: str) -> float:
        """Returns how far the simulated median is from the measured one; 0 where one of them does not exist."""
        simulated, measured = self._usual[name], self._measured[name]
        return simulated / measured - 1 if simulated and measured else 0.0

    def pace_error(self) -> float:
        """Returns how much slower or faster all steps would have to be for the medians to agree; infinity if `PACES`
        are not enough."""
        return max(self._pace_error(is_slower) for is_slower in (True, False))

    def _pace_error(self, is_slower: bool) -> float:
        """Returns it for the medians that a slower server, or a faster one, explains."""
        left = {name for name in FELT if self.off(name) and (self.off(name) < 0) == is_slower}
        error = 0.0
        for pace in PACES:
            if not left:
                return error
            error = pace - 1
            simulated = self._simulated(pace if is_slower else 1 / pace)
            left = {name for name in left if (simulated[name] < self._measured[name]) == is_slower}
        return math.inf if left else error

    def _simulated(self, factor: float) -> dict[str, float]:
        """Returns the medians where all steps take so many times as long."""
        replica = msgspec.structs.replace(self._replica, pace=self._replica.pace.times(factor))
        return _medians(run_of(replica.run(self._requests, Change(), seed=0)).outcomes)


def _medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns the medians of what users felt (ns); 0 where nobody did."""
    felt = {name: [value for value in map(time_of, outcomes) if value is not None] for name, time_of in FELT.items()}
    return {name: statistics.median(values) if values else 0.0 for name, values in felt.items()}


def answered(run: Run, arm: int) -> list[Outcome]:
    return [o for o in run.outcomes if o.arm == arm and o.sent_ns is not None and o.chunk_ns]


def _requests(run: Run, arm: int, replica: Replica) -> Iterator[TracedRequest]:
    """Yields the run's requests as they were sent. What was found in the cache is a prefix that all share."""
    asked = [
        Asked(o.sent_ns or 0, _prompt(number, o), output_tokens(o) or len(o.chunk_ns))
        for number, o in enumerate(sorted(answered(run, arm), key=lambda o: o.sent_ns or 0))
    ]
    return asked_requests(asked, replica.approach, replica.config.max_model_len)


def _prompt(number: int, outcome: Outcome) -> tuple[int, ...]:
    cached, whole = outcome.cached_tokens or 0, prompt_tokens_of(outcome)
    return (*mixed_tokens(SHARED, 0, min(cached, whole)), *mixed_tokens(number + 2, cached, max(cached, whole)))
