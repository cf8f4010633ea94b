"""A GGUF file's metadata as the same `ModelConfig` that a `config.json` becomes.

    general.architecture   what is served                 rows of q and k
    llama                  Llama, Mistral and Mixtral     neighbours are rotary pairs
    qwen2, qwen3           Qwen2, Qwen3                   halves, as in a Hugging Face checkpoint
    qwen3moe               Qwen3 with experts             the same

What a key cannot say is taken from the tensors that are there: whether the head is tied (no `output.weight`), which
projections have biases, which layers have experts, and the factors by which each rotary frequency is divided
(`rope_freqs.weight`, how GGUF writes Llama 3.1's scaling). A key of the architecture that is not known here may change
the arithmetic, so it is refused, unless it has the value that changes nothing (`NEUTRAL`).
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splittime.core.errors import ConfigError
from splittime.kernels.layer import AttentionSpec, MixtureSpec, MlpSpec, NormSpec, RopeSpec, RouterSpec
from splittime.models import parts
from splittime.models.config import ModelConfig, advice
from splittime.models.fields import GGUF_LIMITS, MISSING, Bounds, Fields, in_words, is_whole
from splittime.models.gguf.file import GgufModel, open_model
from splittime.models.pooling import gguf_pooling


class GgufKeys(Fields):
    """The keys that begin with `prefix`, by what follows it."""

    def __init__(self, model: GgufModel, prefix: str) -> None:
        mine = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
        super().__init__(mine, prefix, model.path.name, GGUF_LIMITS)
        self.model = model

    def bad(self, key: str, value: object, want: str, limit: object = None) -> ConfigError:
        return self.model.broken(f"{self.prefix}{key}", f"is {value!r}, must be {want}", str(value), limit)

    def refuse_unknown(self, known: set[str], neutral: dict[str, tuple[object, ...]]) -> None:
        """Raises for a key that is not in `known` and has none of its `neutral` values."""
        for key, value in self.values.items():
            if key not in known and (key not in neutral or isinstance(value, np.ndarray) or value not in neutral[key]):
                said = f"is {value!r}: it may change what the model computes, and is not implemented"
                raise self.model.broken(f"{self.prefix}{key}", said, str(value))

    def count(self, key: str, default: object = MISSING) -> int:
        """An int within the key's bounds. One for each layer will do if they are all the same."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise self.bad(key, value, f"{in_words('an integer', GGUF_LIMITS[key])}, the same for all layers")
            self.values[key] = value[0].item()
        return super().count(key, default)

    def count_or_zero(self, key: str) -> int:
        """A positive int; 0 if it is that, or absent."""
        return 0 if self._get(key, 0) == 0 else self.count(key)

    def index(self, key: str, size: int) -> int | None:
        """An int from 0 to below `size`, or nothing."""
        value, bounds = self.values.get(key), Bounds(0, size - 1)
        if value is not None and not is_whole(value, bounds):
            raise self.bad(key, value, in_words("an integer", bounds), list(bounds))
        return value


LLAMA = "llama"
ARCHITECTURES = (LLAMA, "qwen2", "qwen3", "qwen3moe")
HEAD_NORMED = ("qwen3", "qwen3moe")
NAMES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
READ = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scale_linear", "expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("expert_weights_norm", "vocab_size"),
}
SILENT = {
    *("tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
    *("attention.layer_norm_epsilon", "pooling_type"),
}
"""These tell of the model's past, or are read by no layer of it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (1,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
}
END_NAMES = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "< EOT >", "_<EOT>", "<｜end▁of▁sentence｜>", "</s>"),  # noqa: RUF001  (DeepSeek spells it so)
}
"""Names that model makers give a token that ends a turn; it counts where the file calls it a control token."""
CONTROL = 3


SAMPLING = {name: name for name in ("top_p", "top_k", "min_p")}
SAMPLING |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Names behind `general.sampling.`, as llama.cpp writes them, and in `generation_config.json`."""
ADVISED = {("smollm2", "135M"): {"temperature": 0.2, "top_p": 0.9}}
"""By base name and size, from the makers' cards: what files without `general.sampling.` leave out."""


def load_gguf_config(path: Path, generation: str = "auto") -> ModelConfig:
    """Raises `ConfigError` naming the key, or the tensor, that cannot be served. generation: "auto" takes what the
    makers advise of sampling."""
    model = open_model(path)
    architecture = GgufKeys(model, "general.").text("architecture")
    if architecture not in ARCHITECTURES:
        said = f"is {architecture!r}, which is not served; these are: {', '.join(ARCHITECTURES)}"
        raise model.broken("general.architecture", said, architecture, list(ARCHITECTURES))
    keys = GgufKeys(model, f"{architecture}.")
    keys.refuse_unknown(READ | SILENT, NEUTRAL)
    config = _config(model, keys, architecture)
    return msgspec.structs.replace(config, sampling=_sampling(model)) if generation == "auto" else config


def _sampling(model: GgufModel) -> dict[str, float | int]:
    general = GgufKeys(model, "general.").values
    known = ADVISED.get((general.get("basename", ""), general.get("size_label", "")), {})
    said = {theirs: general[f"sampling.{ours}"] for ours, theirs in SAMPLING.items() if f"sampling.{ours}" in general}
    return advice(said or known, model.path.name)


def _config(model: GgufModel, keys: GgufKeys, architecture: str) -> ModelConfig:
    num_layers, hidden_size = keys.count("block_count"), keys.count("embedding_length")
    window = keys.count_or_zero("attention.sliding_window")
    norm = NormSpec(keys.number("attention.layer_norm_rms_epsilon"))
    mlp = MlpSpec(keys.count("feed_forward_length"), "blk.0.ffn_up.bias" in model.file_of)
    mixture = _mixture(keys, architecture)
    if window and architecture != LLAMA:
        raise keys.bad("attention.sliding_window", window, "0: which layers have the window is not said")
    mixers = [_attention(model, keys, norm if architecture in HEAD_NORMED else None, window or None)] * num_layers
    feed_forwards = [mixture if mixture and _has_router(model, index) else mlp for index in range(num_layers)]
    vocab_size = _vocab_size(model)
    return ModelConfig(
        architecture=NAMES.get(architecture) or _llama_name(window, mixture),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=parts.layers(norm, mixers, feed_forwards),
        norm=norm,
        max_position_embeddings=keys.count("context_length"),
        tie_word_embeddings="output.weight" not in model.file_of,
        checkpoint_dtype=_dtype(model),
        eos_token_ids=_eos_token_ids(model, vocab_size),
        pooling=gguf_pooling(keys.index("pooling_type", 5), f"{architecture}.pooling_type", hidden_size),
    )


def _llama_name(window: int, mixture: MixtureSpec | None) -> str:
    if mixture is not None:
        return "MixtralForCausalLM"
    return "MistralForCausalLM" if window else "LlamaForCausalLM"


def _attention(
    model: GgufModel, keys: GgufKeys, head_norm: NormSpec | None, window_tokens: int | None
) -> AttentionSpec:
    num_heads = keys.count("attention.head_count")
    head_dim = _head_dim(keys, num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=head_dim,
        position=_rope(model, keys, head_dim),
        window_tokens=window_tokens,
        head_norm=head_norm,
        qkv_bias="blk.0.attn_q.bias" in model.file_of,
        output_bias="blk.0.attn_output.bias" in model.file_of,
    )


def _head_dim(keys: GgufKeys, num_heads: int) -> int:
    hidden_size = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    if head_dim % 2:
        raise keys.bad("attention.key_length", head_dim, "even, for the rotary embedding")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, head_dim) != head_dim:
            raise keys.bad(key, keys.count(key), f"the length of a key, {head_dim}")
    return head_dim


def _kv_heads(keys: GgufKeys, num_heads: int) -> int:
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.bad("attention.head_count_kv", num_kv_heads, f"a divisor of attention.head_count, {num_heads}")
    return num_kv_heads


def _vocab_size(model: GgufModel) -> int:
    file = model.file_of.get("token_embd.weight")
    if file is None:
        raise model.broken("tensor 'token_embd.weight'", "is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _rope(model: GgufModel, keys: GgufKeys, head_dim: int) -> RopeSpec:
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.text("rope.scaling.type", "linear" if "rope.scale_linear" in keys.values else "none")
    if kind not in ("none", "linear"):
        raise keys.bad("rope.scaling.type", kind, "none or linear; Llama 3.1's comes as rope_freqs.weight")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    if "rope_freqs.weight" in model.file_of:
        if factor != 1.0:
            raise keys.bad("rope.scaling.factor", factor, "1 beside rope_freqs.weight")
        return RopeSpec("divided", theta, divisors=_divisors(model, head_dim))
    return RopeSpec("default", theta) if factor == 1.0 else RopeSpec("linear", theta, factor)


def _divisors(model: GgufModel, head_dim: int) -> tuple[float, ...]:
    file = model.file_of["rope_freqs.weight"]
    place = file.tensors["rope_freqs.weight"]
    if place.type.name != "F32" or place.shape != (head_dim // 2,):
        said = f"is {place.type.name} {list(place.shape)}, must be F32 [{head_dim // 2}]"
        raise model.broken("tensor 'rope_freqs.weight'", said)
    values = file.bytes_of("rope_freqs.weight").view("<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise model.broken("tensor 'rope_freqs.weight'", "has values that are not positive numbers")
    return tuple(values.tolist())


def _mixture(keys: GgufKeys, architecture: str) -> MixtureSpec | None:
    num_experts = keys.count_or_zero("expert_count")
    if not num_experts:
        return None
    if architecture not in (LLAMA, "qwen3moe"):
        raise keys.bad("expert_count", num_experts, f"0 for {architecture}")
    chosen = keys.count("expert_used_count")
    if chosen > num_experts:
        raise keys.bad("expert_used_count", chosen, f"at most expert_count, {num_experts}")
    inner = keys.count("expert_feed_forward_length", keys.count("feed_forward_length"))
    return MixtureSpec(RouterSpec(num_experts, chosen, keys.flag("expert_weights_norm", True)), MlpSpec(inner))


def _has_router(model: GgufModel, index: int) -> bool:
    return f"blk.{index}.ffn_gate_inp.weight" in model.file_of


def _dtype(model: GgufModel) -> str:
    """The widest of the matrices that are multiplied and floats; beside integers alone nothing is gained by more than
    bfloat16. Routers do not count: converters widen them to float32, whatever the model was."""
    is_looked_up = "output.weight" in model.file_of
    kinds = {
        file.tensors[name].type
        for name, file in model.file_of.items()
        if len(file.tensors[name].shape) > 1 and not name.endswith(".ffn_gate_inp.weight")
        if not (is_looked_up and name == "token_embd.weight")
    }
    names = {kind.name for kind in kinds if not kind.has_integers}
    return "float32" if "F32" in names else "float16" if "F16" in names else "bfloat16"


def _eos_token_ids(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    """The ids that the file names, then control tokens that are known to end a turn."""
    keys = GgufKeys(model, "tokenizer.ggml.")
    named = [keys.index(f"{kind}_token_id", vocab_size) for kind in ("eos", "eot", "eom")]
    tokens = model.metadata.get("tokenizer.ggml.tokens", [])
    kinds = model.metadata.get("tokenizer.ggml.token_type", ())
    known = [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL]
    ends = [number for number in known if number < vocab_size and tokens[number] in END_NAMES]
    return tuple(dict.fromkeys([number for number in named if number is not None] + ends))
