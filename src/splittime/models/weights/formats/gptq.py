"""GPTQ as AutoGPTQ and GPTQModel store it (github.com/ModelCloud/GPTQModel; the method: arXiv:2210.17323).

    qweight [in * bits / 32, out]      int32    an output's weights for neighbouring inputs in one word, lowest first
    qzeros  [groups, out * bits / 32]  int32    neighbouring outputs in one word, lowest first
    scales  [groups, out]              float16
    g_idx   [in]                       int32    each input's group; with desc_act in any order

"gptq", the older of two checkpoint formats, stores each zero point less one, "gptq_v2" as it is. What a stored 15 (or
255) of the older means readers do not agree on: 16 (256), as the definition says and vLLM reads it, or 0. Here it is
16. GPTQModel though subtracts one of each field of a whole word at once, where 0 borrows from the next field; the same
addition, with its carries, gives back what it had, and is done where `meta.quantizer` names GPTQModel.

Some exports give every layer a bias of zeros, which the architecture does not have (`Checkpoint.not_taken`).
"""

from typing import Any

import torch
from torch import Tensor

from splittime.models.fields import Fields
from splittime.models.weights.formats.recipe import FLOATS, Recipe, Tensors, group_size, refuse, refuse_others
from splittime.models.weights.formats.stored import GroupedWeight, act_order, centred, num_groups, num_words, unpack

METHOD = "gptq"
ALLOWED: dict[str, tuple[Any, ...]] = {
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "dynamic": ({}, []),
}


def parse(values: dict[str, Any]) -> Recipe:
    fields = Fields(values, "quantization_config.")
    refuse_others(values, METHOD, ALLOWED)
    layout = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if layout != fields.text("format", layout):
        raise refuse("format", values["format"], f"{layout!r}, as checkpoint_format says")
    is_older = layout == "gptq"
    return Recipe(
        method=METHOD,
        layout=layout,
        bits=fields.count("bits"),
        group_size=group_size(fields, "group_size"),
        symmetric=fields.flag("sym", True),
        zero_shift=int(is_older),
        carries=is_older and "gptqmodel" in str(values.get("meta", "")).lower(),
        act_order=fields.flag("desc_act", False),
        only=_only(values),
    )


def is_excepted(module: str, recipe: Recipe) -> bool:
    """Returns whether the config lists what is quantised, and not this."""
    return bool(recipe.only) and not any(module.endswith(f".{name}") for name in recipe.only)


def _only(values: dict[str, Any]) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`: lists of names, one for each step of the making."""
    key = "modules_in_block_to_quantize"
    listed = [name for names in values.get(key) or [] for name in (names if isinstance(names, list) else [names])]
    if not all(isinstance(name, str) for name in listed):
        raise refuse(key, listed, "lists of module names")
    return tuple(listed)


def is_stored(module: str, tensors: Tensors) -> bool:
    return f"{module}.qweight" in tensors


class GptqWeight(GroupedWeight):
    def __init__(self, tensors: Tensors, module: str, recipe: Recipe, out_features: int, in_features: int) -> None:
        bits, groups = recipe.bits, num_groups(recipe, in_features)
        words = (torch.int32,)
        self._qweight = tensors.take_stored(f"{module}.qweight", words, num_words(in_features, bits), out_features)
        self._qzeros = tensors.take_stored(f"{module}.qzeros", words, groups, num_words(out_features, bits))
        self._all_scales = tensors.take_stored(f"{module}.scales", FLOATS, groups, out_features)
        read = [self._qweight, self._qzeros, self._all_scales]
        super().__init__(module, recipe, out_features, in_features, read, self._overflows_in(out_features, recipe))
        index = f"{module}.g_idx"
        if recipe.act_order or index in tensors:
            groups_of = tensors.take_stored(index, words, in_features)
            self.columns = act_order(index, groups_of, recipe.group_size or in_features, groups)

    def _overflows_in(self, out_features: int, recipe: Recipe) -> bool:
        """Returns whether a zero point of four bits is 16."""
        if recipe.bits == 8 or recipe.symmetric or recipe.carries or not recipe.zero_shift:
            return False
        return bool((unpack(self._qzeros, 4)[:, :out_features] == 15).any())

    def _integers(self, begin: int, end: int) -> Tensor:
        fields = unpack(self._qweight[:, begin:end].t(), self.recipe.bits)
        return centred(fields[:, : self.in_features], self.recipe.bits)

    def _scales(self, begin: int, end: int) -> Tensor:
        return self._all_scales[:, begin:end].t()

    def _zeros(self, begin: int, end: int) -> Tensor:
        bits, shift = self.recipe.bits, self.recipe.zero_shift
        per_word = 32 // bits
        first = begin // per_word
        words = self._qzeros[:, first : -(-end // per_word)]
        if self.recipe.carries:
            words, shift = _add_to_fields(words, bits), 0
        fields = unpack(words, bits)[:, begin - first * per_word : end - first * per_word]
        return fields.t().short() + shift


def _add_to_fields(words: Tensor, bits: int) -> Tensor:
    """One to each field, what overflows going into the next: int32 [n, m] -> the same."""
    ones = sum(1 << at for at in range(0, 32, bits))
    return (words.long() + ones).view(torch.int32).unflatten(1, (-1, 2))[..., 0]  # the lower half of each sum
