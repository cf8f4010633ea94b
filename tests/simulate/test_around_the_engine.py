"""What lies around the engine: found in accounts and steps, and given to requests that nobody has sent yet."""

import random

import known_replicas
import msgspec
import pytest
from test_step_times import a_record
from test_trace import SYSTEM, account

from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Stage
from splittime.plan.load import Asked, asked_requests
from splittime.simulate import replica
from splittime.simulate.change import Change
from splittime.simulate.figures import figures
from splittime.simulate.replica import Approach
from splittime.simulate.trace import traced_requests

BASE_NS, TOKEN_NS, HANDING_NS = 3_000, 7, 400
COSTS = msgspec.structs.replace(known_replicas.COSTS, device=(1e6, 0.0, 2e5, 2e4, 10.0, 0.0))


def served(tokens: int) -> ClosedAccount:
    """One whose text took a time that grows with the prompt."""
    text_ns = BASE_NS + TOKEN_NS * tokens
    spans = ((Stage.RECEIVE, 0, 500), (Stage.TOKENIZE, 500, text_ns), (Stage.ADMIT, text_ns, text_ns + HANDING_NS))
    intervals = tuple(StageInterval(stage, None, begin, end) for stage, begin, end in spans)
    return account("a", (1,) * tokens, 0, intervals=intervals, end_ns=text_ns + HANDING_NS)


def test_what_a_text_takes_grows_with_the_prompt() -> None:
    found = replica._approach([served(tokens) for tokens in range(10, 1_000, 10)])
    assert found == Approach(BASE_NS, pytest.approx(TOKEN_NS), HANDING_NS)
    alike = replica._approach([served(100)] * 30)
    assert alike == Approach(BASE_NS + 100 * TOKEN_NS, 0.0, HANDING_NS)


def test_an_engine_wakes_where_it_was_idle_before() -> None:
    record = a_record(random.Random(0), 1, 0, 1.0)
    woken = msgspec.structs.replace(record, idle_ns=9_000, host_gap_ns=700)
    busy = msgspec.structs.replace(record, idle_ns=0, host_gap_ns=20)
    assert replica._delivery([served(10)], [busy, woken, busy]).to_wake_ns == 700
    assert replica._delivery([served(10)], [busy]).to_wake_ns == 0


def test_an_answer_ends_where_the_context_does() -> None:
    asked = [Asked(0, (1,) * 90, 50), Asked(0, (1,) * 90, 4), Asked(0, (1,) * 200, 50)]
    made = list(asked_requests(asked, Approach(), 100))
    assert [one.request.sampling.max_tokens for one in made] == [10, 4, 1]


def test_who_was_refused_is_in_no_figure_but_its_own() -> None:
    came, step = account("a", SYSTEM, 0), a_record(random.Random(0), 1, 0, 1.0)
    refused = account("b", SYSTEM, 10**9, finish_reason="refused")
    assert figures([came, refused], [step]) == figures([came], [step])


def on_its_way(number: int, lag_ns: int) -> ClosedAccount:
    """One whose 32 tokens each took so long to its client, and whose end came three times as long after the last."""
    begin_ns = number * 10**9
    spans = (
        (Stage.RECEIVE, 0, 9),
        (Stage.HANDOFF, 9, 20),
        (Stage.PREFILL, 20, 40),
        (Stage.DELIVER, 40, 40 + 3 * lag_ns),
    )
    intervals = tuple(StageInterval(stage, None, begin_ns + begin, begin_ns + end) for stage, begin, end in spans)
    ready_ns = tuple(begin_ns + 30 for _ in range(32))
    more = {"token_ready_ns": ready_ns, "token_written_ns": tuple(at_ns + lag_ns for at_ns in ready_ns)}
    end_ns = begin_ns + 40 + 3 * lag_ns
    return account(f"r{number}", (number,) * 20, begin_ns, intervals=intervals, end_ns=end_ns, **more)


def test_a_replay_has_each_answers_own_way_to_its_client() -> None:
    """A busy server takes ten times the median for some: those have it again, whatever is changed."""
    lags = [10_000 * (1 + 9 * (number % 3 == 0)) for number in range(30)]
    requests = traced_requests([on_its_way(number, lag_ns) for number, lag_ns in enumerate(lags)], 2048)
    server = replica.replica_with({"max_num_seqs": 4}, COSTS, Approach(), "test")
    for change in (Change(), Change({"max_num_seqs": 1})):
        made = {each.request_id: each for each in server.run(requests, change, 0).accounts}
        for number, lag_ns in enumerate(lags):
            assert set(derive.send_lag_ns(made[f"r{number}"])) == {lag_ns}
            assert derive.stage_ns(made[f"r{number}"])[Stage.DELIVER] == 3 * lag_ns


def test_who_came_at_one_instant_came_in_the_order_of_asking() -> None:
    """The names of a simulated run are numbered: as texts `r10` stands before `r9`."""
    at_once = [msgspec.structs.replace(on_its_way(0, 1), request_id=f"r{number}") for number in (10, 2, 9)]
    assert [each.request.request_id for each in traced_requests(at_once, 2048)] == ["r2", "r9", "r10"]
