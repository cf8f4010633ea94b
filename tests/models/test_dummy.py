"""Random weights of a config's shapes."""

import json

import pytest
import tiny_config
import torch

from splittime.core import this_process
from splittime.core.errors import ConfigError
from splittime.kernels.choose import make_backend
from splittime.models.config import load_config
from splittime.models.quant.plan import choose
from splittime.models.weights.load import load_decoder
from splittime.runner.config import RunnerConfig
from splittime.runner.load import load


def decoder_of(folder):
    plan = choose(None, "float32")
    return load_decoder(folder, load_config(folder), make_backend("reference", torch.float32), plan, 16, is_dummy=True)


def test_no_file_but_the_config_is_needed_and_every_start_has_the_same_weights(tmp_path):
    tiny_config.write(tmp_path)
    first, second = decoder_of(tmp_path), decoder_of(tmp_path)
    ids = torch.tensor([0, 5, 60])
    assert torch.equal(first.decoder.embedding[ids], second.decoder.embedding[ids])
    logits = [one.decoder.logits(one.decoder.embedding[ids]) for one in (first, second)]
    assert torch.equal(*logits)
    assert torch.isfinite(logits[0]).all()
    assert first.num_parameters == tiny_config.NUM_PARAMETERS


def test_a_quantised_config_is_refused(tmp_path):
    tiny_config.write(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    config = RunnerConfig(model_path=str(tmp_path), load_format="dummy", kernels="reference")
    with pytest.raises(ConfigError, match="load_format"):
        load(config, lambda name, begin_ns, end_ns: None)


@pytest.mark.parametrize(("free_layers", "begun"), [(3, [1, 2]), (8, [1, 2, 3])])
def test_what_does_not_fit_into_memory_is_refused_before_it_is_taken(tmp_path, monkeypatch, free_layers, begun):
    tiny_config.write(tmp_path, num_hidden_layers=10)
    monkeypatch.setattr(this_process, "free_memory_bytes", lambda: 4 * (61 * 32 + free_layers * tiny_config.LAYER))
    config = RunnerConfig(model_path=str(tmp_path), load_format="dummy", kernels="reference", max_model_len=16)
    done = []
    with pytest.raises(ConfigError, match="of 10 layers take"):
        load(config, lambda name, begin_ns, end_ns: None, lambda layer, total, num_bytes: done.append(layer))
    assert done == begun


def test_a_share_of_a_card_is_refused_where_there_is_none(tmp_path):
    tiny_config.write(tmp_path)
    settings = {"load_format": "dummy", "kernels": "reference", "gpu_memory_utilization": 0.5}
    with pytest.raises(ConfigError, match="run on the CPU"):
        load(RunnerConfig(model_path=str(tmp_path), **settings), lambda name, begin_ns, end_ns: None)


def test_the_config_itself_must_be_there(tmp_path):
    config = RunnerConfig(model_path=str(tmp_path), load_format="dummy", kernels="reference")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(config, lambda name, begin_ns, end_ns: None)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(ConfigError, match="NoSuchModel"):
        load(config, lambda name, begin_ns, end_ns: None)


@pytest.mark.parametrize(
    ("sizes", "settings", "said"),
    [
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 20}, {}, "model needs 70368744177664 bytes"),
        ({"intermediate_size": 1 << 20, "hidden_size": 1 << 16, "head_dim": 8}, {}, "model needs 274877906944 bytes"),
        ({"max_position_embeddings": 1 << 27}, {"kv_cache_memory_bytes": 1 << 20}, "max_model_len needs 12884901888"),
    ],
)
def test_sizes_that_no_file_backs_are_refused_before_anything_is_made_of_them(
    tmp_path, monkeypatch, sizes, settings, said
):
    tiny_config.write(tmp_path, **sizes)
    monkeypatch.setattr(this_process, "free_memory_bytes", lambda: 8 << 30)
    config = RunnerConfig(model_path=str(tmp_path), load_format="dummy", kernels="reference", **settings)
    with pytest.raises(ConfigError, match=said):
        load(config, lambda name, begin_ns, end_ns: None)
