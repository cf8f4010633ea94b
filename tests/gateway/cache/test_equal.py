"""Equal requests: what is given again, to whom, and what the account, the headers and the counts say of it."""

import json
import re
import time
import uuid

import pytest

from patience import until
from splittime.ledger.account_json import account_from_json

from ..conftest import gateway_of
from ..test_relay import events, stages
from .conftest import config


def ask(gateway, model="m0", headers=None, **body):
    """Returns X-Cache, the answer's headers and body, and the account, which sums exactly."""
    request_id = uuid.uuid4().hex
    told = {"temperature": 0, **body}
    status, found, data = gateway.ask(model, {"x-request-id": request_id, **(headers or {})}, **told)
    account = account_from_json(gateway.account(request_id))
    account.verify()
    assert sum(one.duration_ns for one in account.intervals) == account.end_ns - account.start_ns
    assert status == 200
    return found.get("x-cache"), found, data, account


def until_hit(gateway, model="m0", **body):
    """What was answered is kept a moment later: ask until it is given again."""
    for _ in range(200):
        found = ask(gateway, model, **body)
        if found[0] == "hit":
            return found
        time.sleep(0.005)
    raise AssertionError("never a hit")


def content(data: bytes) -> str:
    return json.loads(data)["choices"][0]["message"]["content"]


def test_an_equal_request_is_given_the_answer_again(caching, echoing):
    said, headers, first, account = ask(caching, seed=1)
    assert said == "miss"
    assert "age" not in headers
    assert stages(account) == ["receive", "admit", "cache", "admit", "route", "upstream", "deliver"]
    said, headers, again, account = until_hit(caching, seed=1)
    asked = echoing.numbers
    assert content(again) == content(first)
    assert stages(account) == ["receive", "admit", "cache", "deliver"]
    assert (account.finish_reason, account.output_tokens, account.attempts) == ("stop", 3, ())
    assert int(headers["age"]) >= 0
    assert headers["x-cache-entry"].startswith("equal-")
    assert until_hit(caching, seed=1)[2] != again  # each has an id of its own
    assert echoing.numbers == asked


def test_what_was_the_first_requests_own_is_not_given_again(caching):
    ask(caching, seed=2)
    *_, data, account = until_hit(caching, seed=2)
    told = json.loads(data)
    assert "timing" not in told
    assert told["id"] == account.group_id == f"chatcmpl-{account.request_id}"


def test_a_stream_is_given_again_as_a_stream(caching):
    for model, is_paced in (("m0", True), ("m1", False)):
        *_, first, _ = ask(caching, model, stream=True, pause_s=0.05, seed=3)
        _, headers, again, account = until_hit(caching, model, stream=True, pause_s=0.05, seed=3)
        assert headers["content-type"] == "text/event-stream"
        assert events(again)[-1] == b"[DONE]"
        told = [json.loads(one)["choices"] for one in events(first)[:-1]]
        assert [json.loads(one)["choices"] for one in events(again)[:-1]] == told
        paced = [one.duration_ns for one in account.intervals if one.cause == "replay_pace"]
        assert (sum(paced) > 0.09e9) == is_paced
        assert b"timing" not in again
        whole_said, *_ = ask(caching, model, pause_s=0.05, seed=3)
        assert whole_said == "miss"  # a stream's answer is no whole one's


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seed": 10}, {"seed": 11}),
        ({"seed": 12, "messages": [{"role": "user", "content": "a"}]}, {"seed": 12}),
        ({"seed": 13, "tools": [{"type": "function"}]}, {"seed": 13}),
        ({"seed": 14, "max_tokens": 4}, {"seed": 14}),
        ({"seed": 15, "user": "a"}, {"seed": 15}),
        ({"seed": 2**64 + 1}, {"seed": 2**64 + 2}),
    ],
)
def test_what_differs_is_asked_anew(caching, one, other):
    ask(caching, **one)
    until_hit(caching, **one)
    assert ask(caching, **other)[0] == "miss"


def test_two_ways_to_write_one_request_are_equal(caching):
    ask(caching, seed=20)
    until_hit(caching, seed=20)
    raw = b'{ "seed":20.0, "temperature":0.0,"max_tokens":3, "n":1, "stream":false, "stop":null,'
    raw += b'"messages":[{"content":"\\u0078","role":"user"}], "model":"m0"}'
    assert ask(caching, raw=raw)[0] == "hit"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"temperature": 0.7}, "sampled"),
        ({"temperature": None}, "sampled"),
        ({"n": 2}, "several_answers"),
        ({"store": True}, "stored_elsewhere"),
        ({"filling": "x" * 300_000}, "long"),
        ({"headers": {"cache-control": "no-store"}}, "no_store"),
    ],
)
def test_what_is_passed_by(caching, body, why):
    before = caching.get("/stats")["cache"]["results"].get("bypass", 0)
    for number in (1, 2):
        assert ask(caching, seed=30, **body)[0] == "bypass"
        assert caching.get("/stats")["cache"]["results"]["bypass"] == before + number
    assert f'why="{why}"' in metrics(caching)


def metrics(gateway) -> str:
    import urllib.request

    with urllib.request.urlopen(gateway.url + "/metrics") as answer:
        return answer.read().decode()


def test_samples_are_kept_where_a_route_says_so(caching):
    ask(caching, "m1", temperature=0.7, seed=31)
    until_hit(caching, "m1", temperature=0.7, seed=31)


def test_no_cache_asks_anew_and_keeps_what_it_gets(caching):
    ask(caching, seed=40)
    *_, old, _ = until_hit(caching, seed=40)
    said, _, new, _ = ask(caching, seed=40, headers={"cache-control": "no-cache"})
    assert said == "bypass"
    assert content(new) != content(old)
    for _ in range(200):
        *_, now, _ = until_hit(caching, seed=40)
        if content(now) == content(new):
            return
    raise AssertionError("the new one is not kept")


def test_an_answer_too_old_is_none(caching):
    ask(caching, "m4", seed=41)
    ask(caching, seed=41)
    until_hit(caching, "m4", seed=41)
    until_hit(caching, seed=41)
    time.sleep(2.1)
    assert ask(caching, "m4", seed=41)[0] == "miss"
    assert ask(caching, seed=41, headers={"cache-control": "max-age=60"})[0] == "hit"
    said, headers, *_ = ask(caching, seed=41)
    assert (said, int(headers["age"]) >= 2) == ("hit", True)
    assert ask(caching, seed=41, headers={"cache-control": "max-age=1"})[0] == "miss"


@pytest.mark.parametrize("ends", ["length", "tool_calls", "content_filter"])
@pytest.mark.parametrize("stream", [False, True])
def test_only_what_ended_by_itself_is_kept(caching, ends, stream):
    for _ in range(3):
        assert ask(caching, seed=50, ends=ends, stream=stream)[0] == "miss"
        time.sleep(0.02)


def test_a_failure_and_half_an_answer_are_not_kept(caching):
    for _ in range(3):
        status, headers, _ = caching.ask("m0", temperature=0, seed=51, act="fails")
        assert (status, headers["x-cache"]) == (500, "miss")
        status, headers, data = caching.ask("m0", temperature=0, seed=51, act="dies", stream=True)
        assert (headers["x-cache"], b"upstream_died" in data) == ("miss", True)
        time.sleep(0.02)


def test_a_long_answer_is_given_and_not_kept(caching):
    for stream in (False, True):
        for _ in range(2):
            said, _, data, _ = ask(caching, seed=52, says="x" * 5000, stream=stream)
            assert (said, len(data) > 5000) == ("miss", True)
            time.sleep(0.02)


def test_a_model_without_a_route_has_no_cache(caching):
    for _ in range(2):
        said, *_, account = ask(caching, "plain", seed=60)
        assert said is None
        assert "cache" not in stages(account)


def test_answers_outlive_the_gateway_in_a_file(echoing, tmp_path):
    file = tmp_path / "answers.db"
    for number in range(2):
        with gateway_of(tmp_path, config(echoing, "shadow_share = 0.0", cache={"file": str(file)})) as gateway:
            said, *_ = ask(gateway, seed=70)
            assert said == ("miss" if number == 0 else "hit")
            until_hit(gateway, seed=70)
    assert file.stat().st_mode & 0o077 == 0


def test_a_tenants_answers_are_its_own(echoing, tmp_path):
    tenants = "".join(
        f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}"\noperator = {str(name == "ops").lower()}\n'
        for name in ("ops", "one", "two")
    )
    keys = {"OPS": "ops-key", "ONE": "one-key", "TWO": "two-key"}
    with gateway_of(tmp_path, config(echoing, "shadow_share = 0.0") + tenants, **keys) as gateway:

        def said(key: str) -> tuple[str, dict]:
            _, headers, _ = gateway.ask("m0", {"authorization": f"Bearer {key}"}, temperature=0)
            return headers["x-cache"], headers

        def post(path: str, key: str, raw: dict) -> tuple[int, dict]:
            headers = {"authorization": f"Bearer {key}"}
            status, _, data = gateway.ask("", headers, path, raw=json.dumps(raw).encode())
            return status, json.loads(data)

        assert said("one-key")[0] == "miss"
        until(lambda: said("one-key")[0] == "hit")
        assert said("two-key")[0] == "miss"
        until(lambda: said("two-key")[0] == "hit")
        entry = said("one-key")[1]["x-cache-entry"]
        assert post("/cache/wrong", "two-key", {"entry": entry})[0] == 404
        assert post("/cache/purge", "two-key", {"tenant": "one"})[0] == 403
        assert post("/cache/purge", "two-key", {"entry": entry}) == (200, {"purged": 0})
        assert post("/cache/purge", "two-key", {"older_than_s": 3600}) == (200, {"purged": 0})
        assert post("/cache/purge", "two-key", {}) == (200, {"purged": 1})
        assert said("one-key")[0] == "hit"
        assert post("/cache/wrong", "one-key", {"entry": entry}) == (200, {"removed": True})
        assert said("one-key")[0] == "miss"
        until(lambda: said("one-key")[0] == "hit")
        assert post("/cache/purge", "ops-key", {"model": "plain"}) == (200, {"purged": 0})
        assert post("/cache/purge", "ops-key", {"tenant": "one", "model": "m0"}) == (200, {"purged": 1})
        assert gateway.get("/stats", "ops-key")["cache"]["wrong"] == {"equal": 1}


@pytest.mark.parametrize(
    ("path", "raw", "status", "code"),
    [
        ("/cache/wrong", b'{"entry": "equal-1"}', 400, None),
        ("/cache/wrong", b"{}", 400, "invalid_type"),
        ("/cache/purge", b'{"modle": "m0"}', 400, "invalid_type"),
        ("/cache/purge", b"{", 400, "invalid_json"),
        ("/cache/wrong", b'{"entry": "equal-' + b"0" * 64 + b'"}', 404, "no_such_entry"),
    ],
)
def test_what_cannot_be_purged_is_said(caching, path, raw, status, code):
    told, _, data = caching.ask("", path=path, raw=raw)
    assert told == status
    assert code is None or json.loads(data)["error"]["code"] == code


def test_who_asks_for_what_is_gone_is_told_since_when_answers_are_kept(caching):
    raw = b'{"entry": "equal-' + b"1" * 64 + b'"}'
    hint = json.loads(caching.ask("", path="/cache/wrong", raw=raw)[2])["error"]["hint"]
    assert re.search(r"the store has none from before \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, when it was empty", hint)


def test_a_gateway_that_keeps_nothing_says_so(gateway):
    status, _, data = gateway.ask("", path="/cache/purge", raw=b"{}")
    assert (status, json.loads(data)["error"]["code"]) == (404, "no_cache")
