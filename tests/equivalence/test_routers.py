"""Routers whose options are drawn at random: the experts and weights are those of the definition, one token at a time,
and layers of such mixtures give the same on every CPU backend."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_or_not import has_native_kernels

from splittime.kernels.api import AttentionBatch
from splittime.kernels.choose import make_backend
from splittime.kernels.compose import choose_experts
from splittime.kernels.layer import AttentionSpec, LayerSpec, MixtureSpec, MlpSpec, NormSpec, RopeSpec, RouterSpec
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import choose
from splittime.models.weights.load import load_decoder
from splittime.runner.kv_store import KvStore

TOKENS, BLOCK_SIZE = 13, 4


@st.composite
def routers(draw):
    num_groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(2, 4))
    chosen_groups = draw(st.integers(1, num_groups))
    return RouterSpec(
        num_experts=num_groups * size,
        num_chosen=draw(st.integers(1, chosen_groups * size)),
        normalises=draw(st.booleans()),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        has_bias=draw(st.booleans()),
        is_corrected=draw(st.booleans()),
        num_groups=num_groups,
        chosen_groups=chosen_groups,
        least_sum=draw(st.sampled_from([1e-20, 0.3])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


def defined(logits: list[float], spec: RouterSpec, correction: list[float]) -> dict[int, float]:
    """Returns the weight of each expert that one token goes to."""
    odds = [math.exp(one) for one in logits]
    scores = [one / sum(odds) for one in odds]
    if spec.scoring == "sigmoid":
        scores = [one / (1 + one) for one in odds]
    ranks = [score + more for score, more in zip(scores, correction, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(begin, begin + size) for begin in range(0, spec.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(ranks[expert] for expert in group)[-2:]))
    allowed = [expert for group in groups[: spec.chosen_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: spec.num_chosen]
    total = max(sum(scores[expert] for expert in chosen), spec.least_sum) if spec.normalises else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@settings(max_examples=60, deadline=None)
@given(routers(), st.integers(0, 1 << 20))
def test_experts_and_weights_are_those_of_the_definition(spec, seed):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, spec.num_experts, generator=source) * 2
    correction = torch.randn(spec.num_experts, generator=source) * 0.3
    weights, chosen = choose_experts(logits, spec, correction if spec.is_corrected else None)
    added = correction.tolist() if spec.is_corrected else [0.0] * spec.num_experts
    for token in range(TOKENS):
        want = defined(logits[token].tolist(), spec, added)
        assert dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True)) == pytest.approx(want, rel=1e-4)


def mixture_model(mixtures):
    norm, mixer = NormSpec(1e-5), AttentionSpec(4, 2, 8, RopeSpec("default", 1e4))
    return ModelConfig(
        architecture="Qwen2MoeForCausalLM",
        vocab_size=50,
        hidden_size=32,
        layers=tuple(LayerSpec(norm, mixer, mixture) for mixture in mixtures),
        norm=norm,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
        eos_token_ids=(),
    )


def logits_of(model, kernels, lengths):
    """Of all of a prompt, computed in steps of these lengths."""
    ops = make_backend(kernels, torch.float32)
    decoder = load_decoder(None, model, ops, choose(None, "float32"), 64, is_dummy=True).decoder
    store, found, begin = KvStore(decoder.kv_groups, 8, BLOCK_SIZE, torch.float32), [], 0
    for length in lengths:
        positions = torch.arange(begin, begin + length)
        places = (positions // BLOCK_SIZE, positions % BLOCK_SIZE)
        batch = AttentionBatch([0, length], [begin + length], torch.arange(8)[None], *places, int(length == 1))
        hidden = decoder.forward(positions * 7 % model.vocab_size, positions, store, batch)
        found.append(decoder.logits(hidden))
        begin += length
    return torch.cat(found)


@st.composite
def mixtures(draw):
    shared = draw(st.sampled_from([None, MlpSpec(16), MlpSpec(20, has_bias=True)]))
    expert = MlpSpec(24, has_bias=draw(st.booleans()))
    return MixtureSpec(draw(routers()), expert, shared, shared is not None and draw(st.booleans()))


@settings(max_examples=8, deadline=None)
@given(st.lists(mixtures(), min_size=1, max_size=3))
def test_every_backend_computes_them_whole_and_in_chunks(drawn):
    model = mixture_model(drawn)
    want = logits_of(model, "reference", [TOKENS])
    for kernels in ["torch", *(["native"] if has_native_kernels() else [])]:
        for lengths in ([TOKENS], [5, 1, 6, 1]):
            torch.testing.assert_close(logits_of(model, kernels, lengths), want, atol=2e-4, rtol=2e-4)
    assert want.abs().max() > 0.1
