"""Adapters: what they add is what merging them into the weights adds, and rows that use none are not touched."""

import json
import os

import pytest
import tiny_checkpoint
import torch
from driving import Driver, Sequence
from native_or_not import has_native_kernels
from safetensors.torch import save_file

import adapter_files
from splittime.core.errors import ConfigError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig, SpeculativeConfig
from splittime.runner.draft_sources import model_drafter

PROMPT = [5, 9, 3, 44, 17, 8, 30, 2, 11, 25, 60, 7, 1, 19]
SCORED = SamplingParams(temperature=0.0, seed=0, logprobs=5)
KERNELS = ["torch", *(["native"] if has_native_kernels() else [])]
ROUTES = [(kernels, {"dtype": "float32"}) for kernels in KERNELS]
ROUTES += [(kernels, {"dtype": "float32", "quantization": "int8"}) for kernels in KERNELS]
needs_native = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")


def runner_of(folder, **settings):
    given = {"max_model_len": 64, "block_size": 8, "num_threads": 1, "packed_cache": "off", "enable_lora": True}
    return load_torch_runner(RunnerConfig(model_path=str(folder), **{**given, **settings}))


def answers(runner, sequences, num_tokens=6):
    """The tokens, with their log-probabilities, of requests that are served beside each other."""
    driver = Driver(runner)
    for place, sequence in enumerate(sequences):
        driver.step({sequence: len(PROMPT) - place % 3, **dict.fromkeys(sequences[:place], 1)})
    while any(len(one.outputs) < num_tokens for one in sequences):
        late = {one: len(one.tokens) - one.num_computed for one in sequences}
        driver.step(late)
    return {one.name: scores(one)[:num_tokens] for one in sequences}


def scores(sequence):
    return [(entry.token_id, entry.logprob) for result in sequence.results for entry in result.logprobs]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, tiny_checkpoint.write(folder)


@pytest.mark.parametrize(("kernels", "settings"), ROUTES)
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "r": 3, "lora_alpha": 5}])
def test_an_adapter_is_what_merging_it_is(base, tmp_path, kernels, settings, changes):
    folder, tensors = base
    adapter = adapter_files.write_adapter(tmp_path / "a", tensors, **changes)
    whole = tmp_path / "whole"
    whole.mkdir()
    tiny_checkpoint.write(whole)
    save_file(adapter_files.merged(tensors, adapter, **changes), whole / "model.safetensors")
    runner, oracle = runner_of(folder, kernels=kernels, **settings), runner_of(whole, kernels=kernels, **settings)
    assert runner.slots.adapters.load("a#1", str(tmp_path / "a")) == sum(one.numel() for one in adapter.values())
    asked = SamplingParams(temperature=0.0, seed=0, logprobs=5, prompt_logprobs=0)
    found, merged = Sequence("r", PROMPT, asked, "a#1"), Sequence("r", PROMPT, asked)
    Driver(runner).prefill(found, [5])
    Driver(oracle).prefill(merged)
    got, wanted = (
        torch.tensor([entry.logprob for result in one.results for entry in result.prompt_logprobs])
        for one in (found, merged)
    )
    plain = Sequence("p", PROMPT, asked)
    Driver(runner).prefill(plain)
    unmoved = torch.tensor([entry.logprob for entry in plain.results[0].prompt_logprobs])
    bound = 2e-4 if "quantization" not in settings else 0.1  # the merged weights are rounded, the adapter is not
    assert (got - wanted).abs().max() < bound
    assert (unmoved - wanted).abs().max() > 0.5


@needs_native
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_many_in_one_batch_are_each_alone(base, tmp_path, settings):
    folder, tensors = base
    runner = runner_of(folder, kernels="native", **settings)
    modules = (adapter_files.ALL, ("self_attn.q_proj", "mlp.down_proj"), ("self_attn.v_proj", "mlp.up_proj"))
    for number, mine in enumerate(modules):
        adapter_files.write_adapter(tmp_path / f"{number}", tensors, seed=number, modules=mine, r=2 + number)
        runner.slots.adapters.load(f"{number}", str(tmp_path / f"{number}"))
    plan = [("a", "0"), ("free", ""), ("b", "1"), ("c", "2"), ("d", "0"), ("e", "")]
    alone = {}
    for name, adapter in plan:
        alone |= answers(runner, [Sequence(name, PROMPT, SCORED, adapter)])
    together = answers(runner, [Sequence(name, PROMPT, SCORED, adapter) for name, adapter in plan])
    assert together == alone
    assert len({json.dumps(alone[name]) for name in ("a", "free", "b", "c")}) == 4


@needs_native
def test_drafts_are_verified_with_the_adapter(base, tmp_path):
    """Three that the adapter would write, then one that it would not."""
    folder, tensors = base
    runner = runner_of(folder, kernels="native", dtype="float32")
    adapter_files.write_adapter(tmp_path / "a", tensors)
    runner.slots.adapters.load("a", str(tmp_path / "a"))
    whole = answers(runner, [Sequence("r", PROMPT, SCORED, "a")])["r"]
    free = answers(runner, [Sequence("f", PROMPT, SCORED)])["f"]
    assert free[0][0] != whole[0][0]
    driver, drafted = Driver(runner), Sequence("d", PROMPT, SCORED, "a")
    driver.prefill(drafted)
    tokens = [token for token, _ in whole]
    wrong = (tokens[4] + 1) % 61
    assert driver.verify(drafted, [*tokens[1:4], wrong]).token_ids == tuple(tokens[1:5])


@needs_native
def test_a_draft_model_knows_no_adapters_and_drafts_for_those_who_have_one(base):
    runner = runner_of(base[0], kernels="native", dtype="float32", speculative_config='{"method": "self"}')
    drafter = model_drafter(runner, SpeculativeConfig(method="self", num_speculative_tokens=2))
    drafter.admit(Admitted("r", tuple(PROMPT), 0, SCORED, (1, 2), "", "a"))
    assert drafter.runner.slots.adapters is None
    assert drafter.runner.slots["r"].error is None


def test_one_that_is_unloaded_stays_with_who_runs(base, tmp_path):
    folder, tensors = base
    runner = runner_of(folder, kernels="torch")
    adapter_files.write_adapter(tmp_path / "a", tensors)
    runner.slots.adapters.load("a", str(tmp_path / "a"))
    whole = answers(runner, [Sequence("r", PROMPT, SCORED, "a")])
    driver, running = Driver(runner), Sequence("r", PROMPT, SCORED, "a")
    driver.prefill(running)
    runner.slots.adapters.unload("a")
    while len(running.outputs) < 6:
        driver.step({running: 1})
    assert scores(running) == whole["r"]
    late = Sequence("late", PROMPT, SCORED, "a")
    driver.step({late: len(PROMPT)})
    assert late.results[0].error.code == "adapter_not_loaded"


REFUSED = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "a bias": ({"bias": "all"}, "bias"),
    "other modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "a rank above the limit": ({"r": 17}, "max_lora_rank, 16"),
    "no rank": ({"r": "4"}, "r = 4"),
    "a scale that is none": ({"lora_alpha": float("nan")}, "lora_alpha"),
    "a scale beyond all": ({"lora_alpha": 1e308}, "lora_alpha"),
    "a scale of too many digits": ({"lora_alpha": -(10**400)}, "lora_alpha"),
    "a truth for a scale": ({"lora_alpha": True}, "lora_alpha"),
    "a scale that makes too much of it": ({"lora_alpha": 1 << 20}, r"by lora_alpha holds values beyond"),
    "ranks of their own": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "another method": ({"peft_type": "IA3"}, "peft_type"),
    "what nobody knows": ({"quantum": 3}, "quantum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(base, tmp_path, name):
    changes, said = REFUSED[name]
    adapter_files.write_adapter(tmp_path, base[1])
    config = {**adapter_files.CONFIG, **changes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        runner_of(base[0], kernels="torch").slots.adapters.load("a", str(tmp_path))


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
FAR = PREFIX.replace("layers.0", "layers.2")
SPOILED = {
    "an embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 61)}, "no part"),
    "a layer too many": ({f"{FAR}A.weight": torch.ones(4, 32), f"{FAR}B.weight": torch.ones(32, 4)}, "no part"),
    "half of a pair": ({f"{PREFIX}B.weight": None}, "has no lora_B"),
    "another shape": ({f"{PREFIX}A.weight": torch.ones(4, 31)}, r"\[4, 31\]"),
    "integers": ({f"{PREFIX}A.weight": torch.ones(4, 32, dtype=torch.int32)}, "int32"),
    "a NaN": ({f"{PREFIX}A.weight": torch.full((4, 32), float("nan"))}, "not finite"),
    "too large a number": ({f"{PREFIX}A.weight": torch.full((4, 32), 1e30)}, "beyond 65504"),
    "too much": ({"x": torch.zeros(1 << 23)}, "has at most"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_file_that_does_not_fit_is_refused(base, tmp_path, name):
    changes, said = SPOILED[name]
    given = adapter_files.write_adapter(tmp_path, base[1]) | changes
    given = {tensor: content for tensor, content in given.items() if content is not None}
    save_file(given, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=said):
        runner_of(base[0], kernels="torch").slots.adapters.load("a", str(tmp_path))


def test_a_long_header_is_refused_before_it_is_read(base, tmp_path):
    adapter_files.write_adapter(tmp_path, base[1])
    (tmp_path / "adapter_model.safetensors").write_bytes((2 << 20).to_bytes(8, "little") + b" " * (2 << 20))
    with pytest.raises(ConfigError, match="header of 2097152 bytes"):
        runner_of(base[0], kernels="torch").slots.adapters.load("a", str(tmp_path))


def test_a_pipe_is_refused_and_not_opened(base, tmp_path):
    adapter_files.write_adapter(tmp_path, base[1])
    (tmp_path / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="no regular file"):
        runner_of(base[0], kernels="torch").slots.adapters.load("a", str(tmp_path))


def test_a_file_of_nothing_is_refused(base, tmp_path):
    adapter_files.write_adapter(tmp_path, base[1])
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="no tensors"):
        runner_of(base[0], kernels="torch").slots.adapters.load("a", str(tmp_path))


def test_only_so_many_are_loaded(base, tmp_path, monkeypatch):
    adapter_files.write_adapter(tmp_path, base[1])
    monkeypatch.setattr("splittime.runner.batch.MOST_LOADED", 2)
    adapters = runner_of(base[0], kernels="torch").slots.adapters
    for name in ("a", "b"):
        adapters.load(name, str(tmp_path))
    with pytest.raises(ConfigError, match="2 adapters are loaded"):
        adapters.load("c", str(tmp_path))
    adapters.unload("a")
    adapters.load("c", str(tmp_path))


def test_ranks_share_no_adapters(base):
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        runner_of(base[0], tensor_parallel_size=2)
