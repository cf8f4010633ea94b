"""Drafts of a model: a model that drafts for itself is always right, and no draft changes a token.

A model of the same weights computes and draws what the model will, to the last bit, so one wrong draft shows that its
keys and values, tokens or counts were not those of the request.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from native_or_not import has_native_kernels
from test_drafted_engine import generate
from test_engine_equivalence import MODEL, load_runner

from splittime.assemble import model_source, settings
from splittime.core.errors import ConfigError
from splittime.core.step import StepPlan, StepResult
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig, SpeculativeConfig, speculative_config
from splittime.runner.draft_sources import ModelDrafter, drafting_of, model_drafter
from splittime.runner.draft_steps import num_spare_blocks
from splittime.runner.drafting import Draft, DraftingRunner, Look
from splittime.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")
MOST = 5
FEW_BLOCKS = 30
DRAFT_MODEL = '{"method": "draft_model", "model": "code-draft", "num_speculative_tokens": 5}'


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return load_runner()


@pytest.fixture(scope="module")
def plain(runner: TorchRunner) -> dict[str, list]:
    return generate(runner, runner.resolved.num_blocks)[0]


class AllTaken(ModelDrafter):
    """Tells no chance, and takes all steps of the model to last as long, so that what is drafted and verified does not
    depend on the machine's pace."""

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        drafts = super().draft(plan, msgspec.structs.replace(result, device_ns=10**9, sample_ns=0), look) or {}
        return {name: Draft(draft.token_ids, ()) for name, draft in drafts.items()}


def drafting_by(runner: TorchRunner, kind: type[ModelDrafter] = AllTaken, **changes: Any) -> DraftingRunner:
    """A clock that stands still makes drafts cost nothing, so that they are worth it."""
    blocks = runner.resolved.num_blocks + num_spare_blocks(MOST, 16, runner.resolved.max_num_seqs)
    sizes = {"kv_cache_memory_bytes": blocks * runner.resolved.kv_bytes_per_block} if not changes else {}
    drafts = load_runner(**(sizes | changes))
    return DraftingRunner(runner, kind(drafts, MOST, drafts.resolved.num_blocks - blocks_of(drafts), 256, lambda: 0))


def blocks_of(drafts: TorchRunner) -> int:
    return num_spare_blocks(MOST, 16, drafts.resolved.max_num_seqs)


def assert_alike(found: dict[str, list], plain: dict[str, list]) -> None:
    """Tokens and ranks are the same. Log-probabilities may differ in the last bits where a request was preempted: its
    text is computed again as one piece, and not row by row."""
    for name, answer in plain.items():
        pairs = list(zip(found[name], answer, strict=True))
        told = [pair for pair in pairs if isinstance(pair[1], tuple)]
        assert [one for one, _ in pairs if not isinstance(one, tuple)] == [
            one for _, one in pairs if not isinstance(one, tuple)
        ]
        assert [(one[0], one[2]) for one, _ in told] == [(one[0], one[2]) for _, one in told]
        assert [one[1] for one, _ in told] == pytest.approx([one[1] for _, one in told], abs=0.002)


@pytest.mark.parametrize("num_blocks", [None, FEW_BLOCKS])
def test_a_model_that_drafts_for_itself_is_always_right(
    runner: TorchRunner, plain: dict[str, list], num_blocks: int | None
) -> None:
    """Also with so few blocks that requests are preempted, and the second time, when prompts are found in the cache."""
    drafting = drafting_by(runner)
    for _ in range(2):
        found, scheduler = generate(drafting, num_blocks or runner.resolved.num_blocks)
        assert_alike(found, plain)
        assert scheduler.counts.accepted_draft_tokens == scheduler.counts.draft_tokens > (20 if num_blocks else 100)
        assert bool(scheduler.counts.num_preemptions) is (num_blocks is not None)


@pytest.mark.parametrize("kind", [ModelDrafter, AllTaken])
def test_drafts_of_another_model_change_no_token(
    runner: TorchRunner, plain: dict[str, list], kind: type[ModelDrafter]
) -> None:
    folder = str(model_source.locate("code-draft"))
    found, scheduler = generate(drafting_by(runner, kind, model_path=folder), runner.resolved.num_blocks)
    assert found == plain
    if kind is AllTaken:
        assert scheduler.counts.draft_tokens > scheduler.counts.accepted_draft_tokens > 30


@pytest.fixture
def asked_runner(request: pytest.FixtureRequest) -> TorchRunner:
    folder = str(model_source.locate("code-draft"))
    path = {"draft_model_path": folder} if "draft_model" in request.param else {}
    return load_runner(speculative_config=request.param, max_num_seqs=8, **path)


@pytest.mark.parametrize("asked_runner", [DRAFT_MODEL, '{"method": "self"}'], indirect=True)
def test_what_is_asked_for_is_made_and_changes_no_token(asked_runner: TorchRunner, plain: dict[str, list]) -> None:
    told: list[str] = []
    found, _ = generate(
        drafting_of(asked_runner, lambda name, begin_ns, end_ns: told.append(name)), asked_runner.resolved.num_blocks
    )
    assert found == plain
    assert told == ["draft model"]
    drafter = model_drafter(asked_runner, speculative_config(asked_runner.config.speculative_config))
    assert drafter.costs.draft.is_known
    assert drafter.costs.text_ns > 1


def test_falling_asleep_forgets_what_the_draft_model_computed(runner: TorchRunner, plain: dict[str, list]) -> None:
    drafting = drafting_by(runner)
    generate(drafting, runner.resolved.num_blocks)
    drafting.forget()
    found, scheduler = generate(drafting, runner.resolved.num_blocks)
    assert found == plain
    assert scheduler.counts.accepted_draft_tokens == scheduler.counts.draft_tokens > 100


def test_the_caches_of_both_models_share_the_memory_that_is_asked_for() -> None:
    folder, asked = str(model_source.locate("code-draft")), 64 << 20
    alone = load_runner(kv_cache_memory_bytes=asked)
    both = load_runner(kv_cache_memory_bytes=asked, speculative_config=DRAFT_MODEL, draft_model_path=folder)
    drafts = load_runner(model_path=folder, kv_cache_memory_bytes=asked)
    each = alone.resolved.kv_bytes_per_block + drafts.resolved.kv_bytes_per_block
    assert alone.resolved.num_blocks == asked // alone.resolved.kv_bytes_per_block
    assert both.resolved.num_blocks == asked // each


def test_the_settings_find_the_draft_model() -> None:
    found = settings.from_arguments({"speculative_config": {"method": "draft_model", "model": "code-draft"}})
    told = settings.worker_settings(found, MODEL)
    assert f'"draft_model_path":"{model_source.locate("code-draft")}"'.encode() in told


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    import tiny_checkpoint

    tiny_checkpoint.write(tmp_path)
    config = RunnerConfig(model_path=str(MODEL), speculative_config=DRAFT_MODEL, draft_model_path=str(tmp_path))
    with pytest.raises(ConfigError, match="tokens, and the model has"):
        load_torch_runner(config)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_model_in_no_fewer_bits_is_refused(quantization: str) -> None:
    own = f'{{"method": "self", "quantization": "{quantization}"}}'
    config = RunnerConfig(model_path=str(MODEL), speculative_config=own, quantization=quantization)
    with pytest.raises(ConfigError, match=f"whose weights are {quantization} already"):
        load_torch_runner(config)


def test_a_draft_model_is_loaded_as_it_is_asked_for(tmp_path: Path) -> None:
    """Its own weights in the bits that are asked for and its own context; KV and threads as the model has them."""
    folder = shutil.copytree(model_source.locate("code-draft"), tmp_path / "draft")
    values = json.loads((folder / "config.json").read_text())
    changed = {"max_position_embeddings": 64, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(values | changed))
    asked = SpeculativeConfig(method="draft_model", model=str(folder), quantization="int8")
    given = {"speculative_config": msgspec.json.encode(asked).decode(), "draft_model_path": str(folder)}
    runner = load_runner(dtype="auto", kv_cache_memory_bytes=16 << 20, packed_cache="off", **given)
    drafts = model_drafter(runner, asked).runner
    assert (drafts.resolved.dtype, drafts.resolved.max_model_len) == ("float32", 64)
    assert "int8" in drafts.resolved.weights
    assert drafts.resolved.kv_cache_dtype == runner.resolved.kv_cache_dtype == "bfloat16"
    assert drafts.config.num_threads == runner.resolved.num_threads


def test_a_model_s_own_copy_is_of_the_same_weights_in_fewer_bits() -> None:
    """Random ones too, and where activations are asked for that rounded weights are not multiplied with."""
    sizes = {"kv_cache_memory_bytes": 16 << 20, "packed_cache": "off", "load_format": "dummy"}
    own = SpeculativeConfig(method="self")
    given = {"speculative_config": msgspec.json.encode(own).decode(), "activation_dtype": "float32"}
    drafts = model_drafter(load_runner(**sizes, **given), own).runner
    assert drafts.config.load_format == "dummy"
    assert "int4" in drafts.resolved.weights


def test_a_draft_model_that_computes_nothing_finite_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model_source.locate("code-draft"), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"makes no drafts: .* not finite"):
        drafting_of(load_runner(speculative_config=DRAFT_MODEL, draft_model_path=str(folder), max_num_seqs=8))
