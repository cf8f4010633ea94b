"""The architectures that are served: each entry composes its layers from the parts in `parts`, and names its tensors.

To add one, write a function that composes its layers and enter it in `ARCHITECTURES`. What `config.json` leaves out is
filled with the default that transformers gives that architecture. What the parts cannot say (another norm, another
activation) is not supported and is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from splittime.core.errors import ConfigError
from splittime.kernels.layer import LayerSpec, MixtureSpec, MlpSpec
from splittime.models import parts
from splittime.models.fields import Fields, bad

SLIDING_WINDOW = 4096  # of Mistral, Qwen2 and Qwen3 where the config names none


@dataclass(frozen=True)
class MlpNames:
    """The linears of one MLP."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the modules of a layer, below `model.layers.N.`.

    experts: the place of one expert, by number; expert: its linears, below that place.
    """

    input_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: MlpNames = MlpNames("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}."
    expert: MlpNames = MlpNames("gate_proj", "up_proj", "down_proj")

    def mlps(self, feed_forward: MlpSpec | MixtureSpec) -> tuple[MlpNames, ...]:
        """The names of the one MLP, or of each expert."""
        if isinstance(feed_forward, MlpSpec):
            return (self.mlp,)
        places = (self.experts.format(number) for number in range(feed_forward.router.num_experts))
        one = self.expert
        return tuple(MlpNames(place + one.gate, place + one.up, place + one.down) for place in places)


@dataclass(frozen=True)
class Architecture:
    """compose: from the config's fields to the layers."""

    compose: Callable[[Fields], tuple[LayerSpec, ...]]
    names: LayerNames = LayerNames()


def _llama(fields: Fields) -> tuple[LayerSpec, ...]:
    is_biased = fields.flag("attention_bias", False)
    mixers = parts.attention(fields, parts.no_windows(fields), qkv_bias=is_biased, output_bias=is_biased)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, fields.flag("mlp_bias", False)))


def _mistral(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.same_windows(fields, SLIDING_WINDOW))
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields))


def _mixtral(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.same_windows(fields), theta=1_000_000.0)
    experts = parts.mixtures(fields, num_chosen=2, normalises=True)
    return parts.layers(parts.norm(fields, 1e-5), mixers, experts)


def _qwen2(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.windows_by_layer(fields, SLIDING_WINDOW), qkv_bias=True)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields))


def _qwen3(fields: Fields) -> tuple[LayerSpec, ...]:
    is_biased, norm = fields.flag("attention_bias", False), parts.norm(fields)
    windows = parts.windows_by_layer(fields, SLIDING_WINDOW)
    mixers = parts.attention(fields, windows, head_dim=128, head_norm=norm, qkv_bias=is_biased, output_bias=is_biased)
    return parts.layers(norm, mixers, parts.mlps(fields))


def _qwen3_moe(fields: Fields) -> tuple[LayerSpec, ...]:
    is_biased, norm = fields.flag("attention_bias", False), parts.norm(fields)
    windows = parts.same_windows(fields, SLIDING_WINDOW)
    if not fields.flag("use_sliding_window", False):
        windows = parts.no_windows(fields)
    mixers = parts.attention(fields, windows, head_norm=norm, qkv_bias=is_biased, output_bias=is_biased)
    experts = parts.mixtures(fields, num_chosen=8, normalises=fields.flag("norm_topk_prob", False))
    return parts.layers(norm, mixers, experts)


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama),
    "MistralForCausalLM": Architecture(_mistral),
    "Qwen2ForCausalLM": Architecture(_qwen2),
    "MiMoForCausalLM": Architecture(_qwen2),  # with a head beside it (`models.head`)
    "Qwen3ForCausalLM": Architecture(_qwen3),
    "MixtralForCausalLM": Architecture(
        _mixtral,
        LayerNames(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", expert=MlpNames("w1", "w3", "w2")
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(_qwen3_moe),
}


def layer_names(name: str) -> LayerNames:
    """Returns what checkpoints of the architecture `name`, which is served, call a layer's modules."""
    return ARCHITECTURES[name].names


def find(values: dict[str, object]) -> str:
    """The name of a config's architecture. Raises `ConfigError` that lists what is supported."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise bad("architectures", names, "a list of one name")
    if names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}",
            param="architectures",
            value=names[0],
            limit=list(ARCHITECTURES),
        )
    return names[0]
