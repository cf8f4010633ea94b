"""A server behind a gateway shares among the gateway's tenants; all else is the key's."""

import pytest

from splittime.web.tenants import NOT_BELIEVED, TOLD_TENANT

from .conftest import LiveServer, say

OPERATOR, SHOP = ({"Authorization": f"Bearer {key}"} for key in ("operators", "shop"))
SEARCH = {TOLD_TENANT: "search;weight=2"}


@pytest.fixture
def live(launch) -> LiveServer:
    return launch(say("ok"), config={"api_key": ("operators", "shop")})


def ask(live: LiveServer, headers: dict, name: str = "r", **more) -> tuple:
    body = {"prompt": "x", "max_tokens": 2, **more}
    return live.post("/v1/completions", body, {**headers, "X-Request-Id": name})


def test_a_gateways_tenant_is_who_shares_and_all_else_is_the_keys(live) -> None:
    assert ask(live, OPERATOR, "own", cache_salt="s")[0] == 200
    assert ask(live, OPERATOR | SEARCH, "told", cache_salt="s")[0] == 200
    own, told = live.engine.submitted
    assert (own.tenant, own.weight, told.tenant, told.weight) == ("key-1", 1.0, "key-1/search", 2.0)
    assert own.cache_salt == told.cache_salt
    assert told.request_id == "told@key-1"
    assert [account.tenant for account in live.ledger.accounts()] == ["key-1", "key-1/search"]
    assert live.get("/ledger/requests/told", **OPERATOR)[2]["tenant"] == "key-1/search"
    assert live.get("/ledger/requests/told", **SHOP)[0] == 404


def test_a_refusal_is_in_the_tenants_account_too(live) -> None:
    assert ask(live, OPERATOR | SEARCH, n=0)[0] == 400
    assert [account.tenant for account in live.ledger.accounts()] == ["key-1/search"]


def test_its_place_in_the_queue_and_in_the_lanes_of_texts_is_the_tenants(live, monkeypatch) -> None:
    seen: dict[str, set[tuple[str, float]]] = {}
    admission, texts = live.service.admission, live.service.texts
    for part, name in ((admission, "check"), (admission, "enter"), (texts, "submit")):
        whole = getattr(part, name)

        def noted(*given, whole=whole, name=name, **more):
            seen.setdefault(name, set()).add((more["tenant"], more["weight"]))
            return whole(*given, **more)

        monkeypatch.setattr(part, name, noted)
    assert ask(live, OPERATOR | SEARCH)[0] == 200
    assert live.post("/tokenize", {"prompt": "x"}, OPERATOR | SEARCH)[0] == 200
    assert seen == {name: {("key-1/search", 2.0)} for name in ("check", "enter", "submit")}


def test_another_key_shares_as_itself_and_is_told(live) -> None:
    status, headers, _ = ask(live, SHOP | SEARCH)
    assert (status, headers["x-splittime-notice"]) == (200, NOT_BELIEVED)
    assert [(one.tenant, one.weight) for one in live.engine.submitted] == [("key-2", 1.0)]
    assert "x-splittime-notice" not in ask(live, OPERATOR | SEARCH)[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_name_that_is_none_is_refused(live, path: str) -> None:
    status, _, answer = live.post(path, {"prompt": "x"}, {**OPERATOR, TOLD_TENANT: "a/b"})
    assert (status, answer["error"]["param"]) == (400, TOLD_TENANT)
    assert not live.engine.submitted


def test_without_keys_whoever_asks_is_believed_a_name_and_no_weight(launch) -> None:
    live = launch()
    assert ask(live, SEARCH)[0] == 200
    assert [(one.tenant, one.weight) for one in live.engine.submitted] == [("search", 1.0)]
