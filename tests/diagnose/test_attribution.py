"""Whose the time was: every nanosecond has one owner, whatever the books hold; what is stated outranks what is "
"inferred."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules_queue import poisson
from ward import MS, Case, Ward, ids

from splittime.diagnose.attribution import (
    COMPUTING,
    DEPRIVED,
    MEANING,
    Computed,
    attribution,
    owners_between,
    stages_and_stops,
)
from splittime.diagnose.finding import RULES
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage

WARDS = st.builds(
    Ward,
    step_ms=st.floats(0.1, 8),
    token_ms=st.floats(0.001, 0.5),
    gap_ms=st.floats(0.0, 3.0),
    settings=st.sampled_from(
        [{}, {"max_num_seqs": 2}, {"num_blocks": 40, "max_model_len": 512}, {"max_prefill_tokens": 16}]
    ),
    stops_ms=st.lists(st.tuples(st.floats(0, 2000), st.floats(1, 300)), max_size=4).map(sorted),
    wait_share=st.sampled_from([0.0, 0.5]),
    sample_share=st.sampled_from([0.0, 0.4]),
    knobs=st.sampled_from([[], [(200.0, {"paused": True}), (400.0, {"paused": False})]]),
)


@settings(max_examples=25, deadline=None)
@given(WARDS, st.integers(1, 60))
def test_every_nanosecond_has_one_owner(ward, output):
    books = ward.run(*poisson(20, 40, prompt=80, output=output))
    found = attribution(books)
    for account in books.accounts:
        owned = [times.get(account.request_id, 0.0) for times in found.times_ns.values()]
        assert sum(owned) == pytest.approx(account.end_ns - account.start_ns, abs=2_000)
        assert min(owned) >= 0
    assert sum(share for _, share in found.largest()) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(WARDS, st.integers(1, 60), st.data())
def test_whoever_asks_of_a_part_of_a_request_is_told_what_the_doctor_says_of_all(ward, output, data):
    """`explain`, the comparison with the usual request and the critical path read what the doctor reads."""
    books = ward.run(*poisson(20, 40, prompt=80, output=output))
    account = data.draw(st.sampled_from(books.accounts))
    cuts = data.draw(st.lists(st.integers(account.start_ns, account.end_ns), max_size=4).map(sorted))
    edges = list(pairwise([account.start_ns, *cuts, account.end_ns]))
    parts = [owners_between(books, account, *edge) for edge in edges]
    for (begin_ns, end_ns), part in zip(edges, parts, strict=True):
        assert sum(part.values()) == pytest.approx(end_ns - begin_ns, abs=2_000)
    told = {owner: times.get(account.request_id, 0.0) for owner, times in attribution(books).times_ns.items()}
    for owner in {*told, *(owner for part in parts for owner in part)}:
        assert sum(part.get(owner, 0.0) for part in parts) == pytest.approx(told.get(owner, 0.0), abs=2_000)
    (stages,) = stages_and_stops(books, [account])
    assert sum(stages.values()) == account.end_ns - account.start_ns
    for owner in DEPRIVED:
        assert stages.get((owner, None), 0) == pytest.approx(told.get(owner, 0.0), abs=2_000)


def test_a_step_is_divided_wholly():
    books = Ward(stops_ms=[(500, 200)], wait_share=0.3, sample_share=0.4).run(*poisson(20, 40))
    by_step = timeline(books).by_step
    for step, parts in zip(books.steps, by_step, strict=True):
        assert sum(parts) == pytest.approx(step.host_gap_ns + step.end_ns - step.begin_ns, abs=10)
    assert by_step[:, Part.STOPPED].sum() == pytest.approx(200 * MS, rel=0.01)


def test_a_stop_in_a_step_with_prompts_is_not_the_prompts():
    """Books without the kernel's word cannot know; with it, what a stop took is nobody else's."""
    chats = [Case(150 * i, ids(16, i), 120) for i in range(20)]
    prompts = [Case(300 + 400 * i, ids(60, 100 + i), 2) for i in range(8)]
    books = Ward(stops_ms=[(301 + 400 * i, 200) for i in range(8)]).run(*chats, *prompts)
    found = attribution(books)
    assert found.share(Computed.STOPPED) > 0.15
    assert found.share(Computed.OTHERS_PROMPTS) < 0.05
    blind = tuple(msgspec.structs.replace(step, off_cpu_ns=None, cpu_wait_ns=None) for step in books.steps)
    assert attribution(msgspec.structs.replace(books, steps=blind)).share(Computed.OTHERS_PROMPTS) > 0.1


def test_time_without_records_of_steps_belongs_to_its_stage():
    books = Ward().run(*poisson(20, 40))
    found = attribution(msgspec.structs.replace(books, steps=()))
    assert found.share(Stage.DECODE) > 0.5
    assert set(found.times_ns) <= set(STAGE_MEANING) | set(CAUSE_MEANING)


def test_what_a_thread_is_always_off_for_is_no_stop():
    """Each step waits a third of its time for other threads' part of a product."""
    books = Ward().run(*poisson(20, 40))
    off = tuple(msgspec.structs.replace(s, off_cpu_ns=(s.end_ns - s.begin_ns) // 3, cpu_wait_ns=0) for s in books.steps)
    assert attribution(msgspec.structs.replace(books, steps=off)).share(Computed.STOPPED) < 0.02


def test_every_owner_has_words_and_every_cause_a_rule_or_none_that_is_said():
    """What no rule explains is told by `no_cure_known`, in the words of its cause."""
    words = {**STAGE_MEANING, **CAUSE_MEANING, **MEANING}
    owners = [*Stage, *Cause, *Computed]
    assert all(words[owner] for owner in owners)
    explained = {owner for rule in RULES.values() for owner in rule.explains}
    assert explained <= {str(owner) for owner in owners}
    for cause in (Cause.PAUSED, Cause.POLICY, Cause.BATCH_SLOTS, Cause.KV_BLOCKS, Cause.TOKEN_BUDGET):
        assert cause in explained
    assert not explained & {str(owner) for owner in (Stage.PREFILL, Stage.DECODE)}
    assert set(COMPUTING) <= set(words)
