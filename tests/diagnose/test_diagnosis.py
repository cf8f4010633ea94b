"""The doctor as a whole: the order of what it says, when it abstains, and that a run without accounts is still read."""

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_rules_queue import poisson
from ward import Ward

from splittime.cli.doctor import diagnosis_text
from splittime.diagnose.doctor import MIN_REQUESTS, Diagnosis, diagnose, of_time, roots
from splittime.diagnose.finding import CANNOT_TELL, FOUND, NO_CURE_KNOWN, NOTHING_FOUND, RULES, Cure, Finding, in_order
from splittime.ledger.stages import Cause, Stage


def finding(name: str, share: float, is_limit: bool = False) -> Finding:
    return Finding(
        name=name,
        claim="c",
        evidence=(),
        share_of_time=share,
        confidence=1.0,
        confidence_from="f",
        cure=Cure(sentence="s"),
        cost="c",
        counter_check="k",
        regime="r",
        is_limit=is_limit,
    )


names = st.sampled_from("abcdef")
found = st.lists(st.builds(finding, names, st.floats(0, 1), st.booleans()), unique_by=lambda f: f.name)
trees = st.dictionaries(names, st.lists(names, max_size=3).map(tuple), max_size=6)


@given(found, trees)
def test_nothing_is_lost_and_the_largest_comes_first(findings, tree):
    ordered = in_order(findings, tree, "abcdef")
    assert sorted(f.name for f in ordered) == sorted(f.name for f in findings)
    if not tree:
        ranks = [(f.comes_last, -f.share_of_time) for f in ordered]
        assert ranks == sorted(ranks)


def test_a_root_comes_before_the_symptoms_whose_time_it_explains_and_takes_their_rank():
    findings = [finding("symptom", 0.9), finding("other", 0.5), finding("root", 0.45), finding("limit", 1.0, True)]
    ordered = [f.name for f in in_order(findings, {"root": ("symptom",)}, ("root",))]
    assert ordered == ["root", "symptom", "other", "limit"]


@given(found, trees)
def test_illnesses_come_before_limits_whatever_their_shares(findings, tree):
    ordered = [f.is_limit for f in in_order(findings, tree, "abcdef")]
    assert ordered == sorted(ordered)


def test_what_no_cure_is_known_for_has_the_rank_of_its_share():
    findings = [finding("limit", 1.0, True), finding("no_cure_known", 0.6, True), finding("slot_bound", 0.2)]
    assert [f.name for f in in_order(findings, {}, ())] == ["no_cure_known", "slot_bound", "limit"]


def test_what_is_small_is_not_told_before_what_is_large_whoever_causes_whom():
    """As it stood on the page: a fifth of the time before all of it."""
    findings = [finding("cpu_starved", 0.19), finding("overload", 0.96), finding("slot_bound", 0.77)]
    assert [f.name for f in in_order(findings, roots(), of_time())] == ["slot_bound", "overload", "cpu_starved"]


def test_a_root_whose_share_is_of_something_else_comes_first_whatever_it_is():
    """Requests that failed, a client that was late."""
    findings = [finding("slot_bound", 0.9), finding("requests_fail", 0.01)]
    assert [f.name for f in in_order(findings, roots(), of_time())] == ["requests_fail", "slot_bound"]


def test_a_server_of_ours_without_a_request_is_not_told_to_be_another():
    books = Ward().run(*poisson(10, 1))
    said = diagnosis_text(diagnose(msgspec.structs.replace(books, accounts=())), "")
    assert "requests served: only 0" in " ".join(said.plain.split())
    assert "only a splittime server keeps them" not in " ".join(said.plain.split())


def test_roots_of_roots():
    tree = {"a": ("b",), "b": ("c",)}
    findings = [finding("c", 0.8), finding("a", 0.4), finding("b", 0.5)]
    assert [f.name for f in in_order(findings, tree, "abcdef")] == ["a", "b", "c"]
    findings = [finding("c", 0.8), finding("a", 0.3), finding("b", 0.5)]
    assert [f.name for f in in_order(findings, tree, "abcdef")] == ["b", "c", "a"], "a explains little of c"


@given(found, trees)
def test_nothing_jumps_ahead_of_what_is_more_than_twice_as_large(findings, tree):
    ordered = [f.share_of_time for f in in_order(findings, tree, "abcdef") if not f.comes_last]
    assert all(2 * first >= later for i, first in enumerate(ordered) for later in ordered[i:])


def test_the_rules_name_existing_symptoms_and_make_no_circle():
    tree = roots()
    assert set().union(*tree.values()) <= {*RULES, NO_CURE_KNOWN}

    def below(name: str, above: frozenset[str]) -> None:
        assert name not in above, f"{name} is its own root"
        for symptom in tree.get(name, ()):
            below(symptom, above | {name})

    for name in RULES:
        below(name, frozenset())
    for rule in RULES.values():
        assert rule.meaning.endswith("."), rule.name


def test_every_finding_says_all_that_it_must():
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    for one in diagnose(books).findings:
        for field in ("claim", "cost", "counter_check", "regime", "confidence_from"):
            assert len(getattr(one, field)) > 20, field
        assert one.evidence
        assert 0 < one.share_of_time <= 1
        assert 0 < one.confidence <= 1


def test_a_ledger_with_holes_is_not_diagnosed():
    """More than a twentieth of the time unattributed: what is known might not be what was lost."""
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    holed = [_with_hole(account, 0.2) for account in books.accounts]
    diagnosis = diagnose(msgspec.structs.replace(books, accounts=tuple(holed)))
    assert diagnosis.findings == ()
    assert diagnosis.withheld
    assert not diagnosis.healthy
    assert diagnosis.exit_code == CANNOT_TELL
    assert "neither book" in diagnosis.abstentions[-1].why
    small = [_with_hole(account, 0.02) for account in books.accounts]
    assert diagnose(msgspec.structs.replace(books, accounts=tuple(small))).findings[0].name == "slot_bound"


def _with_hole(account, share: float):
    """Its end lies later, and nobody knows why."""
    wall_ns = account.end_ns - account.start_ns
    hole_ns = int(wall_ns * share / (1 - share))
    last = account.intervals[-1]
    hole = type(last)(Stage.UNATTRIBUTED, Cause.ENGINE_DIED, account.end_ns, account.end_ns + hole_ns)
    return msgspec.structs.replace(account, end_ns=account.end_ns + hole_ns, intervals=(*account.intervals, hole))


def test_exit_codes():
    assert diagnose(Ward().run(*poisson(10, 80))).exit_code == NOTHING_FOUND
    assert diagnose(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))).exit_code == FOUND
    assert diagnose(Ward().run(*poisson(10, MIN_REQUESTS - 1))).exit_code == CANNOT_TELL


def test_the_same_books_give_the_same_answer():
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    assert diagnose(books).as_json() == diagnose(books).as_json()
    back = msgspec.json.decode(msgspec.json.encode(diagnose(books)), type=Diagnosis)
    assert back == diagnose(books)


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"num_blocks": 40, "max_model_len": 512}])
def test_told_in_80_columns(settings):
    shown = io.StringIO()
    diagnosis = diagnose(Ward(settings=settings).run(*poisson(25, 100, output=60)))
    Console(file=shown, width=200, color_system=None).print(diagnosis_text(diagnosis, ""))
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    if diagnosis.illnesses:
        assert "1. " + diagnosis.illnesses[0].name in shown.getvalue()
        assert "splittime explain r" in shown.getvalue()
    else:
        assert "Nothing found" in shown.getvalue()


def test_an_old_server_without_facts_is_diagnosed_as_far_as_it_goes():
    books = msgspec.structs.replace(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)), facts=None)
    diagnosis = diagnose(books)
    assert diagnosis.findings[0].name == "slot_bound"
    assert {"gc_pauses", "cold_start"} <= {abstention.name for abstention in diagnosis.abstentions}
