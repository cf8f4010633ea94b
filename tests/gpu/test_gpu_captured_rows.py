"""A captured step makes logits of all its rows; only those that sample get a token: after a preemption a row of one
token may be there to fill the cache alone, and so is each that `splittime quality` decodes."""

import pytest
import tiny_model

pytest.importorskip("triton")

from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=2)


def load(folder, kernels: str) -> TorchRunner:
    asked = {"model_path": str(folder), "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "packed_cache": "off"}
    return load_torch_runner(RunnerConfig(kernels=kernels, dtype="float32", **asked))


def follow(runner: TorchRunner) -> list:
    """`back` comes again with two tokens of its output known; `new` decodes beside it; then `back` alone."""
    admitted = (Admitted("back", (5, 6, 7, 8), 2, GREEDY, ()), Admitted("new", (9, 4), 0, GREEDY, ()))
    prompts = (Row("back", 0, (5, 6), (0,), 0), Row("new", 0, (9, 4), (1,), 1))
    (_, first) = runner.run(StepPlan(1, prompts, admitted)).rows
    filling = (Row("back", 2, (7,), (), 0), Row("new", 2, first.token_ids, (), 1))
    mixed = runner.run(StepPlan(2, filling))
    alone = runner.run(StepPlan(3, (Row("back", 3, (8,), (), 0),)))
    found = [(row.request_id, row.token_ids, row.error, [one.rank for one in row.logprobs]) for row in mixed.rows]
    return [*found, (alone.rows[0].token_ids, alone.rows[0].error), mixed.execution]


def test_rows_that_sample_and_rows_that_do_not(tmp_path):
    folder = tiny_model.write(tmp_path)
    runner = load(folder, "triton")
    runner.capture((1, 2))  # type: ignore[attr-defined]
    *got, execution = follow(runner)
    *want, _ = follow(load(folder, "reference"))
    assert execution == "captured"
    assert got == want
    assert [len(tokens) for _, tokens, _, _ in got[:2]] == [0, 1]
