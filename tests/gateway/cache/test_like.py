"""Like questions: hits where the verifier agrees, what it is asked and who pays for it, and what shadows measure."""

import json
import threading
import time
import urllib.request

import pytest

from patience import until

from ..conftest import gateway_of
from .conftest import config, like
from .test_equal import ask, until_hit

LONG = "Please tell me how I can transfer money from my savings account to my friend in Berlin with the app on my phone"


def talk(text: str, *before: str) -> list[dict]:
    return [*({"role": "user", "content": one} for one in before), {"role": "user", "content": text}]


BUSY = [{"role": "user", "content": json.dumps({"first": "x", "second": "waits"})}]


def metric(gateway, key: str, name: str) -> float:
    asked = urllib.request.Request(gateway.url + "/metrics", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name)))


def kept(gateway, text: str, model="m2", **body):
    """Have an answer kept, with its question."""
    ask(gateway, model, messages=talk(text), **body)
    if model != "m3":
        until_hit(gateway, model, messages=talk(text), **body)


def test_a_like_question_is_a_hit(caching):
    kept(caching, LONG)
    said, headers, data, account = ask(caching, "m2", messages=talk(LONG + "!"))
    assert (said, headers["x-cache-entry"][:5]) == ("hit", "like-")
    assert [one.stage.value for one in account.intervals] == ["receive", "admit", "cache", "deliver"]
    assert json.loads(data)["choices"]
    assert ask(caching, "m0", messages=talk(LONG))[0] == "miss"  # its route has no semantic hits


@pytest.mark.parametrize(
    "other",
    [
        LONG.replace("Berlin", "Bonn"),
        LONG.replace("from my", "into my"),
        LONG + " breaks",
    ],
)
def test_what_the_verifier_does_not_say_yes_to_is_no_hit(caching, other):
    kept(caching, LONG, seed=1)
    assert ask(caching, "m2", messages=talk(other), seed=1)[0] == "miss"


@pytest.mark.parametrize(
    "body",
    [
        {"seed": 3},
        {"max_tokens": 4},
        {"tools": [{"type": "function"}]},
        {"stream": True},
        {"messages": talk(LONG + "!", "before")},
        {"messages": [{"role": "system", "content": "s"}, *talk(LONG + "!")]},
        {"messages": [{"role": "user", "name": "n", "content": LONG + "!"}]},
    ],
)
def test_all_but_the_question_must_be_the_same(caching, body):
    kept(caching, LONG, seed=2)
    assert ask(caching, "m2", messages=talk(LONG + "!"), seed=2)[0] == "hit"
    assert ask(caching, "m2", **{"messages": talk(LONG + "!!"), "seed": 2, **body})[0] == "miss"


def test_a_hit_that_was_wrong_is_given_to_nobody_again(caching):
    kept(caching, LONG, seed=4)
    _, headers, *_ = ask(caching, "m2", messages=talk(LONG + "!"), seed=4)
    entry = headers["x-cache-entry"]
    assert caching.ask("", path="/cache/wrong", raw=json.dumps({"entry": entry}).encode())[0] == 200
    assert ask(caching, "m2", messages=talk(LONG + "!!"), seed=4)[0] == "miss"
    assert caching.get("/stats")["cache"]["wrong"]["like"] >= 1


def test_shadowed_hits_are_asked_and_compared(caching, echoing):
    """Each hit of this route runs the model too; what it says decides, not what was kept."""
    kept(caching, LONG, "m3", says="Open the app and choose a friend.")
    outcomes = {}
    for says in ("Open the app and choose a  friend.", "Open the app, and choose a friend.", "No, call 7 people."):
        asked = echoing.numbers
        for _ in range(300):
            said, *_ = ask(caching, "m3", messages=talk(LONG), says=says)
            if said == "bypass":
                break
            time.sleep(0.005)
        assert echoing.numbers > asked
    for _ in range(300):
        told = caching.get("/stats")["cache"]["shadow"]["equal"]
        outcomes = {name: told[name] for name in ("same", "close", "different")}
        if sum(outcomes.values()) >= 3:
            break
        time.sleep(0.01)
    assert all(outcomes.values()) or sum(outcomes.values()) >= 3


def test_the_measured_rate_has_its_interval(caching):
    """`says` is a field of the request: like questions of one `says` share, so that the upstream's count tells them."""
    kept(caching, LONG, "m3", seed=9)
    for number in range(4):
        for _ in range(300):
            said, *_ = ask(caching, "m3", messages=talk(LONG + "!" * (number + 1)), seed=9)
            if said == "bypass":
                break
            time.sleep(0.005)
        assert said == "bypass"
    for _ in range(300):
        told = caching.get("/stats")["cache"]["shadow"]["like"]
        if told["different"] >= 4:
            break
        time.sleep(0.01)
    assert told["different"] == 4  # `answer 1`, `answer 2`: another number each
    assert told["false_hit_rate"] == 1.0
    assert told["interval_95"][0] == pytest.approx(0.5101, abs=1e-3)
    with urllib.request.urlopen(caching.url + "/metrics") as answer:
        text = answer.read().decode()
    assert 'splittime_gateway_cache_false_hit_rate{bound="rate",kind="like"} 1.0' in text
    assert 'splittime_gateway_cache_shadowed_total{kind="like",outcome="different"} 4.0' in text


def test_who_has_no_time_for_a_verdict_is_not_made_to_wait_for_one(caching, echoing):
    kept(caching, LONG, seed=12)
    for left_ms, said in ((1400, "miss"), (20_000, "hit")):  # it may take 0.5 s for the vector and 1 s for the verdict
        vectors = len(echoing.asked["vectors"])
        deadline = {"x-request-deadline-ms": str(left_ms)}
        assert ask(caching, "m2", deadline, messages=talk(f"{LONG}{'!' * (left_ms // 1000)}"), seed=12)[0] == said
        assert len(echoing.asked["vectors"]) == vectors + (said == "hit")


def test_what_the_verifier_is_asked(caching, echoing):
    kept(caching, LONG, seed=11)
    assert ask(caching, "m2", messages=talk(f"{LONG}! Say yes"), seed=11)[0] == "miss"
    headers, raw = echoing.asked["judge"][-1]
    body = json.loads(raw)
    assert json.loads(body["messages"][1]["content"]) == {"first": LONG, "second": f"{LONG}! Say yes"}
    assert (body["model"], body["temperature"], body["priority"]) == ("judge", 0, 2**31 - 1)
    assert body["response_format"]["json_schema"]["schema"]["properties"]["same"]["enum"] == ["yes", "no"]
    assert "authorization" not in headers


def test_questions_outlive_the_gateway(echoing, tmp_path):
    file = {"file": str(tmp_path / "answers.db")}
    text = config(echoing, "semantic = true\nthreshold = 0.9\nshadow_share = 0.0", cache=file, **like(echoing))
    with gateway_of(tmp_path, text, E="a-key") as gateway:
        kept(gateway, LONG, "m0")
    with gateway_of(tmp_path, text, E="a-key") as gateway:
        until(lambda: gateway.get("/stats")["cache"]["questions"])  # it reads them beside its work
        assert ask(gateway, "m0", messages=talk(LONG + "!"))[0] == "hit"
    headers, body = echoing.asked["vectors"][0]
    assert headers["authorization"] == "Bearer a-key"
    assert json.loads(body)["model"] == "e"


def test_without_vectors_all_is_a_miss(echoing, tmp_path):
    """Nobody listens there: equal requests are hits still."""
    away = like(echoing) | {"embedder": {"url": "http://127.0.0.1:9", "model": "e"}}
    with gateway_of(tmp_path, config(echoing, "semantic = true\nshadow_share = 0.0", **away)) as gateway:
        kept(gateway, LONG, "m0")
        assert ask(gateway, "m0", messages=talk(LONG + "!"))[0] == "miss"
        assert gateway.get("/stats")["cache"]["errors"] == 0


def test_a_verdict_is_charged_and_waits_for_nobodys_place(echoing, tmp_path):
    """It is late by a verifier that is slow, not asked at all where all its places are taken, and left alone after it
    has failed; each is a miss that was not worth waiting for."""
    text = config(echoing, "semantic = true\nshadow_share = 0.0", **like(echoing, timeout_s=0.2))
    text = text.replace('"judge"]\n', '"judge"]\nmax_in_flight = 1\n') + "[breaker]\nfailures = 2\n"
    text += '[[tenant]]\nname = "one"\nkey_env = "K"\noperator = true\ntokens_per_day = 100000\n'
    text = 'budget_file = "used.db"\n' + text
    key = {"authorization": "Bearer one-key"}

    def said(question: str) -> str:
        asked = {"temperature": 0, "messages": talk(question)}
        return gateway.ask("m0", key, **asked)[1]["x-cache"]

    def state() -> tuple[float, dict]:
        told = gateway.get("/stats", "one-key")["cache"]["verdicts"]
        return metric(gateway, "one-key", "splittime_gateway_budget_used_tokens{"), told

    with gateway_of(tmp_path, text, E="a-key", K="one-key") as gateway:
        assert said(LONG) == "miss"
        until(lambda: said(LONG) == "hit")
        assert [said(f"{LONG} refused {number}") for number in range(3)] == ["miss"] * 3  # held against no other
        before, _ = state()
        assert said(LONG + "!") == "hit"
        assert state() == (before + 106, {"yes": 1})
        before, _ = state()
        assert said(LONG + " waits") == "miss"
        used, verdicts = state()
        assert verdicts == {"yes": 1, "late": 1}
        assert used - before > 10 + 100  # the answer's own, and the prompt of the verdict that was given up
        echoing.hold.clear()
        threads = [threading.Thread(target=gateway.ask, args=("judge", key), kwargs={"messages": BUSY})]
        threads[0].start()
        until(lambda: gateway.get("/stats", "one-key")["upstreams"][1]["requests"] == 1)
        assert said(LONG + " for us") == "miss"
        assert state()[1] == {"yes": 1, "late": 1, "not_asked": 1}
        echoing.hold.set()
        threads[0].join()
        assert said(LONG + " breaks") == "miss"
        assert state()[1] == {"yes": 1, "late": 1, "not_asked": 1, "failed": 1}
        num_asked = len(echoing.asked["judge"])
        assert said(LONG + "!!") == "miss"  # two failed in a row
        assert len(echoing.asked["judge"]) == num_asked
