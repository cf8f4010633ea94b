"""A model whose layers differ in every part: all CPU backends agree, whole or in chunks, and say what they fuse."""

from pathlib import Path

import pytest
import torch
from native_or_not import has_native_kernels

from splittime.kernels.api import AttentionBatch
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import (
    AttentionSpec,
    KvGroup,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import choose
from splittime.models.weights.load import load_decoder
from splittime.runner.kv_store import KvStore

NORM, OTHER_NORM = NormSpec(1e-5), NormSpec(1e-6)
WIDE = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, position=RopeSpec("default", 1e4))
NARROW = AttentionSpec(2, 1, 8, RopeSpec("linear", 1e5, 2.0), window_tokens=5, head_norm=NORM, qkv_bias=True)
LAYERS = (
    LayerSpec(NORM, WIDE, MlpSpec(48)),
    LayerSpec(NORM, NARROW, MlpSpec(80, has_bias=True)),
    LayerSpec(NORM, WIDE, MixtureSpec(RouterSpec(4, 2, normalises=True), MlpSpec(24))),
    LayerSpec(OTHER_NORM, NARROW, MlpSpec(32)),
    LayerSpec(NormSpec(1e-5, is_centred=True), WIDE, MlpSpec(48), "shared"),
)
MODEL = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=50,
    hidden_size=32,
    layers=LAYERS,
    norm=NORM,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    checkpoint_dtype="float32",
    eos_token_ids=(),
)
TOKENS, BLOCK_SIZE = 21, 4


def loaded_by(kernels):
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")
    ops = make_backend(kernels, torch.float32)
    return load_decoder(Path(), MODEL, ops, choose(None, "float32"), 64, is_dummy=True)


def logits_of(decoder, lengths):
    """Of one prompt, computed in steps of these lengths: the last logits."""
    store = KvStore(decoder.kv_groups, 8, BLOCK_SIZE, torch.float32)
    begin = 0
    for length in lengths:
        positions = torch.arange(begin, begin + length)
        batch = AttentionBatch(
            query_begins=[0, length],
            context_lens=[begin + length],
            block_tables=torch.arange(8)[None],
            token_blocks=positions // BLOCK_SIZE,
            token_offsets=positions % BLOCK_SIZE,
            num_decode_rows=int(length == 1),
        )
        hidden = decoder.forward(positions * 7 % MODEL.vocab_size, positions, store, batch)
        begin += length
    return decoder.logits(hidden[-1:])


@pytest.fixture(scope="module")
def want():
    return logits_of(loaded_by("reference").decoder, [TOKENS])


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.parametrize("lengths", [[TOKENS], [8, 6, 6, 1], [19, 1, 1]], ids=str)
def test_every_backend_computes_it(kernels, lengths, want):
    got = logits_of(loaded_by(kernels).decoder, lengths)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    assert want.abs().max() > 0.1


def test_layers_that_are_kept_alike_are_a_group():
    decoder = loaded_by("reference").decoder
    assert decoder.kv_groups == (KvGroup((0, 2, 4), 2, 16, None), KvGroup((1, 3), 1, 8, 5))
    store = KvStore(decoder.kv_groups, 8, BLOCK_SIZE, torch.float32)
    wide, narrow = 2 * 2 * 4 * 16, 2 * 4 * 8
    assert [layer.data[0].numel() for layer in store.layers] == [wide, narrow, wide, narrow, wide]
    assert len(decoder.turns) == 2


def test_what_is_not_fused_says_why():
    told = loaded_by("native").layers
    assert told == (
        "2 fused, 1 as parts: experts are chosen between two calls of the library, "
        "1 as parts: the norm of the heads has another epsilon than the layer's, "
        "1 as parts: norms take off a mean, attention and MLP are given the same"
    )
    assert loaded_by("torch").layers == "5 as parts: the torch kernels are single operations"
