"""A run that is killed and repeated ends in the weights of one that was not; numbers that are none end a run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from schools import STUDENT, TEACHER, make_model, write_config, write_texts

from splittime.core.errors import ConfigError, EngineError
from splittime.kernels.native import check
from splittime.kernels.native.library import isa_names
from splittime.lab.distill import run
from splittime.lab.distill.inputs import DistillRequest
from splittime.lab.distill.job import LAST_GOOD, DistillRun, DistillSettings, Task
from splittime.lab.distill.loss import Distillation
from splittime.lab.distill.run import Hooks, distill
from splittime.lab.distill.student import StudentPlan, read_weights
from splittime.lab.quantize.tensor_file import Work
from splittime.runner.machine import choose_kernels

HERE = Path(__file__).parent
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_distill_resume import ask, distill, hooks
def on_checkpoint(state):
    if state.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
distill(ask(Path(sys.argv[2]), "killed"), hooks(on_checkpoint))
"""
UPDATES = 7


def ask(folder, out, **changed):
    settings = DistillSettings(tokens=UPDATES * 128, step_tokens=128, workers=1, own_outputs=2, **changed)
    texts = [folder / "text.jsonl"]
    return DistillRequest(
        str(folder / "teacher"), str(folder / "config.json"), texts, (), folder / out, None, (), settings
    )


def hooks(on_checkpoint=lambda state: None, on_update=lambda state, update: None):
    return Hooks(lambda what, done, of: None, on_update, on_checkpoint, every=2)


def prepare(folder):
    make_model(folder / "teacher", TEACHER)
    write_config(folder / "config.json", STUDENT)
    write_texts(folder / "text.jsonl", 30)


@pytest.fixture
def other_isa(monkeypatch):
    """An instruction set that is not found the fastest here, as another process may find it."""
    if choose_kernels("auto")[0] != "native":
        return "none"
    monkeypatch.delenv(check.ASKED, raising=False)
    check.choose_isa.cache_clear()
    fastest = check.choose_isa()[0]
    monkeypatch.setenv(check.ASKED, fastest)  # so that what the run sets is taken back
    monkeypatch.delenv(check.ASKED)
    yield next((isa for isa in isa_names() if isa not in (fastest, check.EMULATED)), fastest)
    monkeypatch.undo()
    check.choose_isa.cache_clear()
    check.choose_isa()


@pytest.mark.timeout(600)  # a process of its own has to import torch
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, other_isa):
    """Though another instruction set is the fastest when it goes on, whose sums end in other bits."""
    prepare(tmp_path)
    command = [sys.executable, "-c", KILLED, str(HERE), str(tmp_path)]
    environment = os.environ | {check.ASKED: other_isa}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (tmp_path / "killed").exists()
    with pytest.raises(ConfigError, match=r"begun with another alpha: 0\.9, now 0\.5"):
        distill(ask(tmp_path, "killed", alpha=0.5), hooks())
    steps = []
    again = distill(ask(tmp_path, "killed"), hooks(on_update=lambda state, update: steps.append(state.step)))
    assert steps == [5, 6, 7]
    assert other_isa in ("none", check.choose_isa()[0])
    whole = distill(ask(tmp_path, "whole"), hooks())
    assert (again.updates, again.seen_tokens) == (whole.updates, whole.seen_tokens) == (UPDATES, UPDATES * 128)
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("killed", "whole")]
    assert files[0] == files[1]
    assert again.scores == whole.scores
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("begun_with", "kernels", "here"),
    [("avx9", "native", "portable, avx2"), ("torch", "native", "portable, avx2"), ("avx2", "torch", "torch")],
)
def test_a_run_whose_kernels_are_not_here_is_refused_by_their_name(tmp_path, monkeypatch, begun_with, kernels, here):
    monkeypatch.setenv(check.ASKED, "untouched")
    monkeypatch.setattr(run, "choose_kernels", lambda asked: (kernels, "as told"))
    monkeypatch.setattr(run, "choose_isa", lambda: ("avx2", "as told"))
    monkeypatch.setattr(run, "isa_names", lambda: ["portable", "avx2"])
    work = Work(tmp_path / "out")
    work.adopt({"alpha": 1}, begun_with)
    with pytest.raises(ConfigError, match=f"was begun with {begun_with}; what runs here: {here}$") as error:
        run._compute_as_begun(work, {"alpha": 1})
    assert f"name another --out, or remove {work.folder}" in error.value.info.hint
    work.close()
    assert os.environ[check.ASKED] == "untouched"


class Breaking:
    """A teacher that says nothing sensible from its third batch on."""

    def __init__(self):
        self.asked = 0

    def hidden(self, tokens):
        self.asked += 1
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        value = float("nan") if self.asked > 2 else 0.0
        return torch.full((len(hidden), STUDENT.vocab_size), value)


def broken_run(folder, goal=None):
    tokens = np.random.default_rng(0).integers(0, 4096, 1000).astype(np.uint32)
    plan = StudentPlan(STUDENT, STUDENT.config())
    settings = DistillSettings(tokens=1000, step_tokens=64, workers=1)
    folder.mkdir(exist_ok=True)
    return DistillRun(Task(settings, plan, tokens, folder, folder, Breaking(), None, 64, goal=goal))


def test_the_last_good_weights_outlive_a_loss_that_is_not_finite(tmp_path):
    run, kept = broken_run(tmp_path), {}
    with pytest.raises(EngineError, match=f"loss of update 3 is not finite; .* update 2 are in .*{LAST_GOOD}") as error:
        run.train(lambda state, update: kept.update(run.model.state_dict() if state.step == 2 else {}), every=1)
    run.close()
    assert "--start-from" in error.value.info.hint
    found = read_weights(tmp_path / LAST_GOOD, STUDENT)
    assert found.keys() == kept.keys()
    assert all(bool(weight.isfinite().all()) for weight in found.values())


def test_a_head_is_not_said_to_go_on_from_other_weights(tmp_path):
    """Since `--start-from` does not go with one."""
    run = broken_run(tmp_path, goal=Distillation(Breaking(), 0.9, 1.0))
    with pytest.raises(EngineError, match="update 2 are in") as error:
        run.train(lambda state, update: None, every=1)
    run.close()
    assert "--start-from" not in error.value.info.hint
    assert "begin anew, another --out" in error.value.info.hint


def test_without_a_checkpoint_there_is_none_to_name(tmp_path):
    run = broken_run(tmp_path)
    with pytest.raises(EngineError, match="no checkpoint yet"):
        run.train(lambda state, update: None, every=100)
    run.close()
    assert not (tmp_path / LAST_GOOD).exists()


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "last.pt").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"last\.pt is damaged"):
        broken_run(tmp_path)
