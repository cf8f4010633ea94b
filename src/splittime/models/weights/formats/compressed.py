"""compressed-tensors (github.com/vllm-project/compressed-tensors), as llm-compressor writes it: integers along rows.

    "int-quantized"   weight             [out, in]              int8     -128..127
    "pack-quantized"  weight_packed      [out, in * bits / 32]  int32    q, unsigned, lowest first
                      weight_shape       [2]                             out, in
    both              weight_scale       [out, groups]
    "float-quantized" weight             [out, in]              e4m3, see `floats`; weight_scale, perhaps input_scale
    not symmetric     weight_zero_point  [out, groups]          int8     signed; or, of "pack-quantized",
                                         [out * bits / 32, groups] int32 unsigned, neighbouring rows in one word
    act-order         weight_g_idx       [in]                   int32    each column's group (-1 throughout: none)

Activations beside integers may stay floats or be rounded to 8 bits, symmetric, for each token as it comes; scales of
activations that are stored are refused. Beside e4m3 they are e4m3: by token, in groups of 128, or by a stored scale,
which is passed over (`floats`). (What the kernels do to activations is theirs to say: `kernels.api.WeightScheme`.)
"""

import re
from typing import Any

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.models.fields import Fields
from splittime.models.weights.formats import floats
from splittime.models.weights.formats import recipe as recipes
from splittime.models.weights.formats.stored import GroupedWeight, act_order, centred, num_groups, num_words, unpack

METHOD = "compressed-tensors"
WHOLE, PACKED = "int-quantized", "pack-quantized"
BITS = {WHOLE: (8,), PACKED: (4, 8)}
STRATEGIES = {WHOLE: ("channel",), PACKED: ("group", "channel")}
REORDERED = ("group", "dynamic")
ORDERS = (False, "weight", "static", *REORDERED)
TOKENS = {"num_bits": (8,), "type": ("int",), "strategy": ("token",), "symmetric": (True,), "dynamic": (True,)}


def parse(values: dict[str, Any]) -> recipes.Recipe:
    fields = Fields(values, "quantization_config.")
    layout = fields.text("format", "")
    if layout not in (*BITS, *floats.LAYOUTS):
        raise recipes.refuse("format", layout, f"{' or '.join(map(repr, (*BITS, floats.LAYOUTS[0])))} (of {METHOD})")
    _refuse_extras(values)
    group = _only_group(values.get("config_groups"))
    if group.get("format") not in (None, layout):
        raise recipes.refuse("config_groups.format", group["format"], f"{layout!r}, as format says")
    if layout in floats.LAYOUTS:
        return floats.parse_compressed(METHOD, fields, layout, group)
    activations = recipes.object_or_none(group.get("input_activations"), "config_groups.input_activations")
    if activations is not None:
        recipes.one_of_each(
            activations,
            "config_groups.input_activations",
            TOKENS,
            "activations rounded to 8 bits, symmetric, for each token as it comes",
        )
    weights = recipes.an_object(group.get("weights"), "config_groups.weights")
    recipes.refuse_others(
        weights, METHOD, {"type": ("int",), "dynamic": (False,), "actorder": ORDERS, "block_structure": ()}
    )
    recipes.refuse_others(weights, METHOD, {"num_bits": BITS[layout], "strategy": STRATEGIES[layout]})
    own = Fields(weights, "quantization_config.config_groups.weights.")
    return recipes.Recipe(
        method=METHOD,
        layout=layout,
        bits=own.count("num_bits"),
        group_size=recipes.group_size(own, "group_size") if own.text("strategy") == "group" else 0,
        symmetric=own.flag("symmetric", True),
        act_order=weights.get("actorder") in REORDERED,
        exceptions=recipes.patterns(fields, "ignore"),
        rounds_activations=activations is not None,
    )


def _refuse_extras(values: dict[str, Any]) -> None:
    recipes.refuse_others(values, METHOD, {"quantization_status": ("compressed",)})
    kept = recipes.object_or_none(values.get("kv_cache_scheme"), "kv_cache_scheme")
    if kept is not None and (kept.get("num_bits"), kept.get("type")) != (8, "float"):
        raise recipes.refuse("kv_cache_scheme", kept, "none, or one of 8 bits and type 'float'")
    for key in ("sparsity_config", "transform_config"):
        found = recipes.an_object(values.get(key) or {}, key)
        if found.get("format") not in (None, "dense") or found.get("config_groups"):
            raise recipes.refuse(key, found, "none")


def _only_group(groups: Any) -> dict[str, Any]:
    found = recipes.an_object(groups, "config_groups")
    if len(found) != 1:
        raise recipes.refuse("config_groups", sorted(found), "one group, of all Linear modules that are not in ignore")
    group = recipes.an_object(next(iter(found.values())), "config_groups")
    if group.get("targets") != ["Linear"]:
        raise recipes.refuse("config_groups.targets", group.get("targets"), "['Linear'], less what is in ignore")
    if group.get("output_activations") is not None:
        raise recipes.refuse("config_groups.output_activations", group["output_activations"], "none")
    return group


def is_excepted(module: str, recipe: recipes.Recipe) -> bool:
    """A module's whole name, or a regular expression from its beginning after "re:"."""
    return any(
        bool(re.match(name[3:], module)) if name.startswith("re:") else name == module for name in recipe.exceptions
    )


def is_stored(module: str, tensors: recipes.Tensors) -> bool:
    names, weight = ("weight_packed", "weight_scale"), f"{module}.weight"
    return any(f"{module}.{name}" in tensors for name in names) or tensors.is_int8(weight) or tensors.is_float8(weight)


class CompressedWeight(GroupedWeight):
    def __init__(
        self, tensors: recipes.Tensors, module: str, recipe: recipes.Recipe, out_features: int, in_features: int
    ) -> None:
        bits, groups = recipe.bits, num_groups(recipe, in_features)
        self._is_packed = recipe.layout == PACKED
        if self._is_packed:
            words = num_words(in_features, bits)
            self._weight = tensors.take_stored(f"{module}.weight_packed", (torch.int32,), out_features, words)
            _check_shape(tensors, f"{module}.weight_shape", out_features, in_features)
        else:
            self._weight = tensors.take_stored(f"{module}.weight", (torch.int8,), out_features, in_features)
        self._all_scales = tensors.take_stored(f"{module}.weight_scale", recipes.FLOATS, out_features, groups)
        self._zero_points = _take_zeros(tensors, f"{module}.weight_zero_point", recipe, out_features, groups)
        read = [self._weight, self._all_scales, *([] if self._zero_points is None else [self._zero_points])]
        super().__init__(module, recipe, out_features, in_features, read)
        if recipe.act_order:
            index = f"{module}.weight_g_idx"
            groups_of = tensors.take_stored(index, (torch.int32,), in_features)
            if (groups_of != -1).any():
                self.columns = act_order(index, groups_of, recipe.group_size or in_features, groups)

    def _integers(self, begin: int, end: int) -> Tensor:
        if not self._is_packed:
            return self._weight[begin:end]
        return centred(unpack(self._weight[begin:end], self.recipe.bits)[:, : self.in_features], self.recipe.bits)

    def _scales(self, begin: int, end: int) -> Tensor:
        return self._all_scales[begin:end]

    def _zeros(self, begin: int, end: int) -> Tensor | None:
        zeros, bits = self._zero_points, self.recipe.bits
        if zeros is None:
            return None
        if zeros.dtype == torch.int8:
            return zeros[begin:end].short() + (1 << (bits - 1))
        per_word = 32 // bits
        first = begin // per_word
        fields = unpack(zeros[first : -(-end // per_word)].t(), bits).t()
        return fields[begin - first * per_word : end - first * per_word].short()


def _take_zeros(
    tensors: recipes.Tensors, name: str, recipe: recipes.Recipe, out_features: int, groups: int
) -> Tensor | None:
    """Takes the zero points; some exports have them for a symmetric weight all the same."""
    if recipe.symmetric and name not in tensors:
        return None
    if recipe.layout == PACKED and not tensors.is_int8(name):
        return tensors.take_stored(name, (torch.int32,), num_words(out_features, recipe.bits), groups)
    return tensors.take_stored(name, (torch.int8,), out_features, groups)


def _check_shape(tensors: recipes.Tensors, name: str, out_features: int, in_features: int) -> None:
    shape = tensors.take_stored(name, (torch.int64, torch.int32), 2).tolist()
    if shape != [out_features, in_features]:
        message = f"weights: {name} is {shape}, the config asks for {[out_features, in_features]}"
        raise ConfigError(message, param=name, value=shape, limit=[out_features, in_features])
