"""The loss is torch's own divergence and cross-entropy, and nothing for a student that is its teacher."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from schools import STUDENT

from splittime.lab.distill import loss as losses
from splittime.lab.distill.job import DistillSettings, objective
from splittime.lab.distill.llama import Llama
from splittime.lab.distill.loss import Distillation, LossParts, TextLoss, task_and_divergence

SEEDS = st.integers(0, 2**32)
TEMPERATURES = st.sampled_from([0.5, 1.0, 2.0, 7.0])


def draw(seed, rows=5, vocab=11):
    random = torch.Generator().manual_seed(seed)
    ours, theirs = (3 * torch.randn(rows, vocab, generator=random, dtype=torch.float64) for _ in range(2))
    return ours, theirs, torch.randint(vocab, (rows,), generator=random)


class Echo:
    """A teacher whose logits are a student's own."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def hidden(self, tokens):
        return self.model.hidden(tokens)

    @torch.no_grad()
    def logits(self, hidden):
        return self.model.logits(hidden)


def make_student(seed):
    torch.manual_seed(seed)
    return Llama(STUDENT)


def windows(seed, count=3, length=9):
    return torch.randint(STUDENT.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed))


@given(SEEDS, TEMPERATURES)
def test_the_parts_are_what_torch_computes(seed, temperature):
    ours, theirs, targets = draw(seed)
    task, kl = task_and_divergence(ours, theirs, targets, temperature)
    softened = F.log_softmax(ours / temperature, -1)
    expected = F.kl_div(softened, F.softmax(theirs / temperature, -1), reduction="batchmean") * temperature**2
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(task, F.cross_entropy(ours, targets))


@given(SEEDS, TEMPERATURES)
def test_the_divergence_is_never_negative_and_zero_for_the_teacher_itself(seed, temperature):
    ours, theirs, targets = draw(seed)
    assert task_and_divergence(ours, theirs, targets, temperature)[1] > 0
    assert task_and_divergence(theirs, theirs, targets, temperature)[1] == 0


def test_a_high_temperature_compares_logits():
    """Hinton et al., section 2.1: the limit is half the mean square of the difference of centred logits."""
    ours, theirs, targets = draw(3)
    kl = task_and_divergence(ours, theirs, targets, 1e4)[1]
    apart = (theirs - theirs.mean(1, keepdim=True)) - (ours - ours.mean(1, keepdim=True))
    torch.testing.assert_close(kl, apart.square().mean(1).mean() / 2, rtol=1e-3, atol=0)


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it():
    model = make_student(0)
    goal = Distillation(Echo(model), alpha=1.0, temperature=2.0)
    batch = windows(1)
    loss, parts = goal(model, batch, goal.before(batch))
    assert parts.kl == pytest.approx(0, abs=1e-6)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in gradients)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_alpha_mixes_the_parts(alpha):
    model, batch = make_student(0), windows(1)
    goal = Distillation(Echo(make_student(5)), alpha, 2.0)
    loss, parts = goal(model, batch, goal.before(batch))
    assert parts.kl > 0.0
    assert loss.item() == pytest.approx(alpha * parts.kl + (1 - alpha) * parts.task, rel=1e-5)
    assert parts.task == pytest.approx(model.loss(batch[:, :-1], batch[:, 1:]).item(), rel=1e-5)


def test_a_large_vocabulary_in_chunks_is_the_same_loss(monkeypatch):
    model, batch = make_student(0), windows(1)
    for goal in (TextLoss(), Distillation(Echo(make_student(5)), 0.4, 2.0)):
        found = []
        for elements in (1 << 30, 5 * STUDENT.vocab_size):
            monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
            loss, _ = goal(model, batch, goal.before(batch))
            found.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
        torch.testing.assert_close(found[0], found[1])


def test_alpha_zero_asks_no_teacher():
    assert isinstance(objective(DistillSettings(minutes=1, alpha=0.0), Echo(make_student(5))), TextLoss)
    assert isinstance(objective(DistillSettings(minutes=1, alpha=0.1), Echo(make_student(5))), Distillation)


def test_the_mean_of_parts_is_of_each():
    assert LossParts.mean([LossParts(1, 2, 3), LossParts(3, 6, 9)]) == LossParts(2, 4, 6)
