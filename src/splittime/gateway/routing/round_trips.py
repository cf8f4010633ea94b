"""How far upstreams are: the least round trip of the connections that requests use, as the kernel measured it.

Linux knows it of each TCP connection, from its first packets on (`tcpi_min_rtt` of TCP_INFO: the least of the latest
five minutes). It is read whenever a request gets a connection, new or kept, which takes a system call and no packet:
nothing is probed. What a TLS handshake, the upstream's work or its queue take is not in it; a proxy that ends the
connection is taken for the upstream. Where the system does not tell, nothing is known.
"""

import socket
import struct
from collections.abc import Collection
from typing import Any

TCP_INFO = getattr(socket, "TCP_INFO", None)
MIN_RTT_AT, MIN_RTT = 148, struct.Struct("=I")  # in us, in `struct tcp_info`
NOT_MEASURED = 2**32 - 1
RISE = 8  # of the way to a longer one with each request


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
