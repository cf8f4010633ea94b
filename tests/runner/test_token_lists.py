"""`allowed_token_ids` and bad words: what may not come never comes, whatever else the request or the batch does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime import LLM, SamplingParams
from splittime.core.errors import RequestError
from splittime.runner.slot import listed, listed_at_all
from splittime.text import grammars

pytestmark = pytest.mark.timeout(300)
PROMPTS = ["def add(a, b):", "# a list\n", "import ", "x = {"]
VOCAB = 12
BLOCK_BYTES = 32768
EXACT = {"dtype": "float32"}  # what is computed again may differ in its last bits (ADR 5), which then change no token
TOKEN = st.integers(0, VOCAB - 1)


def drawn(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": seed, "ignore_eos": True, **more})


def runs_in(tokens: tuple[int, ...], run: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(run)] == run for at in range(len(tokens)))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, max_num_seqs=8, max_model_len=256)


@pytest.fixture(scope="module")
def free(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in llm.generate(PROMPTS, [drawn(seed) for seed in range(4)])]


@pytest.fixture(scope="module")
def asked(free: list[tuple[int, ...]]) -> list[SamplingParams]:
    """Each forbids what came without it: a token, a pair behind the first token, or all but every other token."""
    one, pair, listed, both = free
    return [
        drawn(0, bad_token_ids=((one[5],),)),
        drawn(1, bad_token_ids=(pair[:2], pair[10:13])),
        drawn(2, allowed_token_ids=tuple(set(listed[::2]))),
        drawn(3, allowed_token_ids=both, bad_token_ids=(both[1:3],), logprobs=2, repetition_penalty=1.1),
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TOKEN, max_size=6),
    st.lists(TOKEN, max_size=5, unique=True),
    st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=5),
)
def test_a_token_may_come_when_it_is_allowed_and_completes_no_run(
    outputs: list[int], allowed: list[int], runs: list[list[int]]
) -> None:
    sampling = SamplingParams(allowed_token_ids=tuple(allowed), bad_token_ids=tuple(map(tuple, runs)))
    may = [
        (not allowed or token in allowed)
        and not any([*outputs, token][-len(run) :] == run for run in runs if len(run) <= len(outputs) + 1)
        for token in range(VOCAB)
    ]
    at_all, so_far = listed_at_all(sampling, VOCAB), np.array(outputs, dtype=np.int64)
    if at_all is None:
        assert all(may)
    elif any(may):
        assert listed(sampling, at_all, so_far).tolist() == may
    else:
        with pytest.raises(RequestError, match="leave no token"):
            listed(sampling, at_all, so_far)


def test_what_is_forbidden_never_comes(llm: LLM, free: list[tuple[int, ...]], asked: list[SamplingParams]) -> None:
    answers = [tuple(output.token_ids) for output in llm.generate(PROMPTS, asked)]
    for answer, before, sampling in zip(answers, free, asked, strict=True):
        assert len(answer) == 40
        assert answer != before
        assert not any(runs_in(answer, run) for run in sampling.bad_token_ids)
        assert not sampling.allowed_token_ids or set(answer) <= set(sampling.allowed_token_ids)
    assert answers[1][0] == free[1][0]  # only the last token of a run is kept from coming


def test_alone_and_beside_others_the_same(llm: LLM, free: list[tuple[int, ...]], asked: list[SamplingParams]) -> None:
    plain = [drawn(seed) for seed in range(4)]
    together = llm.generate([*PROMPTS, *PROMPTS], [*asked, *plain])
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, asked, strict=True)]
    assert [output.token_ids for output in together[:4]] == [output.token_ids for output in alone]
    assert [tuple(output.token_ids) for output in together[4:]] == free


@pytest.mark.parametrize(
    "more",
    [
        {"speculative_config": '{"method": "suffix"}', "kernels": "native"},
        {"kv_cache_memory_bytes": 24 * BLOCK_BYTES, "enable_prefix_caching": False, "max_model_len": 128, **EXACT},
        {"async_scheduling": True, "speculative_config": '{"method": "none"}'},
    ],
    ids=["drafts", "preemption", "ahead"],
)
def test_however_it_is_served_the_same(llm: LLM, asked: list[SamplingParams], more: dict[str, object]) -> None:
    plain = LLM(num_threads=1, max_num_seqs=8, max_model_len=256, **EXACT) if EXACT.items() <= more.items() else llm
    expected = [output.token_ids for output in plain.generate(PROMPTS * 2, asked * 2)]
    other = LLM(**{"num_threads": 1, "max_num_seqs": 8, "max_model_len": 256, **more})
    for _ in range(2):  # the second time the answers are known, and guessed whole
        found = other.generate(PROMPTS * 2, asked * 2)
        assert [output.token_ids for output in found] == expected
    assert ("kv_cache_memory_bytes" in more) == any(output.account.num_preemptions for output in found)


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_with_any_kernels_what_is_forbidden_never_comes(asked: list[SamplingParams], kernels: str) -> None:
    llm = LLM(num_threads=1, max_num_seqs=8, max_model_len=128, kernels=kernels)
    for output, sampling in zip(llm.generate(PROMPTS, asked), asked, strict=True):
        answer = tuple(output.token_ids)
        assert not any(runs_in(answer, run) for run in sampling.bad_token_ids)
        assert not sampling.allowed_token_ids or set(answer) <= set(sampling.allowed_token_ids)


def test_lists_that_leave_nothing_end_their_request_alone(llm: LLM) -> None:
    bad, good = llm.generate(
        ["x", "x"], [drawn(0, allowed_token_ids=(5,), bad_token_ids=((5, 5),)), drawn(1, max_tokens=3)]
    )
    assert bad.error is not None
    assert "leave no token" in bad.error.message
    assert (bad.error.status, len(good.token_ids)) == (400, 3)


def test_an_answer_ends_only_where_its_end_is_listed(llm: LLM) -> None:
    only = llm.generate(["x"], drawn(0, ignore_eos=False, allowed_token_ids=(70,), stop_token_ids=(71,)))[0]
    ends = llm.generate(["x"], drawn(0, ignore_eos=False, allowed_token_ids=(71,), stop_token_ids=(71,)))[0]
    assert (only.finish_reason, set(only.token_ids)) == ("length", {70})
    assert ends.finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"allowed_token_ids": (10**6,)}, "allowed_token_ids"),
        ({"bad_token_ids": ((1, -1),)}, "bad_token_ids"),
        ({"bad_token_ids": ((),)}, "bad_words"),
        ({"bad_token_ids": ((1,),), "grammar": grammars.of_choice(["a"], "choice"), "ignore_eos": False}, "form"),
    ],
)
def test_lists_that_make_no_sense_are_refused(llm: LLM, more: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(["x"], drawn(0, **more))
