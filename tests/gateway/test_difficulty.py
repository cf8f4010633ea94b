"""Routing by a request's text: labelled prompts, scores and thresholds, what an account says of it, and replays."""

import json
import random
import tomllib
import uuid

import numpy as np
import pytest

import forked
from splittime.core.errors import ConfigError
from splittime.diagnose.explain import explain
from splittime.gateway.config_file import config_of, read_config
from splittime.gateway.config_keys import secrets_of
from splittime.gateway.routing.difficulty import decide
from splittime.gateway.routing.judge import (
    ALWAYS_LARGE,
    DifficultyJudge,
    JudgedWorth,
    calibrated,
    embedded,
    judges_of,
    lower_end,
    nearest_of,
)
from splittime.gateway.routing.labels import LabelledFile, LabelledPrompt, read_labels, text_of_request
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, upstream
from .test_chaos import metric, sums
from .test_routing import BASE, rule

WORDS = ("sun", "moon", "tree", "river", "house", "bread", "chair", "lamp")
EASY = [f"please translate the word {word} into french" for word in WORDS]
HARD = [f"prove that every {thing} of order {n} is abelian" for thing in ("group", "ring") for n in (2, 3, 5, 7)]


def lines(path, copies: int = 5, **more):
    """A file of prompts that the small model can do, and some that it cannot, in several wordings."""
    told = [
        {"prompt": f"{text} {number}", "small_right": text in EASY, **more}
        for number in range(copies)
        for text in EASY + HARD
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


def config(path, **more) -> str:
    told = {"model": "auto", "small": "small", "large": "big", "labels": str(path), **more}
    return "[[difficulty]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


def judge(path, neighbours: int = 4, target: float = 0.95) -> DifficultyJudge:
    return DifficultyJudge(read_labels(path, "labels"), neighbours, target)


# ---- scores and thresholds


def test_what_is_like_the_easy_ones_goes_to_the_small_model(tmp_path):
    found = judge(lines(tmp_path / "l"))
    easy, hard = "please translate the word cloud into french", "prove that every field of order 11 is abelian"
    assert found.score(easy) > 0.9 > 0.1 > found.score(hard)
    assert (found.chosen.share_small, found.chosen.quality) == (0.5, 1.0)
    body = json.dumps({"messages": [{"role": "user", "content": easy}]}).encode()
    told = decide(found, "/v1/chat/completions", body)
    assert (told.choice, told.labels, told.neighbours) == ("small", found.labels, 4)
    assert told == decide(judge(tmp_path / "l"), "/v1/chat/completions", body)  # made anew
    assert decide(found, "/v1/completions", json.dumps({"prompt": hard}).encode()).choice == "large"
    for body in (b'{"prompt": [1, 2]}', b'{"prompt": ""}', b'{"messages": 3}'):
        assert decide(found, "/v1/completions", body) == decide(found, "/v1/chat/completions", b"{}")
        assert (decide(found, "/v1/completions", body).choice, decide(found, "/v1/completions", body).score) == (
            "large",
            None,
        )


def test_a_text_that_is_like_nothing_has_the_mean_of_all(tmp_path):
    assert judge(lines(tmp_path / "l")).score("\u4e2d") == 0.5


def test_the_threshold_is_the_cheapest_that_reaches_the_target():
    scores, small = (np.tile(one, 100) for one in ([0.1, 0.4, 0.4, 0.9], [0.0, 0.0, 1.0, 1.0]))
    for target, threshold, share, quality in (
        (0.45, 0.0, 1.0, 0.5),
        (0.5, 0.4, 0.75, 0.75),  # half are right; that it is as many beyond these prompts is not certain
        (0.7, 0.4, 0.75, 0.75),
        (0.74, 0.9, 0.25, 1.0),
    ):
        found = calibrated(scores, JudgedWorth(small, np.ones(400), np.ones(400, bool)), target)
        assert (found.threshold, found.share_small, found.quality) == (threshold, share, quality)
        assert target <= found.quality_low < quality
    assumed = JudgedWorth(np.zeros(400), np.ones(400), np.zeros(400, bool))  # the file says nothing of the large model
    found = calibrated(scores, assumed, 1.0)
    assert (found.threshold, found.share_small, found.quality_low) == (ALWAYS_LARGE, 0.0, 1.0)
    large = np.tile([1.0, 1.0, 1.0, 0.0], 100)
    with pytest.raises(ConfigError, match=r"target 0.74 is not reached.*0.750, and 0.713 at the least"):
        calibrated(scores, JudgedWorth(np.zeros(400), large, np.ones(400, bool)), 0.74)


@pytest.mark.parametrize(("mean", "count"), [(0.0, 10), (0.3, 50), (0.9, 50), (0.97, 400), (1.0, 60)])
def test_an_interval_ends_where_a_test_of_the_share_begins_to_refuse(mean, count):
    """Wilson's bound by its definition: the share of which what was seen lies 1.645 deviations above."""
    low = lower_end(mean, count)
    assert 0 <= low <= mean
    assert low == 0 or (mean - low) ** 2 == pytest.approx(1.6449**2 * low * (1 - low) / count)


def test_few_labels_promise_little():
    assert [round(lower_end(0.95, count), 3) for count in (50, 500, 5000)] == [0.872, 0.931, 0.945]


def test_equal_texts_say_nothing_of_each_other():
    """Labels by chance, each text four times: whoever looks at a text's own copies finds them perfectly foretold."""
    draw = random.Random(4)
    worth = {f"question {draw.random()} {draw.random()}": draw.random() < 0.5 for _ in range(150)}
    prompts = [LabelledPrompt(prompt=text, small_right=right) for text, right in worth.items() for _ in range(4)]
    file = LabelledFile(tuple(prompts), "x")
    found = DifficultyJudge(file, 16, 0.95)
    scores = found.fair_scores(list(worth))
    right, wrong = scores[list(worth.values())], scores[[not one for one in worth.values()]]
    assert abs(right.mean() - wrong.mean()) < 0.2
    assert found.chosen.share_small < 0.3
    knowing = DifficultyJudge(file, 4, 0.95)  # a request's own text may be known
    assert [knowing.score(text) for text in worth] == [float(one) for one in worth.values()]


def test_of_equal_cosines_the_first_are_nearest():
    cosines = np.array([0.5, 0.9, 0.5, 0.5, 0.1])
    for number, expected in ((1, [1]), (2, [1, 0]), (3, [1, 0, 2]), (9, [1, 0, 2, 3, 4])):
        assert nearest_of(cosines, number).tolist() == expected


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": "a"}, "a"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "a"),
        ("/v1/completions", {"prompt": [1, 2]}, ""),
        ("/v1/completions", {"messages": [{"role": "user", "content": "a"}]}, ""),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "a"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "a"),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}]}, ""),
        ("/v1/chat/completions", {"messages": ["a", 1, {"role": "user", "content": 3}]}, ""),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, 3]}]},
            "a",
        ),
    ],
)
def test_the_text_is_what_the_user_said_last(path, body, text):
    assert text_of_request(path, body) == text


# ---- what is refused


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "secret", "small_right": 2}', "from 0 to 1"),
        ('{"prompt": "secret"}', "small_right"),
        ('{"small_right": true}', "neither a prompt"),
        ('{"messages": [{"role": "system", "content": "secret"}], "small_right": true}', "neither a prompt"),
        ('{"prompt": "secret", "small_right": true, "large_cost": -1}', "below 0"),
        ("secret", "malformed"),
        ("[" * 100_000, ""),
    ],
)
def test_a_line_that_is_no_label_is_named_and_not_told(tmp_path, line, words):
    path = lines(tmp_path / "l")
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"line 82: ") as caught:
        read_labels(path, "difficulty[0].labels")
    assert words in caught.value.info.message
    assert "secret" not in caught.value.info.message
    assert caught.value.info.param == "difficulty[0].labels"


def test_files_that_are_none_too_short_or_too_long_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_labels(tmp_path / "none", "labels")
    with pytest.raises(ConfigError, match="has 16 prompts"):
        read_labels(lines(tmp_path / "l", copies=1), "labels")
    (tmp_path / "l").write_text("\n" * (16 * 2**20 + 1))
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        read_labels(tmp_path / "l", "labels")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (config("l", model="big"), "difficulty[0].model"),
        (config("l", model=""), "difficulty[0].model"),
        (config("l") + config("l"), "difficulty[0].model"),
        (config("l", small="gone"), "difficulty[0].small"),
        (config("l", large="auto"), "difficulty[0].large"),
        (config("l", large="small"), "difficulty[0].large"),
        (config("l", target=1.5), "difficulty[0].target"),
        (config("l", neighbours=0), "difficulty[0].neighbours"),
        (config("l", tokens=3), "difficulty[0].tokens"),
        (config("l") + "escalate = { below = 1.0 }\n", "difficulty[0].escalate.below"),
        (config("l") + "escalate = { tokens = 4 }\n", "difficulty[0].escalate.below"),
        (config("l") + 'escalate = { below = -1.0, labels = "l" }\n', "difficulty[0].escalate.below"),
        (config("l") + "escalate = { below = -1.0, at_most = 1.1 }\n", "difficulty[0].escalate.at_most"),
        (config("l") + "escalate = { below = -1.0, token = 4 }\n", "difficulty[0].escalate.token"),
        (config("l").replace("labels", "escalates", 1), "difficulty[0].escalates"),
        (config("l") + rule("r", model="auto", upstreams=["a"]), "rule[0].model"),
    ],
)
def test_a_route_that_cannot_be_meant_is_refused(text, param):
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(BASE + text))
    assert caught.value.info.param == param
    assert "small" not in param or "gone" in caught.value.info.message


def test_a_route_that_decides_nothing_is_refused_and_unknown_keys_have_a_neighbour():
    with pytest.raises(ConfigError, match="decides nothing"):
        config_of(tomllib.loads(BASE + config("l").replace('labels = "l"\n', "")))
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(BASE + config("l") + "escalate = { below = -1.0, token = 4 }\n"))
    assert caught.value.info.hint == "did you mean tokens?"


def test_labels_are_read_with_the_keys_and_a_target_that_is_too_high_is_refused(tmp_path):
    path = lines(tmp_path / "l", large_right=0.9)
    told = config_of(tomllib.loads(BASE + config(path, target=0.8)))
    assert secrets_of(told).judges["auto"] is judges_of(told)["auto"]  # read again, not judged again
    with pytest.raises(ConfigError, match=r"difficulty\[0\].target 0.9 is not reached.*0.900, and 0.8") as caught:
        secrets_of(config_of(tomllib.loads(BASE + config(path, target=0.9))))
    assert caught.value.info.param == "difficulty[0].target"


# ---- over HTTP, and from its ledger


@pytest.fixture(scope="module")
def graded(hostile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("difficulty")
    text = f'aliases = {{ usual = "auto" }}\nledger_file = "{folder}/gateway.sqlite"\n'
    text += upstream("little", hostile.url("second"), "small") + upstream("large", hostile.url("fine"), "big")
    text += rule("led", models=["big-*"], model="auto") + rule("bound", models=["bound"], model="small")
    text += config(lines(folder / "labels.jsonl"), neighbours=4)
    with gateway_of(folder, text) as gateway:
        gateway.folder = folder
        yield gateway


def ask(gateway, text, model="auto", **body):
    request_id = uuid.uuid4().hex
    messages = [{"role": "user", "content": text}]
    status, headers, _ = gateway.ask(model, {"x-request-id": request_id}, messages=messages, **body)
    account = account_from_json(gateway.account(request_id))
    sums(account)
    return status, headers, account


@pytest.mark.parametrize("model", ["auto", "usual", "big-chat"])
def test_each_goes_where_its_text_says_and_the_account_says_why(graded, hostile, model):
    before = metric(graded, "splittime_gateway_difficulty_total")
    for text, choice, name, served in ((EASY[0], "small", "second", "small"), (HARD[0], "large", "fine", "big")):
        status, headers, account = ask(graded, text, model)
        assert (status, headers["x-splittime-model"]) == (200, served)
        assert headers["x-splittime-difficulty"] == f"choice={choice}"
        assert json.loads(hostile.asked[name][-1][1])["model"] == served
        routing, stats = account.routing, graded.get("/stats")
        assert (routing.asked_model, routing.model, account.model) == (model, served, served)
        told, known = routing.difficulty, stats["difficulty"]["auto"]
        assert (told.choice, told.threshold, told.neighbours) == (choice, known["threshold"], 4)
        assert (told.score >= told.threshold) is (choice == "small")
        assert routing.policy == stats["policy"]
        assert account.attempts[0].first_tokens is None
        label, after = f'{choice}",model="{served}', metric(graded, "splittime_gateway_difficulty_total")
        assert after[label] == before.get(label, 0) + 1


def test_its_name_is_a_model_and_others_are_as_ever(graded):
    assert [one["id"] for one in graded.get("/v1/models")["data"]] == ["small", "big", "auto", "usual"]
    for model in ("small", "bound"):
        _, headers, account = ask(graded, HARD[0], model)
        assert "x-splittime-model" not in headers
        assert (account.model, account.routing.difficulty) == ("small", None)


def rehearsed(folder, new: str):
    (folder / "new.toml").write_text(new)
    names = ["new.toml", "--config", "gateway.toml", "--ledger", "gateway.sqlite", "--json"]
    done = forked.run(["gateway", "rehearse", *names], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_decisions_are_made_again_from_the_ledger(graded):
    """Under the same config they come out the same; with another target by the same scores; by other labels never."""
    for text in EASY[:3] + HARD[:2]:
        ask(graded, text)
    told = (graded.folder / "gateway.toml").read_text()
    same = rehearsed(graded.folder, told)
    assert same["differences"] == []
    assert same["strange"] == 0
    assert same["reproduced"] == same["requests"] >= 5
    loose = rehearsed(graded.folder, told + "target = 0.4\n")
    assert {(one["old"], one["new"]) for one in loose["differences"]} == {("big", "small")}
    (graded.folder / "other.jsonl").write_text((graded.folder / "labels.jsonl").read_text() + "\n")
    other = rehearsed(graded.folder, told.replace("labels.jsonl", "other.jsonl"))
    assert {one["new"] for one in other["differences"]} == {"auto: by a text that no ledger has"}


def test_explain_says_what_decided(graded):
    _, _, account = ask(graded, EASY[1])
    done = forked.run(["explain", account.request_id, "--url", graded.url])
    words = " ".join(done.stdout.split())
    assert f"small by the score {account.routing.difficulty.score:g} (threshold" in words, done.stdout + done.stderr
    _, _, account = ask(graded, "")
    assert "large, as it has no text (threshold" in " ".join(explain(account).plain.split())


def test_a_running_gateway_takes_other_labels(hostile, tmp_path):
    text = upstream("little", hostile.url("second"), "small") + upstream("large", hostile.url("fine"), "big")
    path = lines(tmp_path / "labels.jsonl")
    with gateway_of(tmp_path, text + config(path, neighbours=4)) as gateway:
        assert ask(gateway, HARD[0])[1]["x-splittime-model"] == "big"
        path.write_text(path.read_text().replace('"small_right": false', '"small_right": true'))
        gateway.process.send_signal(1)
        known = read_config(tmp_path / "gateway.toml").difficulty[0]
        expected = judge(path, known.neighbours, known.target).chosen
        for _ in range(500):
            if gateway.get("/stats")["difficulty"]["auto"]["threshold"] == expected.threshold == 0.0:
                break
        assert ask(gateway, HARD[0])[1]["x-splittime-model"] == "small"


def test_ngrams_are_of_length_one_and_know_wording():
    one, same, other = (embedded(text) for text in ("Open an account", "open an ACCOUNT!", "The weather is fine"))
    assert float(one @ one) == pytest.approx(1)
    assert float(one @ same) == pytest.approx(1)
    assert float(one @ other) < 0.3
    assert not embedded("?!").any()
