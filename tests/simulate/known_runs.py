"""Ledgers of runs under a virtual clock, whose truth is known: requests in bursts that end in every way there is."""

import random
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import msgspec
from fake_sleeper import FakeSleeper
from guessing import DraftsAhead, Guesser
from hypothesis import strategies as st

from benchmarks.fake_runner import FakeRunner, expected_tokens
from benchmarks.timed_run import HostCosts, RequestOutcome, TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.engine import SleepAsk
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Row, RowResult
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import Abort, FromEngine, Hold, MaskFound, Release, Sleep, StepOutput, Wake
from splittime.engine.engine import Engine
from splittime.ledger.account import EMBEDDINGS, Account, ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes, salt_hash
from splittime.ledger.stages import Cause, Stage
from splittime.runner.drafting import Draft
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.recorded import Recorded

STEP_NS, TOKEN_NS, MOVE_NS = 900, 31, 50
CHANCES = (None, 0.02, 0.2, 0.5, 0.77, 0.97)
TELL_NS = 400
APART = (1, 3, 400, 3_000, 60_000), (1, 2, 8, 9), (1, 2, 9, 60)  # between requests; stop strings found; most tokens
BESIDE = (1, 3, 40, 400, 3_000), (1, 1, 1, 2, 8), (2, 3, 9, 60)
TIGHT = SchedulerConfig(max_model_len=256, num_blocks=16, block_size=16, max_num_batched_tokens=64, max_num_seqs=8)

CONFIGS = st.builds(
    lambda tokens, block_size, **more: SchedulerConfig(
        max_model_len=256,
        num_blocks=tokens // block_size,
        block_size=block_size,
        max_num_batched_tokens=more.pop("budget"),
        **more,
    ),
    tokens=st.sampled_from((256, 320, 960)),
    block_size=st.sampled_from((16, 32, 64)),
    max_num_seqs=st.sampled_from((1, 3, 12)),
    budget=st.sampled_from((16, 64, 300)),
    max_prefill_tokens=st.sampled_from((None, 16)),
    policy=st.sampled_from(("fcfs", "priority", "shortest_prefill", "deadline")),
    batching=st.sampled_from(("continuous", "static")),
    starvation_bound_ms=st.sampled_from((0.01, 10.0)),
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    num_host_slots=st.sampled_from((0, 8)),
)

COSTS = HostCosts(after_output_ns=37, to_wake_ns=11, per_message_ns=3)


class AskedBefore:
    """Makes some requests ask what was asked before, or go on with an answer, or end by other tokens, or want the
    log-probabilities of their prompt; and puts some under a salt."""

    def __init__(self, seed: int, eos_every: int, stops: float, after: tuple[int, ...], embeds: float) -> None:
        self._embedding, self._embeds = random.Random(seed + 2), embeds
        self._rng, self._eos_every, self._stops, self._after = random.Random(seed + 1), eos_every, stops, after
        self._asked: list[tuple[tuple[int, ...], int]] = []

    def next(self, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], SamplingParams]:
        rng, max_tokens = self._rng, sampling.max_tokens or 1
        if self._asked and (chance := rng.random()) < 0.4:
            before, count = rng.choice(self._asked)
            answer = expected_tokens(before, rng.choice((count, max(1, count // 2))), eos_every=self._eos_every)
            prompt = before if chance < 0.15 else (*before, *answer, *prompt[: rng.choice((1, 7, 40))])[:255]
        self._asked.append((prompt, max_tokens))
        more = {
            "min_tokens": rng.choice((0, 0, 1, max_tokens)),
            "stop_token_ids": tuple(rng.sample(range(1, 1000), 20)) if self._eos_every and rng.random() < 0.2 else (),
            "prompt_logprobs": 0 if rng.random() < 0.1 else None,
        }
        if self._embedding.random() < self._embeds:
            more = {"pooling": self._embedding.choice(("last", "mean"))}
        return prompt, msgspec.structs.replace(sampling, **more)

    def salt(self) -> str:
        return self._rng.choice(("", "", "salt"))

    def stops_after(self) -> int:
        """After how many tokens a stop string is found; 0: never."""
        return self._rng.choice(self._after) if self._rng.random() < self._stops else 0


class Guessing(Guesser):
    """Tells other chances of each request's drafts in each step, and of some none. guess_ns: what it takes, for each
    request that it knows."""

    def __init__(self, eos_every: int, clock: VirtualClock, guess_ns: int) -> None:
        super().__init__(lambda name, tokens, count: expected_tokens(tokens, count, eos_every=eos_every), 1000)
        self._clock, self._guess_ns = clock, guess_ns

    def draft(self, *args: Any) -> Mapping[str, Draft]:
        drafts = super().draft(*args)
        self._clock.advance(self._guess_ns * len(self._tokens))
        return drafts

    def _chance_of(self, request_id: str) -> float | None:
        return CHANCES[crc32(f"{request_id} {len(self._tokens[request_id])}".encode()) % len(CHANCES)]


class StoppingCrank(Crank):
    """told_ns: when the server tells of the stop strings that it has found. A client that goes away meanwhile changes
    nothing: its request has its answer."""

    def __init__(self, parts: EngineParts, clock: VirtualClock) -> None:
        super().__init__(parts, clock)
        self.told_ns: dict[str, int] = {}

    def abort(self, request_id: str) -> None:
        if self._clock.now_ns() >= self.told_ns.get(request_id, 0):
            super().abort(request_id)


class StoppingRun(TimedRun):
    """A server finds stop strings, and tells the engine a little later; also those of clients that have gone away, of
    which the engine was told then. left_ns: when clients go away."""

    def __init__(self, crank: StoppingCrank, clock: VirtualClock, costs: HostCosts) -> None:
        super().__init__(crank, clock, costs)
        self.stops_after: dict[str, int] = {}
        self.left_ns: dict[str, int] = {}
        self._told_ns = crank.told_ns

    def leave(self, request_id: str, at_ns: int) -> None:
        self.left_ns[request_id] = at_ns
        self.at(at_ns, Abort(request_id))

    def _take(self, message: FromEngine) -> None:
        super()._take(message)
        for output in message.outputs if isinstance(message, StepOutput) else ():
            name, ready_ns = output.request_id, message.ready_ns
            after, now = self.stops_after[name], len(self.outcomes[name].token_ids)
            if now - len(output.token_ids) < after <= now and self.left_ns.get(name, ready_ns + 1) > ready_ns:
                self.left_ns.pop(name, None)
                self._told_ns[name] = ready_ns + TELL_NS
                self.at(ready_ns + TELL_NS, Abort(name))


def _ended_at(account: Account, stopped_ns: int, is_told: bool | int) -> Account:
    """Returns the account of a request whose stop string was found then. is_told: it stays open until the engine has
    said when the request's blocks were free."""
    stopped = Account(account.request_id, account.start_ns, account.marks[0].stage)
    stopped.extend(mark for mark in account.marks if mark.begin_ns <= stopped_ns)
    stopped.enter(Stage.DELIVER, stopped_ns)
    stopped.close(account.end_ns if is_told and account.end_ns is not None else stopped_ns + 1)
    return stopped


def closed(outcome: RequestOutcome, stops_after: int, left_ns: int | None, some_are_told: bool) -> ClosedAccount:
    """Returns the account. left_ns: when its client went away; a stop string that was found later is found still.
    some_are_told: of those with a stop string, every second account says when the engine had freed the blocks. One that
    ended in the very step says so in any case: the server is told both at once."""
    request, account = outcome.request, outcome.account
    reason, count = str(outcome.finish_reasons[0]), len(outcome.token_ids)
    is_stopped = 0 < stops_after <= count and not (stops_after == count and reason in ("stop", "length"))
    is_told = not is_stopped or (some_are_told and crc32(request.request_id.encode()) % 2)
    if is_stopped:
        count, found_ns = stops_after, outcome.token_ready_ns[stops_after - 1]
        is_told = is_told or account.end_ns == found_ns
        account = _ended_at(account, found_ns, is_told)
    return ClosedAccount(
        request_id=request.request_id,
        group_id=request.request_id,
        model="fake",
        endpoint=EMBEDDINGS if request.sampling.pooling else "completions",
        started_at_unix_ns=0,
        start_ns=account.start_ns,
        end_ns=account.end_ns,
        intervals=tuple(account.intervals()),
        finish_reason="stop" if is_stopped else reason,
        error=None if is_stopped else outcome.error,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=outcome.num_cached_tokens or 0,
        output_tokens=count,
        num_preemptions=outcome.num_preemptions,
        token_steps=tuple(outcome.token_steps[:count]),
        token_ready_ns=tuple(outcome.token_ready_ns[:count]),
        token_written_ns=tuple(outcome.token_ready_ns[:count]),
        cancelled_ns=left_ns if is_stopped or reason == "abort" else None,
        freed_ns=account.end_ns if is_told else None,
        prefixes=prompt_hashes(request.prompt_token_ids).prefixes,
        answer_prefixes=answer_hashes(request.prompt_token_ids, outcome.token_ids[:count]),
        cache_salt=salt_hash(request.cache_salt),
        computes_prompt=request.sampling.computes_prompt,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        deadline_ns=request.deadline_ns,
    )


class FailingRunner(FakeRunner):
    """One row in `fails` fails; 0: none."""

    fails = 0

    def _run_row(self, row: Row) -> RowResult:
        result = super()._run_row(row)
        is_bad = self.fails and not crc32(f"{row.request_id} {row.start}".encode()) % self.fails
        return RowResult(row.request_id, error="it failed") if is_bad else result


def is_late(row: Row, run: TimedRun, clock: VirtualClock, seed: int, late: int) -> bool:
    """Whether the mask of a row that samples is; it is there some steps later."""
    mixed = crc32(f"{seed} {row.request_id} {row.start} {clock.now_ns()}".encode())
    if mixed % late:
        return False
    run.at(clock.now_ns() + 1 + mixed % (4 * STEP_NS), MaskFound(row.request_id))
    return True


def record_run(
    config: SchedulerConfig,
    seed: int,
    count: int = 25,
    eos_every: int = 40,
    costs: HostCosts = COSTS,
    have_deadlines: bool = True,
    stops: float = 0.15,
    sleeps_at_ns: int | None = None,
    plans_ahead: bool = False,
    guess_ns: int | None = None,
    is_crowded: bool = False,
    embeds: float = 0.0,
    num_keys: int = 1,
    late: int = 0,
    fails: int = 0,
    holds: float = 0.0,
) -> Recorded:
    """A run of `count` requests in bursts, some with common beginnings, some that end early by every way there is. No
    admission stands before it. guess_ns: what guessing takes, for each request; None: nothing is guessed. is_crowded:
    they come at once, their stop strings are found at once, and no such account waits for the engine's last word.
    embeds: of what share of them no token is wanted. num_keys: of how many keys they are, each of another weight.
    late: the mask of one row in so many is; 0: of none. fails: likewise. holds: what share of them is held a while."""
    gaps_ns, after, lengths = BESIDE if is_crowded else APART
    rng, asked, clock = random.Random(seed), AskedBefore(seed, eos_every, stops, after, embeds), VirtualClock()
    delays = {"step_ns": STEP_NS, "token_ns": TOKEN_NS, "move_ns": MOVE_NS}
    of_row = (lambda row: is_late(row, run, clock, seed, late)) if late else None
    runner = FailingRunner(config.block_size, eos_every=eos_every, clock=clock, **delays, is_late=of_row)
    runner.fails, holding = fails, random.Random(seed + 3)
    sleeper = FakeSleeper(runner, STEP_NS, clock.advance)
    engine, computes = Engine(Scheduler(config), plans_ahead), runner
    if guess_ns is not None:
        computes = DraftsAhead(runner, Guessing(eos_every, clock, guess_ns), clock.now_ns)
    run = StoppingRun(StoppingCrank(EngineParts(engine, computes, sleeper=sleeper), clock), clock, costs)
    if sleeps_at_ns is not None:
        run.at(sleeps_at_ns, Sleep(1, SleepAsk(1, "abort")))
        run.at(sleeps_at_ns + 20_000, Wake(2))
    common = [tuple(rng.randrange(1, 900) for _ in range(rng.choice((20, 90, 150)))) for _ in range(3)]
    at_ns = 0
    for number in range(count):
        at_ns += rng.choice(gaps_ns)
        prompt = (*rng.choice((*common, ())), *(rng.randrange(1, 900) for _ in range(rng.choice((1, 7, 40, 80)))))
        sampling = SamplingParams(max_tokens=rng.choice(lengths), seed=number)
        prompt, sampling = asked.next(prompt, sampling)
        deadline_ns = at_ns + rng.choice((700, 9_000, 90_000)) if rng.random() < 0.15 and have_deadlines else None
        name = f"r{number}"
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=(0,),
            submitted_ns=at_ns,
            priority=rng.randrange(3),
            deadline_ns=deadline_ns,
            cache_salt=asked.salt(),
            tenant=f"key-{crc32(name.encode()) % num_keys}" if num_keys > 1 else "",
            weight=1.0 + crc32(name.encode()) % num_keys,
        )
        run.submit(request)
        run.stops_after[name] = asked.stops_after()
        if holding.random() < holds:
            run.at(at_ns, Hold(name, Cause.GRAMMAR))
            run.at(at_ns + holding.choice((1, 400, 9_000)), Release(name))
        if rng.random() < 0.15:
            run.leave(name, at_ns + rng.choice((1, 2_000, 30_000)))
    run.run()
    settings = msgspec.to_builtins(config) | {"async_scheduling": plans_ahead}
    facts = ServerFacts(version="test", model="fake", max_model_len=256, settings=settings)
    accounts = [
        closed(outcome, run.stops_after[name], run.left_ns.get(name), not is_crowded)
        for name, outcome in run.outcomes.items()
    ]
    return Recorded(accounts, run.steps, facts)
