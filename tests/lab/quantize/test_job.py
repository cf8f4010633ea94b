"""Whole checkpoints: killed anywhere and gone on with, the same bytes; what cannot be done is refused in words."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BIASED, EXPERTS, QWEN3, content, make_model, make_text

from splittime.core.errors import ConfigError
from splittime.lab.quantize import tensor_file
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.settings import QuantizeSettings

GPTQ = QuantizeSettings(scheme="gptq", group_size=32, act_order=True)
EVERY = [
    QuantizeSettings(scheme="int8"),
    QuantizeSettings(scheme="w8a8"),
    QuantizeSettings(scheme="w4a16", group_size=32),
    QuantizeSettings(scheme="awq", group_size=32),
    QuantizeSettings(scheme="gptq", group_size=-1, bits=8),
    GPTQ,
    QuantizeSettings(prune="2:4", metric="wanda"),
    QuantizeSettings(prune="unstructured", sparsity=0.4),
]
IDS = [settings.scheme or f"{settings.prune}-{settings.metric}" for settings in EVERY]


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


class Killed(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("settings", EVERY, ids=IDS)
def test_twice_is_the_same_and_a_stop_between_layers_changes_nothing(settings, model, tmp_path):
    whole = quantize(model, tmp_path / "whole", settings, make_text())
    stopping = {1: 0}

    def stop(done, total):
        if done in stopping:
            stopping.pop(done)
            raise Killed

    with pytest.raises(Killed):
        quantize(model, tmp_path / "halted", settings, make_text(), on_layer=stop)
    assert not (tmp_path / "halted").exists()
    resumed = quantize(model, tmp_path / "halted", settings, make_text(), on_layer=stop)
    assert content(tmp_path / "halted") == content(tmp_path / "whole")
    assert (whole.resumed_layers, resumed.resumed_layers) == (0, 1)
    assert resumed.errors == whole.errors
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("changes", [BIASED, QWEN3, EXPERTS, {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}])
@pytest.mark.parametrize("settings", [EVERY[1], EVERY[3], GPTQ, EVERY[6]], ids=["w8a8", "awq", "gptq", "wanda"])
def test_other_architectures(settings, changes, tmp_path):
    model = make_model(tmp_path / "model", **changes)
    summary = quantize(model, tmp_path / "out", settings, make_text())
    names = {row.kind for row in summary.errors}
    assert names >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(0 < row.mean <= row.worst < 0.9 for row in summary.errors)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in load_file(model / "model.safetensors").items():
        if ".layers." not in name:
            assert torch.equal(tensors[name], tensor)
        if name.endswith(".gate.weight"):  # routers stay, in their own type
            assert (tensors[name].shape, tensors[name].dtype) == (tensor.shape, tensor.dtype)


def test_killed_by_the_system_it_goes_on_to_the_same_bytes(model, tmp_path):
    quantize(model, tmp_path / "whole", GPTQ, make_text())
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_job import GPTQ; from tiny import make_text; from splittime.lab.quantize.job import quantize\n"
        "def stop(done, total):\n"
        "    if done == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "quantize(Path(sys.argv[2]), Path(sys.argv[3]), GPTQ, make_text(), on_layer=stop)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(model), str(tmp_path / "out")]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    summary = quantize(model, tmp_path / "out", GPTQ, make_text())
    assert summary.resumed_layers == 2
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_killed_at_any_moment_a_file_takes_its_name(model, tmp_path, monkeypatch):
    quantize(model, tmp_path / "whole", GPTQ, make_text(), shard_bytes=40_000)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    real, kills = {"replace": os.replace, "rename": os.rename}, 0
    while True:
        left = kills

        def count(name, left_before):
            def move(source, target):
                nonlocal left
                if left == 0 and left_before:
                    raise Killed
                left -= 1
                real[name](source, target)
                if left == -1 and not left_before:
                    raise Killed

            return move

        for name in real:
            monkeypatch.setattr(os, name, count(name, kills % 2 == 0))
        try:
            quantize(model, tmp_path / "out", GPTQ, make_text(), shard_bytes=40_000)
        except Killed:
            kills += 1
            continue
        break
    assert kills > 5
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list(tmp_path.glob("*.unfinished"))


def test_killed_between_the_last_rename_and_the_clearing_away(model, tmp_path, monkeypatch):
    def rename(source, target):
        Path(source).replace(target)
        raise Killed

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(Killed):
        quantize(model, tmp_path / "out", GPTQ, make_text())
    monkeypatch.undo()
    before = content(tmp_path / "out")
    assert quantize(model, tmp_path / "out", GPTQ, make_text()).resumed_layers == 3
    assert content(tmp_path / "out") == before
    assert not list(tmp_path.glob("*.unfinished"))


def halted(model, out, settings=GPTQ, text=None):
    def stop(done, total):
        raise Killed

    with pytest.raises(Killed):
        quantize(model, out, settings, text or make_text(), on_layer=stop)


def test_going_on_with_anything_else_is_refused(model, tmp_path):
    out = tmp_path / "out"
    halted(model, out)
    with pytest.raises(ConfigError, match="begun with another act_order: True, now False"):
        quantize(model, out, QuantizeSettings(scheme="gptq", group_size=32), make_text())
    with pytest.raises(ConfigError, match="another calibration"):
        quantize(model, out, GPTQ, make_text(seed=2))
    with pytest.raises(ConfigError, match="another checkpoint"):
        quantize(make_model(tmp_path / "other", seed=3), out, GPTQ, make_text())
    assert quantize(model, out, GPTQ, make_text()).resumed_layers == 1


def test_a_damaged_manifest_is_refused(model, tmp_path):
    halted(model, tmp_path / "out")
    (tmp_path / "out.unfinished" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        quantize(model, tmp_path / "out", GPTQ, make_text())


def test_what_an_older_version_began_goes_on_with_its_threads_or_is_refused(model, tmp_path):
    halted(model, tmp_path / "out")
    path = tmp_path / "out.unfinished" / "manifest.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({"num_threads": found.pop(tensor_file.MEANS), **found}))
    work = tensor_file.Work(tmp_path / "out")
    assert work.adopt(found, 3) == 1
    with pytest.raises(ConfigError, match="an older version began it") as error:  # which says no kernels
        work.adopt(found, "avx2")
    assert error.value.info.hint == f"remove {path.parent} and begin anew"
    work.close()
    assert quantize(model, tmp_path / "out", GPTQ, make_text()).resumed_layers == 1


def test_hidden_states_in_a_file_give_the_same(model, tmp_path):
    quantize(model, tmp_path / "a", GPTQ, make_text())
    quantize(model, tmp_path / "b", GPTQ, make_text(), in_memory_bytes=0)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_shards_hold_what_one_file_holds(model, tmp_path):
    quantize(model, tmp_path / "one", EVERY[2])
    quantize(model, tmp_path / "many", EVERY[2], shard_bytes=30_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(one)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], one[name])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())


def test_what_lies_beside_the_weights_comes_along(model, tmp_path):
    (model / "LICENSE").write_text("mine")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    quantize(model, tmp_path / "out", EVERY[0])
    assert set(content(tmp_path / "out")) == {
        *("LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "out"))
    note = after.pop("quantization_config")
    assert after == before
    assert (note["quant_method"], note["format"]) == ("compressed-tensors", "pack-quantized")


def test_a_pruned_checkpoint_is_dense_and_says_so(model, tmp_path):
    summary = quantize(model, tmp_path / "out", QuantizeSettings(prune="2:4"))
    tensors, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", model))
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            assert torch.all((tensor.unflatten(1, (-1, 4)) == 0).sum(-1) == 2)
            assert torch.all((tensor == before[name]) | (tensor == 0))
        else:
            assert torch.equal(tensor, before[name])
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["splittime_sparsity"] == {
        **{"pattern": "2:4", "sparsity": 0.5, "metric": "magnitude", "layout": "dense"}
    }
    assert "No kernel here skips zeros" in (summary.honest or "")
    assert (summary.bytes_after == pytest.approx(summary.bytes_before, rel=0.01), summary.error_of) == (True, "weights")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (QuantizeSettings(), "give either --scheme"),
        (QuantizeSettings(scheme="awq", prune="2:4"), "give either --scheme"),
        (QuantizeSettings(scheme="int3"), "one of int8, fp8, w8a8"),
        (QuantizeSettings(scheme="awq"), "give --calibrate|looks at what"),
        (QuantizeSettings(scheme="gptq"), "looks at what"),
        (QuantizeSettings(scheme="w8a8"), "looks at what"),
        (QuantizeSettings(prune="2:4", metric="wanda"), "looks at what"),
        (QuantizeSettings(scheme="w4a16", act_order=True), "belongs to --scheme gptq"),
        (QuantizeSettings(scheme="gptq", static_groups=True), "belongs to --act-order"),
        (QuantizeSettings(prune="2:4", static_groups=True), "belongs to --scheme gptq --act-order"),
        (QuantizeSettings(scheme="int8", group_size=32), "belongs to --scheme w4a16"),
        (QuantizeSettings(scheme="w4a16", smooth=0.5), "belongs to --scheme w8a8"),
        (QuantizeSettings(scheme="w8a8", smooth=1.5), "from 0"),
        (QuantizeSettings(scheme="awq", bits=8), "awq has 4"),
        (QuantizeSettings(scheme="w4a16", group_size=24), "a multiple of 32"),
        (QuantizeSettings(scheme="w4a16", sparsity=0.5), "belongs to --prune"),
        (QuantizeSettings(prune="2:4", sparsity=0.6), "0.5 by definition"),
        (QuantizeSettings(prune="unstructured"), "needs --sparsity"),
        (QuantizeSettings(prune="unstructured", sparsity=1.0), "above 0 and below 1"),
        (QuantizeSettings(prune="4:8"), "one of 2:4"),
        (QuantizeSettings(prune="2:4", metric="luck"), "one of magnitude"),
        (QuantizeSettings(prune="2:4", bits=4), "belongs to --scheme"),
        (QuantizeSettings(scheme="int8", samples=0), "from 1 on"),
        (QuantizeSettings(scheme="w4a16"), "layers.0.self_attn.q_proj has 64 columns, not a multiple of 128"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(settings, said, model, tmp_path):
    with pytest.raises(ConfigError, match=said):
        quantize(model, tmp_path / "out", settings)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_does_not_fit_is_told_what_does(tmp_path):
    model = make_model(tmp_path / "model", intermediate_size=172)
    with pytest.raises(ConfigError, match=r"mlp\.down_proj has 172 columns, not a multiple of 32") as caught:
        quantize(model, tmp_path / "out", QuantizeSettings(scheme="w4a16", group_size=32))
    assert "--group-size -1" in (caught.value.info.hint or "")
    for scheme in ("awq", "gptq"):
        with pytest.raises(ConfigError, match="not a multiple of 8"):
            quantize(model, tmp_path / "out", QuantizeSettings(scheme=scheme, group_size=-1), make_text())
    quantize(model, tmp_path / "out", QuantizeSettings(scheme="w4a16", group_size=-1))
    with pytest.raises(ConfigError, match="not a multiple of 4"):
        quantize(make_model(tmp_path / "odd", intermediate_size=90), tmp_path / "o", QuantizeSettings(prune="2:4"))


def damage(model, name, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors[name])
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value, model, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    damage(model, name, lambda tensor: tensor[3].fill_(value))
    with pytest.raises(ConfigError, match=f"{name} has values that are not finite"):
        quantize(model, tmp_path / "out", GPTQ, make_text())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", EVERY, ids=IDS)
def test_dead_channels_and_zero_weights_stay_zero(settings, model, tmp_path):
    damage(model, "model.layers.0.input_layernorm.weight", lambda tensor: tensor[:8].zero_())
    damage(model, "model.layers.0.mlp.up_proj.weight", lambda tensor: tensor.zero_())
    damage(model, "model.layers.1.self_attn.v_proj.weight", lambda tensor: tensor[:, 5].zero_())
    quantize(model, tmp_path / "out", settings, make_text())
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), name


def test_a_checkpoint_that_is_quantised_already_is_refused(model, tmp_path):
    quantize(model, tmp_path / "out", EVERY[0])
    with pytest.raises(ConfigError, match="quantised already"):
        quantize(tmp_path / "out", tmp_path / "again", EVERY[0])


def test_an_architecture_that_is_not_known_is_refused_by_name(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    shared = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
    (model / "config.json").write_text(json.dumps({**config, **shared, "architectures": ["Qwen2MoeForCausalLM"]}))
    with pytest.raises(ConfigError, match="layers of Qwen2MoeForCausalLM are not known"):
        quantize(model, tmp_path / "out", EVERY[0])


def test_unknown_tensors_are_left_out_with_a_warning(model, tmp_path, caplog):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.extra": torch.ones(2)}, model / "model.safetensors")
    quantize(model, tmp_path / "out", EVERY[0])
    assert "1 tensors are unknown to this architecture and are left out: model.extra" in caplog.text


def test_missing_tensors_are_refused_at_once(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.gate_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.gate_proj\.weight .*missing"):
        quantize(model, tmp_path / "out", EVERY[0])


def test_folders_of_others_are_left_alone(model, tmp_path):
    (tmp_path / "out").mkdir()
    quantize(model, tmp_path / "out", EVERY[0])  # an empty one is no obstacle
    before = content(tmp_path / "out")
    with pytest.raises(ConfigError, match="is there already"):
        quantize(model, tmp_path / "out", EVERY[0])
    assert content(tmp_path / "out") == before
    foreign = tmp_path / "b.unfinished"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds thesis\.txt and no manifest"):
        quantize(model, tmp_path / "b", EVERY[0])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is there already"):
        quantize(model, tmp_path / "file", EVERY[0])
    with pytest.raises(ConfigError, match="cannot write"):
        quantize(model, tmp_path / "file" / "below", EVERY[0])


def test_two_processes_do_not_share_a_folder(model, tmp_path):
    def again(done, total):
        with pytest.raises(ConfigError, match="another process is working"):
            quantize(model, tmp_path / "out", EVERY[0])

    quantize(model, tmp_path / "out", EVERY[0], on_layer=again)


def test_hidden_states_that_do_not_fit_on_the_disk_are_told(model, tmp_path, monkeypatch):
    def full(*place):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"cannot write .*hidden\.f32: No space left"):
        quantize(model, tmp_path / "out", GPTQ, make_text(), in_memory_bytes=0)


@pytest.mark.parametrize("at", range(0, 7, 2))
def test_a_full_disk_is_told_and_can_be_gone_on_from(at, model, tmp_path, monkeypatch):
    left, real = at, os.fsync

    def full(descriptor):
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left") as caught:
        quantize(model, tmp_path / "out", GPTQ, make_text(), shard_bytes=40_000)
    assert "repeat" in (caught.value.info.hint or "") or "same command" in (caught.value.info.hint or "")
    assert not (tmp_path / "out").exists()
    quantize(model, tmp_path / "out", GPTQ, make_text(), shard_bytes=40_000)
    monkeypatch.undo()
    quantize(model, tmp_path / "whole", GPTQ, make_text(), shard_bytes=40_000)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_writers_files_are_read_by_the_library(tmp_path):
    tensors = {
        "a": torch.arange(5, dtype=torch.int8),
        "b": torch.randn(3, 2).bfloat16(),
        "c": torch.ones(1, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }
    tensor_file.write(tmp_path / "x.safetensors", [tensor_file.TensorEntry.of(*item) for item in tensors.items()])
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(found) == 4
