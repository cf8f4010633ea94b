"""What a mock server declares: when each token is due, and in which ways it is spoilt."""

from collections.abc import Sequence

import msgspec

from splittime.core.errors import ConfigError


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What is declared, in ns.

    tokens_per_chunk: so many tokens are written as one event, when the last of them is due.
    buffer_chunks: events are held back until so many have gathered. nagle_every: each N-th chunk waits 40 ms more.
    freezes: (begin, length) counted from the first request: nothing goes on, not even a wait.
    error_rate: share of requests that are answered 500. break_rate: share whose stream breaks off halfway, with an
        error event; both drawn from `seed`.
    slots: at most so many at a time, the rest in a queue; None: no limit.
    """

    ttft_ns: int = 50_000_000
    ttft_per_token_ns: int = 0
    itl_ns: int = 10_000_000
    tokens_per_chunk: int = 1
    buffer_chunks: int = 1
    nagle_every: int = 0
    freezes: tuple[tuple[int, int], ...] = ()
    error_rate: float = 0.0
    break_rate: float = 0.0
    slots: int | None = None
    seed: int = 0

    def validate(self) -> None:
        for name in ("ttft_ns", "ttft_per_token_ns", "itl_ns", "nagle_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0", param=name, value=getattr(self, name), limit=0)
        for name in ("tokens_per_chunk", "buffer_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", param=name, value=getattr(self, name), limit=1)
        for name in ("error_rate", "break_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share of requests", param=name, value=getattr(self, name), limit=1)
        if self.slots is not None and self.slots < 1:
            raise ConfigError("slots must be at least 1", param="slots", value=self.slots, limit=1)


def after(begin_ns: int, duration_ns: int, freezes: Sequence[tuple[int, int]]) -> int:
    """The instant at which so much time has passed since `begin_ns` outside all freezes (absolute, in order)."""
    at_ns = begin_ns
    for freeze_ns, length_ns in freezes:
        if freeze_ns + length_ns <= at_ns:
            continue
        if at_ns + duration_ns < freeze_ns:
            break
        duration_ns -= max(0, freeze_ns - at_ns)
        at_ns = freeze_ns + length_ns
    return at_ns + duration_ns
