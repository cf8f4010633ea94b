"""What a `quantization_config` of compressed-tensors says where weights are e4m3 (`floats`): "float-quantized".

    weights by      "tensor", "channel" or "block" of 128 x 128
    activations by  "token" as it comes, or "tensor" as it comes or with a stored scale; beside blocks "group" of 128

Weights alone in e4m3, with activations as they are, are refused: no kernel here multiplies the two.
"""

from typing import Any

from splittime.models.fields import Fields
from splittime.models.weights.formats.floats import BLOCK
from splittime.models.weights.formats.recipe import Recipe, an_object, one_of_each, patterns, refuse_others

LAYOUTS = ("float-quantized", "naive-quantized")  # the second is its name in older exports
STRATEGIES = {"tensor": ("token", "tensor"), "channel": ("token", "tensor"), "block": ("group",)}
"""The strategies for weights, and those for activations that may stand beside each."""
WEIGHTS, ACTIVATIONS = "config_groups.weights", "config_groups.input_activations"


def parse(method: str, fields: Fields, layout: str, group: dict[str, Any]) -> Recipe:
    weights = an_object(group.get("weights"), WEIGHTS)
    refuse_others(weights, method, {"symmetric": (True,), "dynamic": (False,), "actorder": (False,)})
    one_of_each(weights, WEIGHTS, {"type": ("float",), "num_bits": (8,), "strategy": tuple(STRATEGIES)})
    strategy = weights["strategy"]
    if strategy == "block":
        one_of_each(weights, WEIGHTS, {"block_structure": ([BLOCK, BLOCK],)})
    return Recipe(
        method=method,
        layout=layout,
        bits=8,
        group_size=BLOCK if strategy == "block" else 0,
        symmetric=True,
        exceptions=patterns(fields, "ignore"),
        scales=strategy,
        scale_name="weight_scale",
        has_input_scale=_is_static(group.get("input_activations"), strategy),
        rounds_activations=True,
    )


def _is_static(given: Any, strategy: str) -> bool:
    """Whether activations have a stored scale."""
    activations = an_object(given, ACTIVATIONS)
    ways = STRATEGIES[strategy]
    choices = {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "strategy": ways}
    one_of_each(activations, ACTIVATIONS, choices, f"activations in e4m3, symmetric, by {' or by '.join(ways)}")
    way, is_static = activations["strategy"], activations.get("dynamic") is False
    if way == "group":
        one_of_each(activations, ACTIVATIONS, {"group_size": (BLOCK,)})
    if way != "tensor":
        one_of_each(activations, ACTIVATIONS, {"dynamic": (True,)}, "scales worked out as activations come")
    return is_static
