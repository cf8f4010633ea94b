"""Grammars that are compiled beside the loop: who waits for one is held, and nobody else."""

import threading

import pytest

from splittime.core.clock import VirtualClock
from splittime.core.errors import RequestError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.grammar_gate import GrammarGate
from splittime.drive.messages import Abort, Fail, Release, Submit
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.fake import FakeRunner


class SlowCompiler:
    """Knows "known"; compiles others when it is let, and refuses "bad"."""

    def __init__(self) -> None:
        self.may_go, self.asked = threading.Event(), []

    def is_known(self, grammar: str) -> bool:
        return grammar == "known"

    def compile(self, grammar: str) -> None:
        self.asked.append(grammar)
        assert self.may_go.wait(20)
        if grammar == "bad":
            raise RequestError("no such grammar", param="grammar")


def request_of(name: str, grammar: str = "") -> Request:
    sampling = SamplingParams(max_tokens=2, seed=0, grammar=grammar)
    return Request(request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=0)


def crank_of(grammars: SlowCompiler | None) -> Crank:
    engine = Engine(Scheduler(SchedulerConfig(max_num_seqs=4)))
    return Crank(EngineParts(engine, FakeRunner(), grammars=grammars), VirtualClock())


def test_only_who_asks_for_an_unknown_grammar_is_held() -> None:
    compiler, told, arrived = SlowCompiler(), [], threading.Condition()

    def put(message: object) -> None:
        with arrived:
            told.append(message)
            arrived.notify_all()

    gate = GrammarGate(compiler, put)
    submits = [Submit(request_of(name, name)) for name in ("good", "known", "", "bad")]
    for message in (*submits, Abort("good")):
        gate.let_in(message)
    assert told == [Submit(submits[0].request, Cause.GRAMMAR), submits[1], submits[2],
                    Submit(submits[3].request, Cause.GRAMMAR), Abort("good")]  # fmt: skip
    compiler.may_go.set()
    with arrived:
        assert arrived.wait_for(lambda: len(told) == 7, timeout=20)
    assert told[5] == Release("good")  # who has gone meanwhile is not found
    assert isinstance(told[6], Fail)
    assert (told[6].request_id, told[6].error.message) == ("bad", "no such grammar")


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
    crank.submit(request_of("good", "good"), 0)
    crank.submit(request_of("bad", "bad"), 0)
    assert ends(crank) == {"bad": (FinishReason.ERROR, 400), "good": (FinishReason.LENGTH, 0)}


@pytest.mark.parametrize("is_there", [True, False])
def test_who_was_held_for_what_cannot_be_ends_with_the_error(is_there: bool) -> None:
    crank = crank_of(SlowCompiler())
    crank.submit(request_of("held", "bad"), 0, Cause.GRAMMAR)
    if not is_there:
        crank.abort("held")
    crank.fail("held", RequestError("no such grammar").info)
    assert ends(crank) == {"held": (FinishReason.ERROR, 400) if is_there else (FinishReason.ABORT, 0)}
    crank.engine.scheduler.check()
