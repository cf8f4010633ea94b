"""Where weights come from: what the loader asks of a checkpoint, whatever its files look like.

Names are those of Hugging Face checkpoints ("model.layers.0.self_attn.q_proj"), shapes those of the config. A source
gives each weight as a tensor, or as a `StoredWeight` where it is already integers; what a module is stored as is the
source's to know, the loader asks by module. `checkpoint.Checkpoint` reads safetensors folders, plain and quantised,
`gguf.checkpoint.GgufCheckpoint` reads GGUF files; `load.open_source` takes the one for a path.

Random weights of a config's shapes, made where they are used: to measure the speed of a model that is not here.

Drawn with a standard deviation of half of one over the square root of the columns, so that activations neither vanish
nor overflow; norms are 1, biases 0. A tensor depends on its name alone: every start, and every rank, has the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.layer import LayerSpec, MlpSpec
from splittime.models.names import LayerNames

PLAIN = "safetensors"  # the format of what is not quantised


class StoredWeight(Protocol):
    """One linear weight [out_features, in_features] of a quantised checkpoint: integers and what they stand for.

    Published formats differ in how they lay integers out and agree on what they mean (`kernels.api.RoundedRows`). A
    reader of a format turns its own layout into `RoundedRows` when rows are asked for, so that no more than a piece of
    a large weight is in memory in this form. No value passes through 16 bits where scheme and arithmetic allow that.

    columns: int64 [in], for a weight whose groups are not neighbouring columns (GPTQ's act-order): column j of what
    `rows` gives multiplies x[columns[j]]; None: as they stand.
    """

    out_features: int
    in_features: int
    scheme: WeightScheme
    columns: Tensor | None

    def rows(self, begin: int, end: int) -> RoundedRows:
        """Rows [begin, end), their columns in the order of `columns`."""


class Table(Protocol):
    """An embedding table that is not kept as floats. nbytes: what it takes in the file."""

    nbytes: int

    def look_up(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, hidden], a new tensor."""


class Source(Protocol):
    """All that is in a checkpoint, each thing handed out by name; errors are `ConfigError`s naming the tensor.

    format: "safetensors" for floats; "awq", "gptq", "compressed-tensors" or "gguf" for what has weights as integers.
    recipe: what decides the meaning of the numbers in `files` and is in none of them ("" for nothing).
    files: all that the weights depend on. content_of: the tensors' names, each with the file that holds it.
    num_parameters: of what was taken: weights count by what they stand for, scales and zero points do not count.
    """

    @property
    def format(self) -> str: ...

    @property
    def recipe(self) -> str: ...

    @property
    def files(self) -> list[Path]: ...

    @property
    def content_of(self) -> dict[str, Path]: ...

    @property
    def num_parameters(self) -> int: ...

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name` (with its ".weight" or ".bias"), floats: a norm, a bias."""

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        """The weight of `module` ("model.layers.0.mlp.up_proj", "lm_head", an expert, a router) [out, in]. Asking for
        one twice counts it once: a tied head is asked for as "model.embed_tokens"."""

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor | Table:
        """The embedding table, of which single rows are looked up."""

    def rows_are_paired(self, module: str) -> bool:
        """Returns whether the rows of this query or key projection (and its bias) already have rotary pairs as
        neighbours: those of GGUF's llama have."""

    def release(self, read: Tensor | StoredWeight) -> None:
        """Let the system drop what was read of it; it stays usable. A tensor is one from `take` and the others, or a
        part of such a one."""

    def skip(self, name: str) -> None:
        """Say that `name`, if there, is rightly left unread."""

    def not_taken(self) -> list[str]:
        """The tensors that no part of the model asked for, in order, but for those that are known to say nothing."""


class WrappedSource:
    """A `Source` that hands out what another has; what it does otherwise is said by those that inherit."""

    def __init__(self, whole: Source) -> None:
        self._whole = whole

    @property
    def format(self) -> str:
        return self._whole.format

    @property
    def recipe(self) -> str:
        return self._whole.recipe

    @property
    def files(self) -> list[Path]:
        return self._whole.files

    @property
    def content_of(self) -> dict[str, Path]:
        return self._whole.content_of

    @property
    def num_parameters(self) -> int:
        return self._whole.num_parameters

    def take(self, name: str, *shape: int) -> Tensor:
        return self._whole.take(name, *shape)

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        return self._whole.take_linear(module, out_features, in_features)

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor | Table:
        return self._whole.take_table(module, num_rows, width)

    def rows_are_paired(self, module: str) -> bool:
        return self._whole.rows_are_paired(module)

    def release(self, read: Tensor | StoredWeight) -> None:
        self._whole.release(read.whole if isinstance(read, RowsOf) else read)

    def skip(self, name: str) -> None:
        self._whole.skip(name)

    def not_taken(self) -> list[str]:
        return self._whole.not_taken()


class RowsOf:
    """Rows [begin, end) of `whole`, a `StoredWeight` too."""

    def __init__(self, whole: StoredWeight, begin: int, end: int) -> None:
        self.whole = whole
        self.out_features = end - begin
        self.in_features = whole.in_features
        self.scheme = whole.scheme
        self.columns: Tensor | None = whole.columns
        self._begin = begin

    def rows(self, begin: int, end: int) -> RoundedRows:
        return self.whole.rows(self._begin + begin, self._begin + end)


def whole_of(weight: Tensor | StoredWeight) -> Tensor | StoredWeight:
    """Returns what these are rows of, if they are."""
    while isinstance(weight, RowsOf):
        weight = weight.whole
    return weight


def rows_of(weight: Tensor | StoredWeight, begin: int, end: int) -> Tensor | StoredWeight:
    return weight[begin:end] if isinstance(weight, Tensor) else RowsOf(weight, begin, end)


class JoinedSource(WrappedSource):
    """A `Source` of a checkpoint in which one module holds several projections, one below the other (Phi-3's queries,
    keys and values): it hands out each as a module of its own."""

    def __init__(self, whole: Source, names: LayerNames, layers: Sequence[LayerSpec]) -> None:
        super().__init__(whole)
        self._names, self._layers = names, layers
        self._last: tuple[str, Tensor | StoredWeight] | None = None

    def take(self, name: str, *shape: int) -> Tensor:
        module, _, part = name.rpartition(".")
        joined, begin, rows = self._place(module)
        return self._whole.take(f"{joined}.{part}", rows or shape[0], *shape[1:])[begin : begin + shape[0]]

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        joined, begin, rows = self._place(module)
        if not rows:
            return self._whole.take_linear(module, out_features, in_features)
        if self._last is None or self._last[0] != joined:
            self._last = joined, self._whole.take_linear(joined, rows, in_features)
        return rows_of(self._last[1], begin, begin + out_features)

    def _place(self, module: str) -> tuple[str, int, int]:
        """Returns the module that holds it, the row at which it begins there, and how many rows that has; of a module
        that stands by itself its own name, 0 and 0."""
        _, is_layer, rest = module.partition("model.layers.")
        number, _, below = rest.partition(".")
        if is_layer and number.isdigit():
            spec, names = self._layers[int(number)], self._names
            query, kv, part = spec.attention.query_width, spec.attention.kv_width, spec.feed_forward
            heads = {names.query: 0, names.key: query, names.value: query + kv}
            if names.qkv and below in heads:
                return f"model.layers.{number}.{names.qkv}", heads[below], query + 2 * kv
            if names.gate_up and below in (names.mlp.gate, names.mlp.up) and isinstance(part, MlpSpec):
                begin = part.inner * (below == names.mlp.up)
                return f"model.layers.{number}.{names.gate_up}", begin, 2 * part.inner
        return module, 0, 0


class DummySource:
    """A `source.Source`. dtype, device: of what is handed out."""

    format, recipe = PLAIN, "dummy"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.files: list[Path] = []
        self.content_of: dict[str, Path] = {}
        self._dtype, self._device = dtype, device
        self._sizes: dict[str, int] = {}

    @property
    def num_parameters(self) -> int:
        return sum(self._sizes.values())

    def take(self, name: str, *shape: int) -> Tensor:
        if len(shape) > 1:
            return self._drawn(name, shape)
        self._sizes[name] = shape[0]
        make = torch.zeros if name.endswith(".bias") else torch.ones
        return make(shape, dtype=self._dtype, device=self._device)

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor:
        return self._drawn(f"{module}.weight", (out_features, in_features))

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor:
        return self._drawn(f"{module}.weight", (num_rows, width))

    def rows_are_paired(self, module: str) -> bool:
        return True

    def release(self, read: Tensor | StoredWeight) -> None:
        """Does nothing: the memory goes with its last reference."""

    def skip(self, name: str) -> None:
        """There is nothing that was not asked for."""

    def not_taken(self) -> list[str]:
        return []

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._sizes[name] = tensor.numel()
        source = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        return tensor.normal_(0.0, 0.5 * shape[-1] ** -0.5, generator=source)
