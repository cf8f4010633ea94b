"""Choosing tokens in Triton, beside `runner.sampler` on the same logits and seeds: the same tokens.

In the interpreter a filtered row takes a tenth of a second, so there are few of them; on a card there are many more.
"""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from splittime.core.sampling import SamplingParams
from splittime.kernels.choose import make_backend
from splittime.kernels.draw import DRAW
from splittime.runner import sampler
from splittime.runner.sampler import uniforms

pytest.importorskip("triton")

from splittime.kernels.triton import sampling, weights
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.weights import Draws

pytestmark = pytest.mark.sample(5)

DEVICE = device()
TIMES = 1 if is_interpreted() else 200  # rows for each that the interpreter has time for
TORCH = make_backend("torch", torch.float32)
SMALL = sampling.Chunks(chunk=128, block=64, listed=32, ways=4)  # many of everything in a short row
LAST = 1 - 2.0**-53  # the largest uniform number
NO_SHRINKING = (Phase.explicit, Phase.generate)  # an example takes the interpreter a second

FILTERS = {
    "plain": {},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 30.0},
    "all but greedy": {"temperature": 1e-5, "top_p": 0.9},
    "top_k 1": {"top_k": 1},
    "top_k 7": {"top_k": 7},
    "top_k deep": {"top_k": 250, "temperature": 4.0},
    "top_k beyond the vocabulary": {"top_k": 9999, "top_p": 0.7},
    "top_k beyond 31 bits": {"top_k": 2**40},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-9},
    "top_p nearly 1": {"top_p": 0.9999999},
    "top_p flat": {"top_p": 0.95, "temperature": 8.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0, "top_k": 5},
    "min_p loose, top_p": {"min_p": 0.001, "top_p": 0.9, "temperature": 4.0},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "top_k and top_p far apart": {"top_k": 200, "top_p": 0.2, "temperature": 2.0},
}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kinds_of_rows(times: int, vocab: int) -> torch.Tensor:
    """Spread, peaked, with many ties, and mostly masked."""
    plain, peaked, tied, masked = (randn(times, vocab, seed=seed) for seed in range(4))
    peaked, tied = peaked * 8 - 40, (tied * 2).round() / 2
    masked[:, 1:][randn(times, vocab - 1, seed=5) > 0.3] = -math.inf
    return torch.cat((plain * 2, peaked, tied, masked))


def draw(logits, params, indices, **options):
    draws = Draws.of(sampler.draws(params, indices), DEVICE)
    return sampling.draw(logits.to(DEVICE), draws, **options).tolist()


def draws_of(uniform, **filters) -> Draws:
    """A draw for each of these uniform numbers; what `filters` names may be a number a row."""
    lines = np.zeros(len(uniform), dtype=DRAW)
    lines["uniform"], lines["temperature"], lines["top_p"] = uniform, 1.0, 1.0
    for name, value in filters.items():
        lines[name] = value
    return Draws.of(lines, DEVICE)


def test_uniform_numbers_are_the_hosts_to_the_bit():
    generator = np.random.default_rng(0)
    seeds = np.concatenate(([0, -1, 1, 2**63 - 1, -(2**63)], generator.integers(-(2**63), 2**63 - 1, 3000)))
    indices = np.concatenate((np.arange(1000), generator.integers(0, 2**62, len(seeds) - 1000)))
    got = weights.uniforms(torch.from_numpy(seeds).to(DEVICE), torch.from_numpy(indices).to(DEVICE))
    assert np.array_equal(got.cpu().numpy(), uniforms(seeds, indices))
    assert len(weights.uniforms(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 5000])
def test_argmax_is_the_first_of_the_largest(vocab):
    logits = kinds_of_rows(1, vocab)
    logits[3] = -math.inf
    for chunks in (None, SMALL) if vocab <= 1000 else (None,):
        assert sampling.argmax(logits.to(DEVICE), chunks).tolist() == logits.argmax(-1).tolist()
    assert sampling.argmax(logits[:0].to(DEVICE)).tolist() == []


@pytest.mark.parametrize("name", FILTERS)
def test_the_tokens_are_those_of_the_sampler(name):
    logits = kinds_of_rows(TIMES, 300)
    params = [SamplingParams(seed=seed, **FILTERS[name]) for seed in range(len(logits))]
    indices = [3 * row for row in range(len(logits))]
    assert draw(logits, params, indices) == sampler.choose(logits, params, indices, TORCH)


@pytest.mark.parametrize("vocab", [1, 2, 129, 1000, 3001])
def test_the_tokens_are_those_of_the_sampler_whatever_the_vocabulary(vocab):
    logits = randn(4 * TIMES, vocab, seed=vocab) * 3
    names = ("all", "top_p flat", "hot", "top_k deep")
    params = [SamplingParams(seed=row, **FILTERS[names[row % 4]]) for row in range(len(logits))]
    assert draw(logits, params, range(len(logits))) == sampler.choose(logits, params, range(len(logits)), TORCH)


def test_a_draw_depends_on_neither_its_batch_nor_how_the_row_is_cut():
    logits = randn(3, 300) * 2
    params = [SamplingParams(seed=row, **FILTERS[name]) for row, name in enumerate(("all", "top_p flat", "top_k deep"))]
    together = draw(logits, params, range(3))
    assert draw(logits, params, range(3), chunks=SMALL) == together
    assert draw(logits[1:2], params[1:2], [1])[0] == together[1]


def test_greedy_rows_and_drawn_rows_may_be_mixed():
    logits = kinds_of_rows(1, 200)
    params = [SamplingParams(seed=row, temperature=row % 2, top_k=3) for row in range(4)]
    assert draw(logits, params, range(4)) == sampler.choose(logits, params, range(4), TORCH)


def test_a_row_of_nothing_gets_a_token_and_one_token_is_always_chosen():
    logits = torch.full((3, 190), -math.inf)
    logits[1, 177] = -5.0
    logits[2, 188:] = 1e30
    assert sampling.draw(logits.to(DEVICE), draws_of([LAST] * 3, top_k=4, top_p=0.9)).tolist() == [0, 177, 189]
    for chunks in (None, SMALL):
        got = sampling.draw(logits.to(DEVICE), draws_of([0.0] * 3), filters=False, chunks=chunks)
        assert got.tolist() == [0, 177, 188]
    assert sampling.draw(logits[:0].to(DEVICE), draws_of([])).tolist() == []


def test_what_is_not_finite_still_gets_a_token_of_the_vocabulary():
    logits = randn(4, 70)
    logits[0], logits[1, 3:6], logits[2, 69], logits[3, 5] = math.nan, math.nan, math.inf, math.inf
    logits[3, 6] = math.nan
    draws = draws_of([LAST] * 4, top_k=[3, 0, 2, 0], top_p=0.9)
    for tokens in (sampling.draw(logits.to(DEVICE), draws), sampling.argmax(logits.to(DEVICE), SMALL)):
        assert 0 <= tokens.min() <= tokens.max() < 70


def test_min_p_of_one_keeps_all_that_are_as_likely_as_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.9999, 3.0, -1.0]] * 2)
    draws = draws_of([0.0, LAST], min_p=1.0)
    assert sampling.draw(logits.to(DEVICE), draws, filters=False).tolist() == [1, 3]


def test_seeds_on_the_device_make_the_uniform_numbers():
    logits, params = randn(4, 100), [SamplingParams(seed=-7 * row) for row in range(4)]
    lines = sampler.draws(params, [5, 6, 7, 8])
    lines["uniform"] = 0.5
    seeds = torch.tensor([one.seed for one in params], device=DEVICE)
    draws = Draws(Draws.of(lines, DEVICE).lines, seeds, torch.tensor([5, 6, 7, 8], device=DEVICE))
    got = sampling.draw(logits.to(DEVICE), draws, filters=False).tolist()
    assert got == sampler.choose(logits, params, [5, 6, 7, 8], TORCH)


def last_kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """The definition, for a row that falls: where it ends, ties included."""
    weights = (logits - logits[0]).exp().double()
    kept = (logits >= logits[min(top_k or len(logits), len(logits)) - 1]) & (weights >= min_p)
    before = weights.cumsum(0) - weights
    kept &= (before < top_p * weights[kept].sum()) | (top_p == 1.0)
    return int((logits >= logits[kept][-1]).nonzero()[-1])


@settings(max_examples=3, phases=NO_SHRINKING)
@given(st.integers(2, 400), st.sampled_from([0.01, 1.0, 9.0]), st.sampled_from([0, 4, 1024]), st.integers(0, 999))
def test_thresholds_are_exact(vocab, scale, steps, seed):
    """The largest uniform number chooses the last token that is kept: of a falling row, that is the threshold. A weight
    below 2^-53 of the sum is out of every uniform number's reach."""
    random = Random(seed)
    logits = (randn(vocab, seed=seed) * scale).sort(descending=True).values
    logits = logits.clamp(min=float(logits[0]) - 25)
    logits = logits if steps == 0 else (logits * steps).round() / steps
    rows = 4 * TIMES
    top_ks = [random.choice((0, 1, vocab // 2, random.randint(1, vocab + 1))) for _ in range(rows)]
    top_ps = [random.choice((1.0, 0.5, random.random() + 1e-6)) for _ in range(rows)]
    min_ps = [random.choice((0.0, 1.0, random.random())) for _ in range(rows)]
    draws = draws_of([LAST] * rows, top_k=top_ks, top_p=top_ps, min_p=min_ps)
    got = sampling.draw(logits.expand(rows, -1).contiguous().to(DEVICE), draws).tolist()
    assert got == [last_kept(logits, *one) for one in zip(top_ks, top_ps, min_ps, strict=True)]


def test_thresholds_tell_neighbouring_floats_apart():
    logits = 5.0 - torch.arange(60) * 2.0**-21
    top_ks = [1, 2, 33, 59]
    got = sampling.draw(logits.expand(4, -1).contiguous().to(DEVICE), draws_of([LAST] * 4, top_k=top_ks))
    assert got.tolist() == [top_k - 1 for top_k in top_ks]


@settings(max_examples=4, phases=NO_SHRINKING)
@given(st.integers(1, 90), st.lists(st.floats(0, LAST), min_size=2, max_size=8))
def test_a_larger_uniform_number_never_chooses_an_earlier_token(vocab, numbers):
    logits = (randn(vocab, seed=vocab) * 2).expand(len(numbers), -1).contiguous()
    tokens = sampling.draw(logits.to(DEVICE), draws_of(sorted(numbers)), filters=False).tolist()
    assert tokens == sorted(tokens)
    assert max(tokens) < vocab


def test_log_probabilities_are_the_hosts():
    logits, tokens = randn(4, 500) * 3, [3, 99, 0, 499]
    got = sampler.describe(logits.to(DEVICE), torch.tensor(tokens, device=DEVICE), 5)
    for line, one in enumerate(sampler.token_logprobs(got, tokens, [5] * 4)):
        want = logits[line].log_softmax(-1)
        assert one.rank == 1 + int((want > want[tokens[line]]).sum())
        assert [token for token, _ in one.top] == want.topk(5).indices.tolist()
        assert one.logprob == pytest.approx(float(want[tokens[line]]), abs=1e-5)
        assert [value for _, value in one.top] == pytest.approx(want.topk(5).values.tolist(), abs=1e-5)
