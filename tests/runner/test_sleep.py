"""A runner asleep and awake: the same results bit for bit, memory that is really given back, failures that are undone.

Without a card, level 1 is tested on Triton's interpreter with `parks` set: what a card does, on tensors of the CPU.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_checkpoint
import torch
from torch import Tensor

from splittime.core.clock import SystemClock
from splittime.core.engine import SleepAsk
from splittime.core.errors import ConfigError, EngineError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.kernels.choose import make_backend
from splittime.runner import sleep
from splittime.runner.compose import load_torch_runner, sleeper_of
from splittime.runner.config import RunnerConfig
from splittime.runner.sleep import Emptied, Parked, TorchSleeper, device_tensors
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
PROMPT = tuple(3 + 5 * place % 50 for place in range(11))
ASKED = {
    "greedy": SamplingParams(temperature=0.0, seed=0, logprobs=2),
    "seeded": SamplingParams(temperature=1.2, top_p=0.9, seed=5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint.write(made)
    return made


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer, for the interpreter."""
    made = tmp_path_factory.mktemp("thin")
    tiny_checkpoint.write(made, num_hidden_layers=1)
    return made


def load(folder: Path, kernels: str = "native", **settings: Any) -> tuple[TorchRunner, TorchSleeper]:
    given = {"max_model_len": 64, "block_size": 8, "max_num_seqs": 2, "num_threads": 1, "packed_cache": "off"}
    config = RunnerConfig(model_path=str(folder), kernels=kernels, **(given | settings))
    runner = load_torch_runner(config)
    sleeper = sleeper_of(runner)
    assert sleeper is not None
    return runner, sleeper


def generate(runner: TorchRunner, steps: int = 4) -> list[Any]:
    """Of a greedy request with logprobs and of a seeded one, side by side."""
    return _generate(runner, PROMPT, ("greedy", "seeded"), steps)


def generate_little(runner: TorchRunner) -> list[Any]:
    """For the interpreter, which is slow: a short prompt and a step, greedy."""
    return _generate(runner, PROMPT[:4], ("greedy",), 1)


def _generate(runner: TorchRunner, prompt: tuple[int, ...], names: tuple[str, ...], steps: int) -> list[Any]:
    admitted = tuple(Admitted(name, prompt, 0, ASKED[name], ()) for name in names)
    tables = ((0, 1), (2, 3))
    rows = tuple(Row(name, 0, prompt, table, 1) for name, table in zip(names, tables, strict=False))
    results = [runner.run(StepPlan(1, rows, admitted))]
    for step in range(steps):
        last = [row.token_ids for row in results[-1].rows]
        rows = tuple(Row(name, len(prompt) + step, ids, (), 1) for name, ids in zip(names, last, strict=True))
        results.append(runner.run(StepPlan(step + 2, rows)))
    runner.run(StepPlan(99, (), released=names))
    return [result.rows for result in results]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("kernels", "settings"),
    [
        ("native", {}),
        ("native", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("torch", {"dtype": "float32"}),
        ("reference", {"dtype": "float32", "quantization": "int4"}),
    ],
)
@pytest.mark.sample(2)
def test_the_same_results_on_a_cpu(folder: Path, kernels: str, settings: dict, level: int) -> None:
    runner, sleeper = load(folder, kernels, **settings)
    before = generate(runner)
    for _ in range(2):
        assert sleeper.sleep(level).weights_bytes == (0 if level == 1 else runner.resolved.weights_bytes)
        assert all(not layer.data.any() for layer in runner.store.layers)
        woken = sleeper.wake()
        assert [name for name, _, _ in woken.parts] == ["measure", "weights", "kv", "graphs", "measure"]
        assert generate(runner) == before


@pytest.mark.parametrize(
    ("settings", "level"), [({}, 1), ({}, 2), ({"quantization": "int8"}, 1)], ids=["plain 1", "plain 2", "int8 1"]
)
@pytest.mark.timeout(600)  # the interpreter is slow
@pytest.mark.sample(2)
def test_the_same_results_where_weights_are_parked_and_steps_captured(
    thin: Path, settings: dict, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sleep, "PIECE_BYTES", 5_000)  # weights lie across pieces
    runner, sleeper = load(thin, "triton", **settings)
    runner.capture((1,))
    sleeper.parks = True
    before = generate_little(runner)
    slept = sleeper.sleep(level)
    assert runner.execution.graphs is None  # type: ignore[attr-defined]
    if level == 1:
        left = [one for one in device_tensors(runner.decoder, CPU) if one.untyped_storage().nbytes()]
        assert all(not one.untyped_storage().resizable() for one in left)
        assert slept.weights_bytes > runner.resolved.weights_bytes  # the norms and turns too
        names = [name for name, _, _ in slept.parts if name != "measure"]
        assert names == ["pin", "copy", "graphs", "weights", "kv", "give_back"]
    sleeper.wake()
    assert runner.resolved.graph_sizes == (1,)
    assert runner.execution.graphs is not None  # type: ignore[attr-defined]
    assert generate_little(runner) == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.timeout(600)
@pytest.mark.sample(1)
def test_through_the_whole_engine_planned_ahead(thin: Path, level: int) -> None:
    pytest.importorskip("triton")
    runner, sleeper = load(thin, "triton")
    runner.capture((2,))
    sleeper.parks = True
    limits = {"block_size": 8, "max_model_len": 64, "num_blocks": runner.resolved.num_blocks}
    engine = Engine(Scheduler(SchedulerConfig(**limits)), plans_ahead=True)
    crank = Crank(EngineParts(engine, runner, sleeper=sleeper), SystemClock())
    before = serve(crank)
    said: list[Any] = []
    crank.sleep(SleepAsk(level), 0, said.append)
    while crank.has_work:
        crank.turn()
    (report,) = said
    assert (report.level, report.forgotten_tokens) == (level, 8)  # the one full block of both
    assert crank.wake().slept_ns > 0
    assert serve(crank) == before


def serve(crank: Crank) -> dict[str, list[Any]]:
    """Both requests' tokens and logprobs."""
    got: dict[str, list[Any]] = {name: [] for name in ASKED}
    for name, asked in ASKED.items():
        sampling = msgspec.structs.replace(asked, max_tokens=2, ignore_eos=True)
        crank.submit(Request(request_id=name, prompt_token_ids=PROMPT[:9], sampling=sampling, submitted_ns=0), 1)
    while crank.has_work:
        output = crank.turn()
        assert output is not None
        for news in output.outputs:
            got[news.request_id] += [news.token_ids, news.logprobs]
    return got


class Read:
    """In the place of experts, which the device counts."""

    def bytes_read(self) -> dict[str, int]:
        return {"weights.int8": 5}


def test_what_forgotten_experts_read_stays_counted() -> None:
    pytest.importorskip("triton")
    ops: Any = make_backend("triton", torch.float32)
    before = ops.bytes_read().get("weights.int8", 0)
    for _ in range(2):
        ops._experts.append(Read())
        ops.forget_experts()
        assert ops._experts == []
    assert ops.bytes_read()["weights.int8"] == before + 10


class Shared:
    """What the walk must find, each once: a field, a view of it, a list, a slot, a cycle."""

    __module__ = "splittime.pretended"
    __slots__ = ("__dict__", "hidden")

    def __init__(self) -> None:
        self.whole = torch.arange(20.0)
        self.view = self.whole[5:10]
        self.tied = self.whole
        self.listed = [{"deep": (torch.ones(3, dtype=torch.int8), self.view)}]
        self.hidden = torch.full((2, 2), 7.0)
        self.again = self


def test_what_shares_memory_goes_on_sharing_it() -> None:
    shared = Shared()
    found = device_tensors(shared, CPU)
    assert len(found) == 4
    kept = Parked(found, CPU, 1 << 20)
    assert kept.num_bytes == 80 + 3 + 16
    kept.fill_host()
    kept.free_device()
    assert shared.whole.untyped_storage().nbytes() == 0
    kept.fill_device()
    assert shared.whole.tolist() == list(range(20))
    assert shared.view.tolist() == [5, 6, 7, 8, 9]
    shared.whole[6] = -1
    assert shared.view[1] == -1
    assert shared.tied is shared.whole
    assert shared.listed[0]["deep"][0].tolist() == [1, 1, 1]
    assert shared.hidden.tolist() == [[7, 7], [7, 7]]


def test_a_tied_head_is_one_weight_before_and_after(tmp_path: Path) -> None:
    """On a card the embedding is one tensor, and so is what its head shares with it."""
    pytest.importorskip("triton")
    tiny_checkpoint.write(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    runner, sleeper = load(tmp_path, "triton")
    sleeper.parks = True
    pointers = [one.data_ptr() for one in device_tensors(runner.decoder, CPU)]
    groups = [pointers.index(pointer) for pointer in pointers]
    before = generate_little(runner)
    sleeper.sleep(1)
    sleeper.wake()
    pointers = [one.data_ptr() for one in device_tensors(runner.decoder, CPU)]
    assert [pointers.index(pointer) for pointer in pointers] == groups
    assert generate_little(runner) == before


def test_weights_that_do_not_fit_the_host_leave_it_awake(thin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    runner, sleeper = load(thin, "triton")
    sleeper.parks = True
    before = generate_little(runner)
    monkeypatch.setattr(sleep.this_process, "free_memory_bytes", lambda: 1000)
    with pytest.raises(EngineError, match="stays awake") as caught:
        sleeper.sleep(1)
    assert (caught.value.info.limit, caught.value.info.hint) == (1000, "level=2 drops them")
    assert generate_little(runner) == before


def test_too_little_memory_at_waking_says_how_much_and_leaves_it_asleep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, sleeper = load(folder)
    before = generate(runner)
    sleeper.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(sleep.this_process, "free_memory_bytes", lambda: 1000)
        with pytest.raises(EngineError, match="too few") as caught:
            sleeper.wake()
    needed = runner.resolved.weights_bytes
    assert (caught.value.info.value, caught.value.info.limit) == (needed, 1000)
    assert f"{needed - 1000} too few" in str(caught.value)
    sleeper.wake()
    assert generate(runner) == before


def test_a_folder_that_is_gone_or_changed_leaves_it_asleep(folder: Path, tmp_path: Path) -> None:
    here, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(folder, here)
    runner, sleeper = load(here)
    before = generate(runner)
    sleeper.sleep(2)
    here.rename(away)
    with pytest.raises(ConfigError, match=str(here)):
        sleeper.wake()
    tiny_checkpoint.write(_made(here), num_hidden_layers=1)
    with pytest.raises(ConfigError, match="another model"):
        sleeper.wake()
    shutil.rmtree(here)
    away.rename(here)
    (here / "model.safetensors").write_bytes(b"broken")
    with pytest.raises((ConfigError, EngineError)):
        sleeper.wake()
    assert runner.decoder.layers == ()
    tiny_checkpoint.write(here)
    sleeper.wake()
    assert generate(runner) == before


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_waking_that_fails_half_way_is_undone(thin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    runner, sleeper = load(thin, "triton")
    runner.capture((1,))
    sleeper.parks = True
    before = generate_little(runner)
    sleeper.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "capture", lambda sizes: torch.empty(1 << 60))
        with pytest.raises(EngineError, match="RuntimeError"):
            sleeper.wake()
    assert runner.execution.graphs is None  # type: ignore[attr-defined]
    assert all(
        not one.untyped_storage().nbytes() or not one.untyped_storage().resizable()
        for one in device_tensors(runner.decoder, CPU)
    )
    sleeper.wake()
    assert generate_little(runner) == before


@pytest.mark.skipif(not sleep.MEMORY_MAP.exists(), reason="the system does not tell")
def test_pages_are_given_back_to_the_system_and_read_as_zeros() -> None:
    big = torch.from_numpy(np.zeros(64 << 20, dtype=np.uint8))[3:-5]
    around = big[10 : (32 << 20)]
    big.fill_(1)
    before = sleep.resident_bytes()
    Emptied([around]).free()
    assert before - sleep.resident_bytes() > 24 << 20
    assert not around.any()
    assert big[:10].all()
    assert big[32 << 20 :].all()
    around.fill_(2)
    assert around.sum(dtype=torch.int64) == 2 * len(around)


def test_pieces_of_pages_are_zeroed() -> None:
    small: Tensor = torch.ones(50)
    Emptied([small[10:30]]).free()
    assert small.sum() == 30


def test_what_is_kept_of_past_answers_is_forgotten(tmp_path: Path) -> None:
    tiny_checkpoint.write(tmp_path)
    runner, _ = load(tmp_path)
    told: list[str] = []
    sleeper = TorchSleeper(runner, lambda: told.append("forgotten"))
    slept = sleeper.sleep(1)
    assert told == ["forgotten"]
    assert "texts" in [name for name, _, _ in slept.parts]
