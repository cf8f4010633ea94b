"""How large the numbers of a stranger's config may be: one row a field, read before anything is allocated by it.

A checkpoint is somebody else's file, and a size in it costs memory as soon as it is believed: a tuple with an entry a
layer, a table with a row a position. Each bound is 8 times or more what any published model has, so it refuses no
model; it keeps each size small enough to be multiplied and looped over. Whether all of them together fit the machine
is asked later, with the tensors' own shapes (`weights.checkpoint`) and the free memory (`runner.load`).

A field has one name here for `config.json` and one for GGUF; a field without a row cannot be read as a number at all.
`fields.Fields` and `gguf.keys.GgufKeys` look rows up; tests/models/test_limits.py holds both to it.
"""

from typing import NamedTuple

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
WIDTH, VOCABULARY = Bounds(1, 1 << 20), Bounds(1, 1 << 24)
HEAD_DIM, POSITIONS = Bounds(1, 8192), Bounds(1, 1 << 27)
EPSILON, THETA, FACTOR = Bounds(1e-20, 1.0), Bounds(1e-3, 1e15), Bounds(1e-3, 1e6)

LIMITS: dict[str, Bounds] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "max_window_layers": Bounds(0, 1 << 20),  # compared only: Qwen2 has more of them than layers
    "decoder_sparse_step": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": POSITIONS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "partial_rotary_factor": Bounds(0.0, 1.0),
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "bits": Bounds(1, 64),
    "num_bits": Bounds(1, 64),
    "group_size": WIDTH,
}
"""By the name in config.json."""

GGUF_LIMITS: dict[str, Bounds] = {
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "expert_feed_forward_length": WIDTH,
    "block_count": LAYERS,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "rope.dimension_count": HEAD_DIM,
    "context_length": POSITIONS,
    "attention.sliding_window": POSITIONS,
    "expert_count": EXPERTS,
    "expert_used_count": EXPERTS,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "rope.freq_base": THETA,
    "rope.scaling.factor": FACTOR,
    "rope.scale_linear": FACTOR,
}
"""By the key below the architecture's own name."""
