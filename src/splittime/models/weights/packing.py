"""From rows in a mapped checkpoint to a packed weight, holding little of it unpacked.

A weight is handed to the backend as a sequence of pieces of at most `PIECE_BYTES`, and the pages of a piece are
released when the next one is asked for: the head of a 128 k vocabulary, half a gigabyte, passes through a few
megabytes. Where a finished blob lies in the cache none of that is read.

What is integers in the checkpoint is turned into `RoundedRows` a piece at a time. Formats that store a weight by its
columns have bytes of each row on every page, so those pages (4 or 8 bits a weight) are released with the last piece.
Parts of one fused weight that differ, in their scheme or in the order of their columns, are packed each on its own and
stacked.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

import torch
from torch import Tensor

from splittime.kernels.api import LinearShape, Ops, RoundedRows, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.reference.rounding import dequantize
from splittime.kernels.rounded import UNITS
from splittime.models.quant.plan import INTEGERS, WeightPlan, kept_bytes
from splittime.models.weights.cache import PackedCache
from splittime.models.weights.source import Source, StoredWeight, whole_of

log = logging.getLogger("splittime.weights")

KINDS = ("layers", "head", "router")  # of weights, as `WeightPlan` has them
PIECE_BYTES = 8 << 20
PIECE_ROWS = 64  # pieces begin at multiples of these: the kernels' panels are 16 rows


@dataclass(frozen=True)
class WeightRows:
    """Some rows of a weight: a mapped tensor [out, in] or [out], or what is stored as integers; and the head_dim within
    which halves become pairs (0: they stay as they are). turned_dims: the first of each head, of which alone that is
    so; 0: all. scheme: of floats; None: as of the whole weight."""

    content: Tensor | StoredWeight
    head_dim: int = 0
    turned_dims: int = 0
    scheme: WeightScheme | None = None

    @property
    def shape(self) -> tuple[int, int]:
        if isinstance(self.content, Tensor):
            return self.content.shape[0], self.content.shape[-1]
        return self.content.out_features, self.content.in_features

    def arranged(self) -> Tensor:
        assert isinstance(self.content, Tensor)
        return pair_rows(self.content, self.head_dim, self.turned_dims) if self.head_dim else self.content


def pair_rows(rows: Tensor, head_dim: int, turned_dims: int = 0) -> Tensor:
    """Reorder the first dimension, [heads * head_dim, ...], within each head: halves become neighbouring pairs. Of each
    head the first `turned_dims` alone, unless it is 0."""
    if turned_dims not in (0, head_dim):
        turned, still = rows.unflatten(0, (-1, head_dim)).split((turned_dims, head_dim - turned_dims), dim=1)
        paired = pair_rows(turned.flatten(0, 1), turned_dims).unflatten(0, (-1, turned_dims))
        return torch.cat((paired, still), dim=1).flatten(0, 1)
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


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


class FoundSchemes:
    """Which weights turned out to be kept in which scheme, and the bytes of each."""

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
        finer = asked.finer if most.get("layers") == asked.layers else most.get("layers", asked.finer)
        return replace(asked, finer=finer, **most)

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


class Packer:
    """Packs each weight, or takes it from the cache; notes what was found."""

    def __init__(self, ops: Ops, source: Source, cache: PackedCache | None) -> None:
        self.ops = ops
        self.source = source
        self.cache = cache
        self.found = FoundSchemes()
        self._has_told = False

    def linear(
        self,
        name: str,
        parts: Sequence[WeightRows],
        biases: Sequence[WeightRows],
        scheme: WeightScheme,
        kind: str = "layers",
        is_expert: bool = False,
    ) -> PackedWeight:
        """The packed weight of these parts, one below the other; `biases` of all of them or of none. scheme: of what is
        floats in the checkpoint. kind: one of `KINDS`. is_expert: one of many with the same tokens, whose products
        are with activations as they are: a card has all of these in one."""
        bias = torch.cat([part.arranged().float() for part in biases]) if biases else None
        packed, begin = [], 0
        for run in _runs(parts):
            end = begin + sum(part.shape[0] for part in run)
            own_bias = None if bias is None else bias[begin:end]
            place = f"{name}+{begin}" if begin else name
            packed.append(self._one(place, run, own_bias, self._kept(run, scheme, is_expert), kind))
            begin = end
        return packed[0] if len(packed) == 1 else self.ops.stack_linear(packed)

    def _one(
        self, name: str, parts: Sequence[WeightRows], bias: Tensor | None, scheme: WeightScheme, kind: str
    ) -> PackedWeight:
        """Packs parts that are alike."""
        first = parts[0].content
        columns = None if isinstance(first, Tensor) else first.columns
        shape = LinearShape(sum(part.shape[0] for part in parts), parts[0].shape[1], bias, scheme, columns)
        blob_bytes = self.ops.packed_bytes(shape.out_features, shape.in_features, scheme)
        num_bytes = blob_bytes or kept_bytes(shape.out_features, shape.in_features, scheme)
        self.found.note(kind, scheme, columns is not None, num_bytes)
        cache = self.cache if scheme.name in INTEGERS and blob_bytes is not None else None
        if cache is not None and blob_bytes is not None:
            blob = cache.find(name, blob_bytes)
            if blob is not None:
                return self.ops.linear_from_blob(blob, shape)
        packed = self._pack(parts, shape)
        if cache is not None and packed.blob is not None:
            cache.keep(name, packed.blob)
        return packed

    def _pack(self, parts: Sequence[WeightRows], shape: LinearShape) -> PackedWeight:
        first, scheme = parts[0].content, shape.scheme
        if isinstance(first, Tensor):
            return self.ops.pack_linear(_Pieces(parts, self.source), shape.bias, scheme)
        if scheme.name not in UNITS:
            return self.ops.pack_linear(_widened(parts, self.source, first.scheme), shape.bias, scheme)
        return self.ops.pack_rounded(_rounded_pieces(parts, self.source), shape)

    def _kept(self, run: Sequence[WeightRows], scheme: WeightScheme, is_expert: bool) -> WeightScheme:
        """scheme: of floats. fp8 that the backend has no product for becomes float32, which holds a scale times an e4m3
        to the last bit where the scale has no more than 20 bits."""
        first, scheme = run[0].content, run[0].scheme or scheme
        if not isinstance(first, Tensor):
            scheme = first.scheme if self.ops.keeps(first.scheme) else self._widest(first.scheme)
        return replace(scheme, rounds_activations=False) if is_expert and scheme.name != "bfloat16" else scheme

    def _widest(self, stored: WeightScheme) -> WeightScheme:
        if not self._has_told:
            told = "the %s kernels have no product for %s: weights are kept as float32, exact, in four times the bytes"
            log.warning(told, self.ops.name, stored.name)
            self._has_told = True
        return WeightScheme("float32")


def _runs(parts: Sequence[WeightRows]) -> list[list[WeightRows]]:
    """The parts in order, neighbours together that one packed weight can hold."""
    return [list(run) for _, run in groupby(parts, _likeness)]


def _likeness(part: WeightRows) -> object:
    content = part.content
    if isinstance(content, Tensor):
        return part.scheme
    return content.scheme, None if content.columns is None else content.columns.numpy().tobytes()


class _Pieces(list[Tensor]):
    """The rows of these parts as tensors, each released when the next is taken or the walk ends."""

    def __init__(self, parts: Sequence[WeightRows], source: Source) -> None:
        self._source = source
        super().__init__(piece for part in parts for piece in self._split(part))

    def __iter__(self) -> Iterator[Tensor]:
        for piece in super().__iter__():
            yield piece
            self._source.release(piece)

    def _split(self, rows: WeightRows) -> Sequence[Tensor]:
        """Rows that change their order are copied, here and now."""
        arranged = rows.arranged()
        if rows.head_dim:
            self._source.release(rows.content)
            return [arranged]
        return arranged.split(_piece_rows(arranged.shape[1] * arranged.element_size(), PIECE_ROWS))


def _rounded_pieces(parts: Sequence[WeightRows], source: Source) -> Iterator[RoundedRows]:
    """The rows of these parts, of integers: a piece is made when it is asked for, a weight released after its last."""
    wholes = [whole_of(part.content) for part in parts]
    for part, whole, after in zip(parts, wholes, [*wholes[1:], None], strict=True):
        for begin, end in _split_rounded(part):
            yield _rounded(part, begin, end)
        if whole is not after:
            source.release(whole)


def _widened(parts: Sequence[WeightRows], source: Source, scheme: WeightScheme) -> list[Tensor]:
    """The parts as float32: what the numbers stored in `scheme` stand for."""
    pieces = _rounded_pieces(parts, source)
    return [dequantize(piece.integers, piece.scales, scheme, piece.zeros, piece.minima) for piece in pieces]


def _split_rounded(rows: WeightRows) -> list[tuple[int, int]]:
    """Pieces of whole heads."""
    out_features, in_features = rows.shape
    step = _piece_rows(in_features, lcm(PIECE_ROWS, rows.head_dim or 1))
    return [(begin, min(begin + step, out_features)) for begin in range(0, out_features, step)]


def _piece_rows(row_bytes: int, unit: int) -> int:
    return max(unit, PIECE_BYTES // row_bytes // unit * unit)


def _rounded(rows: WeightRows, begin: int, end: int) -> RoundedRows:
    assert not isinstance(rows.content, Tensor)
    piece = rows.content.rows(begin, end)
    if not rows.head_dim:
        return piece
    values = {name: value for name, value in vars(piece).items() if value is not None}
    return replace(piece, **{name: pair_rows(value, rows.head_dim, rows.turned_dims) for name, value in values.items()})
