"""Keys and their holders: whose key it is, what it may see and use, and that a tenant learns nothing of another."""

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from patience import until
from splittime.core.errors import ConfigError
from splittime.kv.cache import KVCache, Lease
from splittime.server.app import PATHS
from splittime.server.config import ServerConfig
from splittime.web.tenants import ANYBODY, TENANT_FOLDERS, TENANT_PATHS, ApiKeys, Tenant

from .conftest import LiveServer, say
from .test_endings import connect, raw_request

KEYS = ("operators", "search", "shop")
OPERATOR, SEARCH, SHOP = ({"Authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture
def live(launch) -> LiveServer:
    return launch(say("ok"), config={"api_key": KEYS})


def ask(live: LiveServer, who: dict, name: str, **more) -> tuple:
    body = {"prompt": "x", "max_tokens": 2, **more}
    return live.post("/v1/completions", body, {**who, "X-Request-Id": name})


# ---- whose key


def test_each_key_is_taken_whole_and_any_other_refused(live) -> None:
    for who in (OPERATOR, SEARCH, SHOP):
        assert live.get("/v1/models", **who)[0] == 200
    for wrong in ("", "operator", "operatorss", "searchshop", "Search", "search,shop", "key-1", "search\xff"):
        status, headers, answer = live.get("/v1/models", Authorization=f"Bearer {wrong}")
        assert (status, answer["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")


def test_all_keys_are_compared_whichever_is_right(monkeypatch) -> None:
    """Else the time would tell which it is, or how much of one is right."""
    keys, compared = ApiKeys(KEYS), []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: (compared.append((a, b)), a == b)[1])
    counts = []
    for given_key in (*KEYS, "wrong", "", "s", "search" * 1000):
        compared.clear()
        keys.holder({"path": "/v1/models"}, given_key.encode())
        counts.append(len(compared))
        assert {len(part) for pair in compared for part in pair} == {32}
    assert set(counts) == {3}


def test_accounts_carry_the_name_of_the_key(live) -> None:
    for number, who in enumerate((OPERATOR, SEARCH, SHOP), 1):
        ask(live, who, f"r{number}")
        ask(live, who, f"refused{number}", n=0)
    names = {account.request_id: account.tenant for account in live.ledger.accounts()}
    assert names == {f"{kind}{n}@key-{n}": f"key-{n}" for n in (1, 2, 3) for kind in ("r", "refused")}
    assert live.get("/ledger/requests/r2", **OPERATOR)[2]["tenant"] == "key-2"


def test_without_keys_nobody_is_named(launch) -> None:
    live = launch()
    ask(live, {}, "r", cache_salt="s")
    assert live.ledger.accounts()[0].tenant == ""
    assert live.engine.submitted[0].cache_salt == "s"


# ---- what it may see


def test_a_browser_gets_the_pages_without_a_key_and_nothing_that_they_show(live) -> None:
    assert [live.get(path)[0] for path in ("/docs", "/favicon.ico")] == [200, 200]
    assert live.get("/openapi.json")[0] == 401


def test_a_tenant_may_generate_by_every_api(live) -> None:
    apis = [path for method, path, _ in PATHS if method == "POST" and path.startswith("/v1/")]
    assert {"/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"} < set(apis)
    of_operators = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    others = set(apis) - of_operators - TENANT_PATHS
    assert all(path.startswith(TENANT_FOLDERS) for path in others)
    assert not of_operators & TENANT_PATHS


def test_a_tenant_may_ask_for_what_is_listed_and_nothing_else(live) -> None:
    """Whatever comes to be served is the operator's until it is listed."""
    for method, path, _ in PATHS:
        at = re.sub(r"{[^}]*}", "app.js", path)
        answers = {key: live.request(method, at, headers=who) for key, who in (("o", OPERATOR), ("t", SEARCH))}
        is_listed = at in TENANT_PATHS or at.startswith(TENANT_FOLDERS)
        is_page = at.startswith("/dashboard/static/") or at in ("/health", "/ready", "/ping", "/docs", "/favicon.ico")
        if is_listed or is_page:
            assert answers["t"][0] == answers["o"][0], path
        else:
            assert (answers["t"][0], answers["t"][2]["error"]["code"]) == (403, "operator_only"), path
        assert answers["o"][0] not in (401, 403), path
        live.post("/wake", b"", OPERATOR)


@pytest.mark.parametrize(
    "path",
    [
        "/ledger/steps",
        "/ledger/requests/../steps",
        "/ledger//steps",
        "//ledger/steps",
        "/ledger/steps/",
        "/LEDGER/steps",
    ],
)
@pytest.mark.parametrize("spelt", [lambda p: p, lambda p: p.replace("steps", "%73teps"), lambda p: p + "?x=/v1/models"])
def test_no_spelling_of_a_path_lets_a_tenant_in(live, path: str, spelt) -> None:
    assert live.get("/ledger/steps", **OPERATOR)[2]["steps"] == []
    status, _, answer = live.get(spelt(path), **SEARCH)
    assert status in (403, 404)
    assert "steps" not in answer


def test_a_tenant_sees_its_own_accounts_and_the_operator_all(live) -> None:
    for number in range(4):
        ask(live, SEARCH, f"search-{number}")
        ask(live, SHOP, f"shop-{number}")
    seen = {key: live.get("/ledger/requests", **who)[2]["accounts"] for key, who in (("se", SEARCH), ("sh", SHOP))}
    assert [a["request_id"] for a in seen["se"]] == [f"search-{n}@key-2" for n in range(4)]
    assert [a["request_id"] for a in seen["sh"]] == [f"shop-{n}@key-3" for n in range(4)]
    assert len(live.get("/ledger/requests", **OPERATOR)[2]["accounts"]) == 8
    latest = live.get("/ledger/requests?limit=2", **SEARCH)[2]["accounts"]
    assert [a["request_id"] for a in latest] == ["search-2@key-2", "search-3@key-2"]
    assert live.get("/ledger/requests/search-1", **SEARCH)[0] == 200
    assert live.get("/ledger/requests/search-1", **OPERATOR)[0] == 200
    assert live.get("/ledger/requests/search-1", **SHOP)[0] == 404
    assert live.get("/ledger/requests/cmpl-search-1", **SHOP)[0] == 404


def test_one_id_of_two_tenants_shows_each_its_own(live) -> None:
    for who in (SEARCH, SHOP):
        ask(live, who, "same")
    assert live.get("/ledger/requests/same", **SEARCH)[2]["tenant"] == "key-2"
    assert live.get("/ledger/requests/same", **SHOP)[2]["tenant"] == "key-3"
    assert len(live.get("/ledger/requests/same", **OPERATOR)[2]["choices"]) == 2


def test_whether_anothers_request_is_open_is_not_told(launch) -> None:
    live = launch(say("x", end=False), config={"api_key": KEYS}, step_s=0.05)
    with connect(live) as client:
        asked = raw_request(
            {"prompt": "x", "max_tokens": 4000}, headers="X-Request-Id: a\r\nAuthorization: Bearer shop\r\n"
        )
        client.sendall(asked)
        until(lambda: "a@key-3" in live.service.groups)
        unknown = live.get("/ledger/requests/never-came", **SEARCH)[2]["error"]
        for name in ("a", "cmpl-a", "chatcmpl-a"):
            told = [live.get(f"/ledger/requests/{name}", **who)[2]["error"] for who in (OPERATOR, SHOP, SEARCH)]
            assert ["it runs still" in error["message"] for error in told] == [True, True, False]
            assert told[-1] == unknown | {"message": unknown["message"].replace("never-came", name), "value": name}


@pytest.mark.parametrize(("name", "n"), [("a", 1), ("a-0", 1), ("a-1", 2), ("a", 3)])
def test_an_id_that_another_tenant_has_in_flight_is_free(launch, name: str, n: int) -> None:
    """Nothing tells of the other's request, and nothing ends it."""
    live = launch(say("x", end=False), config={"api_key": KEYS}, step_s=0.005)
    asked = {"prompt": "x", "max_tokens": 4000, "n": 2}
    with connect(live) as client:
        client.sendall(raw_request(asked, headers="X-Request-Id: a\r\nAuthorization: Bearer shop\r\n"))
        until(lambda: len(live.engine.running) == 2)
        status, headers, answer = ask(live, SEARCH, name, n=n)
        assert (status, headers["x-request-id"], answer["id"]) == (200, name, f"cmpl-{name}")
        assert len(answer["choices"]) == n
        assert len(live.engine.running) == 2
        for spelt in (name, f"cmpl-{name}"):
            told = live.get(f"/ledger/requests/{spelt}", **SEARCH)[2]
            assert told["tenant"] == "key-2"
            assert {choice["tenant"] for choice in told.get("choices", ())} <= {"key-2"}
        assert not live.ledger.account("a", "key-3")
        assert ask(live, SHOP, "a")[0] == 409


@pytest.mark.parametrize("number", [1, 2])
def test_ids_are_kept_apart_as_soon_as_there_are_two_keys(launch, number: int) -> None:
    service = launch(say("x"), config={"api_key": KEYS[:number]}).service
    ids = {service.full_id("same", tenant) for tenant in service.keys.tenants}
    assert len(ids) == number
    assert ("same" in ids) == (number == 1)


def test_one_tenants_client_that_leaves_ends_its_own_request_alone(launch) -> None:
    live = launch(say("x", end=False), config={"api_key": KEYS}, step_s=0.005)
    asked = {"prompt": "x", "max_tokens": 4000}
    with connect(live) as stays:
        stays.sendall(raw_request(asked, headers="X-Request-Id: a\r\nAuthorization: Bearer shop\r\n"))
        with connect(live) as leaves:
            leaves.sendall(raw_request(asked, headers="X-Request-Id: a\r\nAuthorization: Bearer search\r\n"))
            until(lambda: len(live.engine.running) == 2)
        until(lambda: len(live.engine.running) == 1)
        assert set(live.engine.aborts) == {"a@key-2"}
        assert set(live.service.groups) <= {"a@key-3", "a@key-2"}
        assert live.engine.running[0].request.request_id == "a@key-3"


def test_with_one_key_an_id_is_as_it_was_sent(launch) -> None:
    live = launch(say("x"), config={"api_key": KEYS[:1]})
    ask(live, OPERATOR, "r")
    assert [account.request_id for account in live.ledger.accounts()] == ["r"]


# ---- the cache


salts = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=5)
asked_salts = st.text(st.sampled_from("ab\0:"), max_size=6)


@example("a", "b", "ab", "")  # no part of a request's salt goes on where a tenant's ends
@example("salt:staff", "x", "salt:staffx", "")
@given(salts, asked_salts, salts, asked_salts)
def test_no_request_reaches_another_tenants_cache_whatever_salt_it_names(mine, asked, others, theirs) -> None:
    one, other = Tenant(name="a", salt=mine).cache_salt(asked), Tenant(name="b", salt=others).cache_salt(theirs)
    assert (one == other) == ((mine, asked) == (others, theirs))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    asked_salts,
    asked_salts,
)
def test_a_prompt_finds_no_block_of_another_tenant(tokens, probe, asked, theirs) -> None:
    """Every prefix that one tenant could try against what another has computed."""
    keys = ApiKeys(KEYS)
    victim, attacker = keys.tenants[1], keys.tenants[2]
    cache = KVCache(num_blocks=64, block_size=2)
    held = Lease(victim.cache_salt(asked))
    assert cache.reserve(held, len(tokens))
    cache.commit(held, tokens, len(tokens))
    for prompt in (tokens, [*tokens, 1], probe, tokens[:5]):
        for salt in (attacker.cache_salt(theirs), attacker.cache_salt(asked), attacker.cache_salt(victim.salt)):
            assert cache.match(Lease(salt), prompt) == 0
    own = Lease(victim.cache_salt(asked))
    assert cache.match(own, [*tokens, 1]) == len(tokens) // 2 * 2


def test_requests_go_to_the_engine_with_their_tenants_salt(live) -> None:
    for who in (OPERATOR, SEARCH, SHOP):
        for asked in ("", "mine"):
            ask(live, who, "r", cache_salt=asked)
    salts_given = [request.cache_salt for request in live.engine.submitted]
    assert len(set(salts_given)) == 6


# ---- how much


def keys_file(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


FILE = """
[[key]]
name = "ops"
key = "operators"
operator = true

[[key]]
name = "search"
sha256 = "{}"
requests_per_minute = 2

[[key]]
name = "shop"
key = "shop"
salt = "shared"
max_open_requests = 1

[[key]]
name = "stall"
key = "stall"
salt = "shared"
tokens_per_minute = 5
""".format(hashlib.sha256(b"search").hexdigest())


def test_a_file_names_keys_limits_and_salts(launch, tmp_path) -> None:
    live = launch(say("ok ok", end=False), config={"api_keys_file": keys_file(tmp_path, FILE)})
    stall = {"Authorization": "Bearer stall"}
    assert [ask(live, SEARCH, f"r{n}")[0] for n in range(3)] == [200, 200, 429]
    _, headers, answer = ask(live, SEARCH, "r3")
    assert answer["error"]["reason"] == "requests_per_minute"
    assert 1 <= int(headers["retry-after"]) <= 30
    assert ask(live, SHOP, "r4")[0] == ask(live, OPERATOR, "r5")[0] == 200
    assert [ask(live, stall, f"s{n}", n=2)[0] for n in range(2)] == [200, 429]  # 2 prompt and 4 output tokens
    named = [account.tenant for account in live.ledger.accounts()]
    assert named == ["search"] * 4 + ["shop", "ops"] + ["stall"] * 3
    salts_of = {
        account.tenant: request.cache_salt
        for account, request in zip(
            [a for a in live.ledger.accounts() if a.finish_reason != "refused"], live.engine.submitted, strict=True
        )
    }
    assert salts_of["shop"] == salts_of["stall"]
    assert len(set(salts_of.values())) == 3
    assert live.post("/sleep", b"", SHOP)[0] == 403
    assert live.post("/sleep", b"", OPERATOR)[0] == 200
    assert 'splittime_refusals_total{reason="requests_per_minute"} 2.0' in live.get("/metrics", **OPERATOR)[2].decode()
    assert live.service.quota(ANYBODY).num_open == 0


def test_open_requests_come_free_however_they_end(launch, tmp_path) -> None:
    live = launch(say("x", end=False), config={"api_keys_file": keys_file(tmp_path, FILE)}, step_s=0.02)
    tenant = next(each for each in live.service.keys.tenants if each.name == "shop")
    with connect(live) as client:
        client.sendall(raw_request({"prompt": "x", "max_tokens": 4000}, headers="Authorization: Bearer shop\r\n"))
        until(lambda: live.engine.running)
        status, _, answer = ask(live, SHOP, "r")
        assert (status, answer["error"]["reason"]) == (429, "max_open_requests")
    until(lambda: live.service.quota(tenant).num_open == 0)
    for body in (b"{", b'{"prompt": ""}', b'{"prompt": "x", "n": 99}'):
        assert live.post("/v1/completions", body, SHOP)[0] == 400
    assert live.post("/v1/completions", {"prompt": "x"}, {**SHOP, "X-Request-Deadline-Ms": "1"})[0] in (200, 429, 504)
    assert live.service.quota(tenant).num_open == 0
    assert ask(live, SHOP, "r", max_tokens=1)[0] == 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "key"),
        ("key = []", "length"),
        ("[[key]]\nname = 'a'", "'a' needs key or sha256"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nsha256 = '" + "0" * 64 + "'", "'a' needs key or sha256"),
        ("[[key]]\nname = 'a'\nsha256 = 'abc'", "sha256"),
        ("[[key]]\nname = 'a'\nsha256 = '" + hashlib.sha256(b"").hexdigest() + "'", "'a' is that of an empty key"),
        ("[[key]]\nname = 'a'\nkey = ''", "key of 'a' is empty"),
        ("[[key]]\nname = 'a'\nkey = 'has space'", "key of 'a' is empty, or has a space"),
        ("[[key]]\nname = 'a b'\nkey = 'x'", "name"),
        ("[[key]]\nkey = 'x'", "name"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nadmin = true", "admin"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nrequests_per_minute = 0", "requests_per_minute"),
        ('[[key]]\nname = "a"\nkey = "x"\nsalt = "a\\u0000b"', "salt"),
        ("[[key]]\nname = 'a'\nkey = 'x'\n[[key]]\nname = 'a'\nkey = 'y'", "two keys have the name 'a'"),
        ("[[key]]\nname = 'a'\nkey = 'x'\n[[key]]\nname = 'b'\nkey = 'x'", "'a' and 'b' have the same key"),
        ("[[key]\n", "keys.toml"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_at_start(tmp_path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiKeys(api_keys_file=keys_file(tmp_path, text))
    assert told in caught.value.info.message
    assert caught.value.info.param == "api_keys_file"


def test_errors_quote_no_key(tmp_path) -> None:
    for text in ("[[key]]\nname = 'a'\nkey = 'se cret'", "[[key]]\nname = 3\nkey = 'secret'", "secret"):
        with pytest.raises(ConfigError) as caught:
            ApiKeys(api_keys_file=keys_file(tmp_path, text))
        assert "cret" not in f"{caught.value.info}"
    for wrong in ("", "has space", "\u00e9t\u00e9", "tab\t"):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(api_key=("good", wrong)).validate()
        assert not wrong or wrong not in f"{caught.value.info}"
    with pytest.raises(ConfigError, match="list"):
        ServerConfig(api_key="secret").validate()
    with pytest.raises(ConfigError, match="same key"):
        ApiKeys(("a", "a"))
    with pytest.raises(ConfigError, match="cannot read keys"):
        ApiKeys(api_keys_file=str(tmp_path / "missing"))


# ---- the key for metrics


def test_metrics_may_have_a_key_of_their_own(launch) -> None:
    live = launch(config={"api_key": KEYS, "metrics_api_key": "scraper"})
    scraper = {"Authorization": "Bearer scraper"}
    assert live.get("/metrics", **scraper)[0] == live.get("/metrics", **OPERATOR)[0] == 200
    assert live.get("/metrics", **SEARCH)[0] == 403
    assert live.get("/metrics")[0] == live.get("/metrics", Authorization="Bearer scrape")[0] == 401
    for path in ("/stats", "/v1/models", "/ledger/requests"):
        assert live.get(path, **scraper)[0] == 401


def test_metrics_ask_for_their_key_where_nothing_else_does(launch) -> None:
    live = launch(config={"metrics_api_key": "scraper"})
    assert live.get("/metrics")[0] == 401
    assert live.get("/metrics", Authorization="Bearer scraper")[0] == 200
    assert live.get("/stats")[0] == 200


def test_a_key_for_metrics_does_not_protect_an_address() -> None:
    with pytest.raises(ConfigError, match="host 0"):
        ServerConfig(host="0.0.0.0", metrics_api_key="scraper").validate()
    ServerConfig(host="0.0.0.0", api_keys_file="keys.toml").validate()


# ---- where a proxy has a folder for this server


def test_paths_are_found_with_and_without_a_root_path(launch) -> None:
    live = launch(config={"root_path": "/llm/v2", "api_key": KEYS})
    assert live.get("/llm/v2/v1/models", **SEARCH)[0] == live.get("/v1/models", **SEARCH)[0] == 200
    assert live.get("/llm/v2/v1/models")[0] == 401
    assert live.get("/llm/v2/ledger/steps", **SEARCH)[0] == 403
    assert live.post("/llm/v2/v1/completions", {"prompt": "x"}, SEARCH)[0] == 200
    assert live.get("/llm/v2/health")[0] == 200
    for path in ("/llm/v2/v1/completions/", "/v1/completions/"):  # no redirect, which would lose the proxy's folder
        assert live.post(path, {"prompt": "x"}, SEARCH)[0] == 200
        assert live.post(path, {"prompt": "x"})[0] == 401
    assert live.get("/llm/v1/models", **SEARCH)[0] == 403  # no path of ours
    assert live.get("/openapi.json", **SEARCH)[2]["servers"] == [{"url": "/llm/v2"}]
    page = live.get("/llm/v2/", Accept="text/html")[2].decode()
    for link in re.findall(r'(?:src|href)="([^"#][^"]*)"', page):
        assert not link.startswith("/")


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "//llm", "/l m", "/llm?x"])
def test_a_root_path_that_is_none_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=root).validate()


def test_a_key_has_the_same_part_of_a_cache_wherever_it_stands() -> None:
    """Servers that share blocks may have other keys, in another order."""
    (_, here), (there, other) = ApiKeys(("a", "b")).tenants, ApiKeys(("b", "c")).tenants
    assert here.salt == there.salt
    assert len({here.salt, other.salt, ""}) == 3
