"""Which part of a model is whose, where ranks share it (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).

    rows cut      q, k, v by whole heads; gate and up (of each expert); the head, by the vocabulary
    columns cut   o and down (of each expert): the products are summed over the ranks
    whole         norms, routers, the embedding table: every rank computes them alike, to the last bit

A rank attends with its heads and keeps their keys and values. Of fewer KV heads than ranks each is held by several,
next to the query heads that read it. Biases are cut like rows; one that follows a sum is the first rank's alone, as is
the residual. The head is cut, not repeated: of small models, and at many ranks, it would be most of what a step reads.
Of the embedding only the rows that are looked up are read.

`CutSource` stands between a checkpoint and the loader, which is told of a model as large as one rank's part
(`own_config`) and asks for its weights. Floats stay views of the file: of a weight cut by columns the pages of whole
rows are mapped, and let go.

Some rows, or some columns, of a weight that is integers in the checkpoint are a `StoredWeight` of their own. Rows can
be cut anywhere. Columns are cut between groups, so that each part has its own scales; of one group a row, each part has
that group's scale. Columns that act-order has moved apart cannot be cut: a rank's inputs would be in all groups. What
is cut off by columns is unpacked too, a piece at a time, and dropped.
"""

from dataclasses import astuple, replace
from typing import Literal

import msgspec
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.layer import DeltaSpec, LayerSpec, MlpSpec, mlps_of
from splittime.kernels.rounded import STEP_COLUMNS, UNITS
from splittime.models.architectures import ARCHITECTURES
from splittime.models.config import ModelConfig
from splittime.models.ranks import Ranks
from splittime.models.weights.source import RowsOf, Source, StoredWeight, WrappedSource, rows_of

Cut = Literal["rows", "kv", "columns", "head", "whole"]
EXPERTS_INNER = "experts' intermediate_size"


def _cuts() -> dict[str, Cut]:
    """By the last part of a module's name; what is not here stays whole."""
    found: dict[str, Cut] = {"lm_head": "head", "embed_tokens": "head"}
    for names in (one.names for one in ARCHITECTURES.values()):
        attention: dict[str, Cut] = {names.query: "rows", names.key: "kv", names.value: "kv", names.output: "columns"}
        attention[names.sinks] = "rows"
        mlps = {
            name: cut
            for mlp in (names.mlp, names.expert, names.shared)
            for name, cut in zip(astuple(mlp), MLP_CUTS, strict=True)
        }
        found |= {module.rpartition(".")[2]: cut for module, cut in (attention | mlps).items() if module}
    return found


MLP_CUTS: tuple[Cut, ...] = ("rows", "rows", "columns")  # gate, up, down
CUTS = _cuts()


def bounds(total: int, index: int, count: int) -> tuple[int, int]:
    """The part of [0, total) that is rank `index`'s; their sizes differ by one at most."""
    return total * index // count, total * (index + 1) // count


def widest(total: int, count: int) -> int:
    """Returns the size of the widest of these parts."""
    return -(-total // count)


def check(model: ModelConfig, count: int) -> None:
    """Raises `ConfigError` for a number of ranks that this model cannot be cut for."""
    for layer in dict.fromkeys(model.layers):
        if isinstance(layer.mixer, DeltaSpec):
            raise _refusal(count, "layers keep states, which ranks do not share", 1)
        heads, kv_heads = layer.mixer.num_heads, layer.mixer.num_kv_heads
        if heads % count:
            raise _refusal(count, f"num_attention_heads {heads} is no multiple of it", heads)
        if kv_heads % count and count % kv_heads:
            raise _refusal(count, f"num_key_value_heads {kv_heads} is neither a multiple nor a divisor of it", kv_heads)
        name = "intermediate_size" if isinstance(layer.feed_forward, MlpSpec) else EXPERTS_INNER
        for mlp in mlps_of(layer.feed_forward):
            if mlp.inner % count:
                raise _refusal(count, f"{name} {mlp.inner} is no multiple of it", mlp.inner)
    if model.vocab_size < count:
        raise _refusal(count, f"vocab_size is {model.vocab_size}", model.vocab_size)


def _refusal(count: int, why: str, limit: int) -> ConfigError:
    message = f"tensor_parallel_size is {count}, but the model's {why}"
    hint = "a number that divides the model's heads and inner sizes, such as 1 or 2"
    return ConfigError(message, param="tensor_parallel_size", value=count, limit=limit, hint=hint)


def own_config(model: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The shape of one rank's part; vocab_size stays the whole model's. Raises `ConfigError`."""
    check(model, ranks.count)
    own = {layer: _own_layer(layer, ranks.count) for layer in dict.fromkeys(model.layers)}
    return msgspec.structs.replace(model, layers=tuple(own[layer] for layer in model.layers))


def _own_layer(layer: LayerSpec, count: int) -> LayerSpec:
    mixer, part = layer.attention, layer.feed_forward
    heads = replace(mixer, num_heads=mixer.num_heads // count, num_kv_heads=max(1, mixer.num_kv_heads // count))
    expert, *shared = (replace(mlp, inner=mlp.inner // count) for mlp in mlps_of(part))
    own = expert if isinstance(part, MlpSpec) else replace(part, expert=expert, shared=shared[0] if shared else None)
    return replace(layer, mixer=heads, feed_forward=own)


def counted(own: ModelConfig, ranks: Ranks) -> ModelConfig:
    """`own_config` with the vocabulary of this rank's part of the head: what its products cost."""
    begin, end = bounds(own.vocab_size, ranks.index, ranks.count)
    return msgspec.structs.replace(own, vocab_size=end - begin)


class CutSource(WrappedSource):
    """A `source.Source` of one rank's part of another; sizes asked for are those of `own_config`."""

    def __init__(self, whole: Source, model: ModelConfig, ranks: Ranks) -> None:
        """model: the whole one's shape."""
        super().__init__(whole)
        self._index, self._count = ranks.index, ranks.count
        self._layers = model.layers

    @property
    def recipe(self) -> str:
        """Packed weights of one rank are no other's."""
        return f"{self._whole.recipe} rank {self._index} of {self._count}"

    def take(self, name: str, *shape: int) -> Tensor:
        module, _, part = name.rpartition(".")
        cut = _cut_of(module if part == "bias" else name)
        if cut == "columns":
            bias = self._whole.take(name, *shape)
            return bias if self._index == 0 else torch.zeros_like(bias)
        if cut == "whole":
            return self._whole.take(name, *shape)
        rows, begin = self._place(module, cut, shape[0])
        return self._whole.take(name, rows)[begin : begin + shape[0]]

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        cut = _cut_of(module)
        if cut == "columns":
            begin = self._index * in_features
            weight = self._whole.take_linear(module, out_features, in_features * self._count)
            return _columns(module, weight, begin, begin + in_features)
        if cut == "head":
            begin, end = bounds(out_features, self._index, self._count)
            return rows_of(self._whole.take_linear(module, out_features, in_features), begin, end)
        rows, begin = self._place(module, cut, out_features)
        return rows_of(self._whole.take_linear(module, rows, in_features), begin, begin + out_features)

    def _place(self, module: str, cut: Cut, own: int) -> tuple[int, int]:
        """Returns how many rows there are in all, and where this rank's `own` begin."""
        if cut == "whole":
            return own, 0
        if cut == "rows":
            return own * self._count, own * self._index
        mixer = self._layers[int(module.split(".")[2])].attention  # model.layers.N.
        return mixer.kv_width, mixer.num_kv_heads * self._index // self._count * mixer.head_dim

    def release(self, read: Tensor | StoredWeight) -> None:
        if isinstance(read, Tensor):
            self._whole.release(self._whole_rows(read))
        else:
            self._whole.release(read.whole if isinstance(read, RowsOf | ColumnsOf) else read)

    def _whole_rows(self, read: Tensor) -> Tensor:
        """Returns the whole rows of a weight cut by columns: only pages that hold nothing else are let go."""
        if read.dim() < 2 or read.is_contiguous() or read.stride(1) != 1:
            return read
        width = read.stride(0)
        begin = read.storage_offset() - self._index * read.shape[1]
        return read.as_strided((len(read), width), (width, 1), begin)


def _cut_of(module: str) -> Cut:
    return CUTS.get(module.rpartition(".")[2], "whole")


def _columns(module: str, weight: Tensor | StoredWeight, begin: int, end: int) -> Tensor | StoredWeight:
    return weight[:, begin:end] if isinstance(weight, Tensor) else ColumnsOf(module, weight, begin, end)


HINT = "a smaller tensor_parallel_size, or another checkpoint of the model"


class ColumnsOf:
    """Columns [begin, end) of `whole`. Raises `ConfigError` naming the module where groups forbid it."""

    def __init__(self, module: str, whole: StoredWeight, begin: int, end: int) -> None:
        self.whole = whole
        self.out_features = whole.out_features
        self.in_features = end - begin
        self.columns: Tensor | None = None
        self._columns = slice(begin, end)
        self._groups = _groups(module, whole, begin, end)
        scheme = _scheme(whole, end - begin)  # of a part that begins between two steps, scales are float16
        self.scheme = scheme if begin % STEP_COLUMNS == 0 else replace(scheme, bits=0)

    def rows(self, begin: int, end: int) -> RoundedRows:
        found = self.whole.rows(begin, end)
        scales, zeros, minima = (
            None if each is None else each[:, self._groups] for each in (found.scales, found.zeros, found.minima)
        )
        assert scales is not None
        blocks = slice(self._columns.start // STEP_COLUMNS, -(-self._columns.stop // STEP_COLUMNS))
        steps = found.steps[..., blocks] if found.steps is not None and self.scheme.bits else None
        return RoundedRows(found.integers[:, self._columns], scales, zeros, minima, steps)


def _is_one_group(whole: StoredWeight) -> bool:
    return whole.scheme.group == 0 or whole.scheme.group >= whole.in_features


def _groups(module: str, whole: StoredWeight, begin: int, end: int) -> slice:
    if whole.columns is not None:
        message = f"weights: the inputs of {module} are in act-order, so they cannot be cut for several ranks"
        raise ConfigError(message, param=module, hint=HINT)
    if _is_one_group(whole):
        return slice(None)
    group = whole.scheme.group
    if begin % group or (end % group and end != whole.in_features):
        message = f"weights: {module} has groups of {group} columns; a rank's part [{begin}, {end}) cuts through one"
        raise ConfigError(message, param=module, value=end - begin, limit=group, hint=HINT)
    return slice(begin // group, -(-end // group))


def _scheme(whole: StoredWeight, width: int) -> WeightScheme:
    if whole.scheme.group == 0 or not _is_one_group(whole):
        return whole.scheme
    unit = UNITS[whole.scheme.name]
    return replace(whole.scheme, group=-(-width // unit) * unit)
