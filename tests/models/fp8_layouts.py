"""Linear weights in e4m3 as they are published, and what they mean by the format's definition, byte by byte."""

from dataclasses import dataclass

import torch

BLOCK = 128
FLOAT_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT_STATIC = {**FLOAT_TOKENS, "strategy": "tensor", "dynamic": False}
FLOAT_GROUPS = {**FLOAT_TOKENS, "strategy": "group", "group_size": BLOCK}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def meaning_of(byte):
    """One sign, four bits of exponent (bias 7), three of mantissa; no infinity, and 127 is NaN."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


TABLE = torch.tensor([meaning_of(byte) for byte in range(256)], dtype=torch.float64)


def compressed_fp8(strategy="channel", activations=FLOAT_TOKENS, **others):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    group_0 = {"targets": ["Linear"], "weights": {**weights, **others}, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
    }


@dataclass
class Floats:
    """q: uint8 [out, in]; s: [1, 1], [out, 1] or [blocks, blocks]."""

    q: torch.Tensor
    s: torch.Tensor

    def values(self):
        """float64 [out, in]."""
        s = self.s
        if s.shape[1] > 1 or len(s) not in (1, len(self.q)):
            s = s.repeat_interleave(BLOCK, 0)[: len(self.q)].repeat_interleave(BLOCK, 1)[:, : self.q.shape[1]]
        return TABLE[self.q.long()] * s.double()


def draw_floats(num_out, num_in, kind, seed=0, dtype=torch.bfloat16):
    """dtype: of the scales."""
    source = torch.Generator().manual_seed(sum(map(ord, str(seed))) * 1000 + num_out)
    drawn = (torch.randn(num_out, num_in, generator=source) * 110).clamp(-448, 448)
    shape = {
        "tensor": (1, 1),
        "channel": (num_out, 1),
        "block": (-(-num_out // BLOCK), -(-num_in // BLOCK)),
    }[kind]
    scales = (torch.rand(shape, generator=source) + 0.5) / 110 / num_in**0.5
    return Floats(drawn.to(torch.float8_e4m3fn).view(torch.uint8), scales.to(dtype))


def stored_floats(drawn, name="weight_scale", shape=None, input_scale=None):
    """shape: of the scales in the file, if another."""
    scales = drawn.s if shape is None else drawn.s.reshape(shape)
    tensors = {"weight": drawn.q.view(torch.float8_e4m3fn), name: scales.clone()}
    return tensors if input_scale is None else {**tensors, "input_scale": torch.tensor(input_scale)}


def maker(kind, name="weight_scale", dtype=torch.bfloat16, **how):
    """For `stored_layouts.write`."""

    def make(module, num_out, num_in):
        drawn = draw_floats(num_out, num_in, kind, module, dtype)
        return drawn, stored_floats(drawn, name, **how)

    return make


# name: (quantization_config, make, what is told)
MODELS = {
    "blocks": (BLOCKS, maker("block", "weight_scale_inv"), "fp8: fp8 in groups of 128; head float32"),
    "blocks, float32 scales": (
        {**BLOCKS, "modules_to_not_convert": ["lm_head"]},
        maker("block", "weight_scale_inv", torch.float32),
        "fp8: fp8 in groups of 128; head float32",
    ),
    "auto fp8": (AUTO_FP8, maker("tensor", shape=(), dtype=torch.float32, input_scale=0.03), "fp8: fp8; head float32"),
    "dynamic": (compressed_fp8(), maker("channel"), "compressed-tensors: fp8; head float32"),
    "static": (
        compressed_fp8("tensor", FLOAT_STATIC, observer="minmax"),
        maker("tensor", shape=(1,), input_scale=[0.03]),
        "compressed-tensors: fp8; head float32",
    ),
    "compressed blocks": (
        compressed_fp8("block", FLOAT_GROUPS),
        maker("block"),
        "compressed-tensors: fp8 in groups of 128; head float32",
    ),
}
SHAPE = {"hidden_size": 192, "intermediate_size": 320}  # heads of 48: their pairs of rows cross blocks
