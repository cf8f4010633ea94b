"""What the loader calls a module (as Hugging Face checkpoints do), and what GGUF calls its tensor.

model.embed_tokens  token_embd      model.layers.N.self_attn.q_proj  blk.N.attn_q      (k_proj, v_proj alike)
model.norm          output_norm     model.layers.N.mlp.gate_proj     blk.N.ffn_gate    (up_proj, down_proj alike)
lm_head             output          model.layers.N....experts.E.w1   matrix E of blk.N.ffn_gate_exps
"""

import re

from splittime.core.errors import ConfigError

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
OF_EXPERT = {
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name as its module and "weight" or "bias"."""
    module, _, part = name.rpartition(".")
    if part not in ("weight", "bias"):
        raise ConfigError(f"weights: {name} is neither a weight nor a bias", param=name)
    return module, part


def gguf_name(module: str) -> tuple[str, int | None]:
    """The tensor's name without ".weight", and which of its matrices it is, for an expert."""
    if module in WHOLE:
        return WHOLE[module], None
    layer = _LAYER.fullmatch(module)
    if layer is not None and layer[2] in IN_LAYER:
        return f"blk.{layer[1]}.{IN_LAYER[layer[2]]}", None
    expert = _EXPERT.fullmatch(layer[2]) if layer is not None else None
    if layer is not None and expert is not None and expert[2] in OF_EXPERT:
        return f"blk.{layer[1]}.{OF_EXPERT[expert[2]]}", int(expert[1])
    raise ConfigError(f"weights: {module} has no name in GGUF", param=module)
