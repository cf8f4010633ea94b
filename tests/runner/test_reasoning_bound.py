"""Bounds of what is thought before an answer, by the packaged model: where they count from, what they change, and that
nothing else does."""

import re
from functools import partial

import numpy as np
import pytest

from splittime import LLM, SamplingParams
from splittime.assemble.model_source import load_tokenizer, locate
from splittime.core.errors import RequestError
from splittime.core.sampling import ReasoningLimit
from splittime.runner import torch_runner
from splittime.runner.slot import ReasoningBound
from splittime.text import grammars
from splittime.text.marks import ReasoningPlace
from splittime.text.reasoning import ReasoningMarks, after_reasoning

pytestmark = pytest.mark.timeout(300)
PROMPTS = ["def add(a, b):", "# a list\n", "import ", "x = {"]
BLOCK_BYTES = 32768
EXACT = {"dtype": "float32"}  # what is computed again may differ in its last bits (ADR 5), which then change no token
END = (7, 8, 9)  # a mark of three tokens that the model does not write of itself
sampled = partial(SamplingParams, max_tokens=24, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, max_num_seqs=8, max_model_len=256, kernels="native")


@pytest.fixture(scope="module")
def free(llm: LLM) -> list[tuple[int, ...]]:
    return answers(llm, [None] * 4)


def answers(llm: LLM, limits: list, **more: object) -> list[tuple[int, ...]]:
    asked = [sampled(**{"seed": seed, "reasoning_limit": limit, **more}) for seed, limit in enumerate(limits)]
    return [tuple(output.token_ids) for output in llm.generate(PROMPTS, asked)]


def ids(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(locate(None)).encode(text, add_special_tokens=False))


# ---- answers


@pytest.mark.parametrize("most", [0, 1, 9])
def test_behind_the_bound_comes_the_end_and_the_answer_goes_on(llm: LLM, free: list, most: int) -> None:
    for answer, whole in zip(answers(llm, [ReasoningLimit(most, END)] * 4), free, strict=True):
        assert answer[: most + 3] == (*whole[:most], *END)
        assert not any(answer[at : at + 3] == END for at in range(most + 1, 24))
        assert len(answer) == 24


def test_a_bound_that_is_not_reached_changes_nothing(llm: LLM, free: list) -> None:
    natural = [ReasoningLimit(9, whole[5:7]) for whole in free]
    begun_at_the_bound = [ReasoningLimit(6, whole[5:8]) for whole in free]
    for limits in ([ReasoningLimit(24, END)] * 4, natural, begun_at_the_bound):
        assert answers(llm, limits) == free


def test_reasoning_begins_with_its_mark_or_there_is_none(llm: LLM, free: list) -> None:
    begun = [ReasoningLimit(4, END, ((11, 12), whole[:2])) for whole in free]
    assert [answer[:9] for answer in answers(llm, begun)] == [(*whole[:6], *END) for whole in free]
    assert answers(llm, [ReasoningLimit(4, END, ((11, 12), whole[3:5])) for whole in free]) == free


@pytest.mark.parametrize(
    ("more", "length"),
    [({"bad_token_ids": ((8,),)}, 24), ({"stop_token_ids": (8,), "min_tokens": 8}, 9), ({"stop_token_ids": (8,)}, 7),
     ({"allowed_token_ids": (20, 21, 22)}, 24), ({"frequency_penalty": 2.0, "logprobs": 2}, 24)],
)  # fmt: skip
def test_other_parameters_keep_their_meaning(llm: LLM, more: dict[str, object], length: int) -> None:
    """The end comes whatever they say; as an end id, it ends the answer, but not before the least tokens are out."""
    whole = answers(llm, [None] * 4, **more)
    found = answers(llm, [ReasoningLimit(5, END)] * 4, **more)
    assert [answer[:8] for answer in found] == [(*each[:5], *END)[:length] for each in whole]
    assert all(len(answer) >= length for answer in found)


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_seqs": 1},
        {"speculative_config": '{"method": "suffix"}', "kernels": "native"},
        {"kv_cache_memory_bytes": 24 * BLOCK_BYTES, "enable_prefix_caching": False, "max_model_len": 128, **EXACT},
        {"async_scheduling": True, "speculative_config": '{"method": "none"}'},
    ],
    ids=["alone", "drafts", "preemption", "ahead"],
)
def test_however_it_is_served_the_same(llm: LLM, more: dict[str, object]) -> None:
    asked = [sampled(seed=seed, reasoning_limit=ReasoningLimit(most, END)) for seed, most in enumerate(range(3, 19, 2))]
    plain = LLM(num_threads=1, max_num_seqs=8, max_model_len=256, **EXACT) if EXACT.items() <= more.items() else llm
    expected = [output.token_ids for output in plain.generate(PROMPTS * 2, asked)]
    other = LLM(**{"num_threads": 1, "max_num_seqs": 8, "max_model_len": 256, **more})
    for _ in range(2):  # the second time the answers are known, and guessed whole
        found = other.generate(PROMPTS * 2, asked)
        assert [output.token_ids for output in found] == expected
    assert ("kv_cache_memory_bytes" in more) == any(output.account.num_preemptions for output in found)


def test_the_end_takes_no_steps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[list, list[tuple[int, int]]]:
        llm = LLM(num_threads=1, max_num_seqs=8, max_model_len=256, kernels="native")
        told = answers(llm, [ReasoningLimit(most, END) for most in (0, 2, 4, 6)])
        return told, [tuple(counts) for step in llm.ledger.steps(10_000) for _, *counts in step.verified]

    told, verified = run()
    assert verified == [(2, 2), (3, 3), (3, 3), (3, 3)]  # at 0, the first comes with the prompt's last row
    monkeypatch.setattr(torch_runner.Launched, "tell_drafts", lambda self, slot, token_ids: None)
    assert run() == (told, [])


def test_a_form_begins_behind_the_end(llm: LLM) -> None:
    """Where a character is not whole at the bound, it is finished before."""
    end, form = ids("</think>"), grammars.of_choice(["yes", "no"], "choice")
    held = after_reasoning(form, ReasoningMarks("of text", "<think>", "</think>"), ReasoningPlace.WITHIN, {})
    first_byte = ids("é")[0]
    more = {"grammar": held, "logit_bias": {first_byte: 100.0}, "ignore_eos": False}
    limits = [ReasoningLimit(most, end) for most in (2, 3, 4, 5)]
    found = answers(llm, limits, max_tokens=40, **more)
    for answer, begin in zip(found, (2, 4, 4, 6), strict=True):
        assert answer[:begin:2] == (first_byte,) * (begin // 2)
        assert answer[begin : begin + len(end)] == end
    texts = [output.text for output in llm.generate(PROMPTS, sampled(reasoning_limit=limits[1], max_tokens=40, **more))]
    assert all(re.fullmatch(r"..</think>(yes|no)", text) for text in texts), texts


# ---- the rule


def test_what_must_come_hangs_on_the_outputs_alone() -> None:
    bound = ReasoningBound(ReasoningLimit(3, (5, 5, 6), ((1,), (2, 1))))

    def behind(*outputs: int) -> tuple[int, ...]:
        return bound.must_come(np.array(outputs, dtype=np.int64))

    for begin in ((1,), (2, 1)):
        assert behind(*begin, 9, 9) == ()
        assert behind(*begin, 9, 9, 9) == (5, 5, 6)
        assert behind(*begin, 9, 9, 5) == behind(*begin, 9, 9, 9, 5) == (5, 6)
        assert behind(*begin, 9, 5, 5) == behind(*begin, 5, 5, 5) == (6,)
        assert behind(*begin, 9, 9, 9, 5, 5, 6) == behind(*begin, 5, 5, 6) == behind(*begin, 5, 5, 6, 9, 9) == ()
        assert behind(*begin, 9, 9, 9, 9) == (5, 5, 6)  # what was found before were drafts
    assert behind() == behind(2) == behind(9, 1, 9, 9, 9) == ()


def test_reasoning_may_begin_behind_white_space() -> None:
    bound = ReasoningBound(ReasoningLimit(2, (6,), ((1,),), (), (10, 11)))
    for blanks in ([], [10], [11, 10, 11], [10] * 8):
        assert bound.must_come(np.array([*blanks, 1, 9])) == ()
        assert bound.must_come(np.array([*blanks, 1, 9, 9])) == (6,)
    for others in ([9], [10, 9], [10] * 9):
        assert bound.must_come(np.array([*others, 1, 9, 9, 9])) == ()


def test_a_bound_holds_until_known_outputs_show_that_it_is_over() -> None:
    """After that, a step need not wait for the tokens of the one before."""

    def holding(*known: int) -> bool:
        return ReasoningBound(ReasoningLimit(2, (5, 6), ((1,), (2, 1)), (), (10,))).may_hold(12, np.array(known))

    assert holding(1)
    assert holding(1, 9, 9, 5)
    assert not holding(1, 9, 9, 5, 6)
    assert holding(*[10] * 8)
    assert not holding(*[10] * 10)
    bound = ReasoningBound(ReasoningLimit(2, (5, 6)))
    assert not bound.may_hold(1, np.array([9]))
    assert bound.may_hold(3, np.array([9, 9]))
    assert not bound.may_hold(4, np.array([9, 9, 5, 6]))


def test_reasoning_is_over_where_anything_shows_it() -> None:
    bound = ReasoningBound(ReasoningLimit(2, (5, 6, 7), ((1,),), ((6, 8), (6, 7))))
    for begun in ((5, 6, 8), (5, 6, 7), (6, 8), (5, 3, 6, 7, 4)):
        assert bound.must_come(np.array([1, 9, 9, *begun, 9])) == ()
    assert bound.must_come(np.array([1, 9, 9, 9])) == (5, 6, 7)
    assert bound.must_come(np.array([1, 9, 9, 5, 6, 9])) == (5, 6, 7)


def test_limits_that_cannot_be_are_refused() -> None:
    for limit in (
        ReasoningLimit(1, END, closed_by=((),)),
        ReasoningLimit(1, END, blank_ids=tuple(range(65))),
        ReasoningLimit(-1, END),
        ReasoningLimit(2**63, END),
        ReasoningLimit(1, ()),
        ReasoningLimit(1, END, ((),)),
    ):
        with pytest.raises(RequestError, match="reasoning"):
            SamplingParams(reasoning_limit=limit).validate()


def test_a_mark_outside_the_vocabulary_is_an_error(llm: LLM) -> None:
    (output,) = llm.generate(["x"], sampled(reasoning_limit=ReasoningLimit(0, (9999,))))
    assert "9999" in output.error.message
