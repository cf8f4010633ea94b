"""An incident of a running server: what clients sent, keys and messages of errors are in none of the file's members."""

import io
import json
import zipfile

import pytest

from splittime.core.errors import ConfigError, EngineError
from splittime.diagnose.incident.bundle import pack
from splittime.diagnose.incident.gather import Wanted, from_server
from splittime.wire.target import get_json, get_text

from .conftest import say

KEY, OTHER_KEY, METRICS_KEY = "sk-operator-4711-SECRET", "sk-tenant-0815-SECRET", "sk-metrics-1-SECRET"
SECRETS = (KEY, OTHER_KEY, METRICS_KEY, "SECRET", "blue elephant", "-4711-", "47114711", "green", "/home/planted")
PROMPT = "my password is blue elephant 4711"


def members(packed) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(packed.data)) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def gathered(live, key=KEY, wanted=None):
    return from_server(lambda url: get_json(url, key), lambda url: get_text(url, key), live.url, wanted or Wanted())


def loaded(launch):
    """A server that has seen prompts, answers, ids, models and fields with something in them."""
    live = launch(say("green elephants"), config={"api_key": (KEY, OTHER_KEY), "metrics_api_key": METRICS_KEY})
    for key in (KEY, OTHER_KEY):
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": f"mine-4711-SECRET-{key[3]}"}
        trace = {"traceparent": "00-471147114711471147114711471147ab-4711471147114711-01"}
        chat = {"messages": [{"role": "user", "content": PROMPT}], "cache_salt": "SECRET salt"}
        assert live.post("/v1/chat/completions", chat, headers)[0] == 200
        assert live.post("/v1/completions", {"prompt": PROMPT * 40}, headers | trace)[0] == 200
        assert live.post("/v1/completions", {"prompt": PROMPT, "blue elephant": 1}, headers)[0] == 200
        assert live.post("/v1/completions", {"prompt": PROMPT, "model": "SECRET"}, headers)[0] == 404
        assert live.post("/v1/completions", {"prompt": PROMPT, "stop": ["halt-4711-now"] * 99}, headers)[0] == 400
    return live


def test_no_prompt_no_answer_and_no_key_is_in_it(launch):
    live = loaded(launch)
    ledger = json.dumps(live.get("/ledger/requests", Authorization=f"Bearer {KEY}")[2])
    assert "SECRET" in ledger  # in ids, or nothing would be shown here
    assert "blue elephant" not in ledger  # no error quotes a request
    found = members(pack([gathered(live)], 1, {}, 10**7))
    assert {"server-1/accounts.jsonl", "server-1/stats.json", "server-1/metrics.txt"} <= set(found)
    assert {(name, word) for name, text in found.items() for word in SECRETS if word in text} == set()
    accounts = [json.loads(line) for line in found["server-1/accounts.jsonl"].splitlines()]
    assert len(accounts) == 10
    assert len({account["tenant"] for account in accounts}) == 2
    assert {account["error"]["code"] for account in accounts if account["error"]} >= {"model_not_found"}
    assert 'splittime_requests_total{finish_reason="stop"} 6' in found["server-1/metrics.txt"]
    stats = json.loads(found["server-1/stats.json"])
    assert stats["checks"] == {"health": True, "ready": True}
    assert stats["stats"]["server"]["is_draining"] is False


def test_a_key_that_may_see_little_gathers_little(launch):
    live = loaded(launch)
    found = gathered(live, OTHER_KEY)
    assert len(found.books.accounts) == 5
    assert found.books.facts is None
    assert [note.split()[0] for note in found.notes] == ["/ledger/facts", "/ledger/steps", "/stats", "/metrics"]


def test_a_server_that_is_not_ready_is_told_so(launch):
    live = launch()
    live.call(lambda: setattr(live.service, "is_draining", True))
    found = gathered(live)
    assert found.stats["checks"] == {"health": True, "ready": False}


def test_a_wrong_key_and_nobody_are_errors(launch):
    live = launch(config={"api_key": (KEY,)})
    for url, key, kind in ((live.url, "wrong", ConfigError), ("http://127.0.0.1:9", None, EngineError)):
        with pytest.raises(kind) as refused:
            from_server(lambda asked, key=key: get_json(asked, key), lambda asked: "", url, Wanted())
        assert KEY not in refused.value.info.message
