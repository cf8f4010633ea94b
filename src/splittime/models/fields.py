"""Reading typed values out of a `config.json`: each error names the key, the value that it had, and the limit.

`LIMITS` says how large the numbers of a stranger's config may be, read before anything is allocated by
it. A checkpoint is somebody else's file, and a size in it costs memory as soon as it is believed: a tuple with an entry
a layer, a table with a row a position. Each bound is 8 times or more what any published model has, so it refuses no
model; it keeps each size small enough to be multiplied and looped over. Whether all of them together fit the machine is
asked later, with the tensors' own shapes (`weights.checkpoint`) and the free memory (`runner.load`).

A field without a row cannot be read as a number at all; what GGUF files say is read by the same names (`gguf.config`).
tests/models/test_limits.py holds both to it.
"""

import json
import reprlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from splittime.core.errors import ConfigError

MAX_CONFIG_BYTES = 8 << 20  # of a JSON file that is not a list of tensors
MAX_INDEX_BYTES = 32 << 20  # of model.safetensors.index.json: 100 bytes a tensor
MAX_HEADER_BYTES = 16 << 20  # of one safetensors file's header: 120 bytes a tensor
MAX_IDS = 1024  # in a list of token ids or of layers, unless it has an entry a layer
MAX_METADATA_BYTES = 256 << 20  # of a GGUF file, vocabulary and all
MAX_METADATA_VALUES = 1 << 22  # of it: keys, texts, lists, tensors; each is a Python object
MAX_NAMES = 16_384  # modules that a quantised checkpoint excepts


class Bounds(NamedTuple):
    """Both ends are allowed."""

    least: float
    most: float


LAYERS, HEADS, EXPERTS = Bounds(1, 4096), Bounds(1, 8192), Bounds(1, 8192)
SOME_LAYERS, SOME_EXPERTS = Bounds(0, 4096), Bounds(0, 8192)
WIDTH, VOCABULARY = Bounds(1, 1 << 20), Bounds(1, 1 << 24)
HEAD_DIM, POSITIONS = Bounds(1, 8192), Bounds(1, 1 << 27)
EPSILON, THETA, FACTOR = Bounds(1e-20, 1.0), Bounds(1e-3, 1e15), Bounds(1e-3, 1e6)
SOME_FACTOR = Bounds(0.0, 1e6)

LIMITS: dict[str, Bounds] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "group_size"), WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "decoder_sparse_step", "moe_layer_interval"), LAYERS),
    **dict.fromkeys(("no_rope_layer_interval", "sliding_window_pattern", "full_attention_interval"), LAYERS),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), SOME_LAYERS),
    **{"moe_layer_end_index": Bounds(-1, 4096), "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY},
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **{"hidden_size_per_layer_input": Bounds(0, WIDTH.most), "num_kv_shared_layers": SOME_LAYERS},
    "max_window_layers": Bounds(0, 1 << 20),  # compared only: Qwen2 has more of them than layers
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), HEADS),
    **{"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "linear_conv_kernel_dim": Bounds(2, 64)},
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "n_group", "topk_group"), EXPERTS),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"), SOME_EXPERTS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "moe_norm_min"), EPSILON),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), THETA),
    "partial_rotary_factor": Bounds(0.0, 1.0),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "alpha"), FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow", "swiglu_alpha", "swiglu_limit", "routed_scaling_factor"), FACTOR),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), FACTOR),
    **dict.fromkeys(("logits_scaling", "logit_scale", "query_pre_attn_scalar"), FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), SOME_FACTOR),
    **dict.fromkeys(("bits", "num_bits"), Bounds(1, 64)),
}
"""By the name in config.json."""


CONFIG_NAME = "config.json"
MISSING = object()
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 200
_shown.maxlist = 8


def bad(key: str, value: object, want: str, limit: object = None, file: str = CONFIG_NAME) -> ConfigError:
    shown = _shown.repr(value)
    plain = value if isinstance(value, str | int | float | bool | None) else shown
    return ConfigError(f"{file}: {key} is {shown}, must be {want}", param=key, value=plain, limit=limit)


def is_whole(value: object, bounds: Bounds) -> bool:
    return type(value) is int and bounds.least <= value <= bounds.most


def is_number(value: object, bounds: Bounds) -> bool:
    """Neither infinite nor NaN, both of which JSON as Python reads it has."""
    return (type(value) is int or type(value) is float) and bounds.least <= value <= bounds.most


def in_words(kind: str, bounds: Bounds) -> str:
    return f"{kind} from {bounds.least:g} to {bounds.most:.12g}"


class Fields:
    """A JSON object with typed getters; numbers within `LIMITS`. A null counts as absent, as transformers treats it.
    file: whose it is, for errors."""

    def __init__(
        self, values: dict[str, Any], prefix: str = "", file: str = CONFIG_NAME, limits: Mapping[str, Bounds] = LIMITS
    ) -> None:
        self.values = values
        self.prefix = prefix
        self.file = file
        self.limits = limits

    def below(self, values: dict[str, Any], prefix: str) -> "Fields":
        """Returns the fields of an object within this one, whose names begin with `prefix`."""
        return Fields(values, prefix, self.file, self.limits)

    def named(self, key: str) -> str:
        """Returns what errors call it."""
        return self.prefix + key

    def bad(self, key: str, value: object, want: str, limit: object = None) -> ConfigError:
        return bad(self.named(key), value, want, limit, self.file)

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise ConfigError(f"{self.file}: {self.named(key)} is missing", param=self.named(key))
        return default

    def count(self, key: str, default: object = MISSING) -> int:
        """An int within the key's bounds."""
        value, bounds = self._get(key, default), self.limits[key]
        if not is_whole(value, bounds):
            raise self.bad(key, value, in_words("an integer", bounds), list(bounds))
        return value

    def count_or_none(self, key: str, default: int | None = None) -> int | None:
        """As `count`, or `default` when there is none."""
        return default if self.values.get(key) is None else self.count(key)

    def number(self, key: str, default: object = MISSING) -> float:
        """A number within the key's bounds."""
        value, bounds = self._get(key, default), self.limits[key]
        if not is_number(value, bounds):
            raise self.bad(key, value, in_words("a number", bounds), list(bounds))
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """As `number`, or 0 where there is none."""
        return 0.0 if self.values.get(key) is None else self.number(key)

    def numbers(self, key: str, bounds_of: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers, each within the bounds of the field `bounds_of`."""
        value, bounds = self._get(key, MISSING), self.limits[bounds_of]
        if not isinstance(value, list) or len(value) != count or not all(is_number(item, bounds) for item in value):
            raise self.bad(key, value, f"a list of {count} numbers, each {in_words('', bounds).strip()}", list(bounds))
        return tuple(map(float, value))

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: object = MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def ints(self, key: str, bounds: Bounds) -> tuple[int, ...]:
        """An int, a list of at most `MAX_IDS` ints, or nothing; each within `bounds`."""
        value = self._get(key, [])
        listed = value if isinstance(value, list) else [value]
        if len(listed) > MAX_IDS or not all(is_whole(item, bounds) for item in listed):
            want = f"an integer from {bounds.least} to {bounds.most}, or a list of at most {MAX_IDS} of them"
            raise self.bad(key, value, want, list(bounds))
        return tuple(listed)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError` when there is none."""
    try:
        values = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="model_path", value=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model_path", value=str(path))
    return values


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The file's content. Raises OSError as reading does, and `ConfigError` for a pipe, a device, or too large a
    file, none of which is opened."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no regular file", param="model_path", value=str(path))
    if status.st_size > max_bytes:
        said = f"{path} has {status.st_size} bytes, more than the {max_bytes} that are read of such a file"
        raise ConfigError(said, param="model_path", value=status.st_size, limit=max_bytes)
    return path.read_bytes()
