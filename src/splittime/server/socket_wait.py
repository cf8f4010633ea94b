"""How long a request had lain in its socket when the server first looked: what no account could say of itself.

A request's account begins when its head has been read. If the event loop was busy with others' work before, the bytes
were in the kernel's hands meanwhile, and the kernel knows since when: `tcpi_last_data_recv` of Linux' TCP_INFO is the
time since the connection's latest data came, in ms, a few ms coarse. It costs 2 us a request. Data that came after
the head makes it shorter than it was, never longer.
"""

import socket
import struct
from typing import Any

TCP_INFO = getattr(socket, "TCP_INFO", None)
LAST_DATA_RECV = struct.Struct("=I")
OFFSET = 8 + 11 * 4  # struct tcp_info, linux/tcp.h: eight bytes of state, then 32-bit numbers, of which it is the 12th
LEAST_MS = 8
"""Two of the kernel's ticks: less may be none."""


def unseen_ns(connection: Any) -> int:
    """Returns how long the data that is being read now lay in its socket; 0 below `LEAST_MS`, or if nobody can say.

    connection: a socket."""
    if TCP_INFO is None or connection is None:
        return 0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, OFFSET + LAST_DATA_RECV.size)
    except OSError:  # it is closed already
        return 0
    if len(told) < OFFSET + LAST_DATA_RECV.size:
        return 0
    (ms,) = LAST_DATA_RECV.unpack_from(told, OFFSET)
    return ms * 1_000_000 if ms >= LEAST_MS else 0
