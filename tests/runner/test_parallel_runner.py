"""Ranks as processes: the same answers as one, and an end of all of them when one dies, hangs, or loses its parent.

Every test that starts ranks pays for an import of torch in each, so there are few, and each looks at several things.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import tiny_checkpoint
from safetensors.torch import save_file

from splittime.core.errors import ConfigError, EngineError
from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, Admitted, Row, StepPlan
from splittime.runner.compose import load_torch_runner, sleeper_of
from splittime.runner.config import RunnerConfig
from splittime.runner.start_memory import prefill_tokens_within
from splittime.runner.torch_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)
PATIENCE_S = 60


def load(folder, **settings) -> TorchRunner:
    config = RunnerConfig(model_path=str(folder), **{"max_num_seqs": 4, "packed_cache": "off", **settings})
    return load_torch_runner(config)


def is_there(pid):
    """And not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_gone(pids):
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_there(pid)]}"
        time.sleep(0.02)


def plans():
    """Prompts and decodes in one batch, drawn tokens, scores, a row that is refused; then an end."""
    drawn = SamplingParams(temperature=0.9, top_p=0.8, seed=7, logprobs=2, prompt_logprobs=1, logit_bias={5: 0.5})
    admitted = Admitted("a", (3, 4, 5, 6, 7), 0, GREEDY, ()), Admitted("b", tuple(range(20)), 0, drawn, (2,))
    yield StepPlan(0, (Row("a", 0, (3, 4, 5, 6, 7), (1,), 1), Row("b", 0, tuple(range(9)), (2, 4), 0)), admitted)
    yield StepPlan(1, (Row("a", 5, (8,), (), 1), Row("b", 9, tuple(range(9, 20)), (), 1)))
    strange = Admitted("c", (1, 99), 0, GREEDY, ())
    unknown = Row("a", 6, (PENDING,), (), 1)
    yield StepPlan(2, (unknown, Row("b", 20, (9,), (), 1), Row("c", 0, (1, 99), (3,), 1)), (strange,))
    yield StepPlan(3, (), released=("a", "b", "c"))


def answers(runner):
    results = [runner.run(plan) for plan in plans()]
    has_ranks = runner.resolved.tensor_parallel_size > 1
    for one in results:
        assert one.collective_ns <= one.device_ns + one.sample_ns
        assert (one.collective_ns > 0) == (has_ranks and one.device_ns > 0)
    return [result.rows for result in results]


def test_ranks_answer_like_one_and_end_when_one_is_killed(folder):
    one = load(folder, num_threads=1)
    layers, phases = [], []
    config = RunnerConfig(model_path=str(folder), max_num_seqs=4, num_threads=3, tensor_parallel_size=2)
    runner = load_torch_runner(
        config, lambda *phase: phases.append(phase[0]), lambda *progress: layers.append(progress)
    )
    runner.warm_up()
    resolved = runner.resolved
    assert resolved.tensor_parallel_size == 2
    assert resolved.num_threads == 1
    assert resolved.num_threads_reason == "3 as asked, among 2 ranks"
    assert resolved.num_blocks == one.resolved.num_blocks
    assert resolved.num_parameters == one.resolved.num_parameters
    assert sum(resolved.rank_weights_bytes) >= one.resolved.weights_bytes
    assert [done for done, _, _ in layers] == [1, 2]
    assert phases == ["start ranks", "read config", "load weights", "wait for ranks", "allocate kv cache"]
    assert sleeper_of(runner) is None, "ranks do not sleep"
    assert resolved.rank_pids[0] == os.getpid()
    assert all(map(is_there, resolved.rank_pids))
    assert prefill_tokens_within(runner, 0.1) >= 1

    sent = []
    members = runner.lead.members
    send = members.send
    members.send = lambda content: (sent.append(content), send(content))
    for got, want in zip(answers(runner), answers(one), strict=True):
        assert [row.token_ids for row in got] == [row.token_ids for row in want]
        assert [row.error for row in got] == [row.error for row in want]
        for mine, its in zip(got, want, strict=True):
            scores = [one.logprob for one in (*mine.logprobs, *mine.prompt_logprobs)]
            assert scores == pytest.approx([one.logprob for one in (*its.logprobs, *its.prompt_logprobs)], abs=1e-4)

    rows = [row for content in sent for row in msgspec.msgpack.decode(content, type=StepPlan).rows]
    assert len(rows) == 7
    assert all(row.token_ids != (PENDING,) for row in rows)  # the first rank's choice is told

    runner.on_hidden = print
    with pytest.raises(EngineError, match="models of one rank alone"):
        answers(runner)
    runner.on_hidden = None
    told = []
    runner.watch(told.append)
    other = resolved.rank_pids[1]
    os.kill(other, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"rank 1 \(process {other}\) was killed by SIGKILL"):
        answers(runner)
    assert not is_there(other)
    with pytest.raises(EngineError, match="rank 1"):  # and so for ever
        runner.run(StepPlan(9, ()))
    assert all("rank 1" in str(error) for error in told)


def test_a_rank_that_hangs_ends_them_all(folder):
    runner = load(folder, tensor_parallel_size=2)
    runner.warm_up()
    other = runner.resolved.rank_pids[1]
    os.kill(other, signal.SIGSTOP)
    runner.lead.group.set_timeout(0.5)
    with pytest.raises(EngineError, match=rf"rank 1 \(process {other}\) is stopped"):
        runner.warm_up()
    assert not is_there(other)


LEADER = """
import sys, time
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
runner = load_torch_runner(RunnerConfig(model_path=sys.argv[1], max_num_seqs=1, tensor_parallel_size=2))
print(runner.resolved.rank_pids[1], flush=True)
time.sleep(600)
"""


def test_no_rank_outlives_the_first_not_even_a_stopped_one(folder):
    command = [sys.executable, "-c", LEADER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        try:
            other = int(leader.stdout.readline())
            os.kill(other, signal.SIGSTOP)
        finally:
            leader.kill()
    await_gone([other])


def test_what_one_rank_cannot_read_is_told(folder, tmp_path):
    """Both read the same files, so the first rank finds it too; whoever is first says it."""
    tensors = tiny_checkpoint.write(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj.weight of shape .* is missing"):
        load(tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, but the model's num_attention_heads 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0 must be 1 to"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, "num_threads is 1, fewer than one for each of"),
        ({"tensor_parallel_size": 2, "collective_timeout_s": 0}, "collective_timeout_s = 0 must be at least"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(folder, settings, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=message):
        load(folder, **settings)
