"""Rules and aliases: who gets a request, with which name in its body, and what of it stands in its account."""

import json
import tomllib

import pytest

from splittime.api.decode import decode_once
from splittime.core.errors import ConfigError, RequestError
from splittime.gateway.config_file import config_of
from splittime.gateway.forwarded import forwarded, with_model
from splittime.gateway.routing.policy import RouteFeatures, RoutePolicy

from .conftest import gateway_of, upstream

BASE = upstream("a", "http://127.0.0.1:1", "big", "small") + upstream("b", "http://127.0.0.1:2", "small")
TENANTS = '[[tenant]]\nname = "ops"\noperator = true\nsha256 = "' + "1" * 64 + '"\n'


def rule(name: str, **more) -> str:
    headers = more.pop("headers", {})
    text = f'[[rule]]\nname = "{name}"\n' + "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
    return text + "".join(f'headers.{key} = "{value}"\n' for key, value in headers.items())


def policy(text: str) -> RoutePolicy:
    return RoutePolicy(config_of(tomllib.loads(text)))


def features(model: str = "big", **more) -> RouteFeatures:
    return RouteFeatures(**{"tenant": "", "endpoint": "chat", "prompt_tokens": 100, "model": model, **more})


@pytest.mark.parametrize(
    ("condition", "yes", "no"),
    [
        ({"models": ["big"]}, {"model": "big"}, {"model": "bigger"}),
        ({"models": ["x", "bi*"]}, {"model": "bi"}, {"model": "b"}),
        ({"headers": {"x-class": "batch"}}, {"headers": (("x-class", "batch"),)}, {"headers": (("x-class", "b"),)}),
        ({"headers": {"x-class": "*"}}, {"headers": (("x-class", ""),)}, {}),
        ({"tenants": ["ops"]}, {"tenant": "ops"}, {"tenant": ""}),
        ({"endpoint": "completions"}, {"endpoint": "completions"}, {"endpoint": "chat"}),
        ({"min_prompt_tokens": 100}, {"prompt_tokens": 100}, {"prompt_tokens": 99}),
        ({"max_prompt_tokens": 100}, {"prompt_tokens": 100}, {"prompt_tokens": 101}),
    ],
)
def test_a_rule_matches_what_it_asks_for(condition, yes, no):
    made = policy(BASE + TENANTS + rule("r", model="small", **condition))
    assert (made.decide(features(**yes)).rule, made.decide(features(**yes)).model) == ("r", "small")
    assert made.decide(features(**no)).rule == ""


def test_the_first_that_matches_decides_and_all_conditions_must_hold():
    text = BASE + rule("both", models=["big"], min_prompt_tokens=50, model="small")
    made = policy(text + rule("first", models=["big"], upstreams=["a"]) + rule("second", model="small"))
    assert made.decide(features(prompt_tokens=50)).rule == "both"
    assert made.decide(features(prompt_tokens=49)).rule == "first"
    assert made.decide(features("other")).rule == "second"


def test_a_rule_that_names_upstreams_makes_a_line_of_its_own():
    made = policy(BASE + rule("b-only", upstreams=["b"]))
    assert made.pools == {"small (rule b-only)": ("b",)}
    assert made.serves(made.decide(features("small")))
    assert not made.serves(made.decide(features("big")))  # the rule decides, and b does not serve it


def test_an_alias_is_looked_up_once_and_after_the_rules():
    made = policy('aliases = { default = "big" }\n' + BASE + rule("r", models=["default"], tenants=[], upstreams=["a"]))
    decision = made.decide(features("default"))
    assert (decision.rule, decision.asked_model, decision.model, decision.upstreams) == ("r", "default", "big", ("a",))
    assert made.names == ["big", "small", "default"]


def test_the_version_is_of_what_the_config_says():
    assert policy(BASE).version == policy("# a remark\n" + BASE).version
    assert policy(BASE).version != policy(BASE + rule("r", model="small")).version


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (rule("r", model="gone"), "rule[0].model"),
        (rule("r", model="big", upstreams=["b"]), "rule[0].model"),
        (rule("r", upstreams=["c"]), "rule[0].upstreams"),
        (rule("r", model="big", tenants=["who"]), "rule[0].tenants"),
        (rule("r", models=["big"]), "rule[0].model"),
        (rule("r", model="big", min_prompt_tokens=2, max_prompt_tokens=1), "rule[0].min_prompt_tokens"),
        (rule("r", model="big", min_prompt_tokens=-1), "rule[0].min_prompt_tokens"),
        (rule("r", model="big", headers={"authorization": "*"}), "rule[0].headers.authorization"),
        (rule("r", model="big", headers={"X-Class": "*"}), "rule[0].headers.X-Class"),
        (rule("r", model="big", headers={"x-class": "v" * 65}), "rule[0].headers.x-class"),
        (rule("r", model="big") * 2, "rule[1].name"),
        (rule("r", model="big", regex="x"), "rule[0].regex"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(more, param):
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(BASE + more))
    assert caught.value.info.param == param


@pytest.mark.parametrize("aliases", ['{ big = "small" }', '{ x = "gone" }'])
def test_an_alias_that_cannot_be_meant_is_refused(aliases):
    with pytest.raises(ConfigError, match="aliases"):
        config_of(tomllib.loads(f"aliases = {aliases}\n" + BASE))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"big","prompt":"model"}',
        b'{"prompt": {"model": "big"}, "mod\\u0065l" :\n "b\\u0069g" , "x": 1.50}',
        '{"prompt":"\u00e4\u00f6 big","model":"big"}'.encode(),
    ],
)
def test_the_name_alone_is_replaced(body):
    request = forwarded("/v1/completions", body, 16)
    at, end = request.model_at, request.model_at + request.model_bytes
    assert (request.model, json.loads(body[at:end])) == ("big", "big")
    changed = with_model(request, 'a "quoted" name')
    assert changed.body == body[:at] + json.dumps('a "quoted" name').encode() + body[end:]
    assert decode_once(changed.body, dict) == {**json.loads(body), "model": 'a "quoted" name'}


@pytest.mark.parametrize("model", [b"1", b"null", b"[]", b'{"model": "x"}'])
def test_a_name_that_is_none_is_refused(model):
    with pytest.raises(RequestError, match=r"model"):
        forwarded("/v1/completions", b'{"model": ' + model + b"}", 16)


def test_a_request_goes_where_its_rule_says(hostile, tmp_path):
    text = 'aliases = { usual = "large" }\n' + upstream("one", hostile.url("fine"), "large", "little")
    text += upstream("two", hostile.url("second"), "little")
    text += rule("batch", headers={"x-class": "batch"}, model="little", upstreams=["two"])
    text += rule("never", models=["large-*"], upstreams=["two"])
    with gateway_of(tmp_path, text) as gateway:
        for headers, expected in (({}, ("one", "large", "")), ({"x-class": "batch"}, ("two", "little", "batch"))):
            status, told, _ = gateway.ask("usual", {"x-request-id": f"r{len(headers)}", **headers})
            assert (status, told["x-splittime-upstream"]) == (200, expected[0])
            name = {"one": "fine", "two": "second"}[expected[0]]
            assert json.loads(hostile.asked[name][-1][1])["model"] == expected[1]
            account = gateway.account(f"r{len(headers)}")
            routing = account["routing"]
            assert (routing["asked_model"], routing["model"], routing["rule"]) == ("usual", *expected[1:])
            assert account["model"] == expected[1]
            assert (
                sum(stage["end_ns"] - stage["begin_ns"] for stage in account["stages"]) == account["derived"]["e2e_ns"]
            )
        status, _, body = gateway.ask("large-2")
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        assert [card["id"] for card in gateway.get("/v1/models")["data"]] == ["large", "little", "usual"]
        assert routing["policy"] == gateway.get("/stats")["policy"]
        assert routing["headers"] == [["x-class", "batch"]]
