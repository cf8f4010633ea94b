"""What a model asks of the ranks that share it: processes that hold a part of every layer each and compute in lockstep.

`runner.ranks.group` does it with torch.distributed; `weights.shards` says which part is whose.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerStore, Ops
from splittime.kernels.compose import feed_forward, mix, normed_by
from splittime.kernels.layer import LayerWeights, MixtureWeights, PackedNorm
from splittime.kernels.low_rank import LayerUses


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


@dataclass(frozen=True)
class SharedLayer:
    """A layer of which each rank has a part, run as its parts: the ranks' contributions are summed, and the first rank
    brings the residual."""

    ops: Ops
    weights: LayerWeights
    ranks: Ranks

    @property
    def parts_reason(self) -> str:
        return f"{self.ranks.count} ranks add up what each has of a layer"

    @property
    def needs_host(self) -> bool:
        return isinstance(self.weights.feed_forward, MixtureWeights)

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        assert not uses, "ranks share no adapters"
        ops, layer = self.ops, self.weights
        output, part, given = layer.mixer.output, layer.feed_forward, normed_by(ops, layer.mixer_norm, hidden)
        mixed = mix(ops, layer.mixer, given, turns, kv, plan)

        def attended(residual: Tensor | None) -> Tensor:
            return ops.linear(mixed, output, residual)

        if layer.spec.places == "shared":  # one sum for both
            return self._added(lambda residual: feed_forward(ops, part, given, attended(residual)), hidden, None)
        hidden = self._added(attended, hidden, layer.norm_after_mixer)
        normed, after = normed_by(ops, layer.feed_forward_norm, hidden), layer.norm_after_feed_forward
        hidden = self._added(lambda residual: feed_forward(ops, part, normed, residual), hidden, after)
        return hidden if layer.factor == 1.0 else hidden * layer.factor

    def _added(self, part: Callable[[Tensor | None], Tensor], hidden: Tensor, after: PackedNorm | None) -> Tensor:
        """Returns the residual stream and the sum of all ranks' parts. part: given a residual, with that in it."""
        if after is not None:
            return hidden + self.ops.rms_norm(self.ranks.sum(part(None)), after)
        return self.ranks.sum(part(hidden if self.ranks.index == 0 else None))
