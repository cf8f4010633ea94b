"""What a step of this model needs of the machine at the least, from its shape and from its packed weights as they lie.

Left out, each well under a per cent of a step: norms, rotary turns, activations, the rows of the embedding that are
looked up, and the arithmetic of everything that is not a product. Of a mixture of experts one token's experts count:
a step of several tokens reads more, how many more depends on the text.
"""

from typing import Protocol

from splittime.core.facts import TokenCost
from splittime.kernels.api import WeightScheme
from splittime.kernels.layer import LayerSpec, MixtureSpec
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan, kept_bytes


class PackedSizes(Protocol):
    """What `Ops` says of the size of weights."""

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int | None:
        """Returns the size of a packed weight, None where it is not known to differ from `kept_bytes`."""


def cost(
    model: ModelConfig, plan: WeightPlan, sizes: PackedSizes, weights_bytes: int, kv_bytes_per_token: int
) -> TokenCost:
    """weights_bytes: of all packed weights, the head's and every expert's among them."""
    mixers = [layer.mixer for layer in model.layers]
    routers = [layer.feed_forward.router for layer in model.layers if isinstance(layer.feed_forward, MixtureSpec)]
    idle_expert_bytes = sum(_idle_expert_bytes(layer, model.hidden_size, plan, sizes) for layer in model.layers)
    return TokenCost(
        weight_bytes=weights_bytes - idle_expert_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        operations_per_token=2 * sum(_layer_weights(layer, model.hidden_size) for layer in model.layers),
        operations_per_context_token=4 * sum(mixer.query_width for mixer in mixers),
        head_bytes=_bytes(sizes, model.vocab_size, model.hidden_size, plan.head),
        operations_per_sample=2 * model.vocab_size * model.hidden_size,
        window_tokens=max(model.windows, default=None),
        windowed_share=len(model.windows) / model.num_layers,
        idle_expert_bytes=idle_expert_bytes,
        num_experts=routers[0].num_experts if routers else 0,
        chosen_experts=routers[0].num_chosen if routers else 0,
    )


def _layer_weights(layer: LayerSpec, hidden_size: int) -> int:
    """Returns how many weights one token is multiplied by."""
    return layer.mixer.num_weights(hidden_size) + layer.feed_forward.num_weights(hidden_size)


def _idle_expert_bytes(layer: LayerSpec, hidden_size: int, plan: WeightPlan, sizes: PackedSizes) -> int:
    """Returns the bytes of the experts that one token does not choose."""
    part = layer.feed_forward
    if not isinstance(part, MixtureSpec):
        return 0
    gate_up = _bytes(sizes, 2 * part.expert.inner, hidden_size, plan.layers)
    down = _bytes(sizes, hidden_size, part.expert.inner, plan.layers)
    return (part.router.num_experts - part.router.num_chosen) * (gate_up + down)


def _bytes(sizes: PackedSizes, out_features: int, in_features: int, scheme: WeightScheme) -> int:
    return sizes.packed_bytes(out_features, in_features, scheme) or kept_bytes(out_features, in_features, scheme)
