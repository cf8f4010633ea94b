"""Places for connections: a process may have so many files open, and whoever comes when there are no more is shut out.

So a connection that waits for a request gives its place to a newcomer where all are taken: the one that has waited
longest, and of those first that have never shown a key. Who says nothing so keeps nobody out, and who is at work keeps
its place.
"""

import resource
from typing import Protocol

MOST_FILES = 2**16
KEPT_FILES = 64  # for what a process has open beside connections
PART = 3 / 4  # of the rest: a gateway has connections to upstreams too


class GivesWay(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """End it at once."""
        ...


class Places:
    """most: connections that there may be."""

    def __init__(self, most: int) -> None:
        self._most, self._num_open = most, 0
        self._strangers: dict[GivesWay, None] = {}  # that wait, longest first
        self._known: dict[GivesWay, None] = {}

    def enter(self, one: GivesWay) -> None:
        self._num_open += 1
        if self._num_open > self._most:
            first = next(iter(self._strangers or self._known), None)
            if first is not None:
                self.begin(first)
                first.give_way()
        self.wait(one, is_known=False)

    def wait(self, one: GivesWay, *, is_known: bool) -> None:
        """Says that this one has no request at work from now on. is_known: it has shown a key."""
        self.begin(one)
        (self._known if is_known else self._strangers)[one] = None

    def begin(self, one: GivesWay) -> None:
        """Says that this one has a request at work."""
        self._strangers.pop(one, None)
        self._known.pop(one, None)

    def leave(self, one: GivesWay) -> None:
        self._num_open -= 1
        self.begin(one)


def places_of_process() -> Places:
    """Returns as many as the system gives, of which a process has fewer until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    open_at_once = most if soft == resource.RLIM_INFINITY else soft
    return Places(max(1, int((open_at_once - KEPT_FILES) * PART)))
