"""How long a request had lain in its socket before its head was read, which no account could say of itself.

The kernel knows: `tcpi_last_data_recv` of Linux' TCP_INFO is the time since the connection's latest data came, in ms, a
few ms coarse. It costs 2 us a request. Data that came after the head makes it shorter than it was, never longer.
"""

import socket
import struct

TCP_INFO = getattr(socket, "TCP_INFO", None)
LAST_DATA_RECV = struct.Struct("=I")
LAST_DATA_RECV_AT = 8 + 11 * 4  # struct tcp_info, linux/tcp.h: 8 bytes of state, then 32-bit numbers, of which the 12th
LEAST_UNSEEN_MS = 8  # two of the kernel's ticks: less may be none


def unseen_ns(connection: socket.socket | None) -> int:
    """Returns how long the data being read now lay in its socket; 0 below `LEAST_UNSEEN_MS`, or if nobody can say."""
    if TCP_INFO is None or connection is None:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, LAST_DATA_RECV_AT + LAST_DATA_RECV.size)
    except OSError:  # it is closed already
        return 0
    if len(info) < LAST_DATA_RECV_AT + LAST_DATA_RECV.size:
        return 0
    (ms,) = LAST_DATA_RECV.unpack_from(info, LAST_DATA_RECV_AT)
    return ms * 1_000_000 if ms >= LEAST_UNSEEN_MS else 0
