"""Adapters (LoRA) in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors, for one base.

Such a folder is a stranger's. Its config is held to a list: a field that would change the arithmetic and is not
honoured is refused by name, also one that nobody here has heard of. The file of weights is refused by its size before
it is read, and each tensor by its name, shape and type.

The rows of B for queries and keys are reordered as the base's are (`weights.load` says why). alpha / r, or with rsLoRA
alpha / sqrt(r), is multiplied into B once.
"""

import json
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.layer import AttentionSpec, LayerSpec, MlpSpec, PackedWeight
from splittime.kernels.low_rank import LayerAdapter, LowRank, LowRankPart
from splittime.models.architectures import layer_names
from splittime.models.config import ModelConfig
from splittime.models.fields import read_bounded
from splittime.models.names import LayerNames
from splittime.models.weights.packing import pair_rows
from splittime.models.weights.shard_files import open_file

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20  # 14 tensors a layer; it is read in Python, beside the steps
MAX_ALPHA = 1 << 20  # a thousand times what anybody trains with
MAX_WEIGHT = 65504.0  # the largest number of float16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HONOURED = {"peft_type", "r", "lora_alpha", "use_rslora"}
WITHOUT_EFFECT = {  # on a finished adapter: its tensors say what they belong to
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"),
    *("peft_version", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "eva_config"),
}
KEPT_BASES = (True, False, "gaussian", "eva", "orthogonal")  # of `init_lora_weights`; the others change the base model
_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d{1,4})\.([a-z_.]+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Projection:
    """A module of a layer that may be adapted. product: of `LayerAdapter`'s; begin: its first output there. head_dim:
    within which halves become pairs; 0: its rows stay as they are; turned_dims: see `packing.WeightRows`."""

    product: str
    begin: int
    out_features: int
    in_features: int
    head_dim: int = 0
    turned_dims: int = 0


@dataclass(frozen=True)
class LoraConfig:
    """What `adapter_config.json` says that is honoured. scale: on what is added."""

    rank: int
    scale: float


def read_config(path: Path, max_rank: int) -> LoraConfig:
    """Raises `ConfigError` that names the field that cannot be honoured."""
    try:
        values = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the adapter's {CONFIG_NAME}: {_why(error)}", param="lora_path") from error
    if not isinstance(values, dict):
        raise _refused("", None, "does not hold a JSON object")
    _check_fields(values)
    rank, alpha = values.get("r"), values.get("lora_alpha", 8)
    if type(rank) is not int or not 1 <= rank <= max_rank:
        hint = "start the server with a higher --max-lora-rank"
        raise _refused("r", rank, f"must be a whole number from 1 to max_lora_rank, {max_rank}", max_rank, hint)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise _refused("lora_alpha", alpha, f"must be a number from -{MAX_ALPHA} to {MAX_ALPHA}", MAX_ALPHA)
    return LoraConfig(rank, alpha / math.sqrt(rank) if values.get("use_rslora") else alpha / rank)


def _check_fields(values: dict[str, object]) -> None:
    if values.get("peft_type") != "LORA":
        raise _refused("peft_type", values.get("peft_type"), "must be LORA", "LORA")
    if values.get("use_rslora") not in (None, True, False):
        raise _refused("use_rslora", values["use_rslora"], "must be true or false")
    if values.get("init_lora_weights", True) not in KEPT_BASES:
        hint = "save it with path_initial_model_for_weight_conversion, as PEFT's documentation shows"
        said = "has an adapter that belongs to a changed base model"
        raise _refused("init_lora_weights", values["init_lora_weights"], said, hint=hint)
    known = HONOURED | WITHOUT_EFFECT | {"init_lora_weights"}
    for name, value in values.items():
        is_neutral = value in (None, False, "none") or value in ([], {})
        if name not in known and not is_neutral:
            hint = "q, k, v, o, gate, up and down projections are adapted, each with one A and one B"
            raise _refused(name, value, "is not supported", hint=hint)


def projections(config: ModelConfig, index: int) -> dict[str, Projection]:
    """Returns what may be adapted in a layer, by the module's name below it. Experts are not, nor are modules that hold
    several projections, or these by names that the base model does not have."""
    spec: LayerSpec = config.layers[index]
    names, hidden = layer_names(config.architecture), config.hidden_size
    found = _of_attention(spec.mixer, names, hidden) if isinstance(spec.mixer, AttentionSpec) else {}
    if isinstance(spec.feed_forward, MlpSpec):
        inner, mlp = spec.feed_forward.inner, spec.feed_forward
        found[names.mlp.down] = Projection("down", 0, hidden, inner)
        if not names.gate_up:
            found |= {names.mlp.gate: Projection("gate_up", 0, inner, hidden)} if mlp.is_gated else {}
            found[names.mlp.up] = Projection("gate_up", mlp.outputs - inner, inner, hidden)
    return found


def _of_attention(mixer: AttentionSpec, names: LayerNames, hidden: int) -> dict[str, Projection]:
    """Queries with gates are none that may be adapted: their module holds both."""
    query, kv, turned = mixer.query_width, mixer.kv_width, mixer.position.turned_dims(mixer.head_dim)
    heads = (0, 0) if names.rows_are_paired else (mixer.head_dim, turned)
    found = {names.output: Projection("output", 0, hidden, query)}
    if not names.qkv and not mixer.is_gated:
        found[names.query] = Projection("qkv", 0, query, hidden, *heads)
    if not names.qkv and not mixer.keys_are_values and mixer.keys_of is None:
        found |= {
            names.key: Projection("qkv", query, kv, hidden, *heads),
            names.value: Projection("qkv", query + kv, kv, hidden),
        }
    return found


def load_adapter(folder: Path, config: ModelConfig, ops: Ops, scheme: WeightScheme, max_rank: int) -> "Adapter":
    """Reads and checks a folder. Raises `ConfigError` that names what does not fit. scheme: a float one."""
    lora = read_config(folder / CONFIG_NAME, max_rank)
    layers = [projections(config, index) for index in range(config.num_layers)]
    weights = sum(lora.rank * (one.in_features + one.out_features) for layer in layers for one in layer.values())
    _check_size(folder / WEIGHTS_NAME, 8 + MAX_HEADER_BYTES + weights * torch.float32.itemsize)
    handle = open_file(folder, WEIGHTS_NAME)
    pairs = _pairs(list(handle.keys()), layers)
    packer = _AdapterPacker(ops, scheme, lora, handle.get_tensor)
    made = tuple(packer.layer(index, layers[index], pairs.get(index, ())) for index in range(config.num_layers))
    return Adapter(made, lora.rank, packer.num_parameters)


@dataclass(frozen=True, eq=False)
class Adapter:
    """layers: one for each of the model's."""

    layers: tuple[LayerAdapter, ...]
    rank: int
    num_parameters: int


def _check_size(path: Path, most: int) -> None:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for who writes into it
            raise ConfigError(f"the adapter's {WEIGHTS_NAME} is no regular file", param="lora_path")
        size = found.st_size
        with path.open("rb") as file:
            num_header_bytes = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ConfigError(f"the adapter has no readable {WEIGHTS_NAME}: {_why(error)}", param="lora_path") from error
    if num_header_bytes > MAX_HEADER_BYTES:
        said = f"{WEIGHTS_NAME} has a header of {num_header_bytes} bytes, {MAX_HEADER_BYTES} are read"
        raise ConfigError(said, param="lora_path", value=num_header_bytes, limit=MAX_HEADER_BYTES)
    if size > most:
        said = f"{WEIGHTS_NAME} has {size} bytes; an adapter of this rank for this model has at most {most}"
        raise ConfigError(said, param="lora_path", value=size, limit=most)


def _pairs(tensors: list[str], layers: list[dict[str, Projection]]) -> dict[int, tuple[str, ...]]:
    """Returns the adapted modules of each layer. Raises `ConfigError` for a tensor that belongs to none of them, and
    for one whose other half is missing."""
    halves: dict[tuple[int, str], set[str]] = {}
    for tensor in tensors:
        match = _NAME.fullmatch(tensor)
        index = int(match[1]) if match else -1
        if match is None or index >= len(layers) or match[2] not in layers[index]:
            wanted = (
                f"base_model.model.model.layers.N.MODULE.lora_A.weight, and lora_B, of {', '.join(sorted(layers[0]))}; "
                "serve an adapter of other modules merged into the base model"
            )
            raise _misfit(tensor, "is no part of an adapter that can be served", sorted(layers[0]), wanted)
        halves.setdefault((index, match[2]), set()).add(match[3])
    if not halves:
        raise ConfigError(f"{WEIGHTS_NAME} has no tensors", param="lora_path")
    for (index, module), found in halves.items():
        if len(found) < 2:
            raise _misfit(f"layers.{index}.{module}", f"has no lora_{'B' if found == {'A'} else 'A'}", None, None)
    return {number: tuple(sorted(name for at, name in halves if at == number)) for number, _ in halves}


class _AdapterPacker:
    """take: the tensor of this name."""

    def __init__(self, ops: Ops, scheme: WeightScheme, lora: LoraConfig, take: Callable[[str], Tensor]) -> None:
        self._ops, self._scheme, self._lora, self._take = ops, scheme, lora, take
        self.num_parameters = 0

    def layer(self, index: int, places: dict[str, Projection], modules: tuple[str, ...]) -> LayerAdapter:
        of_product: dict[str, list[str]] = {}
        for module in places:  # in the order of their outputs
            if module in modules:
                of_product.setdefault(places[module].product, []).append(module)
        return LayerAdapter(**{name: self._product(index, places, mine) for name, mine in of_product.items()})

    def _product(self, index: int, places: dict[str, Projection], modules: list[str]) -> LowRank:
        downs, parts, rank = [], [], self._lora.rank
        for module in modules:
            place, prefix = places[module], f"base_model.model.model.layers.{index}.{module}.lora_"
            downs.append(self._read(f"{prefix}A.weight", rank, place.in_features))
            up = self._scaled(f"{prefix}B.weight", place.out_features, rank)
            up = pair_rows(up, place.head_dim, place.turned_dims) if place.head_dim else up
            ends = place.begin, place.begin + place.out_features
            parts.append(LowRankPart(*ends, rank, self._pack(up)))
        return LowRank(self._pack(torch.cat(downs)), tuple(parts))

    def _pack(self, weight: Tensor) -> PackedWeight:
        return self._ops.pack_linear([weight.to(self._ops.device)], None, self._scheme)

    def _read(self, name: str, *shape: int) -> Tensor:
        tensor = self._take(name)
        if tuple(tensor.shape) != shape:
            said = f"has shape {list(tensor.shape)}, the base model and r ask for {list(shape)}"
            raise _misfit(name, said, list(shape), None)
        if tensor.dtype not in DTYPES:
            raise _misfit(name, f"is {tensor.dtype}", [str(dtype) for dtype in DTYPES], None)
        if not torch.isfinite(tensor).all():
            raise _misfit(name, "holds values that are not finite", None, None)
        self.num_parameters += tensor.numel()
        return _of_usual_size(name, tensor.float())

    def _scaled(self, name: str, *shape: int) -> Tensor:
        """Returns a half of a pair with what `lora_alpha` makes of it."""
        return _of_usual_size(f"{name} by lora_alpha", self._read(name, *shape) * self._lora.scale)


def _of_usual_size(name: str, tensor: Tensor) -> Tensor:
    """Raises `ConfigError` for numbers by which every answer would be none."""
    if tensor.numel() and not tensor.abs().max() <= MAX_WEIGHT:
        raise _misfit(name, f"holds values beyond {MAX_WEIGHT:g}", MAX_WEIGHT, None)
    return tensor


def _misfit(name: str, said: str, limit: object, hint: str | None) -> ConfigError:
    return ConfigError(f"the adapter's tensor {name[:200]} {said}", param="lora_path", limit=limit, hint=hint)


def _refused(name: str, value: object, said: str, limit: object = None, hint: str | None = None) -> ConfigError:
    shown = f"{name[:100]} = {str(value)[:100]} " if name else ""
    return ConfigError(
        f"{CONFIG_NAME}: {shown}{said}", param="lora_path", value=str(value)[:100], limit=limit, hint=hint
    )


def _why(error: Exception) -> str:
    """Without the path, which is nobody's business."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else type(error).__name__
