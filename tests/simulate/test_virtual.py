"""An engine in its loop under a virtual clock: what comes at which instant, and what the host costs."""

from benchmarks.fake_runner import FakeRunner, expected_tokens
from benchmarks.timed_run import HostCosts, RequestOutcome, TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.engine import SleepAsk
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import Abort, Configure, ConfigureDone, Sleep, SleepDone, Wake
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

STEP_NS = 1_000
PROMPT = (1, 2, 3)
FREE = HostCosts()


def a_run(costs: HostCosts = FREE, **more) -> TimedRun:
    clock = VirtualClock()
    parts = EngineParts(Engine(Scheduler(SchedulerConfig())), FakeRunner(step_ns=STEP_NS, clock=clock))
    return TimedRun(Crank(parts, clock), clock, costs, **more)


def asked(name: str, at_ns: int, max_tokens: int = 2, deadline_ns: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(
        request_id=name, prompt_token_ids=PROMPT, sampling=sampling, submitted_ns=at_ns, deadline_ns=deadline_ns
    )


def spent_ns(outcome: RequestOutcome) -> dict[tuple[Stage, str | None], int]:
    outcome.account.verify()
    return {(one.stage, one.cause): one.duration_ns for one in outcome.account.intervals() if one.duration_ns}


def test_time_passes_while_it_waits_and_computes_and_at_no_other_time() -> None:
    run = a_run()
    run.submit(asked("later", 50_000))  # in any order
    run.submit(asked("first", 100))
    run.run()
    first, later = run.outcomes["first"], run.outcomes["later"]
    assert first.token_ready_ns == [100 + STEP_NS, 100 + 2 * STEP_NS]
    assert later.token_ready_ns == [50_000 + STEP_NS, 50_000 + 2 * STEP_NS]
    assert first.token_ids == later.token_ids == expected_tokens(PROMPT, 2)
    assert first.token_steps == [1, 2]
    assert (first.ttft_ns, first.e2e_ns) == (STEP_NS, 2 * STEP_NS)
    assert first.finish_reasons == [FinishReason.LENGTH]
    verify_steps(run.steps)
    assert [step.idle_ns for step in run.steps] == [0, 0, 50_000 - 100 - 2 * STEP_NS, 0]


def test_who_comes_while_a_step_runs_has_waited_for_it() -> None:
    run = a_run()
    run.submit(asked("a", 0))
    run.submit(asked("b", 300))
    run.run()
    assert spent_ns(run.outcomes["b"])[Stage.QUEUE, Cause.STEP_IN_FLIGHT] == STEP_NS - 300


def test_what_the_host_does_takes_what_it_is_said_to() -> None:
    run = a_run(HostCosts(after_output_ns=7, to_wake_ns=50, per_message_ns=20))
    run.submit(asked("a", 1_000))
    run.submit(asked("b", 1_060))  # while the first is taken in
    run.run()
    assert run.steps[0].begin_ns == 1_000 + 50 + 2 * 20
    assert len(run.steps[0].rows) == 2
    assert [step.host_gap_ns for step in run.steps[1:]] == [7]
    assert spent_ns(run.outcomes["a"])[Stage.QUEUE, Cause.ENGINE_LOOP] == 90


def test_deadlines_aborts_and_pauses_come_at_their_instants() -> None:
    run = a_run()
    run.at(5, Configure(1, {"paused": True}))
    run.submit(asked("dies", 10, deadline_ns=777))
    run.submit(asked("goes", 10))
    run.at(900, Abort("goes"))
    run.submit(asked("stays", 10))
    run.at(2_000, Configure(2, {"paused": False}))
    run.run()
    ends = {name: (one.finish_reasons, one.account.intervals()[-1].end_ns) for name, one in run.outcomes.items()}
    assert ends["dies"] == ([FinishReason.DEADLINE], 777)
    assert ends["goes"] == ([FinishReason.ABORT], 900)
    assert ends["stays"] == ([FinishReason.LENGTH], 2_000 + 2 * STEP_NS)
    assert [answer.call_id for answer in run.answers if isinstance(answer, ConfigureDone)] == [1, 2]


def test_a_paused_engine_ends_the_run_with_its_requests_where_they_are() -> None:
    run = a_run()
    run.at(0, Configure(1, {"paused": True}))
    run.submit(asked("a", 10))
    run.run()
    assert run.outcomes["a"].finish_reasons == []
    run.at(5_000, Configure(2, {"paused": False}))
    run.run()
    assert run.outcomes["a"].finish_reasons == [FinishReason.LENGTH]


def test_an_engine_that_cannot_sleep_says_so_and_goes_on() -> None:
    run = a_run()
    run.at(5, Sleep(1, SleepAsk(1)))
    run.at(6, Wake(2))
    run.submit(asked("a", 10))
    run.run()
    asleep, awake = [answer for answer in run.answers if isinstance(answer, SleepDone)]
    assert asleep.error is not None
    assert asleep.error.code == "cannot_sleep"
    assert awake.report is not None
    assert run.outcomes["a"].finish_reasons == [FinishReason.LENGTH]


def test_a_closed_loop_asks_again_when_it_has_its_answer() -> None:
    def ask_again(outcome: RequestOutcome, ready_ns: int) -> None:
        outcome.account.close(ready_ns)
        if len(run.outcomes) < 3:
            run.submit(asked(f"r{len(run.outcomes)}", ready_ns + 40))

    run = a_run(on_end=ask_again)
    run.submit(asked("r0", 0))
    run.run()
    starts = [outcome.account.start_ns for outcome in run.outcomes.values()]
    assert starts == [0, 2 * STEP_NS + 40, 4 * STEP_NS + 80]
