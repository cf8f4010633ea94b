"""KL, its lower bound from the likeliest few, and perplexity, by their laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tables import VOCAB, Table, Telling, random_logits

from splittime.core.errors import EngineError
from splittime.lab.quality import texts
from splittime.lab.quality.model import CHUNK_TOKENS, PIECE_TOKENS, chunks, log_softmax, pieces
from splittime.lab.quality.texts import compare, divergence

LOGITS = arrays.arrays(np.float32, (3, 11), elements=st.floats(-30, 30, width=32))
TEXT = [1 + (7 * place + place * place) % (VOCAB - 1) for place in range(200)]


def figures(base, candidate, begin=0, decode_tokens=0):
    return compare(TEXT, *(model.predictions(TEXT, begin, decode_tokens) for model in (base, candidate)))


@given(LOGITS, LOGITS)
@settings(max_examples=80, deadline=None)
def test_divergence_is_no_less_than_0_and_0_of_equals(one, other):
    p, q = log_softmax(one), log_softmax(other)
    found = divergence(p, q)
    assert (found >= 0).all()
    assert found == pytest.approx((np.exp(p) * (p - q)).sum(1), abs=1e-9)
    assert (divergence(p, p) == 0).all()


def test_what_the_base_excludes_counts_nothing():
    p, q = log_softmax(np.array([[0.0, -np.inf]])), log_softmax(np.array([[0.0, 0.0]]))
    assert divergence(p, q) == pytest.approx(np.log(2))


def test_divergence_in_chunks_is_the_same(monkeypatch):
    p, q = (log_softmax(random_logits(seed)) for seed in (1, 2))
    whole = divergence(p, q)
    monkeypatch.setattr(texts, "CHUNK_ELEMENTS", 5 * VOCAB)
    assert (divergence(p, q) == whole).all()


def test_a_uniform_model_has_the_vocabulary_s_perplexity():
    uniform = Table(np.zeros((VOCAB, VOCAB)))
    found = figures(uniform, Table(random_logits()))
    assert np.exp(found.base_nll.mean()) == pytest.approx(VOCAB)
    assert found.kl.min() > 0


def test_a_model_against_itself():
    found = figures(Table(random_logits()), Table(random_logits()))
    assert (found.kl == 0).all()
    assert (found.agrees == 1).all()
    assert (found.base_nll == found.candidate_nll).all()


@pytest.mark.parametrize("decode_tokens", [0, 7])
@pytest.mark.parametrize("begin", [0, 1, 31, 64, 100])
def test_every_token_from_the_begin_is_scored_once(begin, decode_tokens):
    model = Table(random_logits())
    found = figures(model, Table(random_logits(3)), begin, decode_tokens)
    assert found.positions.tolist() == list(range(begin + 1, len(TEXT)))
    want = [-model.logprobs[a, b] for a, b in zip(TEXT[begin:-1], TEXT[begin + 1 :], strict=True)]
    assert found.base_nll == pytest.approx(want)


def test_chunks_and_pieces_cover_all_that_is_fed():
    for num_fed in (1, 2, 63, 64, 65, 300):
        for decode_tokens in (0, 1, 32):
            cut = chunks(num_fed, decode_tokens)
            assert [place for begin, end in cut for place in range(begin, end)] == list(range(num_fed))
            assert max(end - begin for begin, end in cut) <= CHUNK_TOKENS
            assert sum(end - begin == 1 for begin, end in cut) >= min(decode_tokens, num_fed - 1)
            held = [piece for chunk in cut for piece in pieces(chunk, 40)]
            assert [p for begin, end in held for p in range(begin, end)] == list(range(40, num_fed))
            assert all(end - begin <= PIECE_TOKENS for begin, end in held)


@pytest.mark.parametrize("sides", ["base", "candidate", "both"])
def test_of_the_likeliest_few_comes_a_lower_bound(sides):
    base, candidate = random_logits(1), random_logits(1) + random_logits(2, 0.5)
    exact = figures(Table(base), Table(candidate))
    told = figures(
        Telling(base) if sides != "candidate" else Table(base),
        Telling(candidate) if sides != "base" else Table(candidate),
    )
    assert (told.kl <= exact.kl + 1e-5).all()
    assert told.kl.mean() > 0.1 * exact.kl.mean()
    assert (told.agrees == exact.agrees).all()
    assert told.candidate_nll == pytest.approx(exact.candidate_nll)


def test_of_all_tokens_the_bound_is_the_divergence():
    base, candidate = random_logits(1), random_logits(2)
    exact = figures(Table(base), Table(candidate))
    told = figures(Telling(base, top=VOCAB), Telling(candidate, top=VOCAB))
    assert told.kl == pytest.approx(exact.kl, abs=1e-4)


def test_positions_that_are_not_the_same_are_an_error():
    model = Table(random_logits())
    with pytest.raises(EngineError, match="different positions"):
        compare(TEXT, model.predictions(TEXT, 0, 0), model.predictions(TEXT, 5, 0))
    with pytest.raises(EngineError, match="different positions"):
        compare(TEXT, model.predictions(TEXT, 0, 0), model.predictions(TEXT[:100], 0, 0))
