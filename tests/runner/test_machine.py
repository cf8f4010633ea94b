"""Decisions of the machine, told with their reasons."""

import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.kernels.choose import make_backend
from splittime.kernels.native.library import LibraryMissing
from splittime.runner import machine
from splittime.runner.config import NONE, RunnerConfig, speculative_config
from splittime.runner.load import adapter_bytes


@pytest.mark.parametrize(
    ("asked", "checkpoint", "has_bfloat16", "torchs", "natives"),
    [
        ("auto", "float32", True, torch.float32, torch.float32),
        ("auto", "bfloat16", True, torch.bfloat16, torch.bfloat16),
        ("auto", "float16", True, torch.bfloat16, torch.float32),
        ("auto", "bfloat16", False, torch.float32, torch.bfloat16),
        ("auto", "float16", False, torch.float32, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16, torch.bfloat16),
        ("bfloat16", "float16", False, torch.bfloat16, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32, torch.float32),
    ],
)
def test_dtype(monkeypatch, asked, checkpoint, has_bfloat16, torchs, natives):
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: has_bfloat16)
    for kernels, want in (("torch", torchs), ("reference", torchs), ("native", natives)):
        dtype, reason = machine.choose_dtype(asked, checkpoint, kernels)
        assert dtype == want
        assert reason


def test_kv_cache_dtype():
    choose = machine.choose_kv_cache_dtype
    for kernels in ("native", "torch", "reference"):
        assert choose("auto", torch.bfloat16, kernels) == torch.bfloat16
        assert choose("int8", torch.float32, kernels) == torch.int8
    assert choose("float32", torch.bfloat16, "native") == torch.float32
    with pytest.raises(ConfigError, match="with dtype bfloat16 and torch kernels it is one of bfloat16, int8"):
        choose("float32", torch.bfloat16, "torch")


def test_kernels_without_the_library(monkeypatch, caplog):
    """auto says that it is slower and why; to ask for native is to insist."""

    def missing():
        raise LibraryMissing("no compiler was there")

    monkeypatch.setattr(machine, "library", missing)
    assert machine.choose_kernels("auto") == ("torch", "no compiler was there")
    assert "slower: no compiler was there" in caplog.text
    assert machine.choose_kernels("native") == ("native", "as asked")
    monkeypatch.setattr("splittime.kernels.native.ops.choose_isa", missing)
    with pytest.raises(ConfigError, match="kernels=native: no compiler was there"):
        make_backend("native", torch.float32)


def test_packed_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert machine.packed_cache_folder("auto") == tmp_path / "xdg" / "splittime" / "packed"
    for useless in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert machine.packed_cache_folder("auto") == tmp_path / "home" / ".cache" / "splittime" / "packed"
    assert machine.packed_cache_folder("off") is None
    assert machine.packed_cache_folder("~/mine") == tmp_path / "home" / "mine"
    (tmp_path / "file").touch()
    for useless in (str(tmp_path / "file"), "~nosuchuser/x", "x" * 300, "nul\0"):
        with pytest.raises(ConfigError, match="no folder"):
            machine.packed_cache_folder(useless)


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    """A container's arbitrary user."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert machine.packed_cache_folder("auto") is None


def test_threads():
    assert machine.choose_num_threads(3, 1) == (3, "as asked")
    assert machine.choose_num_threads(None, 1 << 20) == (
        1,
        "weights are 1 MiB, at most 128: one thread, not measured",
    )
    assert machine.choose_num_threads(None, 1 << 32)[0] >= 1


def test_blocks_for_all_contexts_or_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1000)
    config = RunnerConfig(model_path="", max_num_seqs=2, speculative_config=NONE)
    assert machine.choose_num_blocks(config, 40, 10)[0] == 6
    num_blocks, reason = machine.choose_num_blocks(config, 64, 100)
    assert num_blocks == 5
    assert "free memory" in reason
    with pytest.raises(ConfigError, match="needs 4 blocks, 800 bytes"):
        machine.choose_num_blocks(config, 64, 200)


def test_what_past_answers_may_take_is_left_free(monkeypatch):
    drafts = '{"method": "suffix"}'
    needed = speculative_config(drafts).memory_bytes
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: needed + 1000)
    plain, drafting = (
        RunnerConfig(model_path="x", max_num_seqs=10**8, block_size=16, speculative_config=one)
        for one in (NONE, drafts)
    )
    assert machine.choose_num_blocks(drafting, 16, 10)[0] == 50
    assert machine.choose_num_blocks(plain, 16, 10)[0] == (needed + 1000) // 20


def test_what_a_step_with_adapters_may_take_is_left_free(monkeypatch):
    """Three ranks a token, of queries, keys and values, float32."""
    needed = 100 * 3 * 8 * 4
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: needed + 1000)
    sizes = {"max_num_seqs": 10**8, "block_size": 16, "speculative_config": NONE, "max_num_batched_tokens": 100}
    plain, adapted = (RunnerConfig(model_path="x", enable_lora=one, max_lora_rank=8, **sizes) for one in (False, True))
    for config, kernels, num_blocks in (
        (adapted, "native", 50),
        (adapted, "torch", (needed + 1000) // 20),
        (plain, "native", (needed + 1000) // 20),
    ):
        taken = adapter_bytes(config, kernels)
        assert machine.choose_num_blocks(config, 16, 10, None, taken)[0] == num_blocks


def test_free_memory_is_a_sensible_number():
    assert 1 << 20 < machine.free_memory_bytes() < 1 << 50


def test_a_cache_beyond_the_machine_is_refused():
    config = RunnerConfig(model_path="", kv_cache_memory_bytes=1 << 60)
    with pytest.raises(ConfigError, match="more than the machine's memory"):
        machine.choose_num_blocks(config, 64, 200)


def test_a_small_model_has_not_all_of_a_cards_memory_in_blocks():
    """Each block is some memory of the host too, and some of the start's time."""
    config = RunnerConfig(model_path="", block_size=16, max_num_seqs=4)
    room = 80 << 30, "80.0 GiB of the card"
    assert machine.choose_num_blocks(config, 1024, 1 << 20, room) == (80 << 10, "80.0 GiB of the card")
    num_blocks, reason = machine.choose_num_blocks(config, 1024, 1 << 10, room)
    assert num_blocks == machine.MOST_BLOCKS
    assert "so small a model" in reason
    long = RunnerConfig(model_path="", block_size=16, max_num_seqs=4)
    assert machine.choose_num_blocks(long, machine.MOST_BLOCKS * 16, 1, room)[0] == 4 * machine.MOST_BLOCKS
