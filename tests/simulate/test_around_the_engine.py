"""What lies around the engine: found in accounts and steps, and given to requests that nobody has sent yet."""

import random

import msgspec
import pytest
from test_step_times import a_record
from test_trace import SYSTEM, account

from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Stage
from splittime.simulate import replica
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.figures import figures
from splittime.simulate.replica import Approach

BASE_NS, TOKEN_NS, HANDING_NS = 3_000, 7, 400


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
