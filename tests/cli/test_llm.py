"""`LLM` over a fake runner: same tokens as the runner defines, verified accounts, stops, streams, early leaving."""

import pytest

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.errors import RequestError
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import EngineParts
from splittime.engine.engine import Engine
from splittime.ledger.stages import Stage
from splittime.llm import LLM
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer


@pytest.fixture
def llm(model_folder):
    config = SchedulerConfig(max_model_len=128, num_blocks=64)
    parts = EngineParts(Engine(Scheduler(config)), FakeRunner(vocab_size=256, step_ns=200_000))
    return LLM.from_parts(parts, Tokenizer.load(model_folder))


def test_outputs_in_order_with_verified_accounts(llm):
    prompts = ["first", "second prompt", [5, 6, 7]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6))
    assert [o.prompt_token_ids for o in outputs][2] == (5, 6, 7)
    for output in outputs:
        assert list(output.token_ids) == expected_tokens(output.prompt_token_ids, 6, 256)
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length"
        output.account.verify()
        assert output.account.output_tokens == 6
        assert len(output.account.token_steps) == len(output.account.token_written_ns) == 6
        assert all(interval.stage is not Stage.UNATTRIBUTED for interval in output.account.intervals)
    assert llm.ledger.counts().accounts == 3
    assert len(llm.ledger.steps()) >= 6


def test_one_text_or_one_list_of_ids_is_one_prompt(llm):
    assert len(llm.generate("text", SamplingParams(max_tokens=1))) == 1
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=1))) == 1
    assert llm.generate([]) == []


def test_without_max_tokens_it_goes_to_the_end_of_the_context(llm):
    (output,) = llm.generate("x" * 100)
    assert len(output.token_ids) == 28
    assert output.finish_reason == "length"


def test_a_stop_string_ends_it_and_leaves_the_engine_empty(llm):
    (whole,) = llm.generate("stop here", SamplingParams(max_tokens=20))
    stop = next(c for c in whole.text[2:] if c not in whole.text[:2] and c != "\N{REPLACEMENT CHARACTER}")
    (cut,) = llm.generate("stop here", SamplingParams(max_tokens=20, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert llm.crank.stats().blocks_used == 0
    assert not llm.crank.has_work


def test_streaming_gives_the_same_text(llm):
    (whole,) = llm.generate("stream", SamplingParams(max_tokens=12))
    pieces = list(llm.stream("stream", SamplingParams(max_tokens=12)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].output is not None
    assert pieces[-1].output.token_ids == whole.token_ids
    assert sum(piece.output is not None for piece in pieces) == 1


def test_leaving_a_stream_early_frees_everything(llm):
    for _ in llm.stream(["a", "b"], SamplingParams(max_tokens=100)):
        break
    assert llm.crank.stats().blocks_used == 0
    assert len(llm.generate("again", SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_a_prompt_that_cannot_be_served_does_not_harm_the_others(llm):
    good, bad = llm.generate(["good", "x" * 500], SamplingParams(max_tokens=2))
    assert good.error is None
    assert bad.finish_reason == "error"
    assert bad.error is not None
    bad.account.verify()


def test_mistakes_are_refused_before_anything_is_submitted(llm):
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        llm.generate(["x", ""])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[1, 2], [3, 9_999]])
    with pytest.raises(RequestError, match="2 prompts and 1"):
        llm.generate(["x", "y"], [SamplingParams()])
    assert not llm.crank.has_work


@pytest.mark.parametrize(
    ("prompts", "sampling", "told"),
    [
        (None, None, "must be a text"),
        ([1.5], None, "must be a text"),
        ([["a"]], None, "must be a text"),
        (b"bytes", None, "bytes are no text"),
        ([b"bytes"], None, "bytes are no text"),
        ("\ud800", None, "not Unicode"),
        ("x", {"max_tokens": 3}, "must be SamplingParams"),
        ("x", SamplingParams(max_tokens="3"), "max_tokens"),
        ("x", SamplingParams(stop="a"), "stop"),
        ("x", SamplingParams(stop=(5,)), "stop"),
        ("x", SamplingParams(logit_bias={"1": 2.0}), "logit_bias"),
    ],
)
def test_wrong_types_are_refused_by_name(llm, prompts, sampling, told):
    with pytest.raises(RequestError, match=told):
        llm.generate(prompts, sampling)
    assert not llm.crank.has_work
    assert len(llm.generate("again", SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_arrays_of_integers_are_token_ids(llm):
    numpy = pytest.importorskip("numpy")
    one = SamplingParams(max_tokens=1)
    assert llm.generate(numpy.array([1, 2, 3]), one)[0].prompt_token_ids == (1, 2, 3)
    assert [o.prompt_token_ids for o in llm.generate([numpy.array([1, 2]), [3]], one)] == [(1, 2), (3,)]


def test_generating_inside_an_open_stream_is_refused_and_harms_neither(llm):
    (whole,) = llm.generate("outer", SamplingParams(max_tokens=12))
    pieces = llm.stream("outer", SamplingParams(max_tokens=12))
    text = next(pieces).text
    with pytest.raises(RequestError, match="not over"):
        llm.generate("inner")
    assert text + "".join(piece.text for piece in pieces) == whole.text
    assert len(llm.generate("again", SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_what_interrupts_the_submitting_leaves_nothing_behind(llm, monkeypatch):
    submit = llm.crank.submit
    monkeypatch.setattr(llm.crank, "submit", lambda request, now_ns: submit(request, now_ns) or _interrupt(request))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"])
    monkeypatch.undo()
    assert not llm.crank.has_work
    assert len(llm.generate("again", SamplingParams(max_tokens=3))[0].token_ids) == 3


def _interrupt(request):
    if request.request_id.endswith("1"):
        raise KeyboardInterrupt
