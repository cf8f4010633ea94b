"""Room, waits and refusals: the model on its own under a clock moved by hand, then over HTTP."""

import concurrent.futures

import pytest

from patience import until
from splittime.core.errors import RequestError
from splittime.ledger.steps import StepRecord
from splittime.scheduler.admission import WINDOW_DEPARTURES, Admission, Place, QueueLimits, Refused, ServiceRate

from .conftest import say

S = 1_000_000_000


def admission(requests: int = 4, tokens: int = 1000) -> Admission:
    return Admission(QueueLimits(requests, tokens))


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    room = admission()
    places = [room.enter(0, count=1, tokens=100, deadline_ns=None) for _ in range(4)]
    with pytest.raises(Refused) as caught:
        room.enter(0, count=1, tokens=1, deadline_ns=None)
    assert caught.value.facts["reason"] == "queued_requests"
    assert caught.value.facts["queued"] == caught.value.facts["limit"] == 4
    places[0].correct([950])
    places[1].leave(0)
    with pytest.raises(Refused, match="prompt tokens"):
        room.enter(0, count=1, tokens=1, deadline_ns=None)
    for place in places:
        place.give_up()
    assert (room.queued_requests, room.queued_prompt_tokens) == (0, 0)
    assert room.refusals == {"queued_requests": 1, "queued_prompt_tokens": 1}


def test_the_bounds_are_the_last_that_fit() -> None:
    room = admission(requests=3, tokens=1000)
    room.enter(0, count=1, tokens=900, deadline_ns=None)
    with pytest.raises(Refused, match="prompt tokens"):
        room.check(0, tokens=101)
    room.check(0, tokens=100)
    room.enter(0, count=2, tokens=100, deadline_ns=None)
    with pytest.raises(Refused, match="as many requests"):
        room.check(0)
    admission(requests=3).enter(0, count=3, tokens=3, deadline_ns=None)


def test_what_many_choices_take_they_give_back() -> None:
    room = admission(requests=10, tokens=1000)
    place = room.enter(0, count=3, tokens=100, deadline_ns=None)  # 33 each
    assert room.queued_prompt_tokens == 99
    place.drop_one()
    assert (room.queued_requests, room.queued_prompt_tokens) == (2, 66)
    place.give_up()
    assert (room.queued_requests, room.queued_prompt_tokens) == (0, 0)
    assert room.expected_wait() is None  # who was not served says nothing of how fast that is


def test_a_departure_told_late_takes_no_time_back() -> None:
    room = admission()
    first, second = (room.enter(0, count=1, tokens=10, deadline_ns=None) for _ in range(2))
    first.leave(5 * S)
    second.leave(3 * S)
    assert room.rate.seconds_per_request == pytest.approx(2.5)
    room.enter(9 * S, count=1, tokens=10, deadline_ns=None).leave(10 * S)
    assert room.rate.seconds_per_request == pytest.approx(2.0)


def test_the_wait_is_the_longer_of_that_by_requests_and_that_by_tokens() -> None:
    rate = ServiceRate()
    rate.add(2 * S, 100)
    assert rate.wait_s(3, 10) == pytest.approx(6.0)
    assert rate.wait_s(1, 500) == pytest.approx(10.0)


def test_only_the_latest_departures_count() -> None:
    rate = ServiceRate()
    for _ in range(WINDOW_DEPARTURES):
        rate.add(100 * S, 7)
    for _ in range(WINDOW_DEPARTURES):
        rate.add(S, 1)
    assert rate.seconds_per_request == pytest.approx(1.0)
    assert rate.wait_s(0, 10) == pytest.approx(10.0)


def test_one_prompt_longer_than_the_bound_is_let_into_an_empty_queue() -> None:
    room = admission(tokens=100)
    room.enter(0, count=1, tokens=5000, deadline_ns=None)
    with pytest.raises(Refused):
        room.enter(0, count=1, tokens=1, deadline_ns=None)


def test_more_choices_than_the_queue_holds_can_never_be_served() -> None:
    with pytest.raises(RequestError):
        admission().enter(0, count=5, tokens=5, deadline_ns=None)


def test_the_wait_is_predicted_from_departures() -> None:
    room = admission(100, 10_000)
    assert room.expected_wait() is None
    places = [room.enter(0, count=1, tokens=10, deadline_ns=None) for _ in range(20)]
    for i in range(10):
        places[i].leave((i + 1) * S // 2)
    assert room.expected_wait().wait_s == pytest.approx(5.0)
    now_ns = 5 * S
    room.check(now_ns, deadline_ns=now_ns + 6 * S)
    with pytest.raises(Refused) as caught:
        room.check(now_ns, deadline_ns=now_ns + 4 * S)
    assert caught.value.facts["reason"] == "deadline"
    assert caught.value.facts["predicted_wait_ms"] == pytest.approx(5000)
    assert caught.value.info.retry_after_s == pytest.approx(1.0)  # then 4 s are enough


def test_an_idle_time_does_not_count_as_service() -> None:
    room = admission()
    for start_s in (0, 100):
        room.enter(start_s * S, count=1, tokens=10, deadline_ns=None).leave(start_s * S + S // 10)
    assert room.rate.seconds_per_request == pytest.approx(0.1)


def test_the_ratio_of_bytes_to_tokens_is_learnt() -> None:
    room = admission()
    for _ in range(200):
        room.learn_ratio(100, 100)
    assert room.estimate_tokens(100) == pytest.approx(100, rel=0.05)


def test_a_full_queue_refuses_at_once_and_serves_again(launch) -> None:
    live = launch(say("x" * 8, end=False), max_running=1, step_s=0.01, config={"max_queued_requests": 3})
    live.engine.paused = True
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(live.post, "/v1/completions", {"prompt": "x", "max_tokens": 2}) for _ in range(3)]
        until(lambda: live.service.admission.queued_requests >= 3)
        status, headers, answer = live.post("/v1/completions", {"prompt": "x"})
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        error = answer["error"]
        assert (error["reason"], error["queued"], error["limit"]) == ("queued_requests", 3, 3)
        assert error["retry_after_s"] > 0
        assert "predicted_wait_ms" in error
        live.engine.paused = False
        assert [future.result()[0] for future in waiting] == [200] * 3
    assert live.post("/v1/completions", {"prompt": "x"})[0] == 200
    assert live.service.admission.queued_requests == 0
    assert 'splittime_refusals_total{reason="queued_requests"} 1.0' in live.get("/metrics")[2].decode()
    refused = [a for a in live.ledger.accounts() if a.finish_reason == "refused"]
    assert len(refused) == 1
    assert [i.stage for i in refused[0].intervals] == ["receive", "deliver"]


def test_a_refusal_costs_no_work_while_streams_run(launch) -> None:
    """It is made before the prompt is tokenised, beside 64 streams: `benchmarks` has how long it takes."""
    live = launch(say("abcdefgh", end=False), max_running=64, step_s=0.004, config={"max_queued_requests": 1})
    with concurrent.futures.ThreadPoolExecutor(66) as pool:
        body = {"prompt": "x", "max_tokens": 250, "stream": True}
        streams = []
        for _ in range(64):
            until(lambda: not live.service.admission.queued_requests)
            streams.append(pool.submit(live.post, "/v1/completions", body))
        live.call(lambda: setattr(live.engine, "max_running", 0))
        last = pool.submit(live.post, "/v1/completions", body)
        until(lambda: live.service.admission.queued_requests)
        statuses = [live.post("/v1/completions", {"prompt": "x" * 2000})[0] for _ in range(30)]
        live.call(lambda: setattr(live.engine, "max_running", 64))
        for stream in [*streams, last]:
            stream.result()
    assert statuses.count(429) >= 20
    refused = [account for account in live.ledger.accounts(limit=500) if account.finish_reason == "refused"]
    assert len(refused) >= 20
    for account in refused:
        assert {interval.stage for interval in account.intervals} <= {"receive", "admit", "deliver"}


def test_a_deadline_ends_a_request_where_it_stands(launch) -> None:
    """A stream's has time to begin; that of one that waits has not."""
    live = launch(say("x", end=False), step_s=0.02)
    deadline = {"X-Request-Deadline-Ms": "80", "X-Request-Id": "late"}
    status, _, answer = live.post("/v1/completions", {"prompt": "x", "max_tokens": 4000}, deadline)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    events = live.events("/v1/completions", {"prompt": "x", "max_tokens": 4000}, {"X-Request-Deadline-Ms": "1500"})
    assert events[-2]["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "[DONE]"
    live.engine.paused = True
    assert live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Deadline-Ms": "30"})[0] == 504
    live.engine.paused = False
    for account in live.ledger.accounts():
        account.verify()
        assert account.finish_reason == "deadline"
        assert account.deadline_ns - account.start_ns in (80 * 10**6, 1_500 * 10**6, 30 * 10**6)
    assert live.engine.is_empty
    assert live.service.admission.queued_requests == 0


def busy_server(launch):
    """One slot that is taken for a second, and three that wait; each departure took 40 ms so far."""
    live = launch(say("x" * 8, end=False), max_running=1, step_s=0.02)
    for _ in range(3):
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    return live


SLO = "x-llm-d-slo-ttft-ms"


def test_what_cannot_have_its_first_token_in_time_is_refused(launch) -> None:
    live = busy_server(launch)
    live.engine.paused = True
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(live.post, "/v1/completions", {"prompt": "x", "max_tokens": 1}) for _ in range(4)]
        until(lambda: live.service.admission.queued_requests >= 4)
        status, headers, answer = live.post("/v1/completions", {"prompt": "x"}, {SLO: "15"})
        error = answer["error"]
        assert (status, error["code"], error["reason"]) == (429, "slo_ttft", "slo_ttft")
        assert error["wait_estimate"] == "departures"
        assert error["predicted_ttft_ms"] > 15
        missing_ms = error["predicted_ttft_ms"] - 15
        assert error["retry_after_s"] * 1000 == pytest.approx(missing_ms, abs=15)  # what had passed of the 15, too
        assert int(headers["retry-after"]) >= 1
        assert 0 <= error["limit"] <= 15
        assert f"{error['predicted_ttft_ms']:.0f} ms predicted (departures)" in error["message"]
        live.engine.paused = False
        assert {future.result()[0] for future in waiting} == {200}
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {SLO: "60000"})[0] == 200
    assert live.service.admission.refusals == {"slo_ttft": 1}


def test_without_the_header_nobody_is_refused_for_a_first_token(launch) -> None:
    live = busy_server(launch)
    live.engine.step_s = 0.002
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(live.post, "/v1/completions", {"prompt": "x", "max_tokens": 4}) for _ in range(8)]
        assert {future.result()[0] for future in sent} == {200}
    assert not live.service.admission.refusals


@pytest.mark.parametrize("value", ["soon", "0", "-5", "", "nan", "99999999999"])
def test_a_bad_time_for_the_first_token_names_its_header(launch, value: str) -> None:
    status, _, answer = launch(say("x")).post("/v1/completions", {"prompt": "x"}, {SLO: value})
    assert status == 400
    assert answer["error"]["param"] == SLO
    assert answer["error"]["value"] == value


def test_a_first_token_that_no_queue_keeps_away_gets_no_time_to_come_back() -> None:
    class Slow:
        def wait_s(
            self, requests: int, tokens: int, own_tokens: int, key: str | None = None, weight: float = 1.0
        ) -> tuple[float, float]:
            return (0.1 * requests, 0.1 * requests + own_tokens)

    room = Admission(QueueLimits(10, 1000), predictor=Slow())
    room.enter(0, count=1, tokens=1, deadline_ns=None)
    with pytest.raises(Refused) as caught:
        room.check(0, tokens=5, first_token_by_ns=2 * S)
    assert caught.value.info.retry_after_s is None
    assert "Even without a queue" in caught.value.info.hint
    with pytest.raises(Refused) as caught:
        room.check(0, tokens=2, first_token_by_ns=2 * S)
    assert caught.value.info.retry_after_s == pytest.approx(0.1, abs=0.0011)  # rounded up
    assert caught.value.facts["wait_estimate"] == "model"


def test_a_queue_that_is_full_names_the_time_until_the_next_one_leaves_it() -> None:
    class Known:
        def wait_s(
            self, requests: int, tokens: int, own_tokens: int, key: str | None = None, weight: float = 1.0
        ) -> tuple[float, float]:
            return (0.25 + requests, 0.5 + requests)

    room = Admission(QueueLimits(1, 1000), predictor=Known())
    room.enter(0, count=1, tokens=1, deadline_ns=None)
    with pytest.raises(Refused) as caught:
        room.check(0)
    assert caught.value.info.retry_after_s == 0.25
    assert caught.value.facts["predicted_wait_ms"] == 1250


def test_the_gauges_say_who_predicts_and_how_far_off_it_is(launch) -> None:
    live = busy_server(launch)
    server = live.get("/stats")[2]["server"]
    assert server["wait_estimate"] == "departures"
    assert server["step_error_ratio"] == {"decode": None, "prompts": None}
    live.call(lambda: live.service.waits.cost.errors.update(decode=0.0625))
    assert live.get("/stats")[2]["server"]["step_error_ratio"]["decode"] == 0.0625
    assert 'splittime_step_prediction_error_ratio{kind="decode"} 0.0625' in live.get("/metrics")[2].decode()


def a_step(number: int, prompt_tokens: int, step_ns: int) -> StepRecord:
    """One row that decodes, and sometimes one of a prompt."""
    rows = (("d", 50, 1), ("p", 0, prompt_tokens)) if prompt_tokens else (("d", 50, 1),)
    times = {"plan_ns": 0, "launch_ns": 0, "device_ns": step_ns, "sample_ns": 0, "commit_ns": 0}
    gaps = {"host_gap_ns": 0, "idle_ns": 0}
    counts = {"prefill_tokens": prompt_tokens, "decode_tokens": 1, "kv_tokens_read": 51 + prompt_tokens}
    state = {"blocks_used": 1, "num_running": len(rows), "num_waiting": 0}
    begin_ns = number * S
    return StepRecord(
        step_id=number, begin_ns=begin_ns, end_ns=begin_ns + step_ns, rows=rows, **times, **gaps, **counts, **state
    )


def test_what_the_ledger_holds_is_what_admission_knows(launch) -> None:
    """Steps of 10 ms, and 1 ms more for each prompt token: 300 tokens in slices of 100 take 330 ms."""
    live = launch(say("x"))
    limits = {"max_num_batched_tokens": 128, "max_prefill_tokens": 100, "enable_chunked_prefill": True}
    live.engine.knobs_now |= {**limits, "batching": "continuous"}
    for number in range(320):
        prompt_tokens = number % 7 * 15 if number % 2 else 0
        step_ns = 10 * S // 1000 + prompt_tokens * S // 1000
        live.call(lambda number=number, p=prompt_tokens, ns=step_ns: live.ledger.add_step(a_step(number, p, ns)))
    prompt = {"prompt": [7] * 300, "max_tokens": 1}
    status, headers, answer = live.post("/v1/completions", prompt, {SLO: "250"})
    error = answer["error"]
    assert (status, error["wait_estimate"]) == (429, "model")
    assert error["predicted_wait_ms"] == 0
    assert error["predicted_ttft_ms"] == pytest.approx(330, rel=0.1)
    assert "Even without a queue" in error["hint"]
    assert "retry-after" not in headers
    assert live.post("/v1/completions", prompt, {SLO: "2000"})[0] == 200
    assert live.post("/v1/completions", prompt)[0] == 200
    gauges = live.get("/stats")[2]["server"]
    assert gauges["wait_estimate"] == "model"
    assert max(gauges["step_error_ratio"].values()) < 0.05


def test_a_key_that_fills_the_queue_turns_nobody_else_away() -> None:
    room = admission(requests=8, tokens=1000)
    for _ in range(8):
        enter_of(room, "greedy")
    with pytest.raises(Refused):
        enter_of(room, "greedy")
    for _ in range(4):
        enter_of(room, "other")
    with pytest.raises(Refused):
        enter_of(room, "other")
    with pytest.raises(Refused):
        enter_of(room, "greedy")
    assert room.queued_requests == 12
    enter_of(room, "heavy", weight=2.0, count=4)
    with pytest.raises(Refused):
        enter_of(room, "heavy", weight=2.0)


def test_a_key_that_fills_the_queue_with_tokens_turns_nobody_else_away() -> None:
    room = admission(requests=100, tokens=1000)
    enter_of(room, "greedy", tokens=1000)
    with pytest.raises(Refused):
        enter_of(room, "greedy", tokens=1)
    place = enter_of(room, "other", tokens=500)
    with pytest.raises(Refused):
        enter_of(room, "other", tokens=1)
    place.give_up()
    enter_of(room, "other", tokens=500)


def test_before_a_newcomer_of_a_key_stand_as_many_of_each_other_key_as_of_its_own() -> None:
    asked: list[tuple[int, int, float]] = []

    class Asked:
        def wait_s(
            self, requests: int, tokens: int, own_tokens: int, key: str | None = None, weight: float = 1.0
        ) -> tuple[float, float]:
            asked.append((requests, tokens, weight))
            return 0.0, 0.0

    room = Admission(QueueLimits(1000, 10**6), predictor=Asked())
    for _ in range(100):
        enter_of(room, "greedy", tokens=50)
    for name, weight in (("other", 1.0), ("heavy", 4.0), ("greedy", 1.0)):
        room.check(1, tokens=20, deadline_ns=10**12, tenant=name, weight=weight)
    assert asked == [(1, 20, 1.0), (1, 5, 4.0), (100, 5000, 1.0)]


def test_those_about_to_be_queued_fill_the_queue_for_others_beyond_their_share_only() -> None:
    room = Admission(QueueLimits(10, 10**6))
    enter_of(room, "greedy", count=5)
    enter_of(room, "other")
    room.check(1, others=3, tenant="greedy")
    with pytest.raises(Refused):
        room.check(1, others=4, tenant="greedy")
    room.check(1, others=60, tenant="other")
    room.check(1, others=60, tenant="third")


def enter_of(room: Admission, tenant: str, *, weight: float = 1.0, count: int = 1, tokens: int = 1) -> Place:
    return room.enter(1, count=count, tokens=tokens * count, deadline_ns=None, tenant=tenant, weight=weight)
