"""What a server knows of itself and a diagnosis needs: its settings, what a token costs, what the machine can do.

Facts only: measured, counted, or read from the model's shape. What follows from them (a step's floor, a share of the
roofline) is an estimate, made in `diagnose` and stored nowhere.

A server tells them at `GET /ledger/facts`, as this structure in JSON (`msgspec.json.decode(body, type=ServerFacts)`),
and its ledger file keeps them (`LedgerFile.facts`). `settings` and `processes` are as of the moment of asking.
"""

from typing import Any

import msgspec

from splittime.core.sleep import SleepReport


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings, measured by short loops on this machine with the server's own number of threads.

    read_rates: (bytes, bytes a second), by rising size: what so many bytes are read at when they are read over and
        over, as a step reads weights and keys; small ones come from a cache, the largest from memory. No size of a
        cache that the machine reports is believed: of a virtual one it may be another's.
    read_bytes_per_s: that of the largest.
    operations_per_s: of the product that the weights use, where a
    multiplication and its addition are two; None if it could not be measured, or not yet. cache_bytes: the processor's
    last-level cache as the machine reports it, for information. cores: that the process may use.
    measured_at_unix_ns: when, which may be some days before the start: ceilings are kept between starts.
    """

    cpu: str
    threads: int
    read_rates: tuple[tuple[int, float], ...] = ()
    read_bytes_per_s: float | None = None
    operations_per_s: float | None = None
    measured_at_unix_ns: int | None = None
    cache_bytes: int | None = None
    cores: int | None = None


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's shape makes a step need, at the least; where ranks share the model, of the first one.

    weight_bytes: read by a step in which a row samples, the packed weights as they lie in memory; of a mixture of
        experts only those that one token chooses. head_bytes: of these the head's, which a step without a sampling row
        leaves alone.
    kv_bytes_per_token: read for each token of context that a row attends to, and written for each new one.
    operations_per_token: of the layers' products, for each token computed; a multiplication and its addition are two.
    operations_per_sample: of the head's product, for each row that samples.
    operations_per_context_token: of attention, for each pair of a computed token and one that it attends to.
    window_tokens, windowed_share: a sliding window, and the share of layers that have it.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    operations_per_token: int
    operations_per_context_token: int
    head_bytes: int = 0
    operations_per_sample: int = 0
    window_tokens: int | None = None
    windowed_share: float = 0.0


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a server, on the host's monotonic clock. name: `server`, `engine`, or `llm` for both in one.

    started_ns: when it was made; ready_ns: when it could first serve. restarts: how often it died and was replaced.
    pauses: (begin, duration) in ns of the latest collections of garbage that took a millisecond or more; all of them
        are in `/stats`.
    sleeps: how it fell asleep and woke, the latest times.
    """

    name: str
    started_ns: int
    ready_ns: int | None = None
    restarts: int = 0
    pauses: tuple[tuple[int, int], ...] = ()
    sleeps: tuple[SleepReport, ...] = ()


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` are the resolved ones, by their flags' names (`max_num_seqs`, `block_size`, `num_blocks`, ...), with
    what was changed on the live server."""

    version: str
    model: str
    max_model_len: int
    settings: dict[str, Any] = {}
    cost: TokenCost | None = None
    machine: Machine | None = None
    processes: tuple[Process, ...] = ()

    def process(self, name: str) -> Process | None:
        return next((process for process in self.processes if process.name == name), None)
