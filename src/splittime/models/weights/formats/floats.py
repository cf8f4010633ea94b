"""Weights that are e4m3 in the file (Micikevicius et al., arXiv:2209.05433): one byte each, and scales.

    w[i, j] = scale(i, j) * q[i, j]

    "tensor"    scale []  or [1]                              one of the whole weight
    "channel"   scale [out, 1]                                one an output
    "block"     scale [out / 128, in / 128, rounded up]       one of 128 x 128 weights

They come as `RoundedRows` with e4m3 in the place of integers and a scale for each row (and 128 columns): no number of
the file is rounded. Looked at on the way: scales are finite and above 0, and no weight is NaN, which e4m3 has two of.

Scales of activations that were measured beforehand (`input_scale`) are read, checked and not used: the kernels that
round activations work out a scale for each token, which is never larger and cuts nothing off.

A `quantization_config` of compressed-tensors says for them ("float-quantized"):

    weights by      "tensor", "channel" or "block" of 128 x 128
    activations by  "token" as it comes, or "tensor" as it comes or with a stored scale; beside blocks "group" of 128

Weights alone in e4m3, with activations as they are, are refused: no kernel here multiplies the two.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.models.fields import Fields
from splittime.models.weights.formats import recipe as recipes

BLOCK = 128  # rows and columns
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


class FloatWeight:
    """A `weights.stored.StoredWeight`; name: of the module. tensors: all that it reads, for `Checkpoint.release`."""

    columns: Tensor | None = None

    def __init__(
        self, tensors: recipes.Tensors, module: str, recipe: recipes.Recipe, out_features: int, in_features: int
    ) -> None:
        self.name = module
        self.out_features = out_features
        self.in_features = in_features
        self.scheme = WeightScheme("fp8", recipe.group_size, rounds_activations=recipe.rounds_activations)
        self._kind = recipe.scales
        self._values = tensors.take_stored(f"{module}.weight", (FLOAT8,), out_features, in_features)
        self._scales = _take_scales(tensors, f"{module}.{recipe.scale_name}", recipe.scales, out_features, in_features)
        if recipe.has_input_scale:
            _take_scales(tensors, f"{module}.input_scale", "tensor", out_features, in_features)
        self.tensors = [self._values]

    def rows(self, begin: int, end: int) -> RoundedRows:
        values = self._values[begin:end]
        if bool((values.view(torch.int8) & 0x7F == 0x7F).any()):
            _refuse(f"{self.name}.weight", "NaN", "the file is damaged, or its conversion overflowed")
        return RoundedRows(values, self._scales_of(begin, end).contiguous())

    def _scales_of(self, begin: int, end: int) -> Tensor:
        """float32 [rows, groups]."""
        if self._kind == "tensor":
            return self._scales.expand(end - begin, 1)
        if self._kind == "channel":
            return self._scales[begin:end]
        return self._scales[torch.arange(begin, end) // BLOCK]


def _take_scales(tensors: recipes.Tensors, name: str, kind: str, out_features: int, in_features: int) -> Tensor:
    """float32 [1, 1], [out, 1] or [blocks, blocks]. Raises `ConfigError` for what cannot be a scale."""
    shape = {
        "tensor": (1,),
        "channel": (out_features, 1),
        "block": (-(-out_features // BLOCK), -(-in_features // BLOCK)),
    }[kind]
    found = tensors.shape_of(name)
    if kind != "block" and found is not None and found == shape[:-1]:
        shape = found  # [] or [out], as some exports have them
    scales = tensors.take_stored(name, recipes.FLOATS, *shape).float()
    wrong = ~((scales > 0) & (scales * LARGEST).isfinite())
    if bool(wrong.any()):
        value = float(scales[wrong][0])
        _refuse(name, f"{value:g}", "a scale is above 0, and 448 of it are finite; the file is damaged")
    return scales if kind == "block" else scales.reshape(-1, 1)


def _refuse(name: str, value: str, why: str) -> NoReturn:
    hint = "convert the model again, or take the unquantised one and --quantization fp8 (on a card) or int8"
    raise ConfigError(f"weights: {name} holds {value}: {why}", param=name, value=value, hint=hint)


LAYOUTS = ("float-quantized", "naive-quantized")  # the second is its name in older exports
FLOAT_STRATEGIES = {"tensor": ("token", "tensor"), "channel": ("token", "tensor"), "block": ("group",)}
"""The strategies for weights, and those for activations that may stand beside each."""
WEIGHTS, ACTIVATIONS = "config_groups.weights", "config_groups.input_activations"


def parse_compressed(method: str, fields: Fields, layout: str, group: dict[str, Any]) -> recipes.Recipe:
    weights = recipes.an_object(group.get("weights"), WEIGHTS)
    recipes.refuse_others(weights, method, {"symmetric": (True,), "dynamic": (False,), "actorder": (False,)})
    recipes.one_of_each(weights, WEIGHTS, {"type": ("float",), "num_bits": (8,), "strategy": tuple(FLOAT_STRATEGIES)})
    strategy = weights["strategy"]
    if strategy == "block":
        recipes.one_of_each(weights, WEIGHTS, {"block_structure": ([BLOCK, BLOCK],)})
    return recipes.Recipe(
        method=method,
        layout=layout,
        bits=8,
        group_size=BLOCK if strategy == "block" else 0,
        symmetric=True,
        exceptions=recipes.patterns(fields, "ignore"),
        scales=strategy,
        scale_name="weight_scale",
        has_input_scale=_is_static(group.get("input_activations"), strategy),
        rounds_activations=True,
    )


def _is_static(given: Any, strategy: str) -> bool:
    """Returns whether activations have a stored scale."""
    activations = recipes.an_object(given, ACTIVATIONS)
    ways = FLOAT_STRATEGIES[strategy]
    choices = {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "strategy": ways}
    recipes.one_of_each(activations, ACTIVATIONS, choices, f"activations in e4m3, symmetric, by {' or by '.join(ways)}")
    way, is_static = activations["strategy"], activations.get("dynamic") is False
    if way == "group":
        recipes.one_of_each(activations, ACTIVATIONS, {"group_size": (BLOCK,)})
    if way != "tensor":
        recipes.one_of_each(activations, ACTIVATIONS, {"dynamic": (True,)}, "scales worked out as activations come")
    return is_static
