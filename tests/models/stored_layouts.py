"""Quantised linear weights and whole tiny checkpoints of them, written one element at a time from the definitions of
the formats: nothing here is shared with what reads them.

A `Drawn` weight is what all formats mean, w[i][j] = s[i][g] * (q[i][j] - z[i][g]) with g = group_of[j].
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies in the lowest four bits, in the next, ...
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@dataclass
class Drawn:
    bits: int
    q: list[list[int]]
    z: list[list[int]]
    s: list[list[float]]
    group_of: list[int]

    @property
    def num_out(self):
        return len(self.q)

    @property
    def num_in(self):
        return len(self.group_of)

    @property
    def num_groups(self):
        return len(self.s[0])

    def values(self):
        """float64 [out, in]: exact, a scale of 11 bits times an integer of 9."""
        rows = []
        for q, z, s in zip(self.q, self.z, self.s, strict=True):
            rows.append([s[g] * (one - z[g]) for one, g in zip(q, self.group_of, strict=True)])
        return torch.tensor(rows, dtype=torch.float64)


def draw(num_out, num_in, bits=4, group=32, symmetric=False, zeros=None, act_order=False, seed=0):
    """zeros: the range to draw zero points from; group: -1 for one a row."""
    source = random.Random(f"{seed} {num_out} {num_in}")
    size = num_in if group == -1 else group
    num_groups = -(-num_in // size)
    top = (1 << bits) - 1
    low, high = zeros or (0, top)
    group_of = [j // size for j in range(num_in)]
    if act_order:
        random.Random(f"{act_order} {num_in}").shuffle(group_of)
    middle = 1 << (bits - 1)
    return Drawn(
        bits,
        [[source.randint(0, top) for _ in range(num_in)] for _ in range(num_out)],
        [[middle if symmetric else source.randint(low, high) for _ in range(num_groups)] for _ in range(num_out)],
        [[_half(source.uniform(0.3, 1.0) / (3 << bits)) for _ in range(num_groups)] for _ in range(num_out)],
        group_of,
    )


def _half(value):
    return float(np.float16(value))


def _words(rows):
    """Lists of unsigned 32-bit integers as an int32 tensor."""
    return torch.from_numpy(np.array(rows, dtype=np.uint64).astype(np.uint32).view(np.int32).copy())


def _scales(drawn, transposed):
    scales = torch.tensor(drawn.s).half()
    return scales.t().contiguous() if transposed else scales


def awq(drawn):
    def word(values, k):
        return sum(values[8 * k + output] << (4 * place) for place, output in enumerate(AWQ_OUTPUTS))

    blocks = range(drawn.num_out // 8)
    q_of = [[drawn.q[i][j] for i in range(drawn.num_out)] for j in range(drawn.num_in)]
    z_of = [[drawn.z[i][g] for i in range(drawn.num_out)] for g in range(drawn.num_groups)]
    return {
        "qweight": _words([[word(values, k) for k in blocks] for values in q_of]),
        "qzeros": _words([[word(values, k) for k in blocks] for values in z_of]),
        "scales": _scales(drawn, True),
    }


def gptq(drawn, layout="gptq"):
    bits, per_word = drawn.bits, 32 // drawn.bits
    stored = [[z - (layout == "gptq") for z in row] for row in drawn.z]

    def weight_word(k, i):
        return sum(drawn.q[i][per_word * k + place] << (bits * place) for place in range(per_word))

    def zero_word(g, k):
        fields = [stored[i][g] if i < drawn.num_out else 0 for i in range(per_word * k, per_word * (k + 1))]
        return sum(field << (bits * place) for place, field in enumerate(fields))

    num_in_words, num_out_words = drawn.num_in // per_word, -(-drawn.num_out // per_word)
    return {
        "qweight": _words([[weight_word(k, i) for i in range(drawn.num_out)] for k in range(num_in_words)]),
        "qzeros": _words([[zero_word(g, k) for k in range(num_out_words)] for g in range(drawn.num_groups)]),
        "scales": _scales(drawn, True),
        "g_idx": torch.tensor(drawn.group_of, dtype=torch.int32),
    }


def compressed_packed(drawn, symmetric=True, packs_zeros=True, with_index=False):
    bits, per_word = drawn.bits, 32 // drawn.bits

    def fields(values):
        words = []
        for begin in range(0, len(values), per_word):
            words.append(sum(one << (bits * place) for place, one in enumerate(values[begin : begin + per_word])))
        return words

    tensors = {
        "weight_packed": _words([fields(row) for row in drawn.q]),
        "weight_shape": torch.tensor([drawn.num_out, drawn.num_in]),
        "weight_scale": _scales(drawn, False),
    }
    if not symmetric and packs_zeros:
        by_group = [fields([drawn.z[i][g] for i in range(drawn.num_out)]) for g in range(drawn.num_groups)]
        tensors["weight_zero_point"] = _words(by_group).t().contiguous()
    elif not symmetric:
        middle = 1 << (bits - 1)
        tensors["weight_zero_point"] = torch.tensor([[z - middle for z in row] for row in drawn.z], dtype=torch.int8)
    if with_index:
        tensors["weight_g_idx"] = torch.tensor(drawn.group_of, dtype=torch.int32)
    return tensors


def compressed_int8(drawn, symmetric=True):
    tensors = {
        "weight": torch.tensor([[q - 128 for q in row] for row in drawn.q], dtype=torch.int8),
        "weight_scale": _scales(drawn, False),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.tensor([[z - 128 for z in row] for row in drawn.z], dtype=torch.int8)
    return tensors


def linears(config):
    """Name -> (out, in) of every quantised module."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
    if "num_experts" in config:
        inner = config["moe_intermediate_size"]
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    blocks = [f"mlp.experts.{number}" for number in range(config.get("num_experts", 0))] or ["mlp"]
    layer |= {f"{block}.{name}": shape for block in blocks for name, shape in mlp.items()}
    head = {"lm_head": (config["vocab_size"], hidden)} if config.get("head_is_quantised") else {}
    numbers = range(config["num_hidden_layers"])
    return head | {f"model.layers.{n}.{name}": shape for n in numbers for name, shape in layer.items()}


def plain_tensors(config):
    """What is left as floats, in float32."""
    source = torch.Generator().manual_seed(1)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        names = ["input_layernorm", "post_attention_layernorm"]
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in names}
        if "Qwen3" in config["architectures"][0]:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        if "Qwen2" in config["architectures"][0]:
            sizes = {"q": hidden, "k": hidden // 2, "v": hidden // 2}
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if "num_experts" in config:
            shapes[f"{prefix}mlp.gate.weight"] = (config["num_experts"], hidden)
    return {name: torch.randn(shape, generator=source) * 0.5 for name, shape in shapes.items()}


def write(folder: Path, quantization, make, except_for=(), **changes):
    """A checkpoint in `folder`: make(module, out, in) -> (Drawn, its tensors by suffix). Beside it, in `folder`/plain,
    the float32 model that it stands for. Modules that contain one of `except_for` stay floats. Returns the tensors."""
    config = {**CONFIG, **changes}
    stored = plain_tensors(config)
    exact = dict(stored)
    for module, shape in linears(config).items():
        drawn, tensors = make(module, *shape)
        exact[f"{module}.weight"] = drawn.values().float()
        if any(name in module for name in except_for):
            stored[f"{module}.weight"] = exact[f"{module}.weight"]
        else:
            stored.pop(f"{module}.weight", None)
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
    for place, tensors, said in (
        (folder, stored, {"quantization_config": quantization}),
        (folder / "plain", exact, {}),
    ):
        place.mkdir(exist_ok=True, parents=True)
        (place / "config.json").write_text(json.dumps({**config, **said}))
        save_file(tensors, place / "model.safetensors")
    return stored
