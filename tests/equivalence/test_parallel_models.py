"""A model cut for several ranks computes what the whole one does: every architecture, logits and greedy tokens, rows of
prompts and of decodes in one batch."""

from pathlib import Path

import pytest
import torch
from driving import Driver, Sequence
from in_turn import in_turn
from random_models import VARIANTS, make

import splittime
from splittime.core.errors import ConfigError
from splittime.models.weights import keeping
from splittime.runner.compose import load_part, load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.sample(5)

NEW_TOKENS = 12
LENGTHS = {"a": 9, "b": 21, "c": 30}  # of prompts


def prompt(length):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def follow(runner: TorchRunner, outputs=None):
    """Mixed steps: two prompts in chunks while a third decodes; then all decode. Returns the logits of all rows of all
    steps, and the outputs. outputs: what another runner chose, to go on with instead of one's own: two likeliest tokens
    may be as likely."""
    seen = []
    decoder = runner.decoder

    class Listener:
        ops = decoder.ops

        def forward(self, *arguments):
            hidden = decoder.forward(*arguments)
            seen.append(decoder.logits(hidden))
            return hidden

        def logits(self, hidden):
            return decoder.logits(hidden)

    runner.decoder = Listener()  # type: ignore[assignment]
    driver = Driver(runner, shuffle_seed=3)
    first, second, third = sequences = [Sequence(name, prompt(length)) for name, length in LENGTHS.items()]
    plan = [{first: 5}, {first: 4}, {first: 1, second: 13, third: 17}, {third: 13, first: 1, second: 8}]
    for work in plan + [{second: 1, first: 1, third: 1}] * NEW_TOKENS:
        driver.step(work)
        for sequence, chosen in zip(sequences, outputs or (), strict=False):
            sequence.tokens[sequence.prompt_len :] = chosen[: len(sequence.outputs)]
    return torch.cat(seen), [sequence.outputs for sequence in sequences]


def runner_of(folder, ranks=None, **settings) -> TorchRunner:
    settings = {"packed_cache": "off", **settings}
    config = RunnerConfig(model_path=str(folder), max_num_seqs=4, num_threads=1, **settings)
    return load_part(config, lambda name, begin_ns, end_ns: None, None, ranks)


def compare(folder, count, atol=5e-5, **settings):
    want, outputs = follow(runner_of(folder, **settings))
    ranks = in_turn(count, lambda ranks: follow(runner_of(folder, ranks, **settings), outputs)[0])
    assert all(torch.equal(got, ranks[0]) for got in ranks)  # every rank the same bits
    torch.testing.assert_close(ranks[0], want, rtol=1e-5, atol=atol)
    best = want.topk(2)
    is_clear = best.values[:, 0] - best.values[:, 1] > 2 * atol
    assert is_clear.float().mean() > 0.8
    assert torch.equal(ranks[0].argmax(-1)[is_clear], best.indices[is_clear, 0])


UNSHARED = [
    *(name for name in VARIANTS if name.startswith("olmo")),
    "cohere-head-norms",
    "gemma4-experts",
    "gemma4-layer-inputs",
]


@pytest.fixture(scope="module", params=[name for name in VARIANTS if name not in UNSHARED])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    make(request.param, made)
    return made


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_two_ranks_compute_what_one_does(folder, kernels):
    compare(folder, 2, kernels=kernels)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("olmo2", "Olmo2ForCausalLM norms the queries of all heads together"),
        ("cohere-head-norms", "CohereForCausalLM norms the queries of all heads by scales of their own"),
        ("gemma4-experts", "Gemma4ForCausalLM norms what all experts add together"),
        ("gemma4-layer-inputs", "Gemma4ForCausalLM norms inputs that each layer has of its own"),
    ],
)
def test_a_norm_of_all_heads_is_not_shared(variant, said, tmp_path):
    make(variant, tmp_path)
    asked = RunnerConfig(model_path=str(tmp_path), tensor_parallel_size=2, num_threads=2)
    with pytest.raises(ConfigError, match=said):
        load_torch_runner(asked)


MORE_RANKS = {
    "llama": (4, {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "qwen3": (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 81, "head_dim": 8}),
    "qwen3-moe": (4, {"num_attention_heads": 4, "num_key_value_heads": 1, "mlp_only_layers": [1], "head_dim": 6}),
}


@pytest.mark.parametrize("variant", MORE_RANKS)
def test_more_ranks_than_key_value_heads_and_odd_parts_of_the_vocabulary(variant, tmp_path, monkeypatch):
    count, changes = MORE_RANKS[variant]
    architecture, differences = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, variant, (architecture, {**differences, **changes}))
    make(variant, tmp_path)
    compare(tmp_path, count)


def test_int8_keys_and_values(tmp_path):
    """Scales are a head's own, so a rank rounds its heads as the whole model does; but for a value that lies between
    two integers, and came out a hair smaller or larger."""
    make("llama", tmp_path)
    compare(tmp_path, 2, atol=0.03, kv_cache_dtype="int8")


def test_packed_weights_are_kept_apart(tmp_path):
    make("llama", tmp_path / "model")
    settings = {"quantization": "int8", "kernels": "native", "packed_cache": str(tmp_path / "kept")}

    def start(ranks):
        runner = runner_of(tmp_path / "model", ranks, **settings)
        return runner.resolved.packed_cache, follow(runner)[0]

    first = in_turn(2, start)
    keeping.finish()
    second = in_turn(2, start)
    assert [story.split()[0] for story, _ in first + second] == ["packed"] * 2 + ["mapped"] * 2
    assert len(list((tmp_path / "kept").glob("*.packed"))) == 2
    assert torch.equal(first[0][1], second[0][1])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_stay_as_close_to_the_floats(quantization):
    """Ranks round their own parts, and the native kernels each token's own part of the activations."""
    folder = Path(splittime.__file__).parent / "packaged" / "code"
    exact, outputs = follow(runner_of(folder, dtype="float32"))
    whole, _ = follow(runner_of(folder, quantization=quantization), outputs)
    parts = in_turn(2, lambda ranks: follow(runner_of(folder, ranks, quantization=quantization), outputs)[0])
    assert torch.equal(*parts)
    assert divergence(exact, parts[0]) < 2 * divergence(exact, whole) + 1e-4


def divergence(exact, got):
    """Mean KL in nats."""
    exact, got = exact.log_softmax(-1), got.log_softmax(-1)
    return float((exact.exp() * (exact - got)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_gguf_files_are_cut_too(kind, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from gguf_files import write

    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(VARIANTS, "llama", ("Llama", sizes))
    make("llama", tmp_path)
    write(tmp_path, tmp_path / "model.gguf", kind)
    compare(tmp_path / "model.gguf", 2, kernels="torch", dtype="float32")


def test_a_rank_has_its_part_alone(tmp_path):
    make("mixtral", tmp_path)
    whole = runner_of(tmp_path)
    both = in_turn(2, lambda ranks: runner_of(tmp_path, ranks))
    for runner in both:
        assert runner.store.shapes[0].num_kv_heads == 1
        assert runner.resolved.kv_bytes_per_block == whole.resolved.kv_bytes_per_block // 2
        assert runner.resolved.num_parameters == whole.resolved.num_parameters
        assert runner.resolved.weights_bytes < 0.6 * whole.resolved.weights_bytes
        assert runner.cost.operations_per_token < 0.52 * whole.cost.operations_per_token
    heads = [runner.cost.operations_per_sample for runner in both]
    assert sum(heads) == whole.cost.operations_per_sample


def test_all_have_as_many_blocks_as_the_poorest(tmp_path, monkeypatch):
    make("llama", tmp_path)
    given = iter([90, 90, 70, 70])  # each rank asks twice
    monkeypatch.setattr("splittime.runner.machine.choose_num_blocks", lambda *_: (next(given), "as drawn"))
    both = in_turn(2, lambda ranks: runner_of(tmp_path, ranks))
    assert {runner.resolved.num_blocks for runner in both} == {70}
    assert {runner.store.num_blocks for runner in both} == {70}
