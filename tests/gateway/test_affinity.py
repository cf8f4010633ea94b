"""Prefix affinity: who gets the next turn of a chat, the cap of load, and what of it is told."""

import json
import random
import tomllib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.diagnose.explain import explain
from splittime.gateway.config import AffinityConfig, BreakerConfig, UpstreamConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.forwarded import forwarded
from splittime.gateway.routing.affinity import BLOCK_BYTES, UNREAD, PrefixAffinity
from splittime.gateway.upstreams import Router, Upstream
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, upstream

LONG = "All of this the upstream has computed before. " * 40
TWO = '[[upstream]]\nname = "a"\nurl = "http://127.0.0.1:1"\nmodels = ["m"]\n[affinity]\n'


class Routed3:
    """Three upstreams behind a router with affinity, and requests that are in flight there."""

    def __init__(self, rooms=(64, 64, 64), seed=7, **config) -> None:
        made = [
            UpstreamConfig(name=f"u{i}", url="http://127.0.0.1:1", models=("m",), max_in_flight=n)
            for i, n in enumerate(rooms)
        ]
        self.upstreams = [Upstream(one, BreakerConfig()) for one in made]
        self.affinity = PrefixAffinity(AffinityConfig(**config))
        self.router = Router(self.upstreams, random.Random(seed), affinity=self.affinity)
        self.in_flight = []

    def choose(self, prompt: str, tenant="", tried=(), **fields):
        asked = forwarded("/v1/completions", json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), 16)
        prefix = self.affinity.seen(asked, tenant)
        return asked, prefix, self.router.choose("m", 0, tried, prefix)

    def send(self, prompt: str, **more):
        """As a `RunningAttempt` does; returns who got it, None if nobody has room."""
        asked, prefix, routed = self.choose(prompt, **more)
        if routed is not None:
            routed.upstream.enter(asked.tokens)
            self.affinity.note_sent(prefix, routed.upstream.name, routed.affinity)
            self.in_flight.append((routed, prefix, asked.tokens))
        return routed

    def end(self, number: int = 0, *, fails: bool = False) -> None:
        routed, prefix, tokens = self.in_flight.pop(number)
        (self.affinity.note_failed if fails else self.affinity.note_answered)(prefix, routed.upstream.name)
        routed.upstream.leave(tokens)

    def serve(self, prompt: str, **more):
        routed = self.send(prompt, **more)
        self.end()
        return routed


def test_the_next_turn_goes_where_the_last_one_was():
    for seed in range(5):
        servers, prompt, chosen = Routed3(seed=seed), LONG, set()
        for turn in range(6):
            routed = servers.serve(prompt)
            chosen.add(routed.upstream.name)
            assert routed.affinity.result == ("hit" if turn else "none")
            prompt += f"Turn {turn}. " + LONG
        assert len(chosen) == 1
        assert routed.considered[0].upstream == routed.upstream.name
        assert len(routed.considered) == 3
        assert routed.affinity.matched_bytes == (len(LONG) * 5 + len("Turn 0. ") * 4 + 1) // BLOCK_BYTES * BLOCK_BYTES


def test_a_failed_attempt_is_forgotten():
    servers = Routed3()
    first = servers.send(LONG)
    servers.end(fails=True)
    again = servers.choose(LONG)[2]
    assert (again.affinity.result, again.affinity.why) == ("none", "unseen")
    assert first.affinity.why == "unseen"


def test_tenants_and_salts_are_kept_apart():
    servers = Routed3()
    servers.serve(LONG, tenant="one", cache_salt="x")
    for other in ({"tenant": "two", "cache_salt": "x"}, {"tenant": "one"}, {"tenant": "one", "cache_salt": "y"}):
        assert servers.choose(LONG, **other)[2].affinity.why == "unseen"
    assert servers.choose(LONG, tenant="one", cache_salt="x")[2].affinity.result == "hit"


def test_who_has_more_to_do_than_the_cap_does_not_get_it():
    servers = Routed3(load_cap=2.0, slack_tokens=100)
    home = servers.serve(LONG).upstream
    others = [one for one in servers.upstreams if one is not home]
    for one in others:
        one.enter(1000)
    worth = len(LONG) // BLOCK_BYTES * BLOCK_BYTES // 4
    home.enter(2 * 1000 + 100 + worth)
    at_cap = servers.choose(LONG)[2]
    assert (at_cap.upstream, at_cap.affinity.result) == (home, "hit")
    assert at_cap.affinity.tokens == at_cap.affinity.cap_tokens == home.tokens
    home.enter(1)
    over = servers.choose(LONG)[2]
    assert over.upstream in others
    assert (over.affinity.result, over.affinity.why, over.affinity.upstream) == ("capped", "over_cap", home.name)
    assert over.affinity.tokens == over.affinity.cap_tokens + 1


def test_another_that_served_a_part_comes_before_one_that_served_nothing():
    servers = Routed3(load_cap=1.0, slack_tokens=0)
    half, third = servers.serve(LONG).upstream, None
    servers.affinity.note_sent(servers.choose(LONG + LONG)[1], "u2" if half.name != "u2" else "u1", None)
    most = servers.choose(LONG + LONG)[2].upstream
    assert most is not half
    third = next(one for one in servers.upstreams if one not in (half, most))
    most.enter(10_000)
    half.enter(10)
    routed = servers.choose(LONG + LONG)[2]
    assert (routed.upstream, routed.affinity.result) == (half, "hit")
    assert third.tokens == 0


def test_who_has_no_room_does_not_get_it():
    servers = Routed3(rooms=(1, 1, 1))
    first = servers.send(LONG)
    second = servers.send(LONG)
    assert second.upstream is not first.upstream
    assert (second.affinity.result, second.affinity.why) == ("capped", "no_room")


def test_it_is_said_of_who_is_named_why_that_one_does_not_get_it():
    servers = Routed3(rooms=(64, 64, 64), load_cap=1.0, slack_tokens=0)
    half, most = servers.upstreams[0], servers.upstreams[1]
    for name, prompt in ((half.name, LONG), (most.name, LONG + LONG)):
        servers.affinity.note_sent(servers.choose(prompt)[1], name, None)
    for one in (half, most):
        one.enter(10_000)
    over = servers.choose(LONG + LONG)[2].affinity
    assert (over.result, over.why, over.upstream) == ("capped", "over_cap", most.name)
    while most.limit > most.requests:
        most.enter(1)
    full = servers.choose(LONG + LONG)[2].affinity
    assert (full.result, full.why, full.upstream) == ("capped", "no_room", most.name)  # the other one is over its cap


def test_a_retry_does_not_go_back_for_its_prefix():
    servers = Routed3()
    first = servers.serve(LONG)
    again = servers.choose(LONG, tried=[first.upstream.name])[2]
    assert again.upstream is not first.upstream
    assert again.affinity.result == "none"


def test_what_says_nothing_is_told():
    servers = Routed3()
    assert servers.choose("short")[2].affinity.why == "short"
    assert servers.router.choose("m", 0, (), UNREAD).affinity.why == "unread"
    for number in range(9):
        servers.serve(LONG + f"{number} " * 300)
    shared = servers.choose(LONG + "another" * 200)[2].affinity
    assert (shared.result, shared.why) == ("none", "shared")
    assert PrefixAffinity(None).seen(forwarded("/v1/completions", b'{"model": "m"}', 16), "") is None


def test_a_common_system_prompt_draws_nobody_to_one_upstream():
    """400 conversations of one turn, four in flight at any time, none of which exceeds a cap."""
    servers, chosen = Routed3(slack_tokens=10**6), Counter()
    for number in range(400):
        chosen[servers.send(LONG + f"{number} asks. " * 100).upstream.name] += 1
        if len(servers.in_flight) >= 4:
            servers.end()
    assert max(chosen.values()) < 0.45 * 400
    assert servers.affinity.results["hit"] < 10


events = st.lists(
    st.tuples(st.sampled_from(["send", "end", "fail"]), st.integers(0, 9), st.integers(1, 6), st.sampled_from("pq")),
    max_size=60,
)


@given(events, st.integers(0, 5), st.sampled_from([0, 300, 10**6]))
@settings(max_examples=100, deadline=None)
def test_under_any_course_loads_are_right_caps_hold_and_the_seed_decides(course, seed, slack):
    runs = [replayed(course, seed, slack) for _ in range(2)]
    assert runs[0] == runs[1]


def replayed(course, seed: int, slack: int) -> list:
    servers, chosen = Routed3(rooms=(2, 3, 4), seed=seed, slack_tokens=slack, max_blocks=4096), []
    for what, number, words, tenant in course:
        if what == "send":
            loads = {one.name: one.tokens for one in servers.upstreams}
            free = [one.tokens for one in servers.upstreams if one.has_room]
            routed = servers.send(f"{number % 3} word " * 60 * words, tenant=tenant)
            chosen.append(None if routed is None else (routed.upstream.name, routed.affinity, routed.considered))
            assert (routed is None) == (not free)
            if routed is not None and routed.affinity.result == "hit":
                beyond = (routed.affinity.matched_bytes - routed.affinity.shared_bytes) // 4
                assert beyond > 0
                assert loads[routed.upstream.name] <= int(1.25 * min(free)) + slack + beyond
        elif servers.in_flight:
            servers.end(number % len(servers.in_flight), fails=what == "fail")
        held = Counter()
        for routed, _, tokens in servers.in_flight:
            held[routed.upstream.name] += tokens
        assert all(one.tokens == held[one.name] for one in servers.upstreams)
        assert all(0 <= one.requests <= one.limit for one in servers.upstreams)
        assert servers.affinity.num_blocks <= 4096
    return chosen


def test_it_is_off_unless_the_config_has_it():
    assert config_of(tomllib.loads(TWO.replace("[affinity]\n", ""))).affinity is None
    config = config_of(tomllib.loads(TWO))
    assert (config.affinity.load_cap, config.affinity.slack_tokens) == (1.25, 4096)


# ---- in front of servers


@pytest.fixture(scope="module")
def chats(hostile, tmp_path_factory):
    text = "[affinity]\nslack_tokens = 100000\n[retries]\nspare = 1000\npause_s = 0.01\n[breaker]\nfailures = 1000\n"
    text += upstream("one", hostile.url("fine"), "m") + upstream("two", hostile.url("second"), "m")
    text += upstream("gone", "http://127.0.0.1:9", "n") + upstream("there", hostile.url("third"), "n")
    text += upstream("away", hostile.url("away"), "o") + upstream("away2", hostile.url("away"), "o")
    with gateway_of(tmp_path_factory.mktemp("affinity"), text) as started:
        yield started


def turns(chat: int, number: int) -> list[dict]:
    asked = [{"role": "user", "content": f"Chat {chat}, turn {turn}. {LONG}"} for turn in range(number)]
    said = [{"role": "assistant", "content": "tick"}] * number
    return [{"role": "system", "content": "Be brief."}] + [
        one for pair in zip(asked, said, strict=True) for one in pair
    ]


def test_chats_stay_where_they_began_and_the_account_says_why(chats):
    homes, before = {}, chats.get("/stats")["affinity"]
    for turn in range(1, 5):
        for chat in range(6):
            request_id = f"chat-{chat}-{turn}"
            messages = turns(chat, turn)[:-1]
            status, headers, _ = chats.ask("m", {"x-request-id": request_id}, messages=messages, stream=bool(chat % 2))
            assert status == 200
            homes.setdefault(chat, set()).add(headers["x-splittime-upstream"])
    assert all(len(home) == 1 for home in homes.values())
    account = account_from_json(chats.account("chat-3-4"))
    account.verify()
    decision = account.attempts[0].affinity
    assert (decision.result, {decision.upstream}) == ("hit", homes[3])
    assert decision.matched_bytes >= 3 * len(LONG)
    assert f"{decision.upstream} had served {decision.matched_bytes} bytes" in " ".join(explain(account).plain.split())
    assert account_from_json(chats.account("chat-3-1")).attempts[0].affinity.why == "unseen"
    told = chats.get("/stats")["affinity"]
    assert [told[result] - before[result] for result in ("hit", "capped", "none")] == [18, 0, 6]


def test_after_failures_no_load_is_left(chats):
    for number in range(8):
        status, headers, _ = chats.ask("n", messages=turns(number, 2), headers={"x-request-id": f"n-{number}"})
        assert (status, headers["x-splittime-upstream"]) == (200, "there")
        chats.account(f"n-{number}")
    told = chats.get("/stats")["upstreams"]
    assert [(one["requests"], one["tokens"], one["expected_wait_ns"]) for one in told] == [(0, 0, 0)] * 6


def test_who_failed_is_not_said_to_have_served_it(chats):
    for number in range(2):
        assert chats.ask("o", {"x-request-id": f"o{number}"}, messages=turns(9, 2))[0] == 503
        account = account_from_json(chats.account(f"o{number}"))
        assert account.attempts[0].affinity.why == "unseen"


def test_the_metrics_count_by_result_alone(chats):
    import urllib.request

    with urllib.request.urlopen(chats.url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    results = [line for line in lines if line.startswith("splittime_gateway_affinity_total{")]
    assert sorted(line.split('"')[1] for line in results) == ["capped", "hit", "none"]
    assert any(line.startswith("splittime_gateway_affinity_blocks ") for line in lines)
