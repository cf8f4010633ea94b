"""What the loader calls a module (as Hugging Face checkpoints do), and what GGUF calls its tensor.

model.embed_tokens  token_embd      model.layers.N.self_attn.q_proj  blk.N.attn_q      (k_proj, v_proj alike)
model.norm          output_norm     model.layers.N.mlp.gate_proj     blk.N.ffn_gate    (up_proj, down_proj alike)
lm_head             output          model.layers.N....experts.E.w1   matrix E of blk.N.ffn_gate_exps
"""

import re
from dataclasses import astuple

from splittime.core.errors import ConfigError
from splittime.models.architectures import ARCHITECTURES

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "router": "ffn_gate_inp",
}
"""By the fields of `LayerNames`."""
MLP = ("ffn_gate", "ffn_up", "ffn_down")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def _modules() -> dict[str, str]:
    """By the name of a module below its layer; an expert's number is N in it."""
    found: dict[str, str] = {}
    for names in {one.names for one in ARCHITECTURES.values()}:
        found |= {getattr(names, field): own for field, own in IN_LAYER.items()}
        found |= dict(zip(astuple(names.mlp), MLP, strict=True))
        place = names.experts.format("N")
        found |= {f"{place}{name}": f"{own}_exps" for name, own in zip(astuple(names.expert), MLP, strict=True)}
    return found


MODULES = _modules()


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
    within = "" if layer is None else layer[2]
    number = re.search(r"(?<=\.)\d+(?=\.)", within)
    own = MODULES.get(within if number is None else f"{within[: number.start()]}N{within[number.end() :]}")
    if layer is None or own is None:
        raise ConfigError(f"weights: {module} has no name in GGUF", param=module)
    return f"blk.{layer[1]}.{own}", None if number is None else int(number[0])
