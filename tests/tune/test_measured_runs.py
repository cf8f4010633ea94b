"""A run is made once, and what is taken from it is its server's own."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_runs import HEALTHY, SimulatedRuns, load, measurer

from splittime.bench.book.records import Run
from splittime.bench.book.slo import parse_slo
from splittime.bench.event_loop import ENDING, interrupt, sigterm_interrupts
from splittime.bench.share import Progress
from splittime.core.errors import ConfigError, EngineError
from splittime.tune import measure
from splittime.tune.goal import Goal
from splittime.tune.measure import (
    DrawnLoad,
    RealRuns,
    limits_of_run,
    recorded_of,
    recorded_of_all,
    run_until_interrupted,
)
from splittime.tune.servers import OwnServers
from splittime.wire.scrape import ServerLimits
from splittime.wire.target import Target

GOAL = Goal(slo=parse_slo("ttft_p99=1s"))
COUNTS = ("planned", "due", "begun", "ended", "failed", "in_flight", "output_tokens")
PROGRESS = Progress(elapsed_s=2.0, ttft_p50_s=None, ttft_p99_s=None, ends_at_s=8.0, **dict.fromkeys(COUNTS, 1))


class SlowRuns(SimulatedRuns):
    """Takes a while, and remembers what it has learnt from."""

    def __init__(self) -> None:
        super().__init__(HEALTHY, GOAL)
        self.learnt: list[Run] = []

    def make(self, changes: Mapping[str, Any], number: int) -> Run:
        time.sleep(0.05)
        return super().make(changes, number)

    def learn(self, run: Run) -> None:
        self.learnt.append(run)


@pytest.fixture(scope="module")
def run() -> Run:
    return SimulatedRuns(HEALTHY, GOAL).make({}, 0)


def with_arm(run: Run, **changes: Any) -> Run:
    return msgspec.structs.replace(run, arms=(msgspec.structs.replace(run.arms[0], **changes),))


def test_a_run_is_made_once_and_learnt_from_each_time(tmp_path: Path) -> None:
    first, second = SlowRuns(), SlowRuns()
    made = measurer(first, tmp_path / "tune.jsonl")
    assert made.seconds is None
    found = made.run({}, 0)
    assert made.seconds >= 0.05
    assert made.run({}, 0) is found
    assert (first.made, first.learnt) == ([({}, 0)], [found, found])
    again = measurer(second, tmp_path / "tune.jsonl").run({}, 0)
    assert (second.made, second.learnt) == ([], [again])


def test_scores_are_of_all_runs_with_these_changes_alone() -> None:
    made = measurer(SimulatedRuns(HEALTHY, GOAL))
    for changes, number in (({}, 0), ({"max_num_seqs": 1}, 0), ({}, 1)):
        made.run(changes, number)
    assert made.scores({}) == [made.notebook.measured[0].score, made.notebook.measured[2].score]
    assert len(made.scores({"max_num_seqs": 1})) == 1


@pytest.mark.parametrize(
    ("asked", "about"),
    [
        ({}, {"duration_s": 20.0, "warm_up_s": 2.0, "seed": 0}),
        ({"num_requests": 5}, {"num_requests": 5, "warm_up_s": 2.0, "seed": 0}),
        ({"trace": "a.csv"}, {"trace": "a.csv", "warm_up_s": 2.0, "seed": 0}),
        ({"warm_up_requests": 3}, {"duration_s": 20.0, "warm_up_requests": 3, "seed": 0}),
        ({"seed": 7, "warm_up_s": 1.0, "duration_s": 3.0}, {"seed": 7, "warm_up_s": 1.0, "duration_s": 3.0}),
    ],
)
def test_what_a_load_says_goes_before_what_is_usual(asked: dict[str, Any], about: dict[str, Any]) -> None:
    assert DrawnLoad(asked).about == about


def test_the_size_of_a_block_is_learnt(run: Run) -> None:
    servers = OwnServers(None, {})
    runs = RealRuns(servers, load(), GOAL, lambda what, share: None)
    runs.learn(with_arm(run, facts=None))
    assert servers.block_bytes is None
    facts = run.arms[0].facts
    runs.learn(with_arm(run, facts=msgspec.structs.replace(facts, settings={"kv_bytes_per_block": 4096})))
    assert servers.block_bytes == 4096


class Nowhere:
    """Servers that are not there."""

    is_live, knobs, about = True, (), {}

    @contextlib.contextmanager
    def serving(self, changes: Mapping[str, Any]) -> Iterator[Target]:
        yield Target(url="http://nobody")


def test_a_run_says_which_it_is_and_how_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said, sent = [], []

    async def limits(target: Target) -> ServerLimits:
        return ServerLimits(vocab_size=100, max_model_len=1024, block_size=16)

    async def run_schedule(schedule: Any, targets: Any, options: Any, on_progress: Any, stop: Any) -> Run:
        sent.append((len(targets), options.slo, options.label))
        on_progress(PROGRESS)
        on_progress(msgspec.structs.replace(PROGRESS, ends_at_s=None))
        return run

    monkeypatch.setattr(measure, "server_limits", limits)
    monkeypatch.setattr(measure, "run_schedule", run_schedule)
    with sigterm_interrupts():
        made = RealRuns(Nowhere(), load(), GOAL, lambda *one: said.append(one)).make({"policy": "fcfs"}, 2)
    assert made is run
    assert said[-2:] == [("run 3 of policy fcfs", 0.25), ("run 3 of policy fcfs", None)]
    assert sent == [(1, GOAL.slo, "policy fcfs")]


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_signal_ended_is_no_run(fails: bool, run: Run) -> None:
    async def work(stop: asyncio.Event) -> Run:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 10)
        if fails:
            raise EngineError("it was cut off")
        return run

    with sigterm_interrupts():
        with pytest.raises(KeyboardInterrupt):
            run_until_interrupted(work)
        assert signal.getsignal(signal.SIGTERM) is interrupt


def test_a_signal_that_comes_when_the_work_has_ended_ends_it_too(run: Run) -> None:
    """While a loop is being closed its handlers are still there, and nobody waits for what they set."""

    async def work(stop: asyncio.Event) -> Run:
        asyncio.get_running_loop().call_soon(stop.set)  # as a handler would, in the loop's last turn
        return run

    with sigterm_interrupts(), pytest.raises(KeyboardInterrupt):
        run_until_interrupted(work)


@pytest.mark.parametrize("sign", ENDING)
def test_a_signal_is_never_swallowed(sign: int, run: Run) -> None:
    """Neither when a run has ended, whose loop listened, nor in a loop."""

    async def work(stop: asyncio.Event) -> Run:
        return run

    async def signalled(stop: asyncio.Event) -> Run:
        signal.raise_signal(sign)
        return await work(stop)

    with sigterm_interrupts():
        handlers = [signal.getsignal(one) for one in ENDING]
        assert run_until_interrupted(work) is run
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(sign)
        with pytest.raises(KeyboardInterrupt):
            run_until_interrupted(signalled)
        assert [signal.getsignal(one) for one in ENDING] == handlers


def test_what_fails_by_itself_says_so(run: Run) -> None:
    async def whole(stop: asyncio.Event) -> Run:
        return run

    async def failing(stop: asyncio.Event) -> Run:
        raise EngineError("no answer")

    with sigterm_interrupts():
        assert run_until_interrupted(whole) is run
        with pytest.raises(EngineError, match="no answer"):
            run_until_interrupted(failing)


def test_a_book_without_steps_or_facts_is_none(run: Run) -> None:
    assert len(recorded_of(run).steps) == len(run.arms[0].steps)
    for changes in ({"facts": None}, {"steps": ()}):
        with pytest.raises(EngineError, match="has no ledger"):
            recorded_of(with_arm(run, **changes))


def test_the_steps_of_several_runs_are_in_order_each_once(run: Run) -> None:
    steps = run.arms[0].steps
    later = [
        msgspec.structs.replace(step, begin_ns=step.begin_ns + 10**12, end_ns=step.end_ns + 10**12) for step in steps
    ]
    other = with_arm(run, steps=tuple(later), accounts=())
    for others in ([other], [other, run]):
        found = recorded_of_all(run, others)
        assert list(found.steps) == [*steps, *later]
        assert len(found.accounts) == len(run.arms[0].accounts) > 0


def test_the_limits_are_those_that_the_server_told(run: Run) -> None:
    found = limits_of_run(run)
    assert (found.vocab_size, found.max_model_len, found.block_size) == (1000, 1024, 16)
    with pytest.raises(ConfigError, match="no facts"):
        limits_of_run(with_arm(run, facts=None))
