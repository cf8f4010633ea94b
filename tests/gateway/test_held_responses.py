"""The table of who keeps which response: bounded, and each tenant's own."""

import pytest

from splittime.gateway.responses import HeldResponse, HeldResponses

HELD = HeldResponse("a", "m")


def test_the_oldest_go_first_of_whoever_has_most():
    table = HeldResponses(4)
    table.note("few", "resp_0", HELD)
    for number in range(10):
        table.note("many", f"resp_{number}", HELD)
    assert len(table) == 4
    assert table.get("few", "resp_0") == HELD
    assert [number for number in range(10) if table.get("many", f"resp_{number}")] == [7, 8, 9]


def test_an_id_counts_once_and_is_forgotten_once():
    table = HeldResponses()
    for model in ("m", "n"):
        table.note("one", "resp_1", HeldResponse("a", model))
    assert len(table) == 1
    assert table.get("one", "resp_1") == HeldResponse("a", "n")
    assert table.get("two", "resp_1") is None
    for _ in range(2):
        table.forget("one", "resp_1")
        table.forget("two", "resp_1")
    assert len(table) == 0


def test_what_is_no_id_is_not_remembered():
    table = HeldResponses()
    for response_id in ("", "a/b", "x" * 129, "resp_1\n", "é"):
        table.note("one", response_id, HELD)
    assert len(table) == 0


@pytest.mark.parametrize("response_id", ["..", ".", ".a", "a..b", "-a", "..%2f"])
def test_what_a_path_would_take_for_a_way_is_no_id(response_id):
    table = HeldResponses()
    table.note("one", response_id, HELD)
    table.note("one", "resp_1.a-b:c", HELD)
    assert len(table) == 1


def test_nobody_notes_what_another_has():
    table = HeldResponses()
    table.note("one", "resp_1", HELD)
    table.note("two", "resp_1", HeldResponse("b", "m"))
    assert (table.get("one", "resp_1"), table.get("two", "resp_1"), len(table)) == (HELD, None, 1)
    table.forget("one", "resp_1")
    table.note("two", "resp_1", HELD)
    assert table.get("two", "resp_1") == HELD
