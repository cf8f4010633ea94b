"""Decisions of the machine, told with their reasons."""

import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.runner import machine
from splittime.runner.config import RunnerConfig


@pytest.mark.parametrize(
    ("asked", "checkpoint", "has_bfloat16", "want"),
    [
        ("auto", "float32", True, torch.float32),
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_dtype(monkeypatch, asked, checkpoint, has_bfloat16, want):
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: has_bfloat16)
    dtype, reason = machine.choose_dtype(asked, checkpoint)
    assert dtype == want
    assert reason


def test_threads():
    assert machine.choose_num_threads(3, 1) == (3, "as asked")
    assert machine.choose_num_threads(None, 1 << 20)[0] == 1
    assert machine.choose_num_threads(None, 1 << 32)[0] >= 1


def test_blocks_for_all_contexts_or_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1000)
    config = RunnerConfig(model_path="", max_num_seqs=2)
    assert machine.choose_num_blocks(config, 40, 10)[0] == 6
    num_blocks, reason = machine.choose_num_blocks(config, 64, 100)
    assert num_blocks == 5
    assert "free memory" in reason
    with pytest.raises(ConfigError, match="needs 4 blocks, 800 bytes"):
        machine.choose_num_blocks(config, 64, 200)


def test_free_memory_is_a_sensible_number():
    assert 1 << 20 < machine.free_memory_bytes() < 1 << 50


def test_a_cache_beyond_the_machine_is_refused():
    config = RunnerConfig(model_path="", kv_cache_memory_bytes=1 << 60)
    with pytest.raises(ConfigError, match="more than the machine's memory"):
        machine.choose_num_blocks(config, 64, 200)
