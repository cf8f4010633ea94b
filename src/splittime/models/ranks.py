"""What a model asks of the ranks that share it: processes that hold a part of every layer each and compute in lockstep.

`runner.parallel.group` does it with torch.distributed; `weights.shards` says which part is whose.
"""

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """As one of them sees it: it is number `index` of `count`. Every rank makes the same calls in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part`, in its place: the same bits on every rank."""

    def join(self, columns: Tensor, total: int) -> Tensor:
        """columns [N, own], as `shards.bounds` cuts `total` -> [N, total]: those of all, the same on every rank."""

    def each(self, number: int) -> list[int]:
        """Every rank's `number`, by rank."""
