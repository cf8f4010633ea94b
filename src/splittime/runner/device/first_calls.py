"""Kernels compiled before the first request, beside those of warm-up steps, captured ones and the largest one.

Triton compiles a kernel for each set of its constants, a second or so each, and some depend on how large a step is: on
how many rows draw a token, on how many tokens choose experts, on how long a chunk and its context are. Each is launched
once here, over the empty cache; what is computed is not looked at.
"""

import torch

from splittime.core.sampling import SamplingParams
from splittime.kernels.api import AttentionBatch
from splittime.kernels.triton import attention_prefill, grouped, sampling
from splittime.kernels.triton.mixture import MixtureLayer
from splittime.kernels.triton.ops import TritonOps
from splittime.models.decoder import Decoder
from splittime.runner import sampler
from splittime.runner.config import Resolved
from splittime.runner.kv_store import KvStore

DRAWN = (SamplingParams(temperature=0.0, seed=0), SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9))
LONG_CONTEXT = 2048  # of which a short chunk's keys are shared by programs


@torch.inference_mode()
def make(decoder: Decoder, store: KvStore, resolved: Resolved) -> None:
    assert isinstance(decoder.ops, TritonOps)
    _draw(decoder.ops, resolved)
    _choose_experts(decoder)
    _attend(decoder, store, resolved.max_model_len)


def _draw(ops: TritonOps, resolved: Resolved) -> None:
    for rows in sampling.lines(resolved.max_num_seqs, resolved.vocab_size):
        logits = torch.zeros(rows, resolved.vocab_size, device=ops.device)
        for kind in DRAWN:
            ops.draw_tokens(logits, sampler.draws([kind] * rows, [0] * rows))


def _choose_experts(decoder: Decoder) -> None:
    """By one layer, as the others are like it."""
    layer = next((one for one in decoder.layers if isinstance(one, MixtureLayer)), None)
    if layer is None:
        return
    ops, experts = decoder.ops, layer.experts
    for tokens in grouped.lines(experts, layer.spec.num_chosen):
        x = torch.zeros(tokens, experts.down.out_features, dtype=ops.activation_dtype, device=ops.device)
        layer.feed_forward(x, x, torch.zeros(tokens, dtype=torch.int32, device=ops.device))


def _attend(decoder: Decoder, store: KvStore, max_model_len: int) -> None:
    """Chunks of some tokens, with no context before them and after a long one, all of it the first block."""
    ops = decoder.ops
    for group, shape in zip(decoder.kv_groups, store.shapes, strict=True):
        mixer, kv = decoder.config.layers[group.layers[0]].mixer, store.layers[group.layers[0]]
        sharing, longest = mixer.num_heads // mixer.num_kv_heads, min(LONG_CONTEXT, max_model_len)
        for tokens in attention_prefill.lines(shape, sharing, ops.activation_dtype.itemsize):
            length = min(tokens, longest)
            q = torch.zeros(length, mixer.num_heads, mixer.head_dim, dtype=ops.activation_dtype, device=ops.device)
            for context in sorted({length, longest}):
                tables = torch.zeros(1, -(-context // shape.block_size), dtype=torch.int64)
                nowhere = torch.full((length,), -1)
                batch = AttentionBatch([0, length], [context], tables, nowhere, nowhere, num_decode_rows=0)
                ops.attention(q, kv, ops.plan_attention(batch, shape, group.window_tokens), 1.0)
