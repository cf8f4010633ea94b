"""Draws from rows on which a search for a threshold could go wrong: against the definition, in float64, on each
instruction set. tests/runner/test_sampler.py has the distributions."""

import time

import numpy as np
import pytest

from splittime.kernels.draw import DRAW

SLACK = 2e-5  # of the kept mass: what rounding may move a border of the inverse CDF
UNIFORMS = (0.0, 0.11, 0.5, 0.83, 1 - 2**-53)


def normal(vocab: int, scale: float) -> np.ndarray:
    return np.random.default_rng(vocab).standard_normal(vocab, dtype=np.float32) * np.float32(scale)


def masked(vocab: int) -> np.ndarray:
    row = normal(vocab, 2.0)
    row[np.random.default_rng(1).random(vocab) < 0.9] = -np.inf
    row[vocab // 2] = 0.5
    return row


def clustered(vocab: int) -> np.ndarray:
    """Half as far from 1 at each step: however a range is cut, nearly all tokens lie in the uppermost part."""
    return (1 - np.ldexp(1.0, -np.arange(vocab) % 25)).astype(np.float32)


ROWS = {
    "peaked": lambda vocab: normal(vocab, 3.0),
    "nearly flat": lambda vocab: normal(vocab, 0.05),
    "flat": lambda vocab: np.full(vocab, -7.25, dtype=np.float32),
    "few values": lambda vocab: normal(vocab, 2.0).round(),
    "two values": lambda vocab: np.where(np.arange(vocab) % 3, 0.5, 1.0).astype(np.float32),
    "masked": masked,
    "one of all": lambda vocab: np.where(np.arange(vocab) == vocab - 1, 0, -np.inf).astype(np.float32),
    "one far above": lambda vocab: np.where(np.arange(vocab) == vocab // 3, 3e4, normal(vocab, 1.0)).astype(np.float32),
    "one above": lambda vocab: np.where(np.arange(vocab) == vocab // 3, 20, normal(vocab, 1.0)).astype(np.float32),
    "falling": lambda vocab: np.linspace(40, -40, vocab, dtype=np.float32),
    "clustered": clustered,
    "wide": lambda vocab: np.random.default_rng(2).standard_cauchy(vocab).astype(np.float32),
    "widest": lambda vocab: np.linspace(-3e38, 3e38, vocab, dtype=np.float32),
}
FILTERS = {
    "none": {},
    "nucleus": {"top_p": 0.95},
    "small nucleus": {"top_p": 1e-6},
    "all but little": {"top_p": 1 - 1e-4},
    "hot nucleus": {"top_p": 0.9, "temperature": 100.0},
    "cold nucleus": {"top_p": 0.9, "temperature": 1e-5},
    "top_k": {"top_k": 3},
    "deep top_k": {"top_k": 2500, "temperature": 2.0},
    "min_p": {"min_p": 0.05},
    "loose min_p, nucleus": {"min_p": 1e-6, "top_p": 0.9},
    "all three": {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
}


def draws_of(filters: dict[str, float]) -> np.ndarray:
    draws = np.zeros(len(UNIFORMS), dtype=DRAW)
    draws["temperature"], draws["top_p"], draws["uniform"] = 1, 1, UNIFORMS
    for name, value in filters.items():
        draws[name] = value
    return draws


def tokens_of(native, row: np.ndarray, draws: np.ndarray, bits: np.ndarray | None = None) -> list[int]:
    """A token for each draw from this row."""
    rows, tokens = np.tile(row, (len(draws), 1)), np.full(len(draws), -1, dtype=np.int32)
    at = None if bits is None else bits.ctypes.data
    native.lib.st_draw(len(draws), len(row), rows.ctypes.data, draws.ctypes.data, at, tokens.ctypes.data)
    return tokens.tolist()


def kept_weights(row: np.ndarray, draw: np.void) -> np.ndarray:
    """Of each token, by the definition: 0 for what the filters leave out."""
    distances = row.astype(np.float64) - row.max()
    weights = np.exp(distances * np.float64(np.float32(1) / draw["temperature"]))
    weights[distances * (1 / draw["temperature"]) < -87.5] = 0  # which the kernel does not tell from nothing
    order = np.argsort(-row, kind="stable")
    floor = -np.inf
    if 0 < draw["top_k"] < len(row):
        floor = row[order[draw["top_k"] - 1]]
    weights[(row < floor) | (weights < draw["min_p"])] = 0
    if draw["top_p"] < 1:
        before = np.cumsum(weights[order]) - weights[order]
        last = np.flatnonzero(before < draw["top_p"] * weights.sum()).max()
        weights[row < row[order[last]]] = 0
    return weights


def token_at(weights: np.ndarray, uniform: float) -> int:
    """By inverse CDF; the last that weighs anything from 1 on."""
    cumulative, last = np.cumsum(weights), int(np.flatnonzero(weights).max())
    place = int(np.searchsorted(cumulative, max(uniform, 0.0) * cumulative[-1], side="right"))
    return last if uniform >= 1 else min(place, last)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.sample(104)
def test_tokens_are_those_of_the_definition(isa, row, filters):
    for vocab in (1, 37, 1024, 40_007):  # the last a large one that no vector divides
        logits, draws = ROWS[row](vocab), draws_of(FILTERS[filters])
        for told, draw in zip(tokens_of(isa, logits, draws), draws, strict=True):
            token = max(told, ~told)
            weights = kept_weights(logits, draw)
            low, high = (token_at(weights, draw["uniform"] + slack) for slack in (-SLACK, SLACK))
            assert low <= token <= high, vocab
            assert logits[token] >= logits[weights > 0].min() - 1e-4, vocab


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.sample(13)
def test_no_row_takes_long(isa, row):
    """A search that left out one value at a time would take minutes."""
    logits, draws = ROWS[row](100_000), [draws_of(filters) for filters in FILTERS.values()]
    begin_s = time.process_time()
    tokens_of(isa, logits, np.concatenate(draws))
    assert time.process_time() - begin_s < 5.0


@pytest.mark.parametrize("filters", FILTERS)
def test_a_row_of_nothing_gives_some_token(isa, filters):
    nothing = np.full(500, -np.inf, dtype=np.float32)
    assert all(-500 <= token < 0 for token in tokens_of(isa, nothing, draws_of(FILTERS[filters])))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("vocab", "places"), [(1000, (0, 7, 64, 999)), (33_007, (0, 100, 33_006))])
def test_a_row_that_is_not_finite_is_told_with_a_token_all_the_same(isa, vocab, places, value):
    row = normal(vocab, 3.0 if vocab == 1000 else 0.5)
    for filters in ({"temperature": 0}, *FILTERS.values()):
        assert all(0 <= token < vocab for token in tokens_of(isa, row, draws_of(filters)))
        for place in places:
            broken = np.where(np.arange(vocab) == place, np.float32(value), row).astype(np.float32)
            assert all(-vocab <= token < 0 for token in tokens_of(isa, broken, draws_of(filters)))


def test_what_is_masked_changes_nothing_but_that_the_row_is_told(isa):
    row = normal(1000, 3.0)
    less = np.append(row, np.float32(-np.inf))
    for filters in ({"temperature": 0}, *FILTERS.values()):
        assert [~token for token in tokens_of(isa, less, draws_of(filters))] == tokens_of(isa, row, draws_of(filters))


@pytest.mark.parametrize("vocab", [1, 31, 32, 45, 1000, 33_007])
def test_what_is_not_allowed_is_left_out_and_makes_no_row_infinite(isa, vocab):
    rng, row = np.random.default_rng(vocab), normal(vocab, 3.0)
    is_allowed = rng.random((3, vocab)) < 0.3
    is_allowed[:, vocab // 2], is_allowed[2] = True, True
    bits = rng.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32)  # behind the vocabulary anything
    for token in range(vocab):
        bits[:, token // 32] &= ~np.uint32(1 << token % 32)
        bits[is_allowed[:, token], token // 32] |= np.uint32(1 << token % 32)
    for filters in ({"temperature": 0}, *FILTERS.values()):
        for line in range(3):
            left = np.where(is_allowed[line], row, np.float32(-np.inf))
            wanted = [max(token, ~token) for token in tokens_of(isa, left, draws_of(filters))]
            draws = draws_of({**filters, "allowed": line + 1})
            assert tokens_of(isa, row, draws, bits) == wanted
            draws["allowed"][::2] = 0
            plain = tokens_of(isa, row, draws_of(filters))
            assert tokens_of(isa, row, draws, bits) == [plain[0], wanted[1], plain[2], wanted[3], plain[4]]
    broken = np.where(np.arange(vocab) == vocab - 1, np.float32(np.nan), row)  # whether it is allowed or not
    assert all(token < 0 for token in tokens_of(isa, broken, draws_of({"allowed": 1}), bits))


def test_a_greedy_row_among_others_has_the_first_of_the_largest(isa):
    rows, draws = np.stack([normal(1000, 3.0).round()] * 3), draws_of({"top_p": 0.9})[:3]
    draws["temperature"][1], tokens, largest = 0, np.zeros(3, dtype=np.int32), np.zeros(3, dtype=np.int32)
    isa.lib.st_draw(3, 1000, rows.ctypes.data, draws.ctypes.data, None, tokens.ctypes.data)
    isa.lib.st_argmax(3, 1000, rows.ctypes.data, largest.ctypes.data)
    assert tokens[1] == largest[1] == rows[1].argmax()


@pytest.mark.parametrize(("vocab", "deviation"), [(5000, 3.0), (33_007, 0.5)])
def test_a_row_has_the_same_token_in_any_company_and_on_any_number_of_threads(isa, vocab, deviation):
    draws = np.concatenate([draws_of(filters) for filters in FILTERS.values()])
    rows = np.stack([normal(vocab + place, deviation)[:vocab] for place in range(len(draws))])
    tokens = np.zeros(len(draws), dtype=np.int32)
    found = []
    for threads in (1, 2):
        isa.lib.st_set_threads(threads)
        isa.lib.st_draw(len(draws), vocab, rows.ctypes.data, draws.ctypes.data, None, tokens.ctypes.data)
        found.append(tokens.tolist())
    alone = [tokens_of(isa, row, draws[place : place + 1])[0] for place, row in enumerate(rows)]
    assert found == [alone, alone]
