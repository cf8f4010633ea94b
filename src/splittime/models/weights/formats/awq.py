"""AWQ as AutoAWQ's "gemm" stores it (github.com/casper-hansen/AutoAWQ; the method: Lin et al., arXiv:2306.00978).

    qweight [in, out / 8]      int32    input j's weights for eight neighbouring outputs in one word
    qzeros  [groups, out / 8]  int32    likewise
    scales  [groups, out]      float16

Within a word the outputs are interleaved: from the lowest four bits up they are 0, 2, 4, 6, 1, 3, 5, 7.
"""

from typing import Any

import torch
from torch import Tensor

from splittime.models.fields import Fields
from splittime.models.weights.formats import recipe as recipes
from splittime.models.weights.formats.stored import GroupedWeight, num_groups, num_words

METHOD = "awq"
WORD = 8  # outputs
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of outputs 0 to 7


def parse(values: dict[str, Any]) -> recipes.Recipe:
    fields = Fields(values, "quantization_config.")
    recipes.refuse_others(values, METHOD, {"bits": (4,), "w_bit": (4,)})
    for key in ("version", "format"):
        version = fields.text(key, "gemm")
        if version.lower() != "gemm":
            raise recipes.refuse(key, version, "'gemm' (of awq)")
    return recipes.Recipe(
        method=METHOD,
        layout="gemm",
        bits=4,
        group_size=recipes.group_size(fields, "group_size", "q_group_size"),
        symmetric=not fields.flag("zero_point", True),
        exceptions=recipes.names(fields, "modules_to_not_convert"),
    )


is_excepted = recipes.is_excepted_by_parts


def is_stored(module: str, tensors: recipes.Tensors) -> bool:
    return f"{module}.qweight" in tensors


class AwqWeight(GroupedWeight):
    def __init__(
        self, tensors: recipes.Tensors, module: str, recipe: recipes.Recipe, out_features: int, in_features: int
    ) -> None:
        words, groups = num_words(out_features, 4), num_groups(recipe, in_features)
        self._qweight = tensors.take_stored(f"{module}.qweight", (torch.int32,), in_features, words)
        self._all_scales = tensors.take_stored(f"{module}.scales", recipes.FLOATS, groups, out_features)
        self._qzeros = None
        if not recipe.symmetric or f"{module}.qzeros" in tensors:
            self._qzeros = tensors.take_stored(f"{module}.qzeros", (torch.int32,), groups, words)
        read = [self._qweight, self._all_scales, *([] if self._qzeros is None else [self._qzeros])]
        super().__init__(module, recipe, out_features, in_features, read)

    def _integers(self, begin: int, end: int) -> Tensor:
        return _outputs(self._qweight, begin, end).view(torch.int8)

    def _scales(self, begin: int, end: int) -> Tensor:
        return self._all_scales[:, begin:end].t()

    def _zeros(self, begin: int, end: int) -> Tensor | None:
        return None if self._qzeros is None else _outputs(self._qzeros, begin, end).short()


def _outputs(words: Tensor, begin: int, end: int) -> Tensor:
    """Words of [n, out / 8] -> uint8 [end - begin, n]."""
    first = begin // WORD
    blocks = words[:, first : -(-end // WORD)].t().clone(memory_format=torch.contiguous_format)
    pairs = blocks.view(torch.uint8).unflatten(1, (-1, 4))  # [blocks, n, byte of the word]
    outputs = torch.empty(len(blocks), WORD, words.shape[0], dtype=torch.uint8)
    for output, place in enumerate(PLACES):
        fields = pairs[..., place // 2]
        outputs[:, output] = fields >> 4 if place % 2 else fields & 15
    return outputs.flatten(0, 1)[begin - first * WORD : end - first * WORD]
