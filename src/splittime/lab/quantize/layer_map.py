"""The names in a layer of a checkpoint: its tensors with their shapes, and its linears by the input they share.

A `LinearGroup` is what calibration sees as one: linears that multiply the same input. `source` makes that input, so
that its channels can be divided by scales there and the weights multiplied by them (the norm before, or the linear
whose rows are the channels: v for o, up for down). With `joint` the experts of a mixture are one group, read where the
router is, because they share their norm; without it each expert is a group of its own, of the tokens that chose it.
Routers are read with their group (`others`) and never rounded. `check_fit` refuses settings that the shapes do not fit.

A `QuantizeSource` is the checkpoint that is quantised. Everything in it is asked for once before any work begins, so
that a tensor that is missing, misshapen or unknown is refused in the first second and not in the last hour.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.layer import MixtureSpec, MlpSpec
from splittime.lab.quantize import layer_map
from splittime.lab.quantize.settings import WHOLE_ROW, QuantizeSettings
from splittime.lab.quantize.tensor_file import TensorEntry
from splittime.models.architectures import layer_names
from splittime.models.config import ModelConfig, load_config
from splittime.models.fields import read_json
from splittime.models.names import MlpNames
from splittime.models.weights.cache import fingerprints
from splittime.models.weights.checkpoint import Checkpoint

Shapes = dict[str, tuple[int, ...]]
Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
USUAL_GROUPS = (128, 64, 32)
KNOWN = tuple(
    f"{name}ForCausalLM"
    for name in (
        *("Llama", "Mistral", "Qwen2", "MiMo", "Qwen3", "Mixtral", "Qwen3Moe", "SmolLM3", "SeedOss", "Ernie4_5"),
        *("Granite", "Ministral", "Ministral3"),
    )
)
log = logging.getLogger("splittime.lab.quantize")

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


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
    hidden, mixer, part = config.hidden_size, config.layers[index].attention, config.layers[index].feed_forward
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
    mixer, part = config.layers[index].attention, config.layers[index].feed_forward
    if mixer.head_norm is not None:
        shapes |= {f"self_attn.{name}_norm.weight": (mixer.head_dim,) for name in "qk"}
    if isinstance(part, MixtureSpec):
        shapes[f"{router(config, index)}.weight"] = (part.router.num_experts, config.hidden_size)
    return shapes


def _biased(config: ModelConfig, index: int) -> list[str]:
    mixer, part = config.layers[index].attention, config.layers[index].feed_forward
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


class QuantizeSource:
    """dtypes: of each tensor of a layer, by full name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values = read_json(folder / "config.json")
        if self.values.get("quantization_config") or self.values.get("compression_config"):
            raise ConfigError(
                f"{folder} is quantised already (config.json has a quantization_config)",
                param="model",
                value=str(folder),
                hint="start from the checkpoint that it was made of",
            )
        self.config = load_config(folder)
        if self.config.architecture not in KNOWN:
            raise ConfigError(
                f"the layers of {self.config.architecture} are not known here; known are {', '.join(KNOWN)}",
                param="model",
                value=self.config.architecture,
                limit=list(KNOWN),
                hint="serve --quantization int8 or int4 rounds its weights as they are loaded",
            )
        self.checkpoint = Checkpoint(folder)
        self.dtypes: dict[str, torch.dtype] = {}
        self._check()

    def _check(self) -> None:
        for index in range(self.config.num_layers):
            prefix = layer_map.layer_prefix(index)
            for name, shape in layer_map.tensor_shapes(self.config, index).items():
                self.dtypes[prefix + name] = self.checkpoint.take(prefix + name, *shape).dtype
        self._outer()
        if self.config.tie_word_embeddings:
            self.checkpoint.skip(HEAD)
        left = self.checkpoint.not_taken()
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            log.warning("%d tensors are unknown to this architecture and are left out: %s", len(left), shown)

    def layer(self, index: int) -> dict[str, Tensor]:
        """The layer's tensors below its prefix, float32, in memory of their own. Raises `ConfigError` for NaN."""
        prefix, weights = layer_map.layer_prefix(index), {}
        for name, shape in layer_map.tensor_shapes(self.config, index).items():
            mapped = self.checkpoint.take(prefix + name, *shape)
            weights[name] = mapped.to(torch.float32, copy=True)
            self.checkpoint.release(mapped)
            if not bool(weights[name].isfinite().all()):
                raise ConfigError(
                    f"weights: tensor {prefix + name} has values that are not finite", param=prefix + name
                )
        return weights

    def embedding(self) -> Tensor:
        return self.checkpoint.take(EMBEDDING, self.config.vocab_size, self.config.hidden_size)

    def _outer(self) -> list[tuple[str, Tensor]]:
        config = self.config
        found = [(EMBEDDING, self.embedding()), (NORM, self.checkpoint.take(NORM, config.hidden_size))]
        if not config.tie_word_embeddings:
            found.append((HEAD, self.checkpoint.take(HEAD, config.vocab_size, config.hidden_size)))
        return found

    def outer_entries(self) -> list[TensorEntry]:
        """Returns what is not in a layer, as it is stored: embedding, last norm, head."""
        return [TensorEntry.of(name, tensor, self.checkpoint.release) for name, tensor in self._outer()]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.checkpoint.files)

    def identity(self, memory: Path) -> dict[str, str]:
        """Hashes of what the result depends on, by file name. memory: a folder that may remember them."""
        paths: Sequence[Path] = self.checkpoint.files
        hashes = dict(zip((path.name for path in paths), fingerprints(paths, memory), strict=True))
        text = json.dumps(self.values, sort_keys=True).encode()
        return {"config.json": hashlib.sha256(text).hexdigest(), **hashes}
