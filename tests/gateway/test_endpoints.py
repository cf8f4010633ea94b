"""The other APIs through a gateway: passed on, charged, retried, cut off, and told their errors in their own form."""

import json
import re
import time
import urllib.error
import urllib.request
import uuid

import pytest

from patience import until
from splittime.api.decode import MAX_PARTS
from splittime.core.errors import RequestError
from splittime.gateway.forwarded import (
    COUNT_TOKENS,
    EMBEDDINGS,
    ENDPOINTS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    forwarded,
)
from splittime.ledger.account_json import account_from_json

from .conftest import DEAD, gateway_of, upstream
from .hostile import MESSAGE_EVENTS, TYPED_WHOLE, response_events
from .test_relay import events

SHA = {"one": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"}  # of "one" and "two"
SHA["two"] = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"

NAMED = {"type": "item_reference", "id": "msg_1"}
SAID = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def typed(hostile, tmp_path_factory):
    text = "[breaker]\nfailures = 1000\n[retries]\nspare = 1\npause_s = 0.01\n"
    text += upstream("typed", hostile.url("typed"), "m", "kept") + upstream("chatsonly", hostile.url("chatsonly"), "c")
    text += upstream("typed2", hostile.url("typed2"), "kept", "both")
    text += upstream("chatsonly2", hostile.url("chatsonly"), "both")
    text += upstream("away", hostile.url("away"), "away+") + upstream("after", hostile.url("typed"), "away+")
    text += upstream("dead", DEAD, "dead") + upstream("big", hostile.url("typed"), "big")
    text += '[[difficulty]]\nmodel = "auto"\nsmall = "m"\nlarge = "big"\nescalate = { below = -1.0 }\n'
    text += '[[cache_route]]\nmodel = "m"\nsampled = true\n'
    text += '[[rule]]\nname = "vectors"\nendpoint = "embeddings"\nmodels = ["vectors"]\nmodel = "m"\n'
    with gateway_of(tmp_path_factory.mktemp("typed"), text) as gateway:
        yield gateway


def ask(gateway, path, model="m", key=None, headers=None, **body):
    """Returns status, answer and the closed account."""
    request_id = uuid.uuid4().hex
    told = {"x-request-id": request_id, **({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    raw = json.dumps({"model": model, **body}).encode()
    status, _, answer = gateway.ask("", told, path, raw=raw)
    account = account_from_json(gateway.account(request_id, key))
    account.verify()
    return status, answer, account


@pytest.mark.parametrize(
    ("path", "tokens"),
    [
        (RESPONSES, (7, 2, 3)),
        (MESSAGES, (7, 2, 3)),
        (COUNT_TOKENS, (0, 0, 0)),
        (EMBEDDINGS, (5, 0, 0)),
        (RERANK, (6, 0, 0)),
        (SCORE, (5, 0, 0)),
    ],
)
def test_each_path_is_passed_on_with_an_account(typed, hostile, path, tokens):
    status, answer, account = ask(typed, path, max_tokens=50, stream=False, temperature=0)
    assert status == 200, answer
    assert {**json.loads(answer), "id": ""} == {**TYPED_WHOLE[path], "id": ""}
    assert account.endpoint == ENDPOINTS[path].name
    assert (account.prompt_tokens, account.cached_tokens, account.output_tokens) == tokens
    assert account.max_tokens == {RESPONSES: 256, MESSAGES: 50}.get(path, 0)
    assert [one.upstream for one in account.attempts] == ["typed"]
    headers, _ = hostile.asked["typed"][-1]
    assert ("anthropic-version" in headers) == (path in (MESSAGES, COUNT_TOKENS))


@pytest.mark.parametrize(("path", "told"), [(RESPONSES, None), (MESSAGES, MESSAGE_EVENTS)])
def test_a_stream_is_passed_on_as_it_is(typed, path, told):
    status, answer, account = ask(typed, path, stream=True, max_tokens=3, max_output_tokens=3)
    data = [json.loads(one) for one in events(answer)]
    assert status == 200
    assert data == (told or response_events(data[0]["response"]["id"]))
    assert answer.startswith(b"event: " + data[0]["type"].encode())
    assert (account.finish_reason, account.prompt_tokens, account.output_tokens) == ("length", 7, 3)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_one_that_breaks_off_ends_with_an_error_its_client_raises(typed, path):
    status, answer, account = ask(typed, path, stream=True, dies_after=3)
    assert (status, account.error.code) == (200, "upstream_died")
    last = json.loads(events(answer)[-1])
    assert b"event: error\n" in answer
    assert last["type"] == "error"
    assert last["error"]["code"] == "upstream_died"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_nobody_is_asked_twice_behind_the_first_byte(typed, hostile, path):
    before = len(hostile.asked["typed"])
    ask(typed, path, stream=True, dies_after=2)
    assert len(hostile.asked["typed"]) == before + 1


def test_a_client_that_leaves_is_cut_off_at_the_upstream(typed, hostile):
    asked = urllib.request.Request(
        typed.url + MESSAGES,
        json.dumps({"model": "m", "stream": True, "stays_after": 3}).encode(),
        {"content-type": "application/json", "x-request-id": "left"},
    )
    before = len(hostile.gone_s["typed"])
    with urllib.request.urlopen(asked, timeout=10) as response:
        assert response.read1()
    for _ in range(500):
        if len(hostile.gone_s["typed"]) > before:
            break
        time.sleep(0.01)
    assert len(hostile.gone_s["typed"]) == before + 1
    account = account_from_json(typed.account("left"))
    assert account.finish_reason == "abort"


def test_before_the_first_byte_another_upstream_is_asked(typed):
    status, _, account = ask(typed, EMBEDDINGS, "away+")
    assert (status, account.attempts[-1].upstream) == (200, "after")


def test_errors_of_the_gateway_have_the_form_of_each_api(typed):
    _, answer, _ = ask(typed, MESSAGES, "nobody")
    told = json.loads(answer)
    assert (told["type"], told["error"]["type"]) == ("error", "not_found_error")
    _, answer, _ = ask(typed, RESPONSES, "nobody")
    assert "type" not in json.loads(answer)
    assert json.loads(answer)["error"]["code"] == "model_not_found"


# ---- a path that an upstream does not have


def test_a_path_that_is_not_there_is_told_as_the_upstream_says_it_and_opens_no_breaker(typed):
    status, answer, account = ask(typed, RESPONSES, "c")
    assert (status, json.loads(answer)) == (404, {"detail": "Not Found"})
    assert (account.finish_reason, account.error.code, len(account.attempts)) == ("refused", "upstream_404", 1)
    (stats,) = [one for one in typed.get("/stats")["upstreams"] if one["name"] == "chatsonly"]
    assert (stats["is_open"], stats["is_busy"]) == (False, False)
    assert ask(typed, "/v1/chat/completions", "c", messages=[])[0] == 200


def test_another_upstream_that_has_the_path_is_asked_and_remembered(typed):
    found = [ask(typed, RERANK, "both") for _ in range(12)]
    assert {status for status, _, _ in found} == {200}
    attempts = [[one.upstream for one in account.attempts] for _, _, account in found]
    assert attempts.count(["chatsonly2", "typed2"]) <= 1  # and no retry of the budget was needed for it
    assert attempts[-6:] == [["typed2"]] * 6
    assert typed.get("/stats")["retries"] <= 1


# ---- responses that are kept


def test_the_next_turn_goes_back_to_who_keeps_the_response(typed, hostile):
    for stream in (False, True):
        for _ in range(6):
            _, answer, first = ask(typed, RESPONSES, "kept", stream=stream)
            told = json.loads(events(answer)[0])["response"] if stream else json.loads(answer)
            status, _, account = ask(typed, RESPONSES, "kept", previous_response_id=told["id"], stream=stream)
            assert status == 200
            assert account.attempts[0].upstream == first.attempts[0].upstream
    assert hostile.kept["typed2"]


def call(gateway, method, path, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(gateway.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_kept_response_is_asked_for_and_forgotten(typed):
    for _ in range(4):  # of two upstreams, whichever it is
        response_id = json.loads(ask(typed, RESPONSES, "kept")[1])["id"]
        path = f"{RESPONSES}/{response_id}"
        assert call(typed, "GET", path)[1]["id"] == response_id
        assert call(typed, "GET", path + "?stream=true")[1]["error"]["param"] == "stream"
        assert call(typed, "POST", path + "/cancel")[1]["error"]["code"] == "not_background"
        assert call(typed, "POST", path)[0] == 404
        assert call(typed, "DELETE", path)[0] == 200
        status, told = call(typed, "GET", path)
        assert (status, told["error"]["code"]) == (404, "not_found")
        assert ask(typed, RESPONSES, "kept", previous_response_id=response_id)[0] == 404


def test_a_response_is_known_while_it_streams(typed):
    body = json.dumps({"model": "m", "stream": True, "stays_after": 1}).encode()
    asked = urllib.request.Request(typed.url + RESPONSES, body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as response:
        response_id = json.loads(events(response.read1())[0])["response"]["id"]
        asked = urllib.request.Request(f"{typed.url}{RESPONSES}/{response_id}")
        with urllib.request.urlopen(asked, timeout=10) as found:
            assert json.load(found)["id"] == response_id
            assert "content-encoding" not in found.headers


def test_what_a_refusal_says_is_no_response(typed, hostile):
    assert ask(typed, RESPONSES, answers=400)[0] == 400
    assert call(typed, "GET", f"{RESPONSES}/{hostile.kept['typed'][-1]}")[0] == 404


def test_a_status_beyond_all_is_a_bad_answer(typed):
    status, answer, _ = ask(typed, RESPONSES, answers=700)
    assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_bad_answer")


@pytest.mark.parametrize("response_id", ["{", "..", "resp_unknown", "..%2f..%2fv1%2fmodels", "a/b", "x" * 200])
def test_an_unknown_response_is_a_clear_error(typed, response_id):
    status, told = call(typed, "GET", f"{RESPONSES}/{response_id}")
    assert (status, told["error"]["code"]) == (404, "not_found")
    assert re.search(r"started at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, and knows none from before", told["error"]["hint"])
    status, answer, account = ask(typed, RESPONSES, "kept", previous_response_id="resp_unknown")
    assert (status, json.loads(answer)["error"]["code"]) == (404, "previous_response_not_found")
    assert account.attempts == ()


def test_a_model_that_its_upstream_does_not_have_cannot_go_on_from_it(typed):
    response_id = json.loads(ask(typed, RESPONSES, "m")[1])["id"]
    status, answer, account = ask(typed, RESPONSES, "dead", previous_response_id=response_id)
    assert (status, account.attempts) == (404, ())
    assert "kept by upstream 'typed'" in json.loads(answer)["error"]["message"]


def test_where_there_is_one_upstream_and_no_tenant_an_unknown_response_is_its_to_say(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("typed", hostile.url("typed"), "m")) as gateway:
        hostile.kept["typed"].append("resp_of_before")
        assert ask(gateway, RESPONSES, previous_response_id="resp_of_before")[0] == 200
        assert call(gateway, "GET", f"{RESPONSES}/resp_of_before")[0] == 200
        assert ask(gateway, RESPONSES, previous_response_id="resp_of_nobody")[0] == 400
        assert ask(gateway, RESPONSES, input=[NAMED])[0] == 200


def test_nobody_has_another_tenants_response(hostile, tmp_path):
    text = f'budget_file = "{tmp_path}/budgets.sqlite"\n' + upstream("typed", hostile.url("typed"), "m")
    for name in ("one", "two"):
        text += f'[[tenant]]\nname = "{name}"\nsha256 = "{SHA[name]}"\noperator = {str(name == "one").lower()}\n'
        text += f"{'tokens_per_minute = 30' if name == 'two' else 'tokens_per_day = 100000'}\n"
    with gateway_of(tmp_path, text) as gateway:
        response_id = json.loads(ask(gateway, RESPONSES, key="two")[1])["id"]
        assert call(gateway, "GET", f"{RESPONSES}/{response_id}", "two")[0] == 200
        assert call(gateway, "GET", f"{RESPONSES}/{response_id}", "one")[0] == 404
        assert ask(gateway, RESPONSES, key="one", previous_response_id=response_id)[0] == 404
        status, answer, account = ask(gateway, RESPONSES, key="one", input=[SAID, NAMED])
        assert (status, json.loads(answer)["error"]["param"], account.attempts) == (400, "input[1]", ())
        assert ask(gateway, RESPONSES, key="two", previous_response_id=response_id)[0] == 200
        assert {ask(gateway, COUNT_TOKENS, key="two")[0] for _ in range(3)} == {200}
        statuses = [ask(gateway, EMBEDDINGS, key="two")[0] for _ in range(4)]
        assert statuses == [200, 200, 429, 429]  # 20 tokens for two responses, five each for two vectors
        before = budget_used(gateway)
        assert ask(gateway, MESSAGES, key="one", stream=True, dies_after=5)[0] == 200
        until(lambda: budget_used(gateway) > before)
        assert budget_used(gateway) - before == 7 + 2  # the prompt as told, and two pieces of an answer
        before, body = budget_used(gateway), {"stream": True, "dies_after": 3}
        assert ask(gateway, RESPONSES, key="one", **body)[0] == 200
        until(lambda: budget_used(gateway) > before)
        assert budget_used(gateway) - before == -(-len(json.dumps({"model": "m", **body})) // 4) + 2  # as estimated


def budget_used(gateway) -> float:
    asked = urllib.request.Request(gateway.url + "/metrics", headers={"authorization": "Bearer one"})
    with urllib.request.urlopen(asked, timeout=10) as response:
        found = re.search(r"splittime_gateway_budget_used_tokens\{.*\} (\S+)", response.read().decode())
    return float(found[1]) if found else 0.0


# ---- what is not for them


@pytest.mark.parametrize(
    ("field", "value"), [("background", True), ("conversation", "conv_1"), ("request_id", "resp_of_another")]
)
def test_what_could_not_be_kept_to_is_refused(typed, field, value):
    status, answer, account = ask(typed, RESPONSES, **{field: value})
    assert (status, json.loads(answer)["error"]["param"], account.attempts) == (400, field, ())
    assert ask(typed, RESPONSES, **{field: None})[0] == 200
    assert ask(typed, MESSAGES, **{field: value})[0] == 200


@pytest.mark.parametrize("item", [NAMED, {"id": "msg_1"}, {"id": "msg_1", "type": None}])
def test_an_item_that_is_only_named_is_refused_where_it_may_be_anothers(typed, item):
    status, answer, account = ask(typed, RESPONSES, "kept", input=[3, SAID, item])
    assert (status, json.loads(answer)["error"]["param"], account.attempts) == (400, "input[2]", ())
    assert "previous_response_id" in json.loads(answer)["error"]["hint"]


@pytest.mark.parametrize("told", ["item_reference", None, {"type": "x"}, [], ["item_reference"], [{"type": 3}]])
def test_whatever_else_the_input_is_its_upstream_judges(typed, told):
    assert ask(typed, RESPONSES, "kept", input=told)[0] == 200


def test_an_input_without_items_is_not_read():
    told = b'{"model":"m","input":[' + b"0," * MAX_PARTS + b"1e999]}"
    assert forwarded(RESPONSES, told, 100).reference == ""


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"1e999,{}", "out of range"),
        (b"[1e999],{}", "out of range"),
        (b'{"type":1e999}', "out of range"),
        (b"0," * MAX_PARTS + b"{}", "length <="),
    ],
)
def test_an_input_of_which_it_cannot_be_told_whose_items_it_names_is_refused(told, why):
    with pytest.raises(RequestError, match=f"input: .*{why}") as caught:
        forwarded(RESPONSES, b'{"model":"m","input":[' + told + b"]}", 100)
    assert caught.value.info.code == "invalid_type"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, EMBEDDINGS, COUNT_TOKENS])
def test_a_name_of_two_models_that_nothing_decides_about_is_refused(typed, path):
    status, answer, account = ask(typed, path, "auto")
    assert (status, json.loads(answer)["error"]["code"], account.attempts) == (400, "not_for_endpoint", ())


def test_answers_of_other_apis_are_not_kept_in_the_cache(typed, hostile):
    before = len(hostile.asked["typed"])
    for _ in range(2):
        ask(typed, RESPONSES, "m", input="the same", temperature=0)
    assert len(hostile.asked["typed"]) == before + 2


def test_a_rule_goes_by_the_endpoint(typed):
    assert ask(typed, EMBEDDINGS, "vectors")[2].routing.rule == "vectors"
    assert ask(typed, RESPONSES, "vectors")[0] == 404
