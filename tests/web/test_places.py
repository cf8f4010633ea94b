"""Who says nothing keeps nobody out: a connection that waits gives its place to a newcomer."""

import resource

import pytest

from splittime.web import connection as module
from splittime.web.connection import KEPT_FILES, MOST_FILES, Places, places_of_process


class Connection:
    def __init__(self, places: Places, gone: list, name: str) -> None:
        self._places, self._gone, self._name = places, gone, name
        places.enter(self)

    def give_way(self) -> None:
        self._gone.append(self._name)
        self._places.leave(self)


@pytest.fixture
def gone() -> list[str]:
    return []


def test_the_longest_silent_goes_first(gone) -> None:
    places = Places(3)
    for name in "abcde":
        Connection(places, gone, name)
    assert gone == ["a", "b"]


def test_who_is_at_work_stays_and_who_showed_a_key_goes_last(gone) -> None:
    places = Places(4)
    at_work, known, answered, _ = (Connection(places, gone, name) for name in "wkad")
    places.begin(at_work)
    for one, is_known in ((known, True), (answered, False)):
        places.begin(one)
        places.wait(one, is_known=is_known)
    for name in "123":
        Connection(places, gone, name)
    assert gone == ["d", "a", "1"]
    for one in ("2", "3"):
        assert one not in gone


def test_a_newcomer_takes_a_known_ones_place_where_no_other_waits(gone) -> None:
    places = Places(2)
    known, at_work = (Connection(places, gone, name) for name in "kw")
    places.wait(known, is_known=True)
    places.begin(at_work)
    Connection(places, gone, "new")
    assert gone == ["k"]
    places.leave(at_work)
    Connection(places, gone, "newer")
    assert gone == ["k"]


def test_who_left_is_not_asked_to_and_gives_room(gone) -> None:
    places = Places(2)
    first, _ = (Connection(places, gone, name) for name in "ab")
    places.leave(first)
    Connection(places, gone, "c")
    assert gone == []
    Connection(places, gone, "d")
    assert gone == ["b"]


@pytest.mark.parametrize(
    ("limits", "raised", "most"),
    [
        ((1024, 4096), 4096, 3024),
        ((1024, resource.RLIM_INFINITY), MOST_FILES, int((MOST_FILES - KEPT_FILES) * 0.75)),
        ((1024, 10**6), MOST_FILES, int((MOST_FILES - KEPT_FILES) * 0.75)),
        ((4096, 4096), None, 3024),
        ((200_000, 200_000), None, int((200_000 - KEPT_FILES) * 0.75)),
        ((16, 16), None, 1),
    ],
)
def test_a_process_asks_for_as_many_files_as_it_may_have(monkeypatch, limits, raised, most) -> None:
    asked = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(module.resource, "setrlimit", lambda which, to: asked.append(to))
    assert places_of_process()._most == most
    assert asked == ([] if raised is None else [(raised, limits[1])])
