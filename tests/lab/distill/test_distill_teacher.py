"""The teacher in the serving kernels says what the student's own arithmetic says of the same weights."""

import pytest
import torch
from schools import TEACHER, make_model

from splittime.lab.distill import head
from splittime.lab.distill.head import Teacher
from splittime.lab.distill.llama import Llama
from splittime.lab.distill.student import read_weights
from splittime.runner import machine

TOKENS = torch.randint(TEACHER.vocab_size, (5, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def not_rounded(monkeypatch):
    """Activations stay float32, as the training model's, on processors with AMX too."""
    monkeypatch.setattr(machine, "choose_isa", lambda: ("avx2", "as the test has it"))


def test_logits_are_those_of_the_training_model(tmp_path):
    folder = make_model(tmp_path / "teacher", TEACHER)
    model = Llama(TEACHER)
    model.load_state_dict(read_weights(folder, TEACHER))
    teacher = Teacher.load(folder, 64, 1)
    found = teacher.logits(teacher.hidden(TOKENS).flatten(0, 1))
    with torch.no_grad():
        expected = model(TOKENS).flatten(0, 1)
    assert float(expected.std()) > 0.5  # or the comparison would say little
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)  # the KV cache is bfloat16


def test_how_windows_are_grouped_changes_nothing(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "teacher", TEACHER)
    together = Teacher.load(folder, 64, 1).hidden(TOKENS)
    monkeypatch.setattr(head, "GROUP_TOKENS", 1)
    apart = Teacher.load(folder, 64, 1)
    assert apart.runner.resolved.num_blocks * apart.runner.resolved.block_size < TOKENS.numel()
    torch.testing.assert_close(apart.hidden(TOKENS), together, rtol=1e-5, atol=1e-5)
    assert not together.is_inference()


def test_an_untied_head_is_the_students_own(tmp_path):
    shape = type(TEACHER)(**{**vars(TEACHER), "tie_word_embeddings": False})
    folder = make_model(tmp_path / "untied", shape)
    weights = read_weights(folder, shape)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    model = Llama(shape)
    model.load_state_dict(weights)
    teacher = Teacher.load(folder, 64, 1)
    with torch.no_grad():
        expected = model(TOKENS).flatten(0, 1)
    torch.testing.assert_close(teacher.logits(teacher.hidden(TOKENS).flatten(0, 1)), expected, rtol=0.02, atol=0.05)
