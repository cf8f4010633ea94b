"""Reading checkpoints: sharded or not, and errors that name the tensor."""

import json
import mmap
from pathlib import Path

import pytest
import torch
from native_or_not import has_native_kernels
from safetensors.torch import save_file

from splittime.core.errors import ConfigError
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.packing import pair_rows


def write(folder, **tensors):
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


def test_a_tensor_comes_as_it_is_stored(tmp_path):
    checkpoint = write(tmp_path, a=torch.ones(2, 3, dtype=torch.float16))
    tensor = checkpoint.take("a", 2, 3)
    assert (tensor.dtype, tensor.sum(), checkpoint.num_parameters) == (torch.float16, 6.0, 6)
    assert checkpoint.not_taken() == []


def resident_bytes(of):
    """How much of the mapping that holds this tensor is in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if "-" in line.split()[0]:
            begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if begin <= of.data_ptr() < end:
                return next(int(entry.split()[1]) << 10 for entry in lines if entry.startswith("Rss:"))
    raise AssertionError("it is nowhere")


@pytest.mark.parametrize("part", [lambda all_: all_, lambda all_: all_.T, lambda all_: all_.T[1::2]])
def test_a_released_tensor_leaves_memory_and_stays_readable(part, tmp_path):
    """Also one of a stack that is stored turned, or whose rows come by turns."""
    if not has_native_kernels():
        pytest.skip("no native kernels")
    written = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    checkpoint = write(tmp_path, a=written)
    tensor = checkpoint.take("a", 1024, 1024)
    assert torch.equal(tensor, written)
    before = resident_bytes(tensor)
    checkpoint.release(part(tensor))
    assert resident_bytes(tensor) < before - (3 << 20)
    assert torch.equal(tensor, written)


def test_a_mapping_whose_name_is_not_utf_8_harms_nobody(tmp_path):
    if not has_native_kernels():
        pytest.skip("no native memory to release")
    odd = tmp_path / "caf\udcff"
    odd.write_bytes(b"x")
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ):
        checkpoint = write(tmp_path, a=torch.ones(64, 64))
        tensor = checkpoint.take("a", 64, 64)
        checkpoint.release(tensor)
        assert tensor.sum() == 64 * 64


def test_memory_that_is_no_mapping_is_never_released(tmp_path):
    checkpoint = write(tmp_path, a=torch.ones(4))
    mine = torch.ones(1 << 18)
    checkpoint.release(mine)
    assert mine.sum() == 1 << 18


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    checkpoint = write(tmp_path, a=torch.ones(2, 3), b=torch.ones(4), c=torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"tensor x of shape \[5\] is missing"):
        checkpoint.take("x", 5)
    with pytest.raises(ConfigError, match=r"tensor a has shape \[2, 3\], the config asks for \[3, 2\]"):
        checkpoint.take("a", 3, 2)
    with pytest.raises(ConfigError, match=r"tensor c is torch\.int64"):
        checkpoint.take("c", 2)
    checkpoint.take("a", 2, 3)
    assert checkpoint.not_taken() == ["b", "c"]


def test_buffers_of_old_exports_are_left_alone(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert write(tmp_path, **{name: torch.ones(2)}).not_taken() == []


def test_shards(tmp_path):
    save_file({"a": torch.full((2,), 1.0)}, tmp_path / "one.safetensors")
    save_file({"b": torch.full((2,), 2.0)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.take("a", 2).sum() + checkpoint.take("b", 2).sum() == 6.0
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ConfigError, match=r"one\.safetensors lacks tensor b"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    with pytest.raises(ConfigError, match=r"three\.safetensors"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="weight_map"):
        Checkpoint(tmp_path)


def test_no_weights_and_broken_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match="cannot read weights"):
        Checkpoint(tmp_path)


def test_pair_rows_makes_halves_neighbours():
    assert pair_rows(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    two_heads = torch.arange(8)[:, None].expand(8, 2)
    assert pair_rows(two_heads, 4)[:, 1].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("name", [None, 5, ["one.safetensors"]])
def test_an_index_that_names_no_file_is_refused(tmp_path, name):
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="weight_map"):
        Checkpoint(tmp_path)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    one = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.* are both model\.norm\.weight"):
        write(tmp_path, **{"model.norm.weight": one, "model.language_model.norm.weight": one + 1})
