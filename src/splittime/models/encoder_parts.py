"""What encoders are made of, and the reading of it: norms, a head, and products out of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.plain import LayerNorm
from splittime.models.encoder_config import EncoderConfig
from splittime.models.fields import Fields
from splittime.models.pooling import dense_layers
from splittime.models.weights.checkpoint import Checkpoint

POOLED = "sentence_embedding"
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class JudgingHead:
    """A layer with a bias, tanh, and another one with one output."""

    dense: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]

    def __call__(self, first: Tensor) -> Tensor:
        """first: the outputs of texts' first tokens, [texts, hidden] -> [texts, 1]."""
        return functional.linear(torch.tanh(functional.linear(first, *self.dense)), *self.output)


@dataclass(frozen=True)
class DenseLayer:
    """A layer behind the pooling."""

    weight: Tensor
    bias: Tensor | None
    is_tanh: bool

    def __call__(self, pooled: Tensor) -> Tensor:
        made = functional.linear(pooled, self.weight, self.bias)
        return torch.tanh(made) if self.is_tanh else made


def read_dense(folder: Path, size: int) -> tuple[DenseLayer, ...]:
    """Returns the layers behind the pooling, of sentence-transformers' form. size: of what is pooled. Raises
    `ConfigError` for what cannot be meant, or does not fit."""
    found = []
    for place, fields in dense_layers(folder):
        if (inputs := fields.count("in_features")) != size:
            raise fields.bad("in_features", inputs, f"{size}, as what it is given has")
        size = fields.count("out_features")
        found.append(_dense(Checkpoint(place), fields, size, inputs))
    return tuple(found)


def _dense(source: Checkpoint, fields: Fields, *shape: int) -> DenseLayer:
    for key in ("module_input_name", "module_output_name"):
        if (module := fields.text(key, POOLED)) != POOLED:
            raise fields.bad(key, module, POOLED)
    named = fields.text("activation_function", TANH)
    if named not in (TANH, IDENTITY):
        raise fields.bad("activation_function", named, f"{TANH} or {IDENTITY}")
    weight = source.take("linear.weight", *shape).float().clone()
    bias = source.take("linear.bias", shape[0]).float().clone() if fields.flag("bias", True) else None
    return DenseLayer(weight, bias, named == TANH)


class EncoderReader:
    """Takes tensors out of a checkpoint, by their names without what those of a model with a head begin with. first:
    the name by which that is known. A bias that the checkpoint does not have, and that its config does not
    speak of, is none."""

    first: ClassVar[str]

    def __init__(self, folder: Path, config: EncoderConfig, ops: Ops, scheme: WeightScheme) -> None:
        """Raises `ConfigError`, as all of it does, naming a file or a tensor that does not fit."""
        self.source, self.config, self.ops, self._scheme = Checkpoint(folder), config, ops, scheme
        self.prefix = config.prefix if config.prefix + self.first in self.source else ""

    def take(self, name: str, *shape: int) -> Tensor:
        return self.source.take(self.prefix + name, *shape)

    def linear(self, names: list[str], out_features: int, in_features: int) -> PackedWeight:
        """Returns the product of these weights, one below the other."""
        parts = [self.take(f"{name}.weight", out_features, in_features) for name in names]
        biases = [self._bias(name, out_features) for name in names]
        given = [bias for bias in biases if bias is not None]
        return self.ops.pack_linear(parts, torch.cat(given) if given else None, self._scheme)

    def norm(self, name: str) -> LayerNorm:
        width = self.config.hidden_size
        weight, bias = self.take(f"{name}.weight", width).float().clone(), self._bias(name, width)
        return LayerNorm(weight, bias, self.config.epsilon)

    def _bias(self, name: str, size: int) -> Tensor | None:
        is_due = any(part in name for part in self.config.biased)
        if is_due or self.prefix + f"{name}.bias" in self.source:
            return self.take(f"{name}.bias", size).float().clone()
        return None
