"""Requests made anew from closed accounts: as long, and with as much in common, as those that came."""

import msgspec
import pytest

from splittime.core.errors import ErrorInfo
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.prompt_parts import prompt_hashes
from splittime.ledger.stages import Stage
from splittime.simulate.costed import output_token
from splittime.simulate.trace import num_equal, refused_requests, traced_requests, with_own_ids

SYSTEM = tuple(range(1_000, 1_100))


def account(name: str, prompt: tuple[int, ...], at_ns: int, **more) -> ClosedAccount:
    stages = ((Stage.RECEIVE, 0, 5), (Stage.ADMIT, 5, 9), (Stage.HANDOFF, 9, 20), (Stage.QUEUE, 20, 30))
    stages = (*stages, (Stage.PREFILL, 30, 40), (Stage.DELIVER, 40, 40))
    intervals = tuple(StageInterval(stage, None, at_ns + begin, at_ns + end) for stage, begin, end in stages)
    return ClosedAccount(
        **{
            "request_id": name,
            "group_id": name,
            "model": "m",
            "endpoint": "chat",
            "started_at_unix_ns": 0,
            "start_ns": at_ns,
            "end_ns": at_ns + 40,
            "intervals": intervals,
            "finish_reason": "length",
            "prompt_tokens": len(prompt),
            "output_tokens": 32,
            "freed_ns": at_ns + 40,
            "prefixes": prompt_hashes(prompt).prefixes,
        }
        | more
    )


def test_what_came_is_made_anew() -> None:
    came = account("a", SYSTEM, 1_000, priority=2, deadline_ns=9_000, max_tokens=77)
    (one,) = traced_requests([came], 2048)
    request = one.request
    assert (len(request.prompt_token_ids), request.sampling.max_tokens) == (100, 32)
    assert (request.submitted_ns, one.received_ns) == (1_009, 1_020)
    assert (request.priority, request.deadline_ns) == (2, 9_000)


@pytest.mark.parametrize(("asked", "given"), [(77, 77), (0, 2048 - 100)])
def test_who_was_cut_short_may_have_what_it_had_asked_for(asked: int, given: int) -> None:
    gone = account("a", SYSTEM, 0, finish_reason="abort", max_tokens=asked, output_tokens=3)
    assert traced_requests([gone], 2048)[0].request.sampling.max_tokens == given


def test_who_met_a_stop_string_could_have_gone_on() -> None:
    stopped = account("a", SYSTEM, 0, finish_reason="stop", max_tokens=60, freed_ns=None)
    (traced,) = traced_requests([stopped], 2048)
    assert (traced.stops_after, traced.request.sampling.max_tokens) == (32, 60)
    (told,) = traced_requests([msgspec.structs.replace(stopped, freed_ns=41)], 2048)  # the engine a moment later
    assert (told.stops_after, told.request.sampling.max_tokens) == (32, 60)
    (ended,) = traced_requests([msgspec.structs.replace(stopped, freed_ns=40)], 2048)
    assert (ended.stops_after, ended.request.sampling.max_tokens) == (None, 32)


def test_who_never_reached_the_engine_is_left_out() -> None:
    refused = account("a", SYSTEM, 0, finish_reason="refused")
    lost = msgspec.structs.replace(refused, finish_reason="abort", intervals=refused.intervals[:2], end_ns=9)
    assert traced_requests([refused, lost], 2048) == []


def test_the_refused_come_again_as_long_as_the_next_that_was_served() -> None:
    full = ErrorInfo("overloaded", "no room", "queued_requests", 429)
    served = [account("a", SYSTEM, 0), account("b", SYSTEM[:50], 500)]
    refused = account("r", (), 100, finish_reason="refused", error=full, intervals=(), end_ns=100)
    other = msgspec.structs.replace(refused, request_id="s", start_ns=900, end_ns=900)
    wrong = msgspec.structs.replace(refused, request_id="w", error=ErrorInfo("request", "bad", "bad", 400))
    traced = traced_requests([*served, refused, wrong], 2048)
    assert [one.account.request_id for one in traced] == ["a", "b"]
    again = refused_requests([*served, refused, other, wrong], traced)
    assert [(one.account.request_id, len(one.request.prompt_token_ids)) for one in again] == [("r", 50), ("s", 50)]
    assert (again[0].admitted_ns, again[0].received_ns) == (100, 100 + 20 - 5)
    assert again[0].request.prompt_token_ids[0] != again[1].request.prompt_token_ids[0]
    assert refused_requests([refused], []) == []


def test_an_id_that_came_twice_is_two_requests() -> None:
    came = [account("a", SYSTEM, 500), account("a", SYSTEM, 0), account("b", SYSTEM, 100)]
    renamed = with_own_ids(traced_requests(came, 2048))
    assert [(one.request.request_id, one.marks[0].begin_ns) for one in renamed] == [("a", 0), ("b", 100), ("a#2", 500)]


def test_prompts_share_what_they_shared() -> None:
    prompts = [(*SYSTEM, 1, 2, 3), (*SYSTEM, *range(50)), tuple(range(103)), (*SYSTEM[:40], *range(60))]
    traced = traced_requests([account(str(n), prompt, n) for n, prompt in enumerate(prompts)], 2048)
    made = [one.request.prompt_token_ids for one in traced]
    assert [len(prompt) for prompt in made] == [len(prompt) for prompt in prompts]
    for i in range(4):
        for j in range(4):
            assert num_equal(made[i], made[j]) // 16 == num_equal(prompts[i], prompts[j]) // 16


def test_the_next_turn_of_a_conversation_begins_with_the_answer_before_it() -> None:
    answer = tuple(range(5_000, 5_032))
    first = account("a", SYSTEM, 0)
    second = account("b", (*SYSTEM, *answer, 7, 7), 100, cached_tokens=128)
    third = account("c", (*SYSTEM, *answer, 7, 7, *range(40)), 200, cached_tokens=128)
    made = [one.request.prompt_token_ids for one in traced_requests([first, second, third], 2048)]
    heard = (*made[0], *(output_token("a") for i in range(32)))
    assert made[1][:128] == heard[:128]
    assert num_equal(made[1], made[2]) >= 128


def test_what_shares_nothing_stays_alone_though_it_hit_the_cache() -> None:
    """Of a source that the ledger does not know, nothing is made up beyond what was found."""
    lonely = account("a", tuple(range(64)), 0, cached_tokens=48)
    assert len(traced_requests([lonely], 2048)[0].request.prompt_token_ids) == 64
