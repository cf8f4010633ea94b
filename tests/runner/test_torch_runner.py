"""The runner's own promises: what is resolved, what is refused, and that a broken row ends alone."""

import itertools
import json

import msgspec
import pytest
import tiny_checkpoint
import torch
from safetensors.torch import save_file

from splittime.core.errors import ConfigError, EngineError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.honoured import TRIED
from splittime.runner.torch_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)


def load(folder, **settings) -> TorchRunner:
    return load_torch_runner(RunnerConfig(model_path=str(folder), **{"max_num_seqs": 4, **settings}))


@pytest.fixture
def runner(folder):
    return load(folder)


def admit(name, *token_ids, sampling=GREEDY, num_outputs=0, stop=()):
    return Admitted(name, token_ids, num_outputs, sampling, stop)


def prefill(runner, *admitted, step_id=0):
    """One plan that admits and computes all of these whole, block n + 1 for the n-th."""
    rows = tuple(Row(one.request_id, 0, one.token_ids, (place + 1,), 1) for place, one in enumerate(admitted))
    return runner.run(StepPlan(step_id, rows, admitted, tuple(runner.slots._by_id)))


def test_what_was_resolved_is_told(folder):
    phases = []
    layers = []
    runner = load_torch_runner(
        RunnerConfig(model_path=str(folder), max_num_seqs=3, kernels="torch"),
        lambda *phase: phases.append(phase),
        lambda *progress: layers.append(progress),
    )
    resolved = runner.resolved
    assert (resolved.architecture, resolved.vocab_size, resolved.eos_token_ids) == ("LlamaForCausalLM", 61, (2,))
    assert (resolved.dtype, resolved.kv_cache_dtype) == ("float32", "float32")
    assert (resolved.max_model_len, resolved.context_length, resolved.num_blocks) == (128, 128, 3 * 8)
    assert resolved.kv_bytes_per_block == 2 * 2 * 2 * 16 * 8 * 4
    norms_bytes = 5 * 32 * 4
    assert resolved.num_parameters * 4 == resolved.weights_bytes + resolved.embedding_bytes + norms_bytes
    assert (resolved.kernels, resolved.kernels_reason, resolved.activation_dtype) == ("torch", "as asked", "float32")
    assert (resolved.weights, resolved.packed_cache) == (
        "float32",
        "not for float32, which is packed as fast as it is read",
    )
    assert [(done, total) for done, total, _ in layers] == [(1, 2), (2, 2)]
    assert layers[-1][2] == resolved.weights_bytes
    assert resolved.dtype_reason
    assert resolved.num_threads_reason
    assert resolved.num_blocks_reason
    assert msgspec.json.decode(msgspec.json.encode(resolved), type=type(resolved)) == resolved
    assert [name for name, _, _ in phases] == ["read config", "load weights", "allocate kv cache"]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(phases))


def test_warm_up_leaves_no_request(runner):
    runner.warm_up()
    assert len(runner.slots) == 0


@pytest.mark.parametrize("length", [1, 2, 17])
def test_warm_up_fits_short_contexts(folder, length):
    load(folder, max_model_len=length, max_num_seqs=1).warm_up()


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float16"},
        {"dtype": "int8"},
        {"kv_cache_dtype": "float16"},
        {"kv_cache_dtype": "bfloat16", "dtype": "float32", "kernels": "torch"},
        {"kv_cache_dtype": "bfloat16", "kernels": "reference"},
        {"load_format": "gguf"},
        {"quantization": "awq"},
        {"quantization": "int3"},
        {"kernels": "cuda"},
        {"kernels": "cpu"},
        {"packed_cache": ""},
        {"packed_cache": __file__},
        {"max_model_len": 129},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"num_threads": 0},
        {"kv_cache_memory_bytes": 4096},
    ],
    ids=str,
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(folder, settings, monkeypatch):
    monkeypatch.setattr("splittime.runner.load.load_decoder", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    name = next(iter(settings))
    assert caught.value.info.param == name
    assert str(settings[name]) in str(caught.value)


def test_kv_cache_memory_decides_the_blocks(folder):
    block_bytes = 2 * 2 * 2 * 16 * 8 * 4
    assert load(folder, kv_cache_memory_bytes=20 * block_bytes + 5).resolved.num_blocks == 20


def test_a_plan_without_rows_only_updates_the_requests(runner):
    prefill(runner, admit("a", 3, 4))
    result = runner.run(StepPlan(7, (), (), ("a", "never seen")))
    assert (result.step_id, result.rows, len(runner.slots)) == (7, (), 0)


def test_results_come_in_the_plans_order(runner):
    admitted = (admit("long", 3, 4, 5), admit("short", 3), admit("middle", 9, 9))
    result = prefill(runner, *admitted)
    assert [row.request_id for row in result.rows] == ["long", "short", "middle"]
    for one, row in zip(admitted, result.rows, strict=True):
        assert prefill(runner, one).rows[0].token_ids == row.token_ids


def test_only_rows_that_sample_get_a_token(runner):
    plan = StepPlan(0, (Row("a", 0, (3, 4), (1,), 0), Row("b", 0, (5,), (2,), 1)))
    admitted = (admit("a", 3, 4, 5), admit("b", 5))
    result = runner.run(msgspec.structs.replace(plan, admitted=admitted))
    assert [len(row.token_ids) for row in result.rows] == [0, 1]
    assert [row.error for row in result.rows] == [None, None]


def test_a_row_that_is_not_finite_fails_alone(tmp_path, folder):
    tensors = tiny_checkpoint.write(tmp_path)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    broken, healthy = load(tmp_path), load(folder)
    others = (admit("x", 3, 4, 5), admit("y", 7))
    want = [row.token_ids for row in prefill(healthy, *others).rows]
    result = prefill(broken, *others, admit("bad prefill", 3, 50, 4), admit("bad token", 50))
    assert [row.token_ids for row in result.rows[:2]] == want
    for row in result.rows[2:]:
        assert "not finite" in row.error
        assert row.token_ids == ()
    silent = StepPlan(2, (Row("z", 0, (50, 3), (5,), 0),), (admit("z", 50, 3, 4),))
    assert "not finite" in broken.run(silent).rows[0].error
    assert all(layer.data.isfinite().all() for layer in broken.store.layers)


def test_a_draft_that_is_not_finite_costs_its_request_nothing(tmp_path, folder):
    """It was a guess: what was accepted before it counts, and nobody inherits what it left in the cache."""
    tensors = tiny_checkpoint.write(tmp_path)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    broken, healthy = load(tmp_path), load(folder)
    plain = admit("x", 3, 4, 5)
    (first,) = prefill(healthy, plain).rows[0].token_ids
    wanted = [healthy.run(StepPlan(1, (Row("x", 3, (first,), (), 1),))).rows[0].token_ids[0]]
    wanted.append(healthy.run(StepPlan(2, (Row("x", 4, (wanted[0],), (), 1),))).rows[0].token_ids[0])
    assert prefill(broken, plain).rows[0].token_ids == (first,)
    row = Row("x", 3, (first,), (), 3, (wanted[0], 50))
    result = broken.run(StepPlan(1, (row,))).rows[0]
    assert (result.token_ids, result.error) == (tuple(wanted), None)
    assert all(layer.data.isfinite().all() for layer in broken.store.layers)


def test_a_row_that_fails_takes_its_drafts_with_it(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    runner = load(tmp_path)
    row = Row("x", 0, (3, 50), (1,), 3, (4, 5))
    result = runner.run(StepPlan(0, (row,), (admit("x", 3, 50),))).rows[0]
    assert result.token_ids == ()
    assert "not finite" in result.error


@pytest.mark.parametrize(
    ("admitted", "said"),
    [
        (admit("a", 3, 61), "prompt holds token id 61"),
        (admit("a", -1), "prompt holds token id -1"),
        (admit("a", 3, sampling=SamplingParams(seed=0, logit_bias={99: 1.0})), "logit_bias holds token id 99"),
        (admit("a", *[3] * 129), "more than max_model_len 128"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_ids_that_the_model_lacks_end_their_request_alone(runner, admitted, said):
    result = prefill(runner, admit("b", 3, 4), admitted)
    assert result.rows[0].token_ids
    assert said in result.rows[1].error


def test_plans_that_make_no_sense_are_our_own_fault(runner):
    with pytest.raises(EngineError, match="not admitted"):
        runner.run(StepPlan(0, (Row("ghost", 0, (3,), (1,), 1),)))
    with pytest.raises(EngineError, match="do not fit its 0 blocks"):
        runner.run(StepPlan(0, (Row("a", 0, (3,), (), 1),), (admit("a", 3),)))
    with pytest.raises(EngineError, match="context of 128"):
        runner.run(StepPlan(0, (Row("a", 128, (3,), tuple(range(9)), 1),), (admit("a", 3),)))
    with pytest.raises(EngineError, match="1 drafts, 1 samples"):
        runner.run(StepPlan(0, (Row("a", 0, (3,), (1,), 1, (4,)),), (admit("a", 3),)))
    with pytest.raises(EngineError, match="draft 61 is outside the vocabulary of 61"):
        runner.run(StepPlan(0, (Row("a", 0, (3,), (1,), 2, (61,)),), released=("a",), admitted=(admit("a", 3),)))
    with pytest.raises(EngineError, match="do not fit its 1 blocks"):
        runner.run(StepPlan(0, (Row("a", 0, (3,), (1,), 17, (4,) * 16),), released=("a",), admitted=(admit("a", 3),)))


def test_min_tokens_holds_back_stop_ids(runner):
    free = prefill(runner, admit("a", 3, 4)).rows[0].token_ids[0]
    sampling = SamplingParams(temperature=0.0, seed=0, min_tokens=1)
    held = admit("a", 3, 4, sampling=sampling, stop=(free, 1000))
    assert prefill(runner, held).rows[0].token_ids != (free,)
    enough = admit("a", 3, 4, sampling=sampling, stop=(free,), num_outputs=1)
    assert prefill(runner, enough).rows[0].token_ids == (free,)


def test_logit_bias_forces_and_forbids(runner):
    free = prefill(runner, admit("a", 3, 4)).rows[0].token_ids[0]
    forced = SamplingParams(temperature=0.0, seed=0, logit_bias={17: 100.0}, logprobs=0)
    row = prefill(runner, admit("a", 3, 4, sampling=forced)).rows[0]
    assert row.token_ids == (17,)
    assert row.logprobs[0].logprob < 0  # the raw model's, not the biased one's
    forbidden = SamplingParams(temperature=0.0, seed=0, logit_bias={free: -100.0})
    assert prefill(runner, admit("a", 3, 4, sampling=forbidden)).rows[0].token_ids != (free,)


def test_logprobs_rank_and_alternatives(runner):
    want = SamplingParams(temperature=1.5, seed=4, logprobs=5)
    row = prefill(runner, admit("a", 3, 4, sampling=want), admit("b", 3, 4)).rows[0]
    one = row.logprobs[0]
    values = [value for _, value in one.top]
    assert one.token_id == row.token_ids[0]
    assert (len(values), values) == (5, sorted(values, reverse=True))
    if one.rank <= 5:
        assert one.top[one.rank - 1] == (one.token_id, one.logprob)
    everything = SamplingParams(temperature=0.0, seed=0, logprobs=20)
    top = prefill(runner, admit("a", 3, 4, sampling=everything)).rows[0].logprobs[0]
    assert sum(torch.tensor([value for _, value in top.top]).exp()) <= 1.0 + 1e-6
    assert top.rank == 1


def test_a_context_far_beyond_the_memory_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    tiny_checkpoint.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**27}))
    monkeypatch.setattr("splittime.runner.load.load_decoder", lambda *_: pytest.fail("it was allocated"))
    with pytest.raises(ConfigError, match=r"needs \d+ b(lock|yte)s"):
        load(tmp_path)


def test_what_would_be_refused_is_in_the_facts_and_nothing_else(folder):
    """A doctor of a file prescribes by it: each value that is tried is refused by a load, or loads."""
    told = load(folder, kernels="torch").resolved.refuses
    for name, value in ((name, value) for name, values in TRIED.items() for value in values):
        asked = {"kernels": "torch", name: value}
        is_told = any(each.has(name, value) for each in told)
        try:
            load(folder, **asked)
            is_refused = False
        except ConfigError:
            is_refused = True
        assert is_told is is_refused, asked
    (threads, cache) = (each for each in told if each.value is None)
    assert (threads.name, threads.least, cache.name) == ("num_threads", 1, "kv_cache_memory_bytes")
    load(folder, kv_cache_memory_bytes=cache.least)
    for num_bytes in (cache.least - 1, cache.most + 1):
        assert cache.has("kv_cache_memory_bytes", num_bytes)
        with pytest.raises(ConfigError):
            load(folder, kv_cache_memory_bytes=num_bytes)
