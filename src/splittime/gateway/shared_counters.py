"""Counters in a Valkey or Redis that several gateways add to: each amount once, whatever replies are lost.

An exchange whose reply does not come may have been carried out, or will be when a store that stood still goes on. So
amounts go in numbered batches. A batch of which nothing is known is sent again as it was, under its number, and a
script carries out only numbers that are above the last one of the same gateway. A field that is no number stays as it
is and hinders no other.
"""

import re
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence

from splittime.gateway.valkey_connection import ValkeyConnection, address_of

TIMEOUT_S = 1.0
LATEST = b"splittime:latest:1:"  # a gateway's last batch
KEPT_S = 40 * 86_400  # of what nobody adds to: longer than a month
NUMBER = re.compile(rb"-?[0-9]{1,19}")
ADD = b"""
local number = tonumber(ARGV[1])
if number > tonumber(redis.call('GET', KEYS[1]) or '0') then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', 86400)
  for at = 3, #ARGV, 3 do
    redis.pcall('HINCRBY', ARGV[at], ARGV[at + 1], ARGV[at + 2])
    redis.pcall('EXPIRE', ARGV[at], ARGV[2])
  end
end
return number
"""

Field = tuple[str, str]  # a hash, and one of its fields


class SharedCounters:
    """Its callers take turns: it has no lock."""

    def __init__(self, url: str) -> None:
        self._connection, self._url = ValkeyConnection(*address_of(url, "limits_valkey"), TIMEOUT_S), url
        self._gateway = uuid.uuid4().hex
        self._number = 0
        self._batch: Counter[Field] = Counter()  # sent, and not known to be carried out
        self._waiting: Counter[Field] = Counter()

    def exchange(self, added: Mapping[Field, int], hashes: Sequence[str]) -> dict[str, dict[str, int]]:
        """Adds amounts; returns what these hashes hold then. Raises `OSError`; the amounts go with a later call."""
        self._waiting.update(added)
        told = self._carried_out(hashes)
        while self._waiting:
            told = self._carried_out(hashes)
        return told

    def close(self) -> None:
        self._connection.close()

    def __str__(self) -> str:
        return self._url

    def _carried_out(self, hashes: Sequence[str]) -> dict[str, dict[str, int]]:
        if not self._batch and self._waiting:
            self._number += 1
            self._batch, self._waiting = self._waiting, Counter()
        reads = [(b"HGETALL", name.encode()) for name in hashes]
        told = self._connection.ask_all(*([self._add()] if self._batch else []), *reads)
        self._batch = Counter()
        return {name: _numbers(one) for name, one in zip(hashes, told[-len(reads) :], strict=True)}

    def _add(self) -> tuple[bytes, ...]:
        amounts = [part for (name, field), by in self._batch.items() for part in (name, field, str(by))]
        head = (b"EVAL", ADD, b"1", LATEST + self._gateway.encode(), b"%d" % self._number, b"%d" % KEPT_S)
        return (*head, *(part.encode() for part in amounts))


def _numbers(told: object) -> dict[str, int]:
    """Returns a hash's fields that are numbers, below 0 too: in a store that was emptied what is given back stands
    alone. Raises `ConnectionError` for what is no hash."""
    if not isinstance(told, list) or len(told) % 2 or not all(isinstance(part, bytes) for part in told):
        raise ConnectionError("the store answered HGETALL otherwise")
    pairs = zip(told[::2], told[1::2], strict=True)
    return {name.decode("utf-8", "replace"): int(value) for name, value in pairs if NUMBER.fullmatch(value)}
