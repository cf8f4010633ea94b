"""What is kept of responses: never more than the bounds, for no longer than was said, and for its own key alone."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.api.responses import Conversation
from splittime.core.errors import NotFound
from splittime.server.service import ENTRY_BYTES, ResponseStore

MANY = 10**9
NOTHING = Conversation()


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def ids(store: ResponseStore, tenant: str = "a") -> list[str]:
    return [name for name in map(str, range(20)) if found(store, tenant, name)]


def found(store: ResponseStore, tenant: str, name: str) -> bool:
    try:
        store.get(tenant, name, "response_id")
    except NotFound:
        return False
    return True


def test_the_oldest_go_where_there_are_too_many() -> None:
    store = ResponseStore(3, MANY, 9)
    for name in range(5):
        assert store.put("a", str(name), b"x", NOTHING)
    assert ids(store) == ["2", "3", "4"]
    assert store.put("a", "3", b"yy", NOTHING)
    assert store.get("a", "3", "response_id").body == b"yy"
    assert store.put("a", "5", b"x", NOTHING)
    assert ids(store) == ["3", "4", "5"]  # what is stored again is new


def test_the_oldest_go_where_they_are_too_large_and_one_too_large_alone_is_not_kept() -> None:
    room = 2 * (ENTRY_BYTES + 10)
    store = ResponseStore(99, room, 9)
    for name in range(3):
        assert store.put("a", str(name), b"x" * 4, Conversation(num_bytes=3))
    assert (ids(store), store.num_bytes) == (["1", "2"], room)
    assert not store.put("a", "3", b"x" * (room - ENTRY_BYTES - 1), Conversation(num_bytes=1))
    assert ids(store) == ["1", "2"]
    assert store.put("a", "3", b"x" * (room - ENTRY_BYTES - 2), Conversation(num_bytes=1))
    assert (ids(store), store.num_bytes) == (["3"], room)


def test_each_is_kept_for_its_time() -> None:
    clock = Clock()
    store = ResponseStore(9, MANY, 1.5, clock)
    store.put("a", "0", b"x", NOTHING)
    clock.now_ns = 1_000_000_000
    store.put("a", "1", b"x", NOTHING)
    clock.now_ns = 1_499_999_999
    assert ids(store) == ["0", "1"]
    clock.now_ns = 1_500_000_000
    assert ids(store) == ["1"]
    clock.now_ns = 2_500_000_000
    assert (ids(store), store.num_bytes) == ([], 0)


def test_another_keys_is_told_as_an_unknown_one() -> None:
    store = ResponseStore(9, MANY, 9)
    store.put("a", "0", b"x", NOTHING)
    said = []
    for tenant, name in (("b", "0"), ("a", "1")):
        for ask in (
            lambda t=tenant, n=name: store.get(t, n, "response_id"),
            lambda t=tenant, n=name: store.delete(t, n),
        ):
            with pytest.raises(NotFound) as refused:
                ask()
            said.append({**refused.value.to_body()["error"], "value": "", "message": ""})
    assert said == [said[0]] * 4
    store.delete("a", "0")
    assert (ids(store), store.num_bytes) == ([], 0)


def test_whoever_stores_much_loses_its_own() -> None:
    store = ResponseStore(8, MANY, 9)
    for name in range(3):
        store.put("quiet", str(name), b"x", NOTHING)
    for name in range(20):
        store.put("loud", str(name), b"x", NOTHING)
    assert ids(store, "quiet") == ["0", "1", "2"]
    assert ids(store, "loud") == ["15", "16", "17", "18", "19"]
    large = ResponseStore(99, 10 * ENTRY_BYTES, 9)
    large.put("quiet", "0", b"x" * ENTRY_BYTES, NOTHING)
    for name in range(20):
        large.put("loud", str(name), b"x", NOTHING)
    assert ids(large, "quiet") == ["0"]


def test_a_store_of_none_keeps_none() -> None:
    store = ResponseStore(0, MANY, 9)
    assert not store.is_on
    assert not store.put("a", "0", b"x", NOTHING)
    with pytest.raises(NotFound, match="no stored response") as refused:
        store.get("a", "0", "previous_response_id")
    assert "max-stored-responses" in (refused.value.info.hint or "")
    assert refused.value.info.code == "previous_response_not_found"


def test_who_asks_for_what_a_restart_took_is_told_when_the_store_was_empty() -> None:
    store = ResponseStore(9, MANY, 9)
    store._begun_unix_s = 1_795_896_660.9
    with pytest.raises(NotFound) as refused:
        store.get("a", "0", "previous_response_id")
    assert "from before 2026-11-28T20:11:00Z, when it started with an empty store" in (refused.value.info.hint or "")


steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 900), st.integers(0, 400)), max_size=60
)


@given(steps)
def test_no_bound_is_ever_passed_and_nothing_is_found_that_was_not_stored(steps) -> None:
    clock, last = Clock(), defaultdict(dict)
    store = ResponseStore(5, 4000, 1e-6, clock)
    for tenant, name, size, wait_ns in steps:
        clock.now_ns += wait_ns
        is_kept = store.put(tenant, str(name), b"x" * size, Conversation(num_bytes=size))
        last[tenant][str(name)] = (size, clock.now_ns)
        assert found(store, tenant, str(name)) is is_kept
        assert len(store._kept) <= 5
        assert store.num_bytes <= 4000
        for holder in "abc":
            for each in ids(store, holder):
                kept_size, stored_ns = last[holder][each]
                assert len(store.get(holder, each, "response_id").body) == kept_size
                assert clock.now_ns - stored_ns < 1000
