"""Verify, then escalate: a small model is asked first, and where its first tokens seem unsure the large one answers."""

import json
import re
import socket
import urllib.request
import uuid

import pytest

from patience import until
from splittime.core.errors import ConfigError
from splittime.gateway.config import DifficultyConfig, EscalateConfig, GatewayConfig
from splittime.gateway.routing.difficulty import Escalations, bounds_of, why_not_looked_at, without_logprobs
from splittime.ledger.account_json import account_from_json
from splittime.ledger.stages import Stage

from .conftest import gateway_of, upstream
from .test_chaos import metric, sums
from .test_endings import assert_nothing_is_left, send
from .test_relay import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SURE, UNSURE = [-0.1] * 6, [-0.1, -0.1, -3.0, -3.0, -0.1, -0.1]  # the first four decide


def route(name: str, large: str, small: str = "little", below: float = -1.0, at_most: float = 1.0) -> str:
    told = f'[[difficulty]]\nmodel = "{name}"\nsmall = "{small}"\nlarge = "{large}"\n'
    return f"{told}escalate = {{ below = {below}, tokens = 4, at_most = {at_most} }}\n"


@pytest.fixture(scope="module")
def graded(hostile, tmp_path_factory):
    """`auto` has the hostile server's `scored` as its small model; the large one of `full` has one place."""
    text = "[breaker]\nfailures = 1000\n[retries]\nspare = 1000\npause_s = 0.01\n"
    text += "".join(f'[[cache_route]]\nmodel = "{name}"\n' for name in ("auto", "full"))
    text += (
        route("auto", "big")
        + route("full", "kept")
        + route("half", "big", at_most=0.5)
        + upstream("little", hostile.url("scored"), resume=True)
    )
    text += upstream("big", hostile.url("fine")) + upstream("kept", hostile.url("keeping"), max_in_flight=1)
    with gateway_of(tmp_path_factory.mktemp("graded"), text) as gateway:
        yield gateway
        assert_nothing_is_left(gateway)


def ask(gateway, model="auto", path=CHAT, headers=None, **body):
    """Returns status, headers, body and the account of an answer."""
    request_id = uuid.uuid4().hex
    told = {"model": model, "max_tokens": 9, **({"prompt": "x"} if path == COMPLETIONS else {"messages": []}), **body}
    raw = json.dumps(told).encode()
    status, answered, answer = gateway.ask("", {"x-request-id": request_id, **(headers or {})}, path, raw=raw)
    account = account_from_json(gateway.account(request_id))
    sums(account)
    return status, answered, answer, account


def ends(account):
    return [(attempt.upstream, attempt.error) for attempt in account.attempts]


def who(headers):
    return headers["x-splittime-model"], headers["x-splittime-difficulty"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_sure_answer_is_the_small_ones_and_says_so(graded, hostile, path, stream):
    status, headers, answer, account = ask(graded, path=path, sure=SURE, stream=stream)
    assert (status, who(headers)) == (200, ("little", "choice=small; check=sure"))
    assert answer.count(b" small") == 6
    assert b"logprob" not in answer.replace(b'"logprobs":null', b"")  # nobody but the gateway asked for them
    assert not stream or events(answer)[-1] == b"[DONE]"
    assert json.loads(hostile.asked["scored"][-1][1])["logprobs"] == (True if path == CHAT else 1)
    (attempt,) = account.attempts
    found = attempt.first_tokens
    assert (found.verdict, found.num_tokens, round(found.mean_logprob, 6), found.below) == ("sure", 4, -0.1, -1.0)
    assert (account.model, account.routing.asked_model, account.routing.model) == ("little", "auto", "little")
    assert account.routing.difficulty.choice == "small"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unsure_answer_is_cut_off_and_the_large_model_answers(graded, hostile, path, stream):
    gone, spent = len(hostile.gone_s["scored"]), metric(graded, "splittime_gateway_asked_anew_seconds_total")
    seen, retries = len(hostile.asked["fine"]), metric(graded, "splittime_gateway_retries_total")
    status, headers, answer, account = ask(graded, path=path, sure=UNSURE, stream=stream, stays=True)
    assert (status, who(headers)) == (200, ("big", "choice=small; check=unsure"))
    assert b"small" not in answer
    assert b"tick" in answer
    assert json.loads(hostile.asked["fine"][-1][1])["model"] == "big"
    assert "logprobs" not in json.loads(hostile.asked["fine"][-1][1])
    assert len(hostile.asked["fine"]) == seen + 1
    until(lambda: not stream or len(hostile.gone_s["scored"]) > gone)  # it was writing; one of before may be late
    assert ends(account) == [("little", "unsure"), ("big", "")]
    small, large = account.attempts
    assert (small.first_tokens.verdict, large.first_tokens) == ("unsure", None)
    assert small.lost_tokens > 0 == large.lost_tokens
    assert small.end_ns <= large.begin_ns
    assert (account.model, account.routing.model) == ("big", "little")  # who answered, and what was decided first
    lasted_ns = sum(one.duration_ns for one in account.intervals if one.stage is Stage.UPSTREAM)
    assert lasted_ns >= small.end_ns - small.begin_ns
    after = metric(graded, "splittime_gateway_asked_anew_seconds_total")
    assert after["unsure"] - spent.get("unsure", 0) == pytest.approx((small.end_ns - small.begin_ns) / 1e9)
    assert metric(graded, "splittime_gateway_retries_total") == retries


def test_nothing_is_given_before_the_verdict(graded, hostile):
    hostile.hold.clear()
    request_id, connection = send(graded, "auto", sure=SURE, stream=True, waits_after=3)
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    hostile.hold.set()
    connection.settimeout(20)
    told = b""
    while b"[DONE]" not in told:
        told += connection.recv(65536)
    assert told.startswith(b"HTTP/1.1 200")
    connection.close()
    account = account_from_json(graded.account(request_id))
    assert account.attempts[0].first_tokens.held_ns > 0.2e9  # which is in the attempt, and in `upstream`
    sums(account)


def test_who_asked_for_logprobs_has_them(graded):
    _, _, answer, _ = ask(graded, sure=SURE, logprobs=True)
    assert len(json.loads(answer)["choices"][0]["logprobs"]["content"]) == 6
    _, _, answer, _ = ask(graded, path=COMPLETIONS, sure=SURE, logprobs=0, stream=True)
    assert answer.count(b'"token_logprobs"') == 6


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_shorter_than_what_is_looked_at_is_judged_by_all_of_it(graded, stream):
    _, headers, _, account = ask(graded, sure=[-3.0, -0.1], stream=stream)
    assert who(headers) == ("big", "choice=small; check=unsure")
    assert account.attempts[0].first_tokens.num_tokens == 2
    _, headers, answer, _ = ask(graded, sure=[-0.1], stream=stream)
    assert who(headers)[0] == "little"
    assert b"small" in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "verdict"),
    [({"mute": True}, "no_logprobs"), ({"n": 2}, "several_answers"), ({"sure": []}, "no_logprobs")],
)
def test_of_whom_nothing_can_be_said_the_answer_is_given_and_it_is_said(graded, stream, more, verdict):
    _, headers, _, account = ask(graded, **{"sure": UNSURE, "stream": stream, **more})
    assert who(headers) == ("little", f"choice=small; check={verdict}")
    assert ends(account) == [("little", "")]
    assert (account.attempts[0].first_tokens.verdict, account.attempts[0].first_tokens.mean_logprob) == (verdict, None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_refuses_logprobs_is_asked_without(graded, stream):
    status, headers, answer, account = ask(graded, sure=UNSURE, stream=stream, refuses=True)
    assert (status, who(headers)) == (200, ("little", "choice=small; check=logprobs_refused"))
    assert ends(account) == [("little", "logprobs_refused"), ("little", "")]
    assert b"small" in answer
    _, _, answer, account = ask(graded, sure=UNSURE, stream=stream, refuses=True, logprobs=True)
    assert ends(account) == [("little", "")]  # its client asked for them: that is the client's to hear
    assert b"no logprobs" in answer


def test_whose_client_has_a_sign_of_life_is_asked_without_logprobs_too(hostile, tmp_path):
    text = "[queue]\nsign_of_life_s = 0.02\n" + route("auto", "big") + upstream("big", hostile.url("fine"))
    text += upstream("little", hostile.url("scored"), "little", "stays", max_in_flight=1)
    with gateway_of(tmp_path, text) as gateway:
        asked = len(hostile.asked["scored"])
        _, first = send(gateway, "stays", sure=[-0.1], stream=True, stays=True)
        until(lambda: len(hostile.asked["scored"]) > asked)
        request_id, connection = send(gateway, "auto", sure=SURE, stream=True, refuses=True)
        told = connection.recv(65536)
        while b": queued" not in told:
            told += connection.recv(65536)
        first.close()
        while b"[DONE]" not in told:
            assert b'"error"' not in told
            told += connection.recv(65536)
        connection.close()
        assert told.count(b" small") == len(SURE)
        account = account_from_json(gateway.account(request_id))
        assert ends(account) == [("little", "logprobs_refused"), ("little", "")]
        sums(account)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": ["a", "b"]}, "several_answers"),
        ({"prompt": [[1, 2], [3]]}, "several_answers"),
        ({"prompt": ["a"]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": []}, ""),
        ({"n": 2}, "several_answers"),
        ({"prompt": ["a", "b"], "echo": True}, "echo"),
    ],
)
def test_several_prompts_have_several_answers(body, why):
    assert why_not_looked_at(body) == why


@pytest.mark.parametrize("choices", [5, None, "x", [], [5, None], {"logprobs": {}}])
def test_choices_that_are_none_are_left_as_they_are(choices):
    assert without_logprobs({"choices": choices}) == {"choices": choices}


def test_an_unsure_answer_is_given_where_the_large_model_has_no_place(graded, hostile):
    asked = len(hostile.asked["keeping"])
    _, connection = send(graded, "kept", stream=True)
    until(lambda: len(hostile.asked["keeping"]) > asked)
    for stream in (False, True, False, True, False, True):  # it is never kept in the cache
        _, headers, answer, account = ask(graded, "full", sure=UNSURE, stream=stream, temperature=0)
        assert who(headers) == ("little", "choice=small; check=unsure_kept")
        assert headers["x-cache"] == "miss"
        assert ends(account) == [("little", "")]
        assert account.attempts[0].first_tokens.why == "no_place"
        assert b"small" in answer
    connection.close()


@pytest.mark.parametrize(("sure", "text"), [(SURE, b" small"), (UNSURE, b"tick")])
def test_the_cache_has_answers_by_the_name_that_was_asked_for(graded, sure, text):
    body = {"sure": sure, "temperature": 0, "max_tokens": 7}
    assert ask(graded, **body)[1]["x-cache"] == "miss"
    asked = []  # a lookup that is late on a busy machine is no hit, and the next one may be
    until(lambda: asked.append(ask(graded, **body)) or asked[-1][1]["x-cache"] == "hit")
    _, headers, answer, account = asked[-1]
    assert text in answer
    assert (account.attempts, account.routing.model, account.routing.difficulty) == ((), "auto", None)
    assert "x-splittime-model" not in headers


def test_the_large_model_has_what_is_left_of_the_deadline(graded, hostile):
    ask(graded, sure=UNSURE, stream=True, pause_s=0.02, headers={"x-request-deadline-ms": "9000"})
    left = [int(hostile.asked[name][-1][0]["x-request-deadline-ms"]) for name in ("scored", "fine")]
    assert left[1] <= left[0] - 40 < 9000
    status, _, _, account = ask(graded, sure=SURE, stream=True, pause_s=5, headers={"x-request-deadline-ms": "200"})
    assert (status, account.finish_reason) == (504, "deadline")
    assert account.attempts[0].first_tokens is None  # there was no verdict


def test_what_dies_while_it_is_held_is_tried_again_and_nothing_of_it_is_given(graded):
    status, _, answer, account = ask(graded, sure=SURE, stream=True, dies_after=2)
    assert (status, account.finish_reason) == (502, "error")
    assert ends(account) == [("little", "upstream_died")] * 3
    assert b"small" not in answer


def test_who_leaves_while_it_is_held_leaves_nothing(graded, hostile):
    gone, asked = len(hostile.gone_s["scored"]), len(hostile.asked["scored"])
    request_id, connection = send(graded, "auto", sure=[-0.1], stream=True, stays=True)
    until(lambda: len(hostile.asked["scored"]) > asked)
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    account = account_from_json(graded.account(request_id))
    sums(account)
    assert (account.finish_reason, account.attempts[0].error) == ("abort", "cancelled")
    until(lambda: len(hostile.gone_s["scored"]) == gone + 1)


def test_the_tenant_pays_for_both(hostile, tmp_path):
    key = "k" * 40
    text = f'budget_file = "{tmp_path}/budgets.sqlite"\n[[tenant]]\nname = "ops"\noperator = true\nkey_env = "OPS"\n'
    text += "tokens_per_day = 1000\n" + route("auto", "big")
    text += upstream("little", hostile.url("scored")) + upstream("big", hostile.url("fine"))
    with gateway_of(tmp_path, text, OPS=key) as gateway:
        headers, used = {"authorization": f"Bearer {key}"}, [0.0]
        for is_stream in (False, True):
            request_id = uuid.uuid4().hex
            assert gateway.ask("auto", headers | {"x-request-id": request_id}, sure=UNSURE, stream=is_stream)[0] == 200
            small, _ = gateway.account(request_id, key)["attempts"]
            assert small["lost_tokens"] > 0
            until(lambda: budget_used(gateway, headers) > used[-1])
            used.append(budget_used(gateway, headers))
    told_by_fine = 10
    assert used[1] == 7 + len(UNSURE) + told_by_fine  # of the small one what it told: it is charged when it is whole
    assert used[2] - used[1] == small["lost_tokens"] + 4 + told_by_fine  # a stream is cut off: prompt and first tokens


def budget_used(gateway, headers) -> float:
    asked = urllib.request.Request(f"{gateway.url}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as response:
        told = re.findall(r"splittime_gateway_budget_used_tokens\{.*day.*\} (\S+)", response.read().decode())
    return float(told[0]) if told else 0.0


# ---- how many


def test_no_more_than_a_share_of_the_latest_answers_is_asked_anew(graded):
    """Of the first ten half, however unsure they are; sure ones between make room again."""
    before = counted(graded)
    found = [ask(graded, "half", sure=UNSURE)[3].attempts[0].first_tokens for _ in range(12)]
    verdicts = [one.verdict for one in found]
    assert verdicts == ["unsure"] * 5 + ["unsure_kept"] * 6 + ["unsure"]
    assert {one.why for one in found if one.verdict == "unsure_kept"} == {"share"}
    for _ in range(2):
        ask(graded, "half", sure=SURE)
    assert ask(graded, "half", sure=UNSURE)[3].attempts[0].first_tokens.verdict == "unsure"
    told = graded.get("/stats")["difficulty"]["half"]["first_tokens"]
    assert told == {"below": -1.0, "judged": 15, "asked_anew": 7}
    assert counted(graded) - before == 6


def counted(gateway) -> float:
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=30) as response:
        found = re.findall(
            r'first_tokens_total\{upstream="little",verdict="unsure_kept",why="share"\} (\S+)', response.read().decode()
        )
    return float(found[0]) if found else 0.0


def test_the_share_is_that_of_the_latest():
    route = Escalations(EscalateConfig(below=-1.0, at_most=0.2), -1.0)
    for _ in range(200):
        route.note(is_anew=False)
    for number in range(100):
        assert route.has_room is (number < 20)
        route.note(is_anew=route.has_room)
    assert route.has_room  # the first of the twenty would be too old then
    never, always = (Escalations(EscalateConfig(below=-1.0, at_most=most), -1.0) for most in (0.0, 1.0))
    for _ in range(120):
        assert (never.has_room, always.has_room) == (False, True)
        always.note(is_anew=True)


def test_an_unsure_answer_is_given_where_the_large_one_would_be_too_late(hostile, tmp_path):
    """Its upstream holds back what it has, so that a first byte is not to be expected before the deadline."""
    text = route("auto", "big") + upstream("little", hostile.url("scored"))
    text += upstream("big", hostile.url("keeping"), "big", "kept")
    with gateway_of(tmp_path, text) as gateway:
        ask(gateway, "big", stream=True, then="late")  # 0.15 s each, as far as it is known
        _, connection = send(gateway, "kept", stream=True, max_tokens=4000)
        until(lambda: (gateway.get("/stats")["upstreams"][1]["expected_wait_ns"] or 0) > 10e9)
        body = {"sure": UNSURE, "stream": True}
        _, headers, _, account = ask(gateway, headers={"x-request-deadline-ms": "9000"}, **body)
        assert who(headers) == ("little", "choice=small; check=unsure_kept")
        assert account.attempts[0].first_tokens.why == "deadline"
        assert who(ask(gateway, **body)[1]) == ("big", "choice=small; check=unsure")
        connection.close()


# ---- a bound from labels


def labelled(path, small_right, logprob=lambda is_right: -0.2 if is_right else -2.0, **more):
    told = [
        {"prompt": f"p{at}", "small_right": one, "small_logprob": logprob(one), **more}
        for at, one in enumerate(small_right)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


def bound(path, target=0.9, at_most=0.5):
    escalate = EscalateConfig(labels=str(path), at_most=at_most)
    route = DifficultyConfig(model="auto", small="s", large="l", target=target, escalate=escalate)
    return bounds_of(GatewayConfig(upstream=(), difficulty=(route,)))["auto"]


def test_the_bound_is_the_lowest_that_reaches_the_target(tmp_path):
    path = labelled(tmp_path / "l", [True] * 150 + [False] * 50, large_right=True)
    found = bound(path)
    assert (found.threshold, found.share_small, found.quality, found.prompts) == (-0.2, 0.75, 1.0, 200)
    assert found.quality_low == pytest.approx(0.98665, abs=1e-4)
    assert bound(path, target=0.6).threshold == -100.0  # the small one alone is worth 0.75, and 0.69 at the least
    with pytest.raises(
        ConfigError, match=r"difficulty\[0\].target 0.9 is not reached with 20% of the answers asked anew"
    ):
        bound(path, at_most=0.2)
    with pytest.raises(ConfigError, match=r"difficulty\[0\].target 0.99 is not reached"):
        bound(path, target=0.99)  # all are right, of 200


def test_a_gateway_goes_by_the_bound_of_its_labels(hostile, tmp_path):
    labelled(tmp_path / "labels.jsonl", [True] * 150 + [False] * 50)
    text = '[[difficulty]]\nmodel = "auto"\nsmall = "little"\nlarge = "big"\ntarget = 0.9\n'
    text += 'escalate = { labels = "labels.jsonl", tokens = 4 }\n'
    text += upstream("little", hostile.url("scored")) + upstream("big", hostile.url("fine"))
    with gateway_of(tmp_path, text) as gateway:
        assert who(ask(gateway, sure=[-0.1] * 4)[1])[0] == "little"
        _, headers, _, account = ask(gateway, sure=[-0.3] * 4)
        assert (who(headers)[0], account.attempts[0].first_tokens.below) == ("big", -0.2)
        told = gateway.get("/stats")["difficulty"]["auto"]["first_tokens"]
        assert (told["below"], told["expected"]["prompts"]) == (-0.2, 200)
