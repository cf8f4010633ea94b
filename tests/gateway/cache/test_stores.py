"""Both stores keep, give back, bound and purge alike; a server that is not there is a miss."""

import time

import pytest

from splittime.core.errors import ConfigError
from splittime.gateway.cache.answers import KeptAnswer, KeptPiece
from splittime.gateway.cache.stores import BEGUN, PART, Purge, SqliteAnswers, ValkeyAnswers, address_of

from ..conftest import gateway_of
from .conftest import config
from .test_equal import ask, until_hit


def answer(key: str, tenant="t", model="m", size=1000, at_s=1000.0) -> KeptAnswer:
    return KeptAnswer(
        key=key,
        tenant=tenant,
        model=model,
        created_unix_s=at_s,
        is_stream=False,
        content_type="application/json",
        pieces=(KeptPiece(5, b"x" * size),),
        mark="m",
    )


def purged(store, which: Purge) -> list[str]:
    return [key for part in store.purge(which) for key in part]


@pytest.fixture(params=["sqlite", "valkey"])
def store(request):
    made = SqliteAnswers(None, 2**20) if request.param == "sqlite" else ValkeyAnswers(request.getfixturevalue("valkey"))
    purged(made, Purge())
    yield made
    made.close()


def test_what_is_put_is_given_back(store):
    assert store.get("a") is None
    store.put(answer("a"), 60)
    store.put(answer("a", size=2000), 60)
    assert store.get("a") == answer("a", size=2000)


@pytest.mark.parametrize(
    ("which", "gone"),
    [
        (Purge(), {"a", "b", "c"}),
        (Purge(tenant="t"), {"a", "b"}),
        (Purge(tenant="t", model="m"), {"a"}),
        (Purge(key="c"), {"c"}),
        (Purge(tenant="t", key="c"), set()),
        (Purge(older_than_unix_s=1500), {"a", "c"}),
    ],
)
def test_what_is_purged_is_gone(store, which, gone):
    for one in (answer("a"), answer("b", model="n", at_s=2000), answer("c", tenant="u")):
        store.put(one, 10**6)
    assert set(purged(store, which)) == gone
    assert {key for key in "abc" if store.get(key) is None} == gone


def test_it_is_known_since_when_answers_are_kept(store):
    """Also after a purge, which takes what it was asked to take."""
    if isinstance(store, ValkeyAnswers):
        store._connection.ask(b"DEL", BEGUN)
        assert store.begun_unix_s() is None
        store._connection.ask(b"SET", BEGUN, b"1000.5")
        store.put(answer("a"), 60)
        assert store.begun_unix_s() == 1000.5
        store._connection.ask(b"DEL", BEGUN)
    store.put(answer("a"), 60)
    begun_s = store.begun_unix_s()
    assert time.time() - 60 < begun_s <= time.time() + 0.001
    purged(store, Purge())
    store.put(answer("b"), 60)
    assert store.begun_unix_s() == begun_s


def test_a_file_keeps_when_it_began_and_one_of_another_format_begins_anew(tmp_path):
    path = str(tmp_path / "answers.db")
    first = SqliteAnswers(path, 2**20)
    first.put(answer("a"), 60)
    begun_s = first.begun_unix_s()
    first.close()
    second = SqliteAnswers(path, 2**20)
    assert (second.begun_unix_s(), second.num_answers) == (begun_s, 1)
    second._rows.execute("PRAGMA user_version = 1")
    second.close()
    third = SqliteAnswers(path, 2**20)
    assert third.begun_unix_s() > begun_s
    assert (third.num_answers, third.get("a")) == (0, None)
    third.close()


def test_a_purge_goes_by_parts(store):
    """So that look-ups come between them; what is put meanwhile is not of those that were there."""
    for number in range(3 * PART + 1):
        store.put(answer(f"{number}", tenant="tu"[number % 2], size=10), 10**6)
    parts = store.purge(Purge(tenant="t"))
    first = next(parts)
    assert 0 < len(first) < PART
    assert all(store.get(key) is None for key in first)
    left = [f"{number}" for number in range(0, 3 * PART + 1, 2) if f"{number}" not in first]
    assert store.get(left[0]) is not None
    if isinstance(store, SqliteAnswers):  # what a scan finds that comes meanwhile, Valkey does not promise
        store.put(answer("new", size=10), 10**6)
    assert sorted(key for part in parts for key in part) == sorted(left)


def test_a_file_is_bounded_and_who_was_used_stays():
    store = SqliteAnswers(None, 5 * answer("a").size)
    for key in "abcde":
        store.put(answer(key), 10**6)
    store.get("a")
    assert store.put(answer("f"), 10**6) == ["b"]
    assert (store.num_answers, store.num_bytes) == (5, 5 * answer("a").size)
    assert store.put(answer("g", size=10**6), 10**6) == []  # larger than all that it may have
    assert store.num_answers == 5
    assert set(store.put(answer("h", at_s=1000 + 2 * 10**6), 60)) == set("acdef")  # these have expired


def test_a_file_of_something_else_is_refused(tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE accounts (x)")
    (tmp_path / "text").write_text("no database at all, and long enough to be sure of it" * 50)
    for name in ("other.db", "text", "nowhere/at/all"):
        with pytest.raises(ConfigError) as caught:
            SqliteAnswers(str(tmp_path / name), 100)
        assert caught.value.info.param == "cache.file"


@pytest.mark.parametrize("url", ["rediss://h", "redis://:secret@h", "redis://h/3", "h:1", "redis://h:x", "http://h"])
def test_an_address_is_an_address(url):
    with pytest.raises(ConfigError) as caught:
        address_of(url, "cache.valkey")
    assert "secret" not in str(caught.value.info)
    assert address_of("redis://localhost", "cache.valkey") == ("localhost", 6379)


def test_two_gateways_share_a_server(echoing, tmp_path, valkey):
    purged(ValkeyAnswers(valkey), Purge())
    text = config(echoing, "shadow_share = 0.0", cache={"valkey": valkey})
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with gateway_of(tmp_path / "one", text) as one, gateway_of(tmp_path / "other", text) as other:
        assert ask(one, seed=1, stream=True)[0] == "miss"
        until_hit(one, seed=1, stream=True)
        assert ask(other, seed=1, stream=True)[0] == "hit"
        assert other.ask("", path="/cache/purge", raw=b"{}")[2] == b'{"purged":1}'
        assert ask(one, seed=1, stream=True)[0] == "miss"


def test_without_its_server_all_is_a_miss(echoing, tmp_path):
    text = config(echoing, "", cache={"valkey": "redis://127.0.0.1:9"})
    with gateway_of(tmp_path, text) as gateway:
        for _ in range(3):
            assert ask(gateway, seed=1)[0] in ("miss", "shared")  # one that has just ended may be shared still
        assert gateway.get("/stats")["cache"]["errors"] >= 3
        assert gateway.ask("", path="/cache/purge", raw=b"{}")[0] == 503
