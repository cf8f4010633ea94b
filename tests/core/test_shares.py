"""Who is next among keys of different weights."""

from splittime.core.shares import KeyShares


def served_in_turn(weights: dict[str, float], count: int) -> list[str]:
    """All keys wait for as many as they like; each turn takes one."""
    shares = KeyShares()
    for name, weight in weights.items():
        for _ in range(count + 1):
            shares.wait(shares.of(name, weight))
    order = []
    for _ in range(count):
        share = shares.first()
        assert share is not None
        assert share is shares.in_turn()[0]
        shares.leave(share, is_served=True)
        share.charge(1)
        order.append(share.name)
    return order


def test_who_had_least_is_next() -> None:
    assert served_in_turn({"a": 1, "b": 1, "c": 1}, 6) == ["a", "b", "c", "a", "b", "c"]


def test_a_key_is_served_by_its_weight() -> None:
    order = served_in_turn({"three": 3, "one": 1}, 40)
    assert (order.count("three"), order.count("one")) == (30, 10)


def test_what_was_had_alone_is_not_owed() -> None:
    shares = KeyShares()
    alone, late = shares.of("alone"), shares.of("late")
    for _ in range(3):
        shares.wait(alone)
    alone.charge(100)
    shares.wait(late)
    assert late.counter == alone.counter
