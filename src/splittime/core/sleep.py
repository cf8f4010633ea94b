"""Sleep: an engine that holds next to no memory and answers quickly again. What is asked, what was done, who does it.

    awake --sleep--> falling_asleep --nothing runs any more--> asleep --wake--> waking --> awake
                          |  wake, or the time-out: awake again           a waking that failed: asleep again

`drive.residency` decides who may go where; a `Sleeper` does the work. Level 1 keeps the weights in the host's memory,
level 2 nowhere: they are read from their files again. Either gives the KV cache's memory back, its content forgotten.
"""

from typing import Protocol

import msgspec

from splittime.core.errors import RequestError

AWAKE, FALLING_ASLEEP, ASLEEP, WAKING = "awake", "falling_asleep", "asleep", "waking"
LEVELS = (1, 2)
MODES = ("wait", "abort")
MAX_TIMEOUT_S = 1e6
WAY_OUT = "POST /wake, or LLM.wake()"

Part = tuple[str, int, int]  # name, begin_ns, end_ns


class Rest(msgspec.Struct, frozen=True):
    """state: one of the four above. level: of its sleep, 0 while it is awake."""

    state: str = AWAKE
    level: int = 0


class SleepAsk(msgspec.Struct, frozen=True):
    """mode: "wait" lets running requests end, for timeout_s at most (then it stays awake), None without end; "abort"
    ends them with an error."""

    level: int = 1
    mode: str = "wait"
    timeout_s: float | None = None

    def validate(self) -> None:
        """Raise `RequestError` naming what is not honoured."""
        if type(self.level) is not int or self.level not in LEVELS:
            raise RequestError(
                f"level is {self.level!r}, must be 1 (weights are kept in host memory) or 2 (they are dropped)",
                param="level",
                value=self.level,
                limit=list(LEVELS),
            )
        if type(self.mode) is not str or self.mode not in MODES:
            raise RequestError(f"mode is {self.mode!r}, must be wait or abort", param="mode", value=self.mode)
        if self.timeout_s is not None and (
            type(self.timeout_s) not in (int, float) or not 0 <= self.timeout_s <= MAX_TIMEOUT_S
        ):
            message = f"timeout_s is {self.timeout_s!r}, must be from 0 to {MAX_TIMEOUT_S:g}"
            raise RequestError(message, param="timeout_s", value=self.timeout_s, limit=MAX_TIMEOUT_S)


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Sleeper` did.

    weights_bytes, kv_bytes: given back, or taken again. (Of a KV cache in a host's memory only the pages that had been
    written are ever taken, so waking takes none.)
    memory, memory_before_bytes, memory_after_bytes: whose memory was looked at, the "process"'s (resident) or the
    "device"'s (all that is not free, whoever has it), and what it was.
    note: for a person, what did not happen and why.
    """

    weights_bytes: int
    kv_bytes: int
    memory: str
    memory_before_bytes: int
    memory_after_bytes: int
    parts: tuple[Part, ...]
    note: str = ""


class SleepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One falling asleep, or one waking.

    action: "sleep" or "wake". changed: false if it was so already; all else is then 0.
    level: 0 of a waking that came before the engine was asleep, and called that off.
    parts: (name, begin_ns, end_ns), one after the other: "drain" (requests end), then the `Sleeper`'s ("measure":
        looking how much memory there is). A name may come again.
    forgotten_tokens, forgotten_host_tokens: of the KV cache's content, and of its copies in host memory.
    aborted_requests: ended by mode=abort. slept_ns: how long it slept.
    restarted: a new process was started for it, and the parts are those of its start.
    """

    action: str
    level: int
    changed: bool = True
    begin_ns: int = 0
    end_ns: int = 0
    parts: tuple[Part, ...] = ()
    weights_bytes: int = 0
    kv_bytes: int = 0
    forgotten_tokens: int = 0
    forgotten_host_tokens: int = 0
    aborted_requests: int = 0
    slept_ns: int = 0
    memory: str = ""
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    note: str = ""
    restarted: bool = False

    @property
    def parts_ns(self) -> dict[str, int]:
        """Returns the sums by name."""
        lengths_ns: dict[str, int] = {}
        for name, begin_ns, end_ns in self.parts:
            lengths_ns[name] = lengths_ns.get(name, 0) + end_ns - begin_ns
        return lengths_ns


class Sleeper(Protocol):
    """Called while no step runs and no request holds anything. A `SplittimeError` leaves things as they were: awake
    where it was to sleep, asleep where it was to wake. Anything else leaves them unknown."""

    def sleep(self, level: int) -> Moved: ...

    def wake(self) -> Moved: ...
