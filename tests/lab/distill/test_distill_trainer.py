"""An update with alpha 0 is an update of plain training, step for step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from schools import STUDENT

from splittime.lab.distill import trainer as trainers
from splittime.lab.distill.job import DistillSettings, objective
from splittime.lab.distill.llama import Llama
from splittime.lab.distill.loss import TextLoss
from splittime.lab.distill.trainer import (
    Optimizer,
    State,
    Trainer,
    Windows,
    accumulate,
    context_at,
    learning_rate_scale,
    make_workers,
)

STEPS, CONTEXT, COUNT = 3, 16, 4


def tokens():
    return np.random.default_rng(0).integers(0, STUDENT.vocab_size, 400).astype(np.uint32)


def start():
    torch.manual_seed(7)
    model = Llama(STUDENT)
    return model, Optimizer(model, "muon", 0.02, 0.008)


def plain_training(micro_batch):
    """Written out, with torch's own loss and backward pass."""
    model, optimizer = start()
    stream, losses = Windows(tokens(), 0), []
    with make_workers(1) as workers:
        for step in range(STEPS):
            batch = stream.batch(CONTEXT, step * COUNT, COUNT)
            parts = batch.split(micro_batch)
            optimizer.adam.zero_grad()
            model.zero_grad()
            mean = sum(F.cross_entropy(model(p[:, :-1]).flatten(0, 1), p[:, 1:].flatten()) for p in parts) / len(parts)
            mean.backward()
            optimizer.step(learning_rate_scale(step / STEPS), workers)
            losses.append(mean.item())
    return losses, model.state_dict()


def trained(num_workers):
    model, optimizer = start()
    state, losses = State(), []
    with make_workers(num_workers) as workers:
        goal = objective(DistillSettings(minutes=1, alpha=0.0), None)
        trainer = Trainer(model, optimizer, Windows(tokens(), 0), goal, workers, num_workers, COUNT * CONTEXT)
        for step in range(STEPS):
            losses.append(trainer.step(state, step / STEPS, CONTEXT).parts.loss)
    assert (state.step, state.tokens) == (STEPS, STEPS * COUNT * CONTEXT)
    return losses, model.state_dict()


def test_alpha_zero_is_plain_training(monkeypatch):
    monkeypatch.setattr(trainers, "MICRO_BATCH_TOKENS", 2 * CONTEXT)
    torch.testing.assert_close(trained(1), plain_training(2), rtol=1e-4, atol=1e-5)


def test_workers_share_the_work_and_change_nothing(monkeypatch):
    monkeypatch.setattr(trainers, "MICRO_BATCH_TOKENS", CONTEXT)
    torch.testing.assert_close(trained(2), trained(1), rtol=0, atol=0)


def test_gradients_are_those_of_the_mean_over_all_windows(monkeypatch):
    """Both optimisers forgive a wrong scale, so the updates above do not show it."""
    monkeypatch.setattr(trainers, "MICRO_BATCH_TOKENS", CONTEXT)
    model, _ = start()
    batch = Windows(tokens(), 0).batch(CONTEXT, 0, COUNT)
    with make_workers(2) as workers:
        parts = accumulate(model, TextLoss(), batch, workers)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert parts.loss == pytest.approx(loss.item(), rel=1e-5)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close([weight.grad for weight in model.parameters()], list(expected), rtol=1e-4, atol=1e-6)


def test_no_window_is_longer_than_the_models_are():
    assert [context_at(progress, 300) for progress in (0.0, 0.5, 0.9)] == [256, 300, 300]
