"""How far upstreams are: the least round trip of the connections that requests use, as the kernel measured it.

Linux knows it of each TCP connection, from its first packets on (`tcpi_min_rtt` of TCP_INFO: the least of the latest
five minutes). It is read whenever a request gets a connection, new or kept, which takes a system call and no packet:
nothing is probed. What a TLS handshake, the upstream's work or its queue take is not in it; a proxy that ends the
connection is taken for the upstream. Where the system does not tell, nothing is known.

How long a request that comes now will wait for a first byte at an upstream, by what those before it did.

Counted are the tokens of the requests that the upstream has and has not begun to answer, and how fast such tokens have
come to a first byte of late, over the time in which there were any. Their ratio is the wait (Little's law, 1961). A
request whose answer streams already is not counted: a server that computes several at once begins the next beside it,
and where it does not, the rate says so. While nothing comes the rate falls, so that an upstream that hangs has a longer
wait with every second.
"""

import math
import socket
import struct
from collections.abc import Collection
from typing import Any

TCP_INFO = getattr(socket, "TCP_INFO", None)
MIN_RTT_AT, MIN_RTT = 148, struct.Struct("=I")  # in us, in `struct tcp_info`
NOT_MEASURED = 2**32 - 1
RISE = 8  # of the way to a longer one with each request
FORGET_S = 30.0  # in which a rate forgets all but 1/e
LEAST_SEEN_S = 0.05  # for a rate to be told
LEAST_TOKENS = 1e-9  # a rate falls to so many at most, and never to "nothing was seen"
MOST_S = 86_400.0  # of a wait that is told: records keep its nanoseconds in 64 bits


class RoundTrip:
    """ns: from the gateway to an address and back; None while nobody knows. It falls at once to a shorter one, and
    rises by an eighth of the difference to a longer one: connections may have taken different ways."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns: int | None = None

    def note(self, ns: int) -> None:
        if self.ns is None or ns <= self.ns:
            self.ns = ns
        else:
            self.ns += (ns - self.ns) // RISE


class RoundTrips:
    """One `RoundTrip` for each host and port that a config names."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, int], RoundTrip] = {}

    def of(self, host: str, port: int) -> RoundTrip:
        """Returns that of an address of the config."""
        return self._by_address.setdefault((host, port), RoundTrip())

    def note(self, host: str | None, port: int | None, connection: Any) -> None:
        """A request has this socket to that address."""
        known = self._by_address.get((host or "", port or 0))
        ns = None if known is None else min_rtt_ns(connection)
        if known is not None and ns is not None:
            known.note(ns)

    def keep(self, addresses: Collection[tuple[str, int]]) -> None:
        """Drops all other addresses, which no config names now."""
        self._by_address = {address: one for address, one in self._by_address.items() if address in addresses}


def min_rtt_ns(connection: Any) -> int | None:
    """Returns the least round trip of a connected socket; None if the system does not tell."""
    if TCP_INFO is None or connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, MIN_RTT_AT + MIN_RTT.size)
    except OSError:  # it is closed already
        return None
    if len(info) < MIN_RTT_AT + MIN_RTT.size:
        return None
    (us,) = MIN_RTT.unpack_from(info, MIN_RTT_AT)
    return None if us == NOT_MEASURED else us * 1000


class FirstByteWaits:
    """tokens: of requests that were sent and have no first byte. Times are ns of one monotonic clock."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests = 0
        self._begun = self._seconds = 0.0
        self._since_ns: int | None = None  # up to when `_seconds` has been counted, while any wait

    def sent(self, tokens: int, now_ns: int) -> None:
        self._elapse(now_ns)
        self._since_ns = now_ns
        self._requests += 1
        self.tokens += tokens

    def begun(self, tokens: int, now_ns: int) -> None:
        """A request that was sent has the first byte of an answer."""
        self.gone(tokens, now_ns)
        self._begun += tokens

    def gone(self, tokens: int, now_ns: int) -> None:
        """A request that was sent is over, and had none."""
        self._elapse(now_ns)
        self._requests -= 1
        self.tokens -= tokens
        if self._requests == 0:
            self._since_ns = None

    def wait_ns(self, now_ns: int) -> int | None:
        """Returns the wait of a request that is sent now; None while too little was seen."""
        if self.tokens == 0:
            return 0
        self._elapse(now_ns)
        if self._seconds < LEAST_SEEN_S or self._begun <= 0:
            return None
        return int(min(self.tokens * self._seconds / self._begun, MOST_S) * 1e9)

    def _elapse(self, now_ns: int) -> None:
        if self._since_ns is not None and now_ns > self._since_ns:
            kept = math.exp((self._since_ns - now_ns) / 1e9 / FORGET_S)
            self._begun = max(self._begun * kept, LEAST_TOKENS) if self._begun else 0.0
            self._seconds = self._seconds * kept + FORGET_S * (1 - kept)  # the same, looked at often or once
            self._since_ns = now_ns
