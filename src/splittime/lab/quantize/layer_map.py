"""The names in a layer of a checkpoint: its tensors with their shapes, and its linears by the input they share.

A `LinearGroup` is what calibration sees as one: linears that multiply the same input. `source` makes that input, so
that its channels can be divided by scales there and the weights multiplied by them (the norm before, or the linear
whose rows are the channels: v for o, up for down). With `joint` the experts of a mixture are one group, read where the
router is, because they share their norm; without it each expert is a group of its own, of the tokens that chose it.
Routers are read with their group (`others`) and never rounded. `check_fit` refuses settings that the shapes do not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from splittime.core.errors import ConfigError
from splittime.kernels.layer import MixtureSpec, MlpSpec
from splittime.lab.quantize.settings import WHOLE_ROW, QuantizeSettings
from splittime.models.architectures import MlpNames, layer_names
from splittime.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
USUAL_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class LinearGroup:
    tap: str
    linears: tuple[str, ...]
    source: str | None
    others: tuple[str, ...] = ()


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def kind_of(linear: str) -> str:
    """`self_attn.q_proj` is a q_proj; an expert's w2 is a w2."""
    return linear.rsplit(".", 1)[-1]


def router(config: ModelConfig, index: int) -> str | None:
    """The router's name, if the layer has one."""
    has_one = isinstance(config.layers[index].feed_forward, MixtureSpec)
    return layer_names(config.architecture).router if has_one else None


def mlps(config: ModelConfig, index: int) -> tuple[MlpNames, ...]:
    """One, or the experts."""
    return layer_names(config.architecture).mlps(config.layers[index].feed_forward)


def tap_of(part: MlpNames) -> str:
    return part.gate + "+up"


def groups(config: ModelConfig, index: int, joint: bool) -> list[LinearGroup]:
    """In the order in which the layer computes them."""
    attention = [LinearGroup(Q, (Q, K, V), INPUT_NORM), LinearGroup(O, (O,), V)]
    return [*attention, *_mlp_groups(config, index, joint)]


def _mlp_groups(config: ModelConfig, index: int, joint: bool) -> Iterator[LinearGroup]:
    gate, parts = router(config, index), mlps(config, index)
    if gate is None:
        yield LinearGroup(tap_of(parts[0]), (parts[0].gate, parts[0].up), MLP_NORM)
    elif joint:
        yield LinearGroup(gate, tuple(name for part in parts for name in (part.gate, part.up)), MLP_NORM, (gate,))
    else:
        yield from (LinearGroup(tap_of(part), (part.gate, part.up), None) for part in parts)
    yield from (LinearGroup(part.down, (part.down,), part.up) for part in parts)


def linear_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear that is rounded or pruned."""
    hidden, mixer, part = config.hidden_size, config.layers[index].mixer, config.layers[index].feed_forward
    query, key = mixer.query_width, mixer.kv_width
    shapes = {Q: (query, hidden), K: (key, hidden), V: (key, hidden), O: (hidden, query)}
    inner = part.inner if isinstance(part, MlpSpec) else part.expert.inner
    for names in mlps(config, index):
        shapes |= {names.gate: (inner, hidden), names.up: (inner, hidden), names.down: (hidden, inner)}
    return shapes


def tensor_shapes(config: ModelConfig, index: int) -> Shapes:
    """Every tensor of the layer, below its prefix."""
    linears = linear_shapes(config, index)
    shapes: Shapes = {f"{norm}.weight": (config.hidden_size,) for norm in (INPUT_NORM, MLP_NORM)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": linears[name][:1] for name in _biased(config, index)}
    mixer, part = config.layers[index].mixer, config.layers[index].feed_forward
    if mixer.head_norm is not None:
        shapes |= {f"self_attn.{name}_norm.weight": (mixer.head_dim,) for name in "qk"}
    if isinstance(part, MixtureSpec):
        shapes[f"{router(config, index)}.weight"] = (part.router.num_experts, config.hidden_size)
    return shapes


def _biased(config: ModelConfig, index: int) -> list[str]:
    mixer, part = config.layers[index].mixer, config.layers[index].feed_forward
    names = [Q, K, V] if mixer.qkv_bias else []
    names += [O] if mixer.output_bias else []
    if isinstance(part, MlpSpec) and part.has_bias:
        names += [name for one in mlps(config, index) for name in (one.gate, one.up, one.down)]
    return names


def check_fit(config: ModelConfig, settings: QuantizeSettings) -> None:
    """Refuses, before any work, settings whose layout these weights do not fit. Raises `ConfigError` naming
    the weight, its width and what it must be a multiple of."""
    for name, (out_features, in_features) in _all_linears(config):
        if settings.prune == "2:4":
            _need(name, "columns", in_features, 4, "use --prune unstructured --sparsity 0.5")
        if settings.group_size not in (None, WHOLE_ROW):
            _need(name, "columns", in_features, settings.group_size or 1, _fitting_group(config))
        per_word = 32 // (settings.bits or 32)
        hint = "use --scheme w4a16 or int8, which fill the last word of a row up"
        if settings.scheme == "gptq":
            _need(name, "columns", in_features, per_word, hint)
        if settings.scheme in ("awq", "gptq"):
            _need(name, "rows", out_features, per_word, hint)


def _all_linears(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    for index in range(config.num_layers):
        for name, shape in linear_shapes(config, index).items():
            yield layer_prefix(index) + name, shape


def _need(name: str, what: str, count: int, unit: int, hint: str) -> None:
    if count % unit:
        message = f"{name} has {count} {what}, not a multiple of {unit}"
        raise ConfigError(message, param=name, value=count, limit=unit, hint=hint)


def _fitting_group(config: ModelConfig) -> str:
    widths = {shape[1] for _, shape in _all_linears(config)}
    for group in USUAL_GROUPS:
        if all(width % group == 0 for width in widths):
            return f"--group-size {group} fits this model"
    return "--group-size -1, one scale for each row, fits every model"
