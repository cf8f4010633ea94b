"""Like questions: which hits there are, which the gate refuses, and what shadows measure."""

import json
import time
import urllib.request

import pytest

from ..conftest import gateway_of
from .conftest import config
from .test_equal import ask, until_hit

LONG = "Please tell me how I can transfer money from my savings account to my friend in Berlin with the app on my phone"


def talk(text: str, *before: str) -> list[dict]:
    return [*({"role": "user", "content": one} for one in before), {"role": "user", "content": text}]


def kept(gateway, text: str, model="m2", **body):
    """Have an answer kept, with its question."""
    ask(gateway, model, messages=talk(text), **body)
    if model != "m3":
        until_hit(gateway, model, messages=talk(text), **body)


def test_a_question_of_the_same_words_is_a_hit(caching):
    kept(caching, LONG)
    said, headers, data, account = ask(caching, "m2", messages=talk(LONG + ", please!"))
    assert (said, headers["x-cache-entry"][:5]) == ("hit", "like-")
    assert [one.stage.value for one in account.intervals] == ["receive", "admit", "cache", "deliver"]
    assert json.loads(data)["choices"]
    assert ask(caching, "m0", messages=talk(LONG))[0] == "miss"  # its route has no semantic hits


@pytest.mark.parametrize(
    "other",
    [
        LONG.replace("Berlin", "Bonn"),
        LONG.replace("transfer money", "not transfer money"),
        LONG.replace("my friend", "2 friends"),
        LONG.replace("from my", "into my"),
        LONG + " and why",
    ],
)
def test_near_words_that_ask_for_something_else_are_no_hit(caching, other):
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


def test_questions_outlive_the_gateway(echoing, tmp_path):
    file = {"file": str(tmp_path / "answers.db")}
    route = "semantic = true\nthreshold = 0.9\nshadow_share = 0.0"
    with gateway_of(tmp_path, config(echoing, route, cache=file)) as gateway:
        kept(gateway, LONG, "m0")
    with gateway_of(tmp_path, config(echoing, route, cache=file)) as gateway:
        for _ in range(100):  # it reads them beside its work
            if gateway.get("/stats")["cache"]["questions"]:
                break
            time.sleep(0.01)
        assert ask(gateway, "m0", messages=talk(LONG + "!"))[0] == "hit"


def test_an_upstream_makes_the_vectors(echoing, tmp_path):
    route = "semantic = true\nshadow_share = 0.0"
    embedder = {"url": echoing.url("vectors"), "model": "e", "key_env": "E"}
    with gateway_of(tmp_path, config(echoing, route, embedder=embedder), E="a-key") as gateway:
        kept(gateway, "Explain the concept of inertia, please", "m0")
        assert ask(gateway, "m0", messages=talk("Explain for me what inertia means please"))[0] == "hit"
        assert ask(gateway, "m0", messages=talk("Define for me what inertia means please"))[0] == "miss"
    headers, body = echoing.asked["vectors"][0]
    assert headers["authorization"] == "Bearer a-key"
    assert json.loads(body)["model"] == "e"


def test_without_vectors_all_is_a_miss(echoing, tmp_path):
    """Nobody listens there: equal requests are hits still."""
    route, embedder = "semantic = true\nshadow_share = 0.0", {"url": "http://127.0.0.1:9", "model": "e"}
    with gateway_of(tmp_path, config(echoing, route, embedder=embedder)) as gateway:
        kept(gateway, LONG, "m0")
        assert ask(gateway, "m0", messages=talk(LONG + "!"))[0] == "miss"
        assert gateway.get("/stats")["cache"]["errors"] == 0
