"""Choosing tokens: distributions by chi-square, filters and penalties against literal loops, seeds against batches."""

import math
import tracemalloc
from collections import Counter
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.kernels.choose import make_backend
from splittime.runner import penalties, sampler
from splittime.runner.sampler import uniforms

VOCAB = 300


def native_ops():
    try:
        return make_backend("native", torch.float32)
    except ConfigError as error:
        pytest.skip(str(error))


BACKENDS = {"torch": lambda: make_backend("torch", torch.float32), "native": native_ops}


@pytest.fixture(params=BACKENDS)
def choose(request):
    """`sampler.choose` with the backend's ops; what the test asks for holds of each."""
    ops = BACKENDS[request.param]()
    return lambda logits, params, indices, *allowed: sampler.choose(logits, params, indices, ops, *allowed)


def logits_of(seed=0, rows=1, vocab=VOCAB, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def filtered_distribution(logits, params: SamplingParams) -> list[float]:
    """The definition, with loops: keep by top_k and min_p, then the nucleus of what is left; ties stay."""
    scaled = [value / params.temperature for value in logits.double().tolist()]
    best = max(scaled)
    weights = [math.exp(value - best) for value in scaled]
    kept = set(range(len(scaled)))
    if params.top_k:
        kth = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        kept = {token for token in kept if scaled[token] >= kth}
    kept = {token for token in kept if weights[token] >= params.min_p}
    total = sum(weights[token] for token in kept)
    so_far, floor = 0.0, best
    for token in sorted(kept, key=lambda token: -scaled[token]):
        if so_far >= params.top_p * total:
            break
        so_far, floor = so_far + weights[token], scaled[token]
    kept = {token for token in kept if scaled[token] >= floor}
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scaled))]


FILTERS = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k 1": {"top_k": 1},
    "top_k 7": {"top_k": 7},
    "top_k beyond the candidates": {"top_k": 200, "temperature": 4.0},
    "top_k beyond the vocabulary": {"top_k": 9999},
    "top_k beyond 31 bits": {"top_k": 2**63 - 1},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "top_p flat": {"top_p": 0.95, "temperature": 8.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "min_p loose, top_p": {"min_p": 0.001, "top_p": 0.9, "temperature": 4.0},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "top_k deep, min_p shallow": {"top_k": 250, "min_p": 0.05},
}


@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name, choose):
    """Chi-square of 6000 draws of one row against the definition; 5 standard deviations is the limit."""
    params = SamplingParams(**{"seed": 1, **FILTERS[name]})
    row = logits_of(3)
    draws = 6000
    chosen = []
    for begin in range(0, draws, 1000):
        chosen += choose(row.expand(1000, -1), [params] * 1000, range(begin, begin + 1000))
    counts = Counter(chosen)
    want = filtered_distribution(row[0], params)
    assert all(want[token] > 0 for token in counts), "a token that the filters exclude was drawn"
    big = [token for token in range(VOCAB) if want[token] * draws >= 5]
    cells = [(counts[token], want[token] * draws) for token in big]
    rest = (draws - sum(got for got, _ in cells), draws - sum(expected for _, expected in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi_square = sum((got - expected) ** 2 / expected for got, expected in cells)
    freedom = len(cells) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_ties_at_the_threshold_of_top_k_that_are_more_than_the_candidates_all_count(choose):
    """20 likelier tokens are 12 % of what top_k leaves, ties included, so a nucleus of a quarter needs the ties."""
    row = torch.full((2500,), -5.0)
    row[:20], row[20:320] = 1.0, 0.5
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.25, seed=1)
    chosen = choose(row.expand(400, -1), [params] * 400, range(400))
    want = filtered_distribution(row, params)
    assert all(want[token] > 0 for token in chosen)
    tied = sum(token >= 20 for token in chosen) / 400
    assert tied == pytest.approx(sum(want[20:]), abs=0.1)


@pytest.mark.parametrize("name", FILTERS)
def test_candidates_and_the_whole_vocabulary_choose_alike(name, monkeypatch):
    ops = make_backend("torch", torch.float32)
    choose = partial(sampler.choose, ops=ops)
    params = [SamplingParams(**{"seed": seed, **FILTERS[name]}) for seed in range(60)]
    logits = logits_of(5, rows=60)
    few = choose(logits, params, range(60))
    monkeypatch.setattr(sampler, "CANDIDATES", (5, 30))
    assert few == choose(logits, params, range(60))
    monkeypatch.setattr(sampler, "CANDIDATES", ())
    assert few == choose(logits, params, range(60))


def test_ties_at_a_threshold_are_all_kept(choose):
    logits = torch.zeros(1, 40)
    logits[0, 3] = 1.0
    for params in (SamplingParams(seed=0, top_k=2), SamplingParams(seed=0, top_p=0.05)):
        drawn = set(choose(logits.expand(500, -1), [params] * 500, range(500)))
        assert drawn == ({3} if params.top_p < 1 else set(range(40)))


def test_masked_tokens_are_never_drawn(choose):
    logits = torch.full((1, 50), float("-inf"))
    logits[0, [7, 49]] = 0.0
    for changes in ({}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 0.5}):
        params = SamplingParams(seed=3, **changes)
        assert set(choose(logits.expand(300, -1), [params] * 300, range(300))) == {7, 49}


def test_choice_depends_on_seed_and_index_alone(choose):
    """A row's token is the same alone and in a batch of every kind of row, at any place."""
    kinds = [SamplingParams(**{"seed": place, **changes}) for place, changes in enumerate(FILTERS.values())]
    kinds += [SamplingParams(temperature=0.0, seed=5), SamplingParams(seed=-(2**63)), SamplingParams(seed=2**63 - 1)]
    logits = logits_of(6, rows=len(kinds))
    indices = [place * 3 for place in range(len(kinds))]
    alone = [choose(logits[p : p + 1], [kinds[p]], [indices[p]])[0] for p in range(len(kinds))]
    order = np.random.default_rng(1).permutation(len(kinds)).tolist()
    together = choose(logits[order], [kinds[p] for p in order], [indices[p] for p in order])
    assert together == [alone[p] for p in order]


def test_greedy_takes_the_largest(choose):
    logits = logits_of(7, rows=20)
    assert choose(logits, [SamplingParams(temperature=0.0, seed=0)] * 20, range(20)) == logits.argmax(1).tolist()


def test_uniforms_are_uniform_and_uncorrelated():
    for seeds, indices in ((np.arange(20000), np.zeros(20000)), (np.full(20000, 42), np.arange(20000))):
        drawn = uniforms(seeds.astype(np.int64), indices.astype(np.int64))
        assert ((drawn >= 0) & (drawn < 1)).all()
        counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 49 + 5 * math.sqrt(98)
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    assert len(set(uniforms(np.array([-1, 0, 1, 2]), np.zeros(4, dtype=np.int64)).tolist())) == 4


def test_uniforms_are_those_of_splitmix64_in_every_version():
    """A seed means the same tokens for as long as anybody keeps it."""

    def mixed(number: int) -> int:
        number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
        return number ^ (number >> 31)

    gamma, seeds, indices = 0x9E3779B97F4A7C15, [0, 1, 42, 42, 2**62], [0, 5, 0, 1, 3]
    keys = [mixed((seed + gamma) % 2**64) for seed in seeds]
    wanted = [(mixed((key + gamma * (at + 1)) % 2**64) >> 11) / 2**53 for key, at in zip(keys, indices, strict=True)]
    assert uniforms(np.array(seeds), np.array(indices)).tolist() == wanted


def penalised_by_definition(logits, params: SamplingParams, prompt, outputs):
    adjusted = logits.tolist()
    for token in range(len(adjusted)):
        if token in prompt or token in outputs:
            penalty = params.repetition_penalty
            adjusted[token] = adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
        count = outputs.count(token)
        adjusted[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        adjusted[token] += params.logit_bias.get(token, 0.0)
    return adjusted


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"presence_penalty": -1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.5, "logit_bias": {4: 2.5, 9: -3.0}},
    ],
    ids=str,
)
def test_penalties_equal_their_definition(changes):
    params = SamplingParams(seed=0, **changes)
    prompt, outputs = [1, 2, 2, 30], [2, 5, 5, 5, 299]
    counts = penalties.TokenCounts(VOCAB, np.array(prompt))
    counts.add_outputs(np.array(outputs[:2]))
    counts.add_outputs(np.array(outputs[2:]))
    logits = logits_of(8)[0]
    want = penalised_by_definition(logits, params, prompt, outputs)
    penalties.adjust(logits, params, counts, (), len(outputs))
    assert logits.tolist() == pytest.approx(want, abs=1e-5)


def test_min_tokens_masks_only_until_they_are_out():
    params = SamplingParams(seed=0, min_tokens=3)
    for num_outputs, is_masked in ((0, True), (2, True), (3, False)):
        logits = logits_of(9)[0]
        penalties.adjust(logits, params, None, (5, 6), num_outputs)
        assert logits[[5, 6]].isneginf().all() == is_masked
        assert penalties.changes_logits(params, num_outputs) == is_masked


@pytest.mark.parametrize("penalty", [1e-45, 1e-300])
def test_a_tiny_repetition_penalty_leaves_logits_that_can_be_drawn_from(penalty, choose):
    logits = logits_of(8)[0]
    counts = penalties.TokenCounts(VOCAB, np.array([3, 4]))
    params = SamplingParams(seed=1, repetition_penalty=penalty, temperature=1e-6)
    logits[3], logits[4] = 2.0, -2.0
    penalties.adjust(logits, params, counts, (), 0)
    assert logits.isfinite().all()
    assert choose(logits.unsqueeze(0), [params], [0]) == [3]


@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 1000, 128_256])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.sample(48)
def test_the_kernel_draws_what_torch_draws(name, vocab):
    """The same definition by two algorithms; they may part only where a uniform falls within rounding of a border."""
    native, plain = native_ops(), make_backend("torch", torch.float32)
    rows = 8 if vocab > 1000 else 40
    params = [SamplingParams(**{"seed": seed, **FILTERS[name]}) for seed in range(rows)]
    logits = logits_of(11, rows=rows, vocab=vocab)
    got = sampler.choose(logits, params, range(rows), native)
    want = sampler.choose(logits, params, range(rows), plain)
    assert sum(one != other for one, other in zip(got, want, strict=True)) <= 1


@pytest.mark.parametrize("name", [*FILTERS, "greedy"])
def test_what_is_not_allowed_is_as_if_it_were_not_there(name, choose):
    logits, rng = logits_of(14, rows=6, vocab=301), np.random.default_rng(1)
    params = [SamplingParams(**{"seed": seed, **FILTERS.get(name, {"temperature": 0.0})}) for seed in range(6)]
    is_allowed = rng.random((6, 301)) < 0.1
    is_allowed[:, 7] = True
    octets = np.packbits(np.pad(is_allowed, ((0, 0), (0, 19))), axis=1, bitorder="little")
    allowed = dict(zip((4, 0, 5), octets.view(np.uint32)[[4, 0, 5]], strict=True))
    wanted = logits.clone()
    wanted[[0, 4, 5]] = wanted[[0, 4, 5]].masked_fill(torch.from_numpy(~is_allowed[[0, 4, 5]]), -torch.inf)
    assert choose(logits, params, range(6), allowed) == choose(wanted, params, range(6))
    assert (wanted[1] == logits[1]).all()


class DrawsWithoutBits:
    """Draws with the native kernel, but not what only bits allow, as Triton's does."""

    def __init__(self) -> None:
        self._ops, self.drawn = native_ops(), 0

    def draw(self, logits, draws, bits=None):
        self.drawn += bits is None
        return None if bits is not None or draws["allowed"].any() else self._ops.draw(logits, draws)


@pytest.mark.parametrize("name", [*FILTERS, "greedy"])
def test_a_kernel_that_reads_no_bits_draws_from_what_they_leave(name):
    params = [SamplingParams(**{"seed": seed, **FILTERS.get(name, {"temperature": 0.0})}) for seed in range(6)]
    logits, ops, allowed = logits_of(14, rows=6, vocab=301), DrawsWithoutBits(), {2: np.arange(10, dtype=np.uint32)}
    found = sampler.choose(logits.clone(), params, range(6), ops, allowed)
    assert (found, ops.drawn) == (sampler.choose(logits, params, range(6), native_ops(), allowed), 1)


@pytest.mark.parametrize("vocab", [1, 5, 64, 999])
def test_the_kernel_finds_the_first_of_the_largest(vocab):
    ops, logits = native_ops(), logits_of(12, rows=30, vocab=vocab).round()
    assert ops.argmax(logits) == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 7, 8, 100, 300])
def test_the_kernel_sees_what_is_not_finite(value, place):
    x = logits_of(13, rows=5, vocab=301)
    x[3, place] = value
    assert native_ops().finite(x) == [True, True, True, False, True]


def test_alternatives_are_packed_and_come_out_as_they_were():
    """As tuples 20 of them took 2.2 KB of memory."""
    logits, counts = logits_of(rows=64, vocab=32_000), [20] * 60 + [0, 1, 2, 3]
    found = sampler.describe(logits, torch.arange(64) + 1000, 20)
    made = sampler.token_logprobs(found, list(range(1000, 1064)), counts)
    wire, decoder = msgspec.msgpack.encode(made), msgspec.msgpack.Decoder(list[TokenLogprob])
    want = logits.log_softmax(-1)
    for line, (one, count) in enumerate(zip(decoder.decode(wire), counts, strict=True)):
        best = want[line].topk(20)
        assert one.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))[:count]
        assert (one.token_id, one.logprob) == (1000 + line, want[line, 1000 + line].item())
    tracemalloc.start()
    kept = [decoder.decode(wire) for _ in range(20)]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / sum(map(len, kept)) < 400
