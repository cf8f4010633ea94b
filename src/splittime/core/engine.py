"""The engine as others see it: its sleep, and its gauges and counters.

Sleep: an engine that holds next to no memory and answers quickly again. What is asked, what was done, who does it.

    awake --sleep--> falling_asleep --nothing runs any more--> asleep --wake--> waking --> awake
                          |  wake, or the time-out: awake again           a waking that failed: asleep again

`drive.residency` decides who may go where; a `Sleeper` does the work. Level 1 keeps the weights in the host's memory,
level 2 nowhere: they are read from their files again. Either gives the KV cache's memory back, its content forgotten.

The engine's gauges and counters at one instant: the engine fills them in, drivers and exporters pass them on.

Blocks of KV cache on their way from one server to another: what is asked (`BlocksAsk`), what is told (`BlocksTold`),
and how a block is known to be the right one.

A block's name is the chained hash of its tokens and all before them under a tenant's salt (`kv.blocks`), so who can
name a block has the text and the salt. `layout` is the hash of all that the block's bytes depend on besides: weights,
types, kernels, shape. A block whose bytes, name or layout are not those that were sent has another digest.
"""

from hashlib import blake2b
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from splittime.core.errors import RequestError

AWAKE, FALLING_ASLEEP, ASLEEP, WAKING = "awake", "falling_asleep", "asleep", "waking"
LEVELS = (1, 2)
MODES = ("wait", "abort")
MAX_TIMEOUT_S = 1e6
WAY_OUT = "POST /wake, or LLM.wake()"

Part = tuple[str, int, int]  # name, begin_ns, end_ns
DIGEST_BYTES = 16
MAX_NAMES = 4096  # in one asking
MAX_TOLD_BYTES = 16 << 20  # of blocks in one answer; its receiver takes no more
NAME_BYTES = 16
OVERHEAD_BYTES = 64  # of a block in an answer, beside its content
PATH = "/kv/blocks"

Name = Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


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


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters of the engine at one instant. `waiting_for`: of `num_waiting`, how many by cause. `host_*`,
    `offloaded_*`, `restored_*`: of the copies of evicted blocks in host memory; all 0 where there are none.
    `draft_tokens`, `accepted_draft_tokens`: drafts that were verified, and those that were right. `adapters_running`,
    `adapters_waiting`: names of those that have a place in the batch, and of those whose requests wait for one. `rest`,
    `gc_*`: filled in by the driver."""

    now_ns: int
    num_waiting: int = 0
    waiting_for: dict[str, int] = {}
    num_running: int = 0
    waiting_prompt_tokens: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_paused: bool = False
    rest: Rest = Rest()
    gc_pause_ns: int = 0
    gc_collections: int = 0
    knobs: dict[str, Any] = {}
    prefix_host_hit_tokens: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    offloaded_tokens: int = 0
    restored_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


class BlocksAsk(msgspec.Struct, frozen=True):
    """names: of the blocks that are wanted; None: those that were used latest, but for the first `skip` of them."""

    layout: str
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)] | None = None
    skip: Annotated[int, Meta(ge=0, le=1 << 32)] = 0


class BlocksTold(msgspec.Struct, frozen=True):
    """The wanted blocks that there are, as many as fit into an answer. digests: of each, `digest_of`."""

    names: tuple[Name, ...]
    blobs: tuple[bytes, ...]
    digests: tuple[bytes, ...] = ()


def digest_of(layout: str, name: bytes, blob: bytes) -> bytes:
    return blake2b(blob, digest_size=DIGEST_BYTES, key=blake2b(layout.encode() + name).digest()).digest()


def with_digests(layout: str, told: BlocksTold) -> bytes:
    """Returns the answer as it is sent."""
    digests = tuple(digest_of(layout, name, blob) for name, blob in zip(told.names, told.blobs, strict=True))
    return msgspec.msgpack.encode(msgspec.structs.replace(told, digests=digests))


def sound_blocks(raw: bytes, ask: BlocksAsk, block_bytes: int) -> dict[bytes, bytes]:
    """Returns the blocks of an answer by name: those that were asked for, of the right size, whole. Raises
    `msgspec.MsgspecError` for what is no answer."""
    told = msgspec.msgpack.decode(raw, type=BlocksTold)
    wanted = None if ask.names is None else set(ask.names)
    return {
        name: blob
        for name, blob, digest in zip(told.names, told.blobs, told.digests)  # noqa: B905  # lengths may be any
        if (wanted is None or name in wanted)
        and len(blob) == block_bytes
        and digest == digest_of(ask.layout, name, blob)
    }
