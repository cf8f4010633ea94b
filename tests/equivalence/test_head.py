"""Drafts of a head: no draft changes a token, and the head reads the features of the token before, whoever computed
them and wherever they lie."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from native_or_not import has_native_kernels
from test_draft_model import FEW_BLOCKS, AllTaken, assert_alike
from test_drafted_engine import generate
from test_engine_equivalence import MODEL, load_runner

from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.lab.distill.head import Head
from splittime.lab.distill.student import StudentPlan, read_plan, write_folder
from splittime.models.head import HiddenFeatures
from splittime.models.weights.head import head_config
from splittime.models.weights.load import read_config
from splittime.runner import draft_sources
from splittime.runner.batch import Batch
from splittime.runner.config import RunnerConfig, SpeculativeConfig, speculative_config
from splittime.runner.draft_sources import drafting_of, head_drafter
from splittime.runner.sleep import PAGE_BYTES
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")


def write_head(folder: Path, seed: int | None) -> Path:
    """A head of random weights; without a seed one that hands on what the model said of the token before."""
    torch.manual_seed(seed or 0)
    plan = read_plan(MODEL)
    head = Head(plan.shape)
    with torch.no_grad():
        if seed is None:
            head.layer.input_proj.weight[:, plan.shape.hidden_size :] = 0
        else:
            for weight in head.parameters():
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    write_folder(folder, StudentPlan(plan.shape, dict(plan.values)), head.state_dict(), MODEL)
    return folder


def asking(folder: Path, **changes: object) -> TorchRunner:
    config = json.dumps({"method": "mtp", "model": str(folder), "num_speculative_tokens": 5})
    return load_runner(speculative_config=config, draft_model_path=str(folder), max_num_seqs=8, **changes)


@pytest.fixture(scope="module")
def plain() -> dict[str, list]:
    runner = load_runner()
    return generate(runner, runner.resolved.num_blocks)[0]


class Timeless(AllTaken):
    """Its own steps take a nanosecond, so that how much it drafts does not depend on what else the machine does."""

    def __init__(self, *sizes: int, features: HiddenFeatures) -> None:
        super().__init__(*sizes, now_ns=itertools.count().__next__, features=features)


class Repeating(Timeless):
    """Notes how often what it drafts is the answer's last token, again and again, in greedy answers."""

    counts: dict[bool, int]

    def draft(self, plan, result, look):  # type: ignore[no-untyped-def]
        drafts = super().draft(plan, result, look) or {}
        for name, draft in drafts.items():
            answer = self._answers[name]
            if name in ("r0", "r4") and answer.num_outputs > 2:
                is_repeated = set(draft.token_ids) == {answer.tokens[-1]}
                Repeating.counts[is_repeated] = Repeating.counts.get(is_repeated, 0) + 1
        return drafts


@pytest.mark.parametrize("num_blocks", [None, FEW_BLOCKS])
def test_a_head_reads_what_the_model_said_of_the_token_before(
    plain: dict[str, list], num_blocks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that adds nothing gives the features back, and of the token before they say the token itself. Also where
    requests are preempted, and the second time, when prompts are found in the cache."""
    monkeypatch.setattr(draft_sources, "ModelDrafter", Repeating)
    Repeating.counts = {}
    runner = asking(write_head(tmp_path, None))
    drafting = drafting_of(runner)
    for _ in range(2):
        found, scheduler = generate(drafting, num_blocks or runner.resolved.num_blocks)
        assert_alike(found, plain)
        scheduler.check()
    assert Repeating.counts.get(True, 0) >= 8
    assert Repeating.counts.get(False, 0) <= 0.1 * Repeating.counts[True], "features are rounded: near ties may turn"


def test_drafts_of_a_head_change_no_token(
    plain: dict[str, list], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_head(tmp_path, 7)
    drafting = drafting_of(asking(folder))
    assert generate(drafting, 200)[0] == plain, "those that pay"
    monkeypatch.setattr(draft_sources, "ModelDrafter", Timeless)
    drafting = drafting_of(asking(folder))
    found, scheduler = generate(drafting, 200)
    assert found == plain
    assert scheduler.counts.draft_tokens > 30
    drafting.forget()
    assert generate(drafting, 200)[0] == plain, "after it fell asleep"


def told_too(runner: TorchRunner, told: list[torch.Tensor]) -> Callable[[Batch, torch.Tensor], None]:
    """What a runner does with its hidden states, and notes them, normed."""
    does = runner.on_hidden
    assert does is not None
    return lambda batch, hidden: (does(batch, hidden), told.append(runner.decoder.normed(hidden).float()))[0]


def test_the_served_head_is_the_trained_one(tmp_path: Path) -> None:
    """The features that it makes of a text, by the kernels and by the module that is trained."""
    folder, text = write_head(tmp_path, 3), tuple(range(300, 340))
    runner = asking(folder)
    head = head_drafter(runner, speculative_config(runner.config.speculative_config)).runner
    greedy, made, states = SamplingParams(temperature=0.0, seed=0), [], []
    for one, told in ((runner, states), (head, made)):
        one.on_hidden = told_too(one, told)
        one.run(StepPlan(0, (Row("a", 0, text, (2, 3, 4), 0),), (Admitted("a", text, 1, greedy, ()),)))
    left = head.decoder.features.data[2:5].flatten(0, 1)
    assert torch.equal(left[: len(text)], states[0].bfloat16()), "of a text, those that the model made"
    head.run(StepPlan(1, (Row("a", len(text) - 1, text[-1:], (), 1),)))
    assert torch.equal(left[: len(text) - 1], states[0].bfloat16()[:-1])
    assert torch.equal(left[len(text) - 1], made[1].bfloat16()[-1]), "of the token before a draft, the head's own"
    (row,) = head.run(StepPlan(2, (Row("a", len(text) - 1, text[-1:], (), 1),))).rows
    assert row.token_ids == (int(runner.decoder.ops.linear(made[2], runner.decoder.head).argmax()),)
    plan = read_plan(MODEL)
    module = Head(plan.shape)
    from splittime.models.weights.checkpoint import Checkpoint

    saved = Checkpoint(folder)
    module.load_state_dict({name: saved.take(name, *w.shape).float() for name, w in module.state_dict().items()})
    table = Checkpoint(MODEL).take("model.embed_tokens.weight", plan.shape.vocab_size, plan.shape.hidden_size).float()
    rounded = states[0].bfloat16().float()[None]
    with torch.no_grad():
        (expected,) = module.depths(rounded, table[list(text)][None], 1)
    assert torch.allclose(made[0], expected[0], atol=0.03, rtol=0.03)
    wrong = module.depths(rounded.flip(1), table[list(text)][None], 1)[0][0]
    assert not torch.allclose(made[0], wrong, atol=0.3, rtol=0.3)


def test_keys_values_and_features_share_the_memory_that_is_asked_for(tmp_path: Path) -> None:
    asked = 64 << 20
    both, alone = asking(write_head(tmp_path, 1), kv_cache_memory_bytes=asked), load_runner(kv_cache_memory_bytes=asked)
    layers, hidden = len(alone.decoder.layers), alone.decoder.config.hidden_size
    each = alone.resolved.kv_bytes_per_block * (layers + 1) // layers + 16 * hidden * 2
    assert both.resolved.num_blocks == asked // each
    assert alone.resolved.num_blocks > both.resolved.num_blocks


def test_a_checkpoint_without_a_head_is_refused_by_the_tensor_that_it_lacks() -> None:
    runner = load_runner(speculative_config='{"method": "mtp"}')
    with pytest.raises(ConfigError, match=r"model\.mtp_layers\.0"):
        drafting_of(runner)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": 512}, "the head has hidden_size 512, and the model 256"),
        ({"vocab_size": 4097}, "the head has vocab_size 4097, and the model 4096"),
        ({"rope_theta": 77.0}, r"no layer of the model has rotary positions as the head has them .*rope_theta 77"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    write_head(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match=words):
        drafting_of(asking(tmp_path))


def test_a_head_is_a_layer_as_the_last_of_its_folder_s() -> None:
    config = read_config(MODEL)
    last = msgspec.structs.replace(config, layers=(config.layers[0], "the last"))
    assert head_config(last, config) == msgspec.structs.replace(config, layers=("the last",))


def test_a_head_that_computes_nothing_finite_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_head(tmp_path, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.mlp.down_proj.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"makes no drafts: .* not finite"):
        drafting_of(asking(tmp_path))


@pytest.mark.parametrize(
    ("of_model", "of_head", "expected"), [(None, "int8", "int8"), ("int8", None, "int8"), ("int8", "int4", "int4")]
)
def test_a_head_has_the_bits_that_are_asked_for_or_the_model_s(
    tmp_path: Path, of_model: str | None, of_head: str | None, expected: str
) -> None:
    runner = asking(write_head(tmp_path, 1), quantization=of_model, kv_cache_memory_bytes=8 << 20, packed_cache="off")
    drafter = head_drafter(runner, SpeculativeConfig(method="mtp", model=str(tmp_path), quantization=of_head))
    assert drafter.runner.decoder.joined.scheme.name == expected
    assert drafter.costs.draft.is_known, "its steps are timed"
    assert drafter.costs.text_ns > 1
    features = drafter.runner.decoder.features.data
    features.fill_(1.0)
    drafter.forget()
    assert features.count_nonzero() * features.itemsize <= 2 * PAGE_BYTES, "but for what shares a page with others"


def test_a_head_that_is_quantised_already_is_not_rounded_again(tmp_path: Path) -> None:
    write_head(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    held = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": held}))
    with pytest.raises(ConfigError, match=r"quantization is 'int8', but the checkpoint is already quantised"):
        head_drafter(asking(tmp_path), SpeculativeConfig(method="mtp", model=str(tmp_path), quantization="int8"))


def test_prefixes_in_host_memory_do_not_go_with_a_head() -> None:
    config = RunnerConfig(model_path="x", speculative_config='{"method": "mtp"}', kv_offload_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="does not go with kv_offload_memory_bytes"):
        config.validate()


def test_a_checkpoint_may_have_its_head_in_it(plain: dict[str, list], tmp_path: Path) -> None:
    """As MiMo's do: the model's own folder has the head's tensors beside its own."""
    from safetensors.torch import load_file, save_file

    head = write_head(tmp_path / "head", 5)
    whole = shutil.copytree(MODEL, tmp_path / "whole")
    save_file(
        load_file(MODEL / "model.safetensors") | load_file(head / "model.safetensors"), whole / "model.safetensors"
    )
    runner = load_runner(model_path=str(whole), speculative_config='{"method": "mtp"}')
    assert msgspec.structs.asdict(speculative_config(runner.config.speculative_config))["model"] is None
    assert generate(drafting_of(runner), 200)[0] == plain


def test_mimo_is_served_with_its_head(tmp_path: Path) -> None:
    """A Qwen2 with biases, a head beside its layers, and the names of MiMo-7B's checkpoints."""
    import tiny_checkpoint
    from safetensors.torch import save_file

    tensors = tiny_checkpoint.write(tmp_path, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    source = torch.Generator().manual_seed(1)
    layer = {name.split(".", 3)[3]: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    head = {name: torch.randn(tensor.shape, generator=source) * 0.3 for name, tensor in layer.items()}
    head |= {f"{name}_layernorm.weight": torch.ones(32) for name in ("token", "hidden", "final")}
    head["input_proj.weight"] = torch.randn(32, 64, generator=source) * 0.2
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in head.items()}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = torch.randn(tensors[name].shape[0], generator=source)
        tensors[name.replace(".weight", ".bias")] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    path = {"model_path": str(tmp_path), "max_model_len": 128}
    asked, prompt = {**path, "speculative_config": '{"method": "mtp"}'}, tuple(range(3, 20))
    answers = []
    for runner in (load_runner(**path), drafting_of(load_runner(**asked))):
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=2, max_model_len=128, num_blocks=16))
        crank, told = Crank(EngineParts(Engine(scheduler), runner), SystemClock()), []
        sampling = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
        crank.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling, submitted_ns=0), 0)
        while crank.has_work:
            output = crank.turn()
            told += [token for one in (output.outputs if output else ()) for token in one.token_ids]
        answers.append(told)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 40
