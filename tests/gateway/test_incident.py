"""An incident of a running gateway: which upstream failed and when is in it, and no secret of clients or its config."""

import io
import json
import zipfile

from splittime.diagnose.incident.bundle import pack
from splittime.diagnose.incident.gather import Wanted, from_server
from splittime.wire.target import get_json, get_text

from .conftest import gateway_of, upstream

KEY, APP_KEY, UPSTREAM_KEY = "sk-operator-SECRET", "sk-app-SECRET", "sk-upstream-SECRET"
TENANTS = (
    '[[tenant]]\nname = "operator"\nkey_env = "OPERATOR"\noperator = true\n'
    '[[tenant]]\nname = "SECRET-customer"\nkey_env = "APP"\n'
)
RULE = '[[rule]]\nname = "by-team"\nheaders = { x-team = "*" }\nupstreams = ["good", "bad"]\n'


def test_what_is_in_it_and_what_is_not(hostile, tmp_path):
    text = TENANTS + RULE + upstream("good", hostile.url("fine"), "m", key_env="THEIRS")
    text += upstream("bad", hostile.url("broken"), "n", key_env="THEIRS")
    with gateway_of(tmp_path, text, OPERATOR=KEY, APP=APP_KEY, THEIRS=UPSTREAM_KEY) as gateway:
        headers = {"authorization": f"Bearer {APP_KEY}", "x-team": "SECRET-team"}
        for number, model in enumerate(("m", "m", "n", "n", "SECRET-model")):
            asked = {"messages": [{"role": "user", "content": "SECRET prompt"}]}
            gateway.ask(model, headers | {"x-request-id": f"SECRET-{number}"}, **asked)
            gateway.account(f"SECRET-{number}", KEY)
        assert "SECRET" in json.dumps(gateway.get("/ledger/requests", KEY))
        found = from_server(lambda url: get_json(url, KEY), lambda url: get_text(url, KEY), gateway.url, Wanted())
    with zipfile.ZipFile(io.BytesIO(pack([found], 1, {}, 10**7).data)) as file:
        told = {name: file.read(name).decode() for name in file.namelist()}
    assert [name for name, words in told.items() if "SECRET" in words or "127.0.0.1" in words] == []
    accounts = [json.loads(line) for line in told["gateway-1/accounts.jsonl"].splitlines()]
    assert [len(account["attempts"]) > 0 for account in accounts] == [True] * 4 + [False]
    assert {attempt["upstream"] for account in accounts for attempt in account["attempts"]} == {"good", "bad"}
    assert {account["routing"]["rule"] for account in accounts if account["routing"]} == {"by-team"}
    assert accounts[2]["error"]["code"].startswith("upstream_5")
    assert "first_error" in told["gateway-1/timeline.txt"]
    assert 'splittime_gateway_attempts_total{result="upstream_500",upstream="bad"} ' in told["gateway-1/metrics.txt"]
