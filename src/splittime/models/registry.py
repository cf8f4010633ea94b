"""Which architectures are served, and the facts in which they differ. To add one, add a row.

What `config.json` leaves out is filled with the default that transformers gives that architecture. What a row cannot
say (a layer that is not attention then MLP, another norm, another activation) is not supported and is refused by name.
"""

from typing import Literal

import msgspec

from splittime.core.errors import ConfigError

BiasRule = Literal["always", "never", "attention_bias"]


class MoeNames(msgspec.Struct, frozen=True):
    """How a checkpoint calls the tensors of a mixture-of-experts block, below `model.layers.N.`."""

    block: str
    gate: str
    up: str
    down: str


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    qkv_bias, output_bias: of the attention's projections; "attention_bias" means that the config's key decides.
    mlp_bias: whether the config's key `mlp_bias` is honoured.
    qk_norm: queries and keys pass an RMS norm of each head before the rotary embedding.
    window: which layers use the config's `sliding_window`: none, all, or those that `layer_types` or
        `max_window_layers` say (and then only with `use_sliding_window`).
    """

    qkv_bias: BiasRule = "never"
    output_bias: BiasRule = "never"
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "all", "all_if_used", "by_layer"] = "none"
    moe: MoeNames | None = None
    always_normalises_experts: bool = False
    sliding_window_default: int | None = None
    head_dim_default: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps_default: float = 1e-6
    rope_theta_default: float = 10_000.0


_MIXTRAL_NAMES = MoeNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN_NAMES = MoeNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias=True),
    "MistralForCausalLM": Architecture(window="all", sliding_window_default=4096),
    "Qwen2ForCausalLM": Architecture(qkv_bias="always", window="by_layer", sliding_window_default=4096),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="by_layer",
        sliding_window_default=4096,
        head_dim_default=128,
    ),
    "MixtralForCausalLM": Architecture(
        window="all",
        moe=_MIXTRAL_NAMES,
        always_normalises_experts=True,
        rms_norm_eps_default=1e-5,
        rope_theta_default=1_000_000.0,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="all_if_used",
        sliding_window_default=4096,
        moe=_QWEN_NAMES,
    ),
}


def find(name: str) -> Architecture:
    """The row of `name`. Raises `ConfigError` that lists what is supported."""
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"architecture {name} is not supported; supported are {supported}",
            param="architectures",
            value=name,
            limit=list(ARCHITECTURES),
        )
    return ARCHITECTURES[name]
