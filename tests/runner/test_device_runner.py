"""The runner of a card, in the interpreter: the tokens of the plain runner, whether steps are planned ahead or not."""

from types import SimpleNamespace

import pytest
import tiny_checkpoint
import torch

pytest.importorskip("triton")

from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError, EngineError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, Admitted, Row, StepPlan
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.kernels.api import WeightScheme
from splittime.kernels.choose import make_backend
from splittime.ledger.steps import verify_steps
from splittime.runner import ceilings
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.device.execution import DecodeGraphs
from splittime.runner.load import largest_step_bytes
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.timeout(600)  # the interpreter is slow
LIMITS = {"max_model_len": 64, "block_size": 8}
ASKED = (
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, seed=0),
    SamplingParams(temperature=1.5, max_tokens=6, seed=1),
    SamplingParams(temperature=0.9, top_p=0.7, top_k=20, max_tokens=4, ignore_eos=True, seed=2),
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=3, logprobs=3),
    SamplingParams(temperature=0.8, max_tokens=5, ignore_eos=True, seed=4, repetition_penalty=1.5, min_tokens=3),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=5, frequency_penalty=1.9, prompt_logprobs=2),
)


def load(folder, kernels: str, **settings) -> TorchRunner:
    given = {"model_path": str(folder), "kernels": kernels, "max_num_seqs": 4, "num_threads": 1, **LIMITS, **settings}
    return load_torch_runner(RunnerConfig(**given))


def generate(runner: TorchRunner, is_ahead: bool, records: list | None = None):
    """Six requests of four kinds of sampling, four at a time, in blocks that do not suffice for all."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=runner.resolved.num_blocks, **LIMITS)
    scheduler = Scheduler(config)
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=is_ahead), runner), SystemClock())  # type: ignore[arg-type]
    for number, sampling in enumerate(ASKED):
        prompt = tuple((7 * number + 3 * place) % 61 for place in range(6 + 3 * number))
        request = Request(
            request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, eos_token_ids=(2,), submitted_ns=0
        )
        crank.submit(request, 1)
    outputs = {f"r{number}": ([], [], []) for number in range(len(ASKED))}
    records = [] if records is None else records
    while crank.has_work:
        output = crank.turn()
        scheduler.check()
        assert output is not None
        records += [output.record] if output.record is not None else []
        for news in output.outputs:
            assert news.error is None, news.error
            tokens, chosen, prompts = outputs[news.request_id]
            tokens += news.token_ids
            chosen += news.logprobs
            prompts += news.prompt_logprobs
    verify_steps(records)
    return outputs


@pytest.fixture(scope="module")
def want(folder):
    return generate(load(folder, "reference"), is_ahead=False)


@pytest.fixture(scope="module")
def device_runner(folder):
    return load(folder, "triton")


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one after the other", "ahead"])
@pytest.mark.sample(1)
def test_the_same_tokens_and_logprobs(device_runner, want, is_ahead):
    compare(generate(device_runner, is_ahead), want)


def test_captured_steps_give_the_same_tokens(folder, want):
    """Four rows in a capture of five, and two in one of three; and the records say so."""
    runner = load(folder, "triton")
    runner.capture((3, 5))
    assert runner.resolved.graph_sizes == (3, 5)
    before, records = runner.decoder.ops.bytes_read(), []
    compare(generate(runner, is_ahead=True, records=records), want)
    for record in records:
        is_decode = record.decode_tokens == len(record.rows)
        assert record.execution == ("captured" if is_decode else "eager")
        size = 3 if len(record.rows) <= 3 else 5
        assert record.padded_rows == (size - len(record.rows) if is_decode else 0)
        assert record.enqueue_ns > 0
    assert any(record.padded_rows for record in records)
    after = runner.decoder.ops.bytes_read()
    assert after["kv.float32"] > before.get("kv.float32", 0)


def compare(got, want):
    assert {name: tokens for name, (tokens, _, _) in got.items()} == {name: one[0] for name, one in want.items()}
    for name, kinds in want.items():
        for some, others in zip(kinds[1:], got[name][1:], strict=True):
            assert [one.token_id for one in some] == [one.token_id for one in others]
            assert [one.rank for one in some] == [one.rank for one in others]
            assert [one.logprob for one in some] == pytest.approx([one.logprob for one in others], abs=1e-4)
            assert [len(one.top) for one in some] == [len(one.top) for one in others]


def test_captured_sizes_that_save_nothing_are_dropped(folder, monkeypatch):
    runner = load(folder, "triton")
    times_ns = {1: 50.0, 2: 100.0, 3: 100.0}
    monkeypatch.setattr(DecodeGraphs, "_replay_ns", lambda graphs, captured: times_ns[captured.buffers.rows])
    runner.capture((1, 2, 3), keep_all=False)
    assert runner.resolved.graph_sizes == (1, 3)
    monkeypatch.undo()
    runner.capture((1, 3), keep_all=False)
    assert runner.resolved.graph_sizes in ((1, 3), (3,)), "timed on what is here"


def test_a_row_that_is_not_finite_ends_alone_and_so_does_what_was_planned_upon_it(tmp_path):
    tensors = tiny_checkpoint.write(tmp_path)
    tensors["model.embed_tokens.weight"][60] = torch.nan
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    runner = load(tmp_path, "triton")
    greedy = ASKED[0]
    admitted = (Admitted("good", (5, 6), 0, greedy, ()), Admitted("bad", (5, 60), 0, greedy, ()))
    first = (Row("good", 0, (5, 6), (0,), 1), Row("bad", 0, (5, 60), (1,), 1))
    following = (Row("good", 2, (PENDING,), (), 1), Row("bad", 2, (PENDING,), (), 1))
    runner.launch(StepPlan(1, first, admitted))
    runner.launch(StepPlan(2, following))
    good, bad = runner.collect().rows
    assert good.token_ids
    assert "finite" in (bad.error or "")
    good, _ = runner.collect().rows
    assert good.error is None
    assert all(torch.isfinite(layer.data).all() for layer in runner.store.layers)


def test_rows_with_drafts_are_refused(device_runner):
    assert not device_runner.verifies_drafts
    plan = StepPlan(1, (Row("a", 0, (3, 4), (0,), 2, (5,)),), (Admitted("a", (3, 4), 0, ASKED[0], ()),))
    with pytest.raises(EngineError, match="this runner does not verify drafts"):
        device_runner.run(plan)
    device_runner.run(StepPlan(2, (), released=("a",)))


def test_a_token_that_no_step_samples_is_an_error_of_the_row(device_runner):
    admitted = (Admitted("lost", (5, 6), 0, ASKED[0], ()),)
    row = Row("lost", 2, (PENDING,), (0,), 1)
    result = device_runner.run(StepPlan(1, (row,), admitted))
    assert "no token" in (result.rows[0].error or "")
    device_runner.run(StepPlan(2, (), released=("lost",)))


def test_a_launch_that_failed_leaves_nothing_to_collect(device_runner, monkeypatch):
    admitted = Admitted("a", (3, 4), 0, SamplingParams(temperature=0.0, max_tokens=4, seed=0), ())
    plan = StepPlan(1, (Row("a", 0, (3, 4), (0,), 1),), (admitted,))
    with monkeypatch.context() as patch:
        patch.setattr(device_runner.execution, "forward", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            device_runner.run(plan)
    again = device_runner.run(StepPlan(2, plan.rows, (admitted,), ("a",)))
    assert (again.step_id, len(again.rows[0].token_ids)) == (2, 1)
    device_runner.run(StepPlan(3, (), released=("a",)))


def test_the_largest_step_is_run_to_see_what_it_takes(device_runner):
    """Without a card nothing is counted, but the step is computed: three prompts of 24 tokens at the most."""
    config = RunnerConfig(model_path="", block_size=8, max_num_seqs=2, max_num_batched_tokens=50)
    num_bytes = largest_step_bytes(device_runner.decoder, config, torch.float32, max_model_len=24)
    assert (num_bytes > 0) == torch.cuda.is_available()


def test_a_card_is_needed_where_nothing_is_interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="CUDA device"):
        make_backend("triton", torch.float32)


def test_what_a_card_can_do_is_measured_on_it(device_runner, monkeypatch):
    card = SimpleNamespace(name="a card", multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name, size in {"COPY_BYTES": 1 << 20, "CARD_TOKENS": 16, "CARD_WIDTH": 64}.items():
        monkeypatch.setattr(ceilings, name, size)
    gauge = ceilings.CardGauge(device_runner.decoder.ops, WeightScheme("float32"), 1, None)
    *pieces, found = gauge.measure()
    assert pieces == [None] * len(pieces)
    assert (found.cpu, found.cores) == ("a card", 132)
    assert found.read_bytes_per_s > 0
    assert found.operations_per_s > 0
