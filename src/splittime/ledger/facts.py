"""What a server knows of itself and a diagnosis needs: its settings, what a token costs, what the machine can do.

Facts only: measured at start-up or read from the model's shape. What follows from them (a step's floor, a share of the
roofline) is an estimate, made in `diagnose` and stored nowhere.
"""

from typing import Any

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings, measured by short loops on this machine with the server's own number of threads.

    read_bytes_per_s: a plain streaming read of memory. operations_per_s: of the product that the weights use, where a
    multiplication and its addition are two; None if it could not be measured.
    """

    cpu: str
    threads: int
    read_bytes_per_s: float | None = None
    operations_per_s: float | None = None
    measured_at_unix_ns: int | None = None


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's shape makes a step need, at the least.

    weight_bytes: read by every step, whatever is in it. kv_bytes_per_token: read for each token of context that a row
    attends to, and written for each new one. operations_per_token: of the products, for each token computed.
    operations_per_context_token: of attention, for each pair of a computed and a cached token.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    operations_per_token: int
    operations_per_context_token: int


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` are the resolved ones, by their flags' names (`max_num_seqs`, `block_size`, `num_blocks`, ...)."""

    version: str
    model: str
    max_model_len: int
    settings: dict[str, Any] = {}
    cost: TokenCost | None = None
    machine: Machine | None = None
