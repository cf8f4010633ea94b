"""Values that are kept: by weight, number and time, and fairly among their owners."""

from splittime.core.shares import KeptByOwner


def names(kept: KeptByOwner[str], owner: str) -> str:
    return "".join(name for name in "abcdefgh" if owner in kept.owners_of(name))


def test_the_one_asked_for_longest_ago_makes_room_within_an_owners_share() -> None:
    for is_by_use, left in ((True, "acd"), (False, "bcd")):
        kept = KeptByOwner[str](most_weight=80, most_of_owner=30, is_by_use=is_by_use)
        for name in "abc":
            kept.put("one", name, name, 10)
        assert kept.get("one", "a") == "a"
        kept.put("one", "d", "d", 10)
        assert names(kept, "one") == left
        assert (kept.weight, kept.weight_forgotten) == (30, 10)
        kept.put("one", "e", "e", 1)  # one more than may be
        assert (kept.weight, kept.weight_forgotten) == (21, 20)


def test_who_keeps_most_loses_first() -> None:
    for kept in (KeptByOwner[str](most_weight=40), KeptByOwner[str](most=4)):
        kept.put("small", "a", "a", 10)
        for name in "abcdef":
            kept.put("large", name, name, 10)
        assert (names(kept, "small"), names(kept, "large")) == ("a", "def")
        kept.put("small", "b", "b", 10)
        assert (names(kept, "small"), names(kept, "large")) == ("ab", "ef")


def test_a_value_is_its_owners_alone_and_weighs_what_it_was_said_to() -> None:
    kept = KeptByOwner[str](most_weight=100)
    kept.put("one", "a", "of one", 10)
    assert (kept.get("other", "a"), kept.weight) == (None, 10)
    kept.put("one", "a", "again", 20)
    assert (kept.weight, len(kept), kept.get("one", "a")) == (20, 1, "again")
    for _ in range(2):
        kept.drop("one", "a")
        kept.drop("other", "a")
    assert (kept.weight, len(kept), kept.get("one", "a"), kept.weight_forgotten) == (0, 0, None, 0)
    assert not kept._weights  # of an owner without values nothing is left


def test_one_that_is_too_heavy_alone_is_kept_while_it_is_the_only_one() -> None:
    kept = KeptByOwner[str](most_weight=20, most_of_owner=20)
    kept.put("one", "a", "a", 90)
    assert (names(kept, "one"), kept.is_full) == ("a", True)
    kept.put("one", "b", "b", 90)
    assert names(kept, "one") == "b"
    kept.put("two", "c", "c", 1)
    assert (names(kept, "one"), names(kept, "two"), kept.is_full) == ("", "c", False)


def test_each_is_kept_for_its_time_from_its_last_put() -> None:
    now_ns = [0]
    kept = KeptByOwner[str](kept_ns=10, clock=lambda: now_ns[0])
    for name, owner in zip("ab", ("one", "two"), strict=True):
        kept.put(owner, name, name, 3)
    now_ns[0] = 6
    kept.put("one", "a", "again", 4)
    now_ns[0] = 10
    assert (kept.get("two", "b"), kept.get("one", "a"), kept.weight_forgotten) == (None, "again", 3)
    now_ns[0] = 16
    assert (kept.get("one", "a"), len(kept), kept.weight_forgotten) == (None, 0, 7)
