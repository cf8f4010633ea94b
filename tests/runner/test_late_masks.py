"""An engine that waits for no mask: answers are those of one that waits for all, and nobody is held up by another's."""

import time
from itertools import count
from queue import SimpleQueue

import pytest

from splittime import LLM, SamplingParams
from splittime.core.request import Request
from splittime.drive.crank import Crank
from splittime.ledger.stages import Cause, Stage
from splittime.runner import grammars as compiled
from splittime.runner.batch import Slots
from splittime.text import grammars

pytestmark = pytest.mark.timeout(120)
FAR = grammars.of_regex("(ab|[c-z ]){4,9000}", "regex")  # large, and walks in a process of its own
NEAR = grammars.of_json_schema({"type": "array", "items": {"enum": ["red", "green", 3]}, "maxItems": 9}, "schema")
FORMS = (FAR, "", NEAR, FAR)


def requests(llm: LLM, **more: object) -> list[Request]:
    asked = {"max_tokens": 24, "temperature": 0.9, "top_k": 40, **more}
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(llm.tokenizer.encode("def add(a, b):")),
            sampling=SamplingParams(seed=number, grammar=grammar, **asked),
            eos_token_ids=llm._eos_token_ids,
            submitted_ns=time.monotonic_ns(),
        )
        for number, grammar in enumerate(FORMS)
    ]


def run(crank: Crank, asked: list[Request], found: SimpleQueue) -> tuple[dict[str, list[int]], dict[str, list], int]:
    """Returns the tokens and marks of each, and how often one was late."""
    tokens, marks, num_late = {one.request_id: [] for one in asked}, {one.request_id: [] for one in asked}, 0
    for request in asked:
        crank.submit(request, time.monotonic_ns())
    while crank.engine.scheduler.has_requests:
        while not found.empty() or not crank.has_work:
            num_late += crank.go_on(found.get(timeout=60))
        output = crank.turn()
        crank.engine.scheduler.check()
        for one in () if output is None else output.outputs:
            assert one.error is None
            tokens[one.request_id] += one.token_ids
            marks[one.request_id] += one.marks
    return tokens, marks, num_late


def slots_of(llm: LLM) -> Slots:
    runner = llm.crank._runner
    while not hasattr(runner, "slots"):
        runner = runner._runner
    return runner.slots


@pytest.fixture(scope="module", params=["none", "suffix"])
def llm(request: pytest.FixtureRequest) -> LLM:
    drafts = {"speculative_config": f'{{"method": "{request.param}"}}'}
    return LLM(num_threads=1, max_num_seqs=8, max_model_len=256, **drafts)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2, "prompt_logprobs": 1}, {"repetition_penalty": 1.3}], ids=str)
def test_answers_are_the_same_whether_steps_wait_for_masks_or_not(
    llm: LLM, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: SimpleQueue[str] = SimpleQueue()
    for name in ("LATE_NS", "LATE_ALONE_NS"):
        monkeypatch.setattr(compiled, name, 0)
    slots, llm.crank._grammars._on_found = slots_of(llm), None
    slots.masks = None  # made anew, with nobody to tell
    waited, _, num_late = run(llm.crank, requests(llm, **more), found)
    assert num_late == 0
    llm.crank._grammars.tell_found(found.put)
    slots.masks = None
    asked, waits = count(), compiled.wait  # the first looks are late, however fast they are
    monkeypatch.setattr(compiled, "wait", lambda looks, s: (set(), looks) if next(asked) < 3 else waits(looks, s))
    went_on, marks, num_late = run(llm.crank, requests(llm, **more), found)
    assert went_on == waited
    assert num_late > 0
    stalls = {name: {mark.stage for mark in told if mark.cause is Cause.GRAMMAR} for name, told in marks.items()}
    assert stalls["1"] == set()
    assert stalls["0"] | stalls["3"] <= {Stage.PREFILL_STALL, Stage.DECODE_STALL}
    assert stalls["0"] | stalls["3"] != set()
