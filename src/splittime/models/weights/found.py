"""Which weights turned out to be kept in which scheme, and the bytes of each: what is told to the user, and counted."""

from collections import Counter
from dataclasses import dataclass

from splittime.kernels.api import WeightScheme
from splittime.models.quant.plan import WeightPlan

KINDS = ("layers", "head", "router")  # as `WeightPlan` has them


@dataclass(frozen=True)
class _Kept:
    scheme: WeightScheme
    is_reordered: bool

    def describe(self) -> str:
        scheme = self.scheme
        parts = [f"{scheme.name} in groups of {scheme.group}" if scheme.group else scheme.name]
        parts += ["zero points"] if scheme.has_zeros else []
        parts += ["minima"] if scheme.has_minima else []
        parts += ["act-order"] if self.is_reordered else []
        return ", ".join(parts)


class Found:
    def __init__(self) -> None:
        self._bytes: dict[str, Counter[_Kept]] = {kind: Counter() for kind in KINDS}

    @property
    def num_bytes(self) -> int:
        return sum(sum(kept.values()) for kept in self._bytes.values())

    def note(self, kind: str, scheme: WeightScheme, is_reordered: bool, num_bytes: int) -> None:
        """kind: one of `KINDS`."""
        self._bytes[kind][_Kept(scheme, is_reordered)] += num_bytes

    def plan(self, asked: WeightPlan) -> WeightPlan:
        """The scheme that most bytes of each kind are in; as asked where there are none."""
        most = {kind: kept.most_common(1)[0][0].scheme for kind, kept in self._bytes.items() if kept}
        return WeightPlan(*(most.get(kind, getattr(asked, kind)) for kind in KINDS))

    def describe(self, source_format: str) -> str:
        """As in "awq: int4 in groups of 128, zero points; head bfloat16"."""
        told = {kind: self._describe(kind) for kind in KINDS if self._bytes[kind]}
        others = [f"; {kind} {what}" for kind, what in told.items() if kind != "layers" and what != told["layers"]]
        return f"{source_format}: {told['layers']}{''.join(others)}"

    def _describe(self, kind: str) -> str:
        kept = self._bytes[kind]
        if len(kept) == 1:
            return next(iter(kept)).describe()
        total = sum(kept.values())
        return " + ".join(f"{one.describe()} ({size / total:.0%})" for one, size in kept.most_common())
