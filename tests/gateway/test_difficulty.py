"""A `[[difficulty]]`: files of judged answers and what they promise, what is refused, and replays of its decisions."""

import json
import tomllib

import pytest

import forked
from splittime.core.errors import ConfigError
from splittime.diagnose.explain import explain
from splittime.gateway.config_file import config_of
from splittime.gateway.routing.difficulty import lower_end, read_labels
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, until_written, upstream
from .test_chaos import metric
from .test_routing import BASE, rule


def lines(path, copies: int = 40, **more):
    """A file of as many answers that the small model was sure and right of, as of others."""
    told = [
        {"small_right": is_right, "small_logprob": -0.5 if is_right else -1.5, "large_right": True, **more}
        for _ in range(copies)
        for is_right in (True, False)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


def config(escalate: str = "{ below = -1.0 }", **more) -> str:
    told = {"model": "auto", "small": "small", "large": "big", **more}
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())
    return f"[[difficulty]]\n{keys}escalate = {escalate}\n"


@pytest.mark.parametrize(("mean", "count"), [(0.0, 10), (0.3, 50), (0.9, 50), (0.97, 400), (1.0, 60)])
def test_an_interval_ends_where_a_test_of_the_share_begins_to_refuse(mean, count):
    """Wilson's bound by its definition: the share of which what was seen lies 1.645 deviations above."""
    low = lower_end(mean, count)
    assert 0 <= low <= mean
    assert low == 0 or (mean - low) ** 2 == pytest.approx(1.6449**2 * low * (1 - low) / count)


def test_few_labels_promise_little():
    assert [round(lower_end(0.95, count), 3) for count in (50, 500, 5000)] == [0.872, 0.931, 0.945]


# ---- what is refused


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "secret", "small_right": 2, "small_logprob": -1}', "from 0 to 1"),
        ('{"prompt": "secret", "small_logprob": -1}', "small_right"),
        ('{"prompt": "secret", "small_right": true}', "small_logprob"),
        ('{"prompt": "secret", "small_right": true, "small_logprob": 0.1}', "small_logprob is from -100 to 0"),
        ('{"prompt": "secret", "small_right": true, "small_logprob": -1, "large_cost": -1}', "below 0"),
        ("secret", "malformed"),
        ("[" * 100_000, ""),
    ],
)
def test_a_line_that_is_no_label_is_named_and_not_told(tmp_path, line, words):
    path = lines(tmp_path / "l")
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"line 82: ") as caught:
        read_labels(path, "difficulty[0].escalate.labels")
    assert words in caught.value.info.message
    assert "secret" not in caught.value.info.message
    assert caught.value.info.param == "difficulty[0].escalate.labels"


def test_files_that_are_none_too_short_or_too_long_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_labels(tmp_path / "none", "labels")
    with pytest.raises(ConfigError, match="has 16 prompts"):
        read_labels(lines(tmp_path / "l", copies=8), "labels")
    (tmp_path / "l").write_text("\n" * (16 * 2**20 + 1))
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        read_labels(tmp_path / "l", "labels")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (config(model="big"), "difficulty[0].model"),
        (config(model=""), "difficulty[0].model"),
        (config() + config(), "difficulty[0].model"),
        (config(small="gone"), "difficulty[0].small"),
        (config(large="auto"), "difficulty[0].large"),
        (config(large="small"), "difficulty[0].large"),
        (config(target=1.5), "difficulty[0].target"),
        (config(tokens=3), "difficulty[0].tokens"),
        (config("{ below = 1.0 }"), "difficulty[0].escalate.below"),
        (config("{ tokens = 4 }"), "difficulty[0].escalate.below"),
        (config('{ below = -1.0, labels = "l" }'), "difficulty[0].escalate.below"),
        (config("{ below = -1.0, at_most = 1.1 }"), "difficulty[0].escalate.at_most"),
        (config("{ below = -1.0, token = 4 }"), "difficulty[0].escalate.token"),
        (config().replace("escalate", "escalates", 1), "difficulty[0].escalates"),
        (config().replace("escalate = { below = -1.0 }\n", ""), "difficulty[0].escalate"),
        (config() + rule("r", model="auto", upstreams=["a"]), "rule[0].model"),
    ],
)
def test_a_route_that_cannot_be_meant_is_refused(text, param):
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(BASE + text))
    assert caught.value.info.param == param
    assert "small" not in param or "gone" in caught.value.info.message


def test_unknown_keys_have_a_neighbour():
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(BASE + config("{ below = -1.0, token = 4 }")))
    assert caught.value.info.hint == "did you mean tokens?"


# ---- over HTTP, and from its ledger


@pytest.fixture(scope="module")
def graded(hostile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("difficulty")
    text = f'aliases = {{ usual = "auto" }}\nledger_file = "{folder}/gateway.sqlite"\n'
    text += upstream("little", hostile.url("second"), "small") + upstream("large", hostile.url("fine"), "big")
    text += rule("led", models=["big-*"], model="auto") + rule("bound", models=["bound"], model="small") + config()
    with gateway_of(folder, text) as gateway:
        gateway.folder = folder
        yield gateway


def ask(gateway, model: str, request_id: str):
    _, headers, _ = gateway.ask(model, {"x-request-id": request_id}, messages=[{"role": "user", "content": "x"}])
    return headers, account_from_json(gateway.account(request_id))


@pytest.mark.parametrize("model", ["auto", "usual", "big-chat"])
def test_whatever_leads_to_it_begins_at_the_small_model(graded, hostile, model):
    before = metric(graded, "splittime_gateway_difficulty_total")
    headers, account = ask(graded, model, f"r-{model}")
    assert headers["x-splittime-difficulty"].startswith("choice=small")
    assert json.loads(hostile.asked["second"][-1][1])["model"] == "small"
    routing = account.routing
    assert (routing.asked_model, routing.model, routing.difficulty.choice) == (model, "small", "small")
    assert f"{model} as small (policy {routing.policy}), small first" in " ".join(explain(account).plain.split())
    label, after = 'small",model="small', metric(graded, "splittime_gateway_difficulty_total")
    assert after[label] == before.get(label, 0) + 1


def test_its_name_is_a_model_and_others_are_as_ever(graded):
    assert [one["id"] for one in graded.get("/v1/models")["data"]] == ["small", "big", "auto", "usual"]
    for model in ("small", "bound"):
        headers, account = ask(graded, model, f"o-{model}")
        assert "x-splittime-model" not in headers
        assert (account.model, account.routing.difficulty) == ("small", None)


def test_decisions_are_made_again_from_the_ledger(graded):
    for number in range(3):
        ask(graded, "auto", f"again-{number}")
    until_written(graded.folder / "gateway.sqlite", "again-2")
    told = (graded.folder / "gateway.toml").read_text()

    def rehearsed(new: str):
        (graded.folder / "new.toml").write_text(new)
        names = ["new.toml", "--config", "gateway.toml", "--ledger", "gateway.sqlite", "--json"]
        done = forked.run(["gateway", "rehearse", *names], graded.folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    same = rehearsed(told)
    assert (same["differences"], same["strange"]) == ([], 0)
    assert same["reproduced"] == same["requests"] >= 3
    turned = rehearsed(told.replace('small = "small"', 'small = "big"').replace('large = "big"', 'large = "small"'))
    assert {(one["old"], one["new"]) for one in turned["differences"]} == {("small", "big")}
