"""The schedule, the windows and the optimiser's arithmetic; nothing is trained here."""

import numpy as np
import pytest
import torch

from splittime.lab.distill.trainer import STAGES, Windows, context_at, learning_rate_scale, orthogonalise
from training.evaluate import overlapping_windows
from training.train import Options, State, parse


def test_learning_rate_warms_up_and_then_only_falls() -> None:
    scales = [learning_rate_scale(step / 1000) for step in range(1001)]
    peak = scales.index(max(scales))
    assert peak == 30
    assert scales[peak] == pytest.approx(1.0)
    assert scales[: peak + 1] == sorted(scales[: peak + 1])
    assert scales[peak:] == sorted(scales[peak:], reverse=True)
    assert scales[-1] == pytest.approx(0.01)


def test_a_run_past_its_budget_stays_at_the_floor() -> None:
    assert learning_rate_scale(1.5) == pytest.approx(0.01)


def test_the_scarcer_budget_decides() -> None:
    options: Options = parse(["--minutes", "10", "--tokens", "1000"])
    assert State(tokens=100, seconds=300).progress(options) == pytest.approx(0.5)
    assert State(tokens=900, seconds=300).progress(options) == pytest.approx(0.9)


def test_a_run_without_a_budget_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse([])


def test_contexts_grow_to_the_limit() -> None:
    contexts = [context_at(progress / 100) for progress in range(101)]
    assert contexts == sorted(contexts)
    assert contexts[-1] == max(context for _, context in STAGES) == 2048


def test_a_pass_visits_each_window_once_and_the_next_pass_differs() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    windows = Windows(tokens, seed=0)
    per_pass = (len(tokens) - 16 - 1) // 16
    first = windows.batch(16, 0, per_pass)[:, 0].tolist()
    second = windows.batch(16, per_pass, per_pass)[:, 0].tolist()
    assert len(set(first)) == len(set(second)) == per_pass
    assert first != second


def test_windows_are_the_same_for_the_same_seed() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    assert torch.equal(Windows(tokens, 3).batch(16, 5, 4), Windows(tokens, 3).batch(16, 5, 4))


@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 100, 257])
def test_every_token_of_a_file_is_scored_once(length: int) -> None:
    scored = [t for _, first, end in overlapping_windows(length, 16) for t in range(first, end + 1)]
    assert scored == list(range(1, length))
    assert all(end - begin <= 16 for begin, _, end in overlapping_windows(length, 16))
    assert all(first - 1 - begin >= 8 for begin, first, _ in list(overlapping_windows(length, 16))[1:])


@pytest.mark.parametrize("shape", [(2, 8, 32), (2, 32, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5
