"""Answers in a Valkey or Redis that several gateways share, by the four commands that it takes: GET, SET, DEL, SCAN.

Each answer is a value with a time to live; the server bounds its own memory (`maxmemory`, `maxmemory-policy`). What is
shared are equal requests' answers: the questions of like ones are searched in each gateway's memory, so that a gateway
finds by likeness what it has kept itself. A server that does not answer is a miss.
"""

import contextlib
import time
from collections.abc import Iterator
from itertools import islice

from splittime.gateway.cache.kept import KeptAnswer, from_bytes, to_bytes
from splittime.gateway.cache.stores import PART, Purge
from splittime.gateway.valkey_connection import ValkeyConnection, address_of

PREFIX = b"splittime:answer:1:"
BEGUN = b"splittime:answers-since"
SCANNED = b"256"


class ValkeyAnswers:
    """num_answers, num_bytes: what this gateway has put there."""

    def __init__(self, url: str) -> None:
        self._connection = ValkeyConnection(*address_of(url, "cache.valkey"))
        self.num_answers = self.num_bytes = 0

    def get(self, key: str) -> KeptAnswer | None:
        found = self._connection.ask(b"GET", PREFIX + key.encode())
        return from_bytes(found) if isinstance(found, bytes) else None

    def put(self, answer: KeptAnswer, max_age_s: float) -> list[str]:
        life_ms = b"%d" % max(1, int(max_age_s * 1000))
        begun = (b"SET", BEGUN, b"%.3f" % time.time(), b"NX")  # once, in a server that has lost what it had
        self._connection.ask_all(begun, (b"SET", PREFIX + answer.key.encode(), to_bytes(answer), b"PX", life_ms))
        self.num_answers += 1
        self.num_bytes += answer.size
        return []

    def purge(self, which: Purge) -> Iterator[list[str]]:
        names = iter([PREFIX + which.key.encode()]) if which.key is not None else self._names()
        while part := list(islice(names, PART)):
            yield [key for name in part if (key := self._purged(name, which)) is not None]

    def _purged(self, name: bytes, which: Purge) -> str | None:
        """Returns the key of an answer that was to go and went."""
        found = self._connection.ask(b"GET", name)
        with contextlib.suppress(ValueError):  # another version's
            if isinstance(found, bytes) and which.takes(answer := from_bytes(found)):
                return answer.key if self._connection.ask(b"DEL", name) else None
        return None

    def each(self) -> Iterator[KeptAnswer]:
        """Yields none: whose questions they are, each gateway knows of itself."""
        return iter(())

    def begun_unix_s(self) -> float | None:
        found = self._connection.ask(b"GET", BEGUN)
        return float(found) if isinstance(found, bytes) else None

    def close(self) -> None:
        self._connection.close()

    def _names(self) -> Iterator[bytes]:
        cursor = b"0"
        while True:
            told = self._connection.ask(b"SCAN", cursor, b"MATCH", PREFIX + b"*", b"COUNT", SCANNED)
            if not (isinstance(told, list) and len(told) == 2 and isinstance(told[0], bytes)):
                raise ConnectionError("the store answered SCAN otherwise")
            yield from told[1]
            cursor = told[0]
            if cursor == b"0":
                return
