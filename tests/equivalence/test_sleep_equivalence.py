"""The model in the package, slept and woken: tokens and logprobs are what they were, and its memory was given back."""

from pathlib import Path

import pytest

from splittime.core.engine import Moved
from splittime.core.errors import Overloaded, RequestError
from splittime.core.sampling import SamplingParams
from splittime.llm import LLM, Output

PROMPTS = ["def read_json(path):", "class Stack:", "import os", "for line in"]
ASKED = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=24, temperature=0.0, prompt_logprobs=1),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11),
    SamplingParams(max_tokens=24, temperature=1.0, repetition_penalty=1.2, seed=12),
]


def generate(llm: LLM) -> list[tuple]:
    outputs: list[Output] = llm.generate(PROMPTS, ASKED)
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.text) for one in outputs]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["as it is", "int8"])
@pytest.mark.sample(2)
def test_the_same_before_and_after(is_ahead: bool, settings: dict, tmp_path: Path) -> None:
    llm = LLM(max_model_len=128, async_scheduling=is_ahead, packed_cache=str(tmp_path), **settings)
    before = generate(llm)
    for level in (1, 2):
        slept = llm.sleep(level)
        assert llm.is_asleep
        assert slept.forgotten_tokens > 0
        if slept.memory_before_bytes:  # the system tells
            assert slept.kv_bytes > 0
            assert slept.memory_after_bytes < slept.memory_before_bytes
        with pytest.raises(Overloaded) as refused:
            llm.generate("x")
        assert "wake()" in (refused.value.info.hint or "")
        woken = llm.wake()
        assert woken.weights_bytes == slept.weights_bytes == (0 if level == 1 else llm.resolved["weights_bytes"])
        assert generate(llm) == before
    facts = llm.facts()
    assert facts is not None
    assert [(one.action, one.level) for one in facts.processes[0].sleeps] == [
        ("sleep", 1), ("wake", 1), ("sleep", 2), ("wake", 2)
    ]  # fmt: skip
    assert "sleep: kv" in [name for name, _, _ in llm.timeline]
    asleep_ns = [record.asleep_ns for record in llm.ledger.steps(100_000) if record.asleep_ns]
    assert len(asleep_ns) == 2


def test_an_llm_that_is_busy_does_not_sleep() -> None:
    llm = LLM(max_model_len=128)
    pieces = llm.stream("def f():", SamplingParams(max_tokens=40, ignore_eos=True))
    next(pieces)
    with pytest.raises(RequestError, match="not over"):
        llm.sleep()
    pieces.close()
    assert llm.sleep().changed
    assert not llm.sleep().changed
    assert llm.wake().changed


def test_one_call_at_a_time_and_a_timeline_with_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_model_len=128)
    sleeper, refused = llm.crank.residency.sleeper, []
    assert sleeper is not None
    sleep = sleeper.sleep

    def others_meanwhile(level: int) -> Moved:
        for call in (lambda: llm.generate("x"), llm.sleep, llm.wake):
            with pytest.raises(RequestError, match="not over"):
                call()
            refused.append(call)
        return sleep(level)

    monkeypatch.setattr(sleeper, "sleep", others_meanwhile)
    monkeypatch.setattr("splittime.llm.MAX_SLEEPS", 4)
    lengths = []
    for _ in range(4):
        llm.sleep()
        llm.wake()
        lengths.append(len(llm.timeline))
    assert len(refused) == 12
    assert lengths[0] < lengths[1] == lengths[2] == lengths[3]
    assert llm.timeline[0][0] == "import torch"
