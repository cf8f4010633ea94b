"""The names in a layer of a checkpoint: its tensors with their shapes, and its linears by the input they share.

A `Group` is what calibration sees as one: linears that multiply the same input. `source` is what makes that input, so
that its channels can be divided by scales there and the weights multiplied by them (the norm before, or the linear
whose rows are the channels: v for o, up for down). With `joint` the experts of a mixture are one group, read where the
router is, because they share their norm; without it each expert is a group of its own, of the tokens that chose it.
Routers are read with their group (`others`) and never rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from splittime.models import registry
from splittime.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"


@dataclass(frozen=True)
class Group:
    tap: str
    linears: tuple[str, ...]
    source: str | None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class MlpNames:
    """The linears of one MLP, below the layer."""

    gate: str
    up: str
    down: str

    @property
    def tap(self) -> str:
        return self.gate + "+up"


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def kind_of(linear: str) -> str:
    """`self_attn.q_proj` is a q_proj; an expert's w2 is a w2."""
    return linear.rsplit(".", 1)[-1]


def has_experts(config: ModelConfig, index: int) -> bool:
    return config.moe is not None and config.moe.layers[index]


def router(config: ModelConfig, index: int) -> str | None:
    names = registry.find(config.architecture).moe
    return f"{names.block}.gate" if names is not None and has_experts(config, index) else None


def mlps(config: ModelConfig, index: int) -> tuple[MlpNames, ...]:
    """One, or the experts."""
    names = registry.find(config.architecture).moe
    if config.moe is None or names is None or not has_experts(config, index):
        return (MlpNames("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),)
    places = (f"{names.block}.experts.{number}." for number in range(config.moe.num_experts))
    return tuple(MlpNames(place + names.gate, place + names.up, place + names.down) for place in places)


def groups(config: ModelConfig, index: int, joint: bool) -> list[Group]:
    """In the order in which the layer computes them."""
    attention = [Group(Q, (Q, K, V), INPUT_NORM), Group(O, (O,), V)]
    return [*attention, *_mlp_groups(config, index, joint)]


def _mlp_groups(config: ModelConfig, index: int, joint: bool) -> Iterator[Group]:
    gate, parts = router(config, index), mlps(config, index)
    if gate is None:
        yield Group(parts[0].tap, (parts[0].gate, parts[0].up), MLP_NORM)
    elif joint:
        yield Group(gate, tuple(name for part in parts for name in (part.gate, part.up)), MLP_NORM, (gate,))
    else:
        yield from (Group(part.tap, (part.gate, part.up), None) for part in parts)
    yield from (Group(part.down, (part.down,), part.up) for part in parts)


def linear_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear that is rounded or pruned."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    shapes = {Q: (query, hidden), K: (key, hidden), V: (key, hidden), O: (hidden, query)}
    inner = config.intermediate_size
    if config.moe is not None and has_experts(config, index):
        inner = config.moe.intermediate_size
    for part in mlps(config, index):
        shapes |= {part.gate: (inner, hidden), part.up: (inner, hidden), part.down: (hidden, inner)}
    return shapes


def tensor_shapes(config: ModelConfig, index: int) -> Shapes:
    """Every tensor of the layer, below its prefix."""
    linears = linear_shapes(config, index)
    shapes: Shapes = {f"{norm}.weight": (config.hidden_size,) for norm in (INPUT_NORM, MLP_NORM)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": linears[name][:1] for name in _biased(config, index)}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    gate = router(config, index)
    if gate is not None and config.moe is not None:
        shapes[f"{gate}.weight"] = (config.moe.num_experts, config.hidden_size)
    return shapes


def _biased(config: ModelConfig, index: int) -> list[str]:
    names = [Q, K, V] if config.qkv_bias else []
    names += [O] if config.output_bias else []
    if config.mlp_bias and not has_experts(config, index):
        names += [name for part in mlps(config, index) for name in (part.gate, part.up, part.down)]
    return names
