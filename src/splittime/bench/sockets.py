"""How many connections one process of the client may hold: the system's limit on open files, and who will not fit.

A closed loop says beforehand how many it needs. One that cannot have them is refused before anything is sent: after the
run it would be VOID, with most of its requests spent on errors. An open loop needs as many as the server makes it need:
there the audit tells (`audit`, "sockets").
"""

import resource
from collections.abc import Sequence

from splittime.bench.share import LoadShare
from splittime.core.errors import ConfigError

SPARE = 24  # files that are no connections of the load: pipes, timers, libraries, what a server is asked beside it


def allow() -> None:
    """Raise this process' limit as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """On all open files of this process; 0 for none."""
    return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def check(shares: Sequence[LoadShare]) -> None:
    """Raises `ConfigError` if a closed loop needs more connections in a process than this may have."""
    needed, room = max(map(at_most, shares)), limit() - SPARE
    if limit() == 0 or needed <= room:
        return
    hint = f"Allow more with `ulimit -n {needed + SPARE}`"
    if room > 0:
        hint += f", deal them out with --workers {-(-sum(map(at_most, shares)) // room)}"
    what = f"{needed} requests at a time need as many connections, and a process may open {max(0, room)} here"
    raise ConfigError(what, param="concurrency", value=needed, limit=max(0, room), hint=f"{hint}, or ask for fewer.")


def at_most(share: LoadShare) -> int:
    """Connections at a time of a closed loop; 0 for an open one: not known."""
    if share.concurrency is None:
        return 0
    return min(share.concurrency * len(share.targets), share.max_in_flight or len(share.jobs), len(share.jobs))
