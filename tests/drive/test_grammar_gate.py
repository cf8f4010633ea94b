"""Grammars that are compiled beside the loop: who waits for one is held, and nobody else."""

import threading
from collections.abc import Callable

import pytest

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import VirtualClock
from splittime.core.errors import RequestError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.gates import GrammarGate
from splittime.drive.messages import Abort, Fail, Release, Submit
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class SlowCompiler:
    """Knows "known"; compiles others when it is let, each for who asks, and refuses "bad"."""

    def __init__(self) -> None:
        self.may_go, self.asked, self.changed = threading.Event(), [], threading.Condition()
        self.kept: set[tuple[str, str]] = set()

    def is_known(self, grammar: str, owner: str = "") -> bool:
        return grammar == "known" or (owner, grammar) in self.kept

    def compile(self, grammar: str, owner: str = "", is_wanted: Callable[[], bool] = lambda: True) -> None:
        with self.changed:
            self.asked.append(grammar)
            self.changed.notify_all()
        while not self.may_go.wait(0.01):
            if not is_wanted():
                raise LookupError
        if grammar == "bad":
            raise RequestError("no such grammar", param="grammar")
        self.kept.add((owner, grammar))


def request_of(name: str, grammar: str = "", tenant: str = "") -> Request:
    sampling = SamplingParams(max_tokens=2, seed=0, grammar=grammar)
    return Request(request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=0, tenant=tenant)


def crank_of(grammars: SlowCompiler | None) -> Crank:
    engine = Engine(Scheduler(SchedulerConfig(max_num_seqs=4)))
    return Crank(EngineParts(engine, FakeRunner(), grammars=grammars), VirtualClock())


class Told(list):
    """What an engine's loop is given. wait_for: returns when there are so many messages."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()

    def put(self, message: object) -> None:
        with self.arrived:
            self.append(message)
            self.arrived.notify_all()

    def wait_for(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self) >= count, timeout=20)


def test_only_who_asks_for_an_unknown_grammar_is_held() -> None:
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    submits = [Submit(request_of(name, name)) for name in ("good", "known", "", "bad", "last")]
    for message in submits:
        gate.let_in(message)
    gate.let_in(Abort("good"))
    held = [Submit(one.request, Cause.GRAMMAR) for one in submits]
    assert told == [held[0], submits[1], submits[2], held[3], held[4], Abort("good")]
    compiler.may_go.set()
    told.wait_for(8)
    ends = {one.request_id: one for one in told[6:]}
    assert isinstance(ends["bad"], Fail)
    assert ends["bad"].error.message == "no such grammar"
    assert ends["last"] == Release("last")
    assert sorted(compiler.asked) == ["bad", "good", "last"]


def test_who_has_gone_is_not_compiled_for_and_its_id_may_come_again() -> None:
    """Not begun, where it waited; else its compiler hears that it is not wanted."""
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for message in (*(Submit(request_of(name, name)) for name in "abx"), Abort("x"), Abort("a")):
        gate.let_in(message)
    again = request_of("x", "new")
    gate.let_in(Submit(again))
    with compiler.changed:  # "a" makes room without being let go
        assert compiler.changed.wait_for(lambda: "new" in compiler.asked, timeout=20)
    compiler.may_go.set()
    told.wait_for(8)
    assert sorted(compiler.asked) == ["a", "b", "new"]
    assert told[5] == Submit(again, Cause.GRAMMAR)
    assert {one.request_id for one in told[6:]} == {"b", "x"}


@pytest.mark.parametrize("grammar", ["known", ""])
def test_an_id_that_comes_again_is_not_released_by_what_was_compiled_for_the_last(grammar: str) -> None:
    """The engine may have ended that one by itself, for its deadline: no abort came."""
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    gate.let_in(Submit(request_of("x", "slow")))
    again = Submit(request_of("x", grammar))
    gate.let_in(again)
    compiler.may_go.set()
    gate._pool.shutdown()
    assert told[1:] == [again]


def test_an_abort_comes_before_what_was_compiled_or_behind_it() -> None:
    """An id that is used again behind the abort hears nothing of the last one."""
    compiler, locked = SlowCompiler(), []
    gate = GrammarGate(compiler, lambda message: locked.append((type(message), gate._lock.locked())))
    gate.let_in(Submit(request_of("x", "slow")))
    compiler.may_go.set()
    gate._pool.shutdown()
    assert locked == [(Submit, False), (Release, True)]


def test_a_compiler_that_breaks_leaves_nobody_waiting_and_a_full_queue_says_so(monkeypatch) -> None:
    class Broken(SlowCompiler):
        def compile(self, *of: object) -> None:
            assert self.may_go.wait(20)
            raise MemoryError

    monkeypatch.setattr("splittime.drive.gates.MOST_WAITING", 1)
    compiler, told = Broken(), Told()
    gate = GrammarGate(compiler, told.put)
    for name in ("one", "two"):
        gate.let_in(Submit(request_of(name, name)))
    gate.let_in(Submit(request_of("other", "other", "another tenant")))
    assert [(one.request_id, one.error.status) for one in told if isinstance(one, Fail)] == [("two", 429)]
    compiler.may_go.set()
    told.wait_for(6)
    assert {(one.request_id, one.error.status) for one in told[-2:]} == {("one", 500), ("other", 500)}


def test_one_tenants_forms_leave_threads_for_anothers() -> None:
    """Sixty that never end of one; one of another is compiled at once."""
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for number in range(60):
        gate.let_in(Submit(request_of(f"a{number}", f"a{number}", "a")))
    gate.let_in(Submit(request_of("b", "of b", "b")))
    with compiler.changed:
        assert compiler.changed.wait_for(lambda: "of b" in compiler.asked, timeout=20)
    assert len(compiler.asked) == 3
    compiler.may_go.set()
    told.wait_for(122)
    assert {type(one) for one in told[61:]} == {Release}


def test_tenants_take_turns(monkeypatch) -> None:
    monkeypatch.setattr("splittime.drive.gates.THREADS", 1)
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        gate.let_in(Submit(request_of(name, name, name[0])))
    compiler.may_go.set()
    told.wait_for(10)
    assert compiler.asked == ["a1", "a2", "b1", "a3", "b2"]


def test_who_leaves_as_its_form_is_there_leaves_the_threads_to_others() -> None:
    """At first an abort between two looks at who waits cost the tenant a thread for good."""
    compiler, told = SlowCompiler(), Told()
    compiler.may_go.set()
    gate = GrammarGate(compiler, told.put)
    for number in range(40):
        name = f"r{number}"
        gate.let_in(Submit(request_of(name, name)))
        leaving = threading.Thread(target=gate.let_in, args=(Abort(name),))
        leaving.start()
        leaving.join()
    gate.let_in(Submit(request_of("last", "last")))
    with told.arrived:
        assert told.arrived.wait_for(lambda: Release("last") in told, timeout=20)
    gate._pool.shutdown()
    assert (gate._num_running.total(), gate._waiting, gate._forms) == (0, {}, {})


def test_requests_of_one_form_wait_for_it_together() -> None:
    """However many: it is compiled once, and whoever has left hears nothing."""
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for number in range(100):
        gate.let_in(Submit(request_of(f"r{number}", "form")))
    gate.let_in(Submit(request_of("of another tenant", "form", "b")))
    gate.let_in(Abort("r0"))
    compiler.may_go.set()
    told.wait_for(202)
    assert compiler.asked == ["form", "form"]
    released = [one.request_id for one in told[102:]]
    assert sorted(released) == sorted([*(f"r{number}" for number in range(1, 100)), "of another tenant"])


def test_a_form_is_known_to_the_tenant_for_whom_it_was_compiled() -> None:
    compiler, told = SlowCompiler(), Told()
    compiler.may_go.set()
    gate = GrammarGate(compiler, told.put)
    first, of_another, again = (Submit(request_of(name, "form", name[0])) for name in ("a1", "b1", "a2"))
    for message, count in ((first, 2), (of_another, 4), (again, 5)):
        gate.let_in(message)
        told.wait_for(count)
    held = [Submit(one.request, Cause.GRAMMAR) for one in (first, of_another)]
    assert told == [held[0], Release("a1"), held[1], Release("b1"), again]
    assert compiler.asked == ["form", "form"]


def test_all_requests_of_a_form_that_cannot_be_hear_why() -> None:
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for number in range(3):
        gate.let_in(Submit(request_of(str(number), "bad")))
    compiler.may_go.set()
    told.wait_for(6)
    assert {(one.request_id, one.error.message) for one in told[3:]} == {
        (str(one), "no such grammar") for one in range(3)
    }


def test_a_form_whose_askers_left_takes_no_place_and_is_begun_anew_for_the_next(monkeypatch) -> None:
    monkeypatch.setattr("splittime.drive.gates.MOST_WAITING", 4)
    compiler, told = SlowCompiler(), Told()
    gate = GrammarGate(compiler, told.put)
    for name in "abc":
        gate.let_in(Submit(request_of(name, name)))
    for name in "ac":
        gate.let_in(Abort(name))
    gate.let_in(Submit(request_of("d", "d")))
    gate.let_in(Submit(request_of("again", "a")))
    compiler.may_go.set()
    with told.arrived:
        assert told.arrived.wait_for(lambda: all(Release(name) in told for name in ("d", "again")), timeout=20)
    assert not [one for one in told if isinstance(one, Fail)]
    assert "c" not in compiler.asked


def test_without_a_compiler_nothing_is_held_here() -> None:
    told: list[object] = []
    GrammarGate(None, told.append).let_in(Submit(request_of("x", "any")))
    assert told == [Submit(request_of("x", "any"))]


def ends(crank: Crank) -> dict[str, tuple[str, int]]:
    found = {}
    while crank.has_work:
        output = crank.turn()
        for one in output.outputs if output is not None else ():
            if one.finish_reason is not None:
                found[one.request_id] = (one.finish_reason, 0 if one.error is None else one.error.status)
    return found


def test_an_engine_that_holds_answers_to_nothing_says_so() -> None:
    crank = crank_of(None)
    crank.submit(request_of("form", "any"), 0)
    crank.submit(request_of("text"), 0)
    assert ends(crank) == {"form": (FinishReason.ERROR, 400), "text": (FinishReason.LENGTH, 0)}


def test_a_crank_in_the_callers_thread_compiles_at_once() -> None:
    compiler = SlowCompiler()
    compiler.may_go.set()
    crank = crank_of(compiler)
    crank.submit(request_of("good", "good", "a"), 0)
    crank.submit(request_of("bad", "bad"), 0)
    assert ends(crank) == {"bad": (FinishReason.ERROR, 400), "good": (FinishReason.LENGTH, 0)}
    assert compiler.kept == {("a", "good")}


@pytest.mark.parametrize("is_there", [True, False])
def test_who_was_held_for_what_cannot_be_ends_with_the_error(is_there: bool) -> None:
    crank = crank_of(SlowCompiler())
    crank.submit(request_of("held", "bad"), 0, Cause.GRAMMAR)
    if not is_there:
        crank.abort("held")
    crank.fail("held", RequestError("no such grammar").info)
    assert ends(crank) == {"held": (FinishReason.ERROR, 400) if is_there else (FinishReason.ABORT, 0)}
    crank.engine.scheduler.check()
