"""What `speculative_config` takes, and what it says of what it does not."""

from pathlib import Path

import pytest
import tiny_checkpoint

from splittime.assemble import model_source, settings
from splittime.core.errors import ConfigError
from splittime.runner import draft_sources, machine, start_memory
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import (
    LEAST_STEP_MS,
    MOST_DRAFTS,
    NONE,
    RunnerConfig,
    SpeculativeConfig,
    speculative_config,
    without_place,
)
from splittime.runner.draft_sources import drafting_of
from splittime.runner.drafting import DraftingRunner
from splittime.runner.honoured import settle_speculation


def test_what_is_asked_for() -> None:
    assert speculative_config(NONE) is None
    assert speculative_config(RunnerConfig(model_path="x").speculative_config) == SpeculativeConfig(method="auto")
    assert speculative_config('{"method": "suffix"}') == SpeculativeConfig(method="suffix")
    found = speculative_config('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3}')
    assert found == SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suffix", "not understood"),
        ("{}", "missing required field `method`"),
        ('{"method": "eagle"}', "Invalid enum value 'eagle'"),
        ('{"method": "draft_model"}', "names no model"),
        ('{"method": "ngram", "model": "code-draft"}', "'ngram' has no use for model"),
        ('{"method": "self", "prompt_lookup_min": 4}', "'self' has no use for prompt_lookup_min"),
        ('{"method": "self", "quantization": "fp8"}', "Invalid enum value 'fp8'"),
        ('{"method": "ngram", "prompt_lookup_max": 4}', "unknown field `prompt_lookup_max`"),
        ('{"method": "suffix", "num_speculative_tokens": 0}', "num_speculative_tokens = 0"),
        (f'{{"method": "suffix", "num_speculative_tokens": {MOST_DRAFTS + 1}}}', "is not in 1 to 64"),
        ('{"method": "suffix", "num_speculative_tokens": "5"}', "not understood"),
        ('{"method": "ngram", "prompt_lookup_min": 1}', "prompt_lookup_min = 1"),
        ('{"method": "none", "num_speculative_tokens": 4}', "'none' has no use for num_speculative_tokens"),
    ],
)
def test_what_is_not_done_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(model_path="x", speculative_config=text).validate()
    assert words in caught.value.info.message
    assert caught.value.info.param == "speculative_config"


def test_a_draft_model_must_lie_somewhere() -> None:
    config = RunnerConfig(model_path="x", speculative_config='{"method": "draft_model", "model": "small"}')
    with pytest.raises(ConfigError, match="names 'small', and draft_model_path does not say where it lies"):
        config.validate()


@pytest.mark.parametrize(
    ("name", "changes"),
    [("async_scheduling", {"async_scheduling": True}), ("tensor_parallel_size", {"tensor_parallel_size": 2})],
)
def test_rows_with_drafts_are_of_one_process_and_one_step_at_a_time(name: str, changes: dict) -> None:
    with pytest.raises(ConfigError, match=f"does not go with {name}"):
        RunnerConfig(model_path="x", speculative_config='{"method": "suffix"}', **changes).validate()
    RunnerConfig(model_path="x", **changes).validate()


def test_kernels_that_could_change_an_answer_are_refused_before_a_weight_is_read() -> None:
    config = RunnerConfig(
        model_path=str(model_source.locate(None)), kernels="torch", speculative_config='{"method": "suffix"}'
    )
    told: list[str] = []
    with pytest.raises(ConfigError, match="needs the native kernels, and these are torch"):
        load_torch_runner(config, lambda name, begin, end: told.append(name))
    assert "weights" not in " ".join(told)


@pytest.mark.parametrize(
    ("kernels", "changes", "words"),
    [
        ("torch", {}, "torch kernels"),
        ("native", {"async_scheduling": True}, "async_scheduling"),
        ("native", {"tensor_parallel_size": 2}, "tensor_parallel_size = 2"),
    ],
)
def test_auto_guesses_nothing_where_it_cannot(kernels: str, changes: dict, words: str) -> None:
    config = RunnerConfig(model_path="x", **changes)
    config.validate()
    settled, reason = settle_speculation(config, kernels, has_states=False)
    assert speculative_config(settled.speculative_config) is None
    assert words in reason
    asked = RunnerConfig(model_path="x", speculative_config='{"method": "suffix"}')
    assert settle_speculation(asked, kernels, has_states=False)[0] is asked, (
        "what is asked for by name is refused elsewhere, not dropped"
    )


@pytest.mark.parametrize("step_ms", [LEAST_STEP_MS, LEAST_STEP_MS - 0.01])
def test_auto_goes_by_the_time_of_a_step(step_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(model_source.locate(None))
    runner = load_torch_runner(RunnerConfig(model_path=path, kernels="native", max_num_seqs=2, num_threads=1))
    monkeypatch.setattr(machine.Others, "busy_cores", lambda self: 0.0)
    measured_ms, told = start_memory.decode_step_ms(runner)
    assert measured_ms > 0
    assert "remembered" in told
    monkeypatch.setattr(start_memory, "decode_step_ms", lambda runner: (step_ms, "said so"))
    answering = drafting_of(runner)
    does_guess = step_ms >= LEAST_STEP_MS
    assert isinstance(answering, DraftingRunner) == does_guess
    told_config = runner.resolved.speculative_config
    assert told_config is None or speculative_config(told_config) == SpeculativeConfig(method="suffix")
    assert (told_config is not None) == does_guess
    assert f"takes {step_ms:.2f} ms" in runner.resolved.speculative_reason


def test_an_argument_may_be_a_table() -> None:
    found = settings.from_arguments({"speculative_config": {"method": "suffix"}})
    assert speculative_config(found["speculative_config"]) == SpeculativeConfig(method="suffix")


def test_where_a_model_lies_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    asked = f'{{"method": "mtp", "model": "{tmp_path}/head/", "num_speculative_tokens": 3}}'
    told = speculative_config(without_place(asked))
    assert told == SpeculativeConfig(method="mtp", model="head", num_speculative_tokens=3)
    for text in (None, NONE, '{"method": "suffix"}', '{"method": "draft_model", "model": "code-draft"}'):
        assert without_place(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram"}', (16, 64, 2, False)),
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4}', (5, 64, 4, False)),
        ('{"method": "suffix", "prompt_lookup_min": 3}', (16, 64, 3, True)),
    ],
)
def test_texts_are_looked_up_as_it_is_asked_for(
    text: str, expected: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(draft_sources, "SuffixDrafter", lambda *sizes: given.append(sizes))
    tiny_checkpoint.write(tmp_path)
    settings = {"kernels": "native", "max_model_len": 64, "num_threads": 1, "packed_cache": "off"}
    drafting_of(load_torch_runner(RunnerConfig(model_path=str(tmp_path), speculative_config=text, **settings)))
    assert given == [expected]
