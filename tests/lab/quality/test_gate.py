"""The gate over models that are tables: which verdict, and for which reason."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import Bytes, Table, Telling, drawn_texts, random_logits, silent

from splittime.core.errors import ConfigError
from splittime.lab.quality.documents import Document
from splittime.lab.quality.margins import EXIT_CODES, Margins, judge, overall, standard
from splittime.lab.quality.model import Reads
from splittime.lab.quality.report import as_json, render_html
from splittime.lab.quality.run import Gate, Tasks, known, unread, unusual
from splittime.lab.quality.texts import DECODE
from splittime.stats.paired import BootstrapEstimate

LOGITS = random_logits()
TEXTS = drawn_texts(LOGITS, 24, 330)
TASKS = Tasks(documents=TEXTS, lengths=(64, 0), text_tokens=4000)


def run(base, candidate, tasks=TASKS, margins=None):
    return Gate(base, candidate, Bytes(), margins or Margins(), silent).run(tasks)


def noisy(size, seed=9):
    return LOGITS + random_logits(seed, size)


def test_a_base_against_itself_passes():
    report = run(Table(LOGITS), Table(LOGITS))
    assert (report.verdict, report.reasons) == ("PASS", [])
    assert {check.estimate.high for check in report.checks if check.rule == "kl"} == {0.0}
    where = [text.where for text in report.texts]
    assert where == ["0-64 tokens", "64-330 tokens", f"64-330 tokens, {DECODE}"]


def test_small_noise_passes_and_large_noise_fails():
    assert run(Table(LOGITS), Table(noisy(0.1))).verdict == "PASS"
    report = run(Table(LOGITS), Table(noisy(1.0)))
    assert report.verdict == "FAIL"
    assert any("KL, mean is beyond its margin" in reason for reason in report.reasons)


def test_a_margin_inside_the_interval_is_inconclusive():
    kl = next(check for check in run(Table(LOGITS), Table(noisy(0.3))).checks if check.rule == "kl")
    margins = Margins(perplexity=2.0, kl=kl.estimate.value, kl_p99=9.0, top1=0.0)
    report = run(Table(LOGITS), Table(noisy(0.3)), replace(TASKS, lengths=(64,)), margins)
    assert report.verdict == "INCONCLUSIVE"
    assert any("it lies so near its margin that more text would hardly settle it" in each for each in report.reasons)
    margins = Margins(perplexity=2.0, kl=(kl.estimate.value + kl.estimate.high) / 2, kl_p99=9.0, top1=0.0)
    (said,) = run(Table(LOGITS), Table(noisy(0.3)), replace(TASKS, lengths=(64,)), margins).reasons
    assert "times as many documents like these would settle it" in said


def test_a_divergence_far_beyond_what_the_claim_usually_costs_is_noted():
    def notes(kl, claims):
        low, high = 0.9 * kl, 1.1 * kl
        return unusual(known(claims), BootstrapEstimate(kl, 0.05 * kl, low, high))

    assert notes(0.0007, ("weights.int8",)) == ""
    assert "2.4 times the 0.0019 that weights.int8" in notes(0.0045, ("weights.int8",))
    assert notes(0.0045, ("weights.int8", "kv.int8")) == ""
    assert notes(0.0045, ()) == notes(9.0, ("weights.unmeasured",)) == ""

    reads = Reads(claims=("weights.int8",), read={"weights.int8": 10**9}, weights_least=1)
    report = run(Table(LOGITS), Table(noisy(0.15), reads=reads), margins=Margins(kl=1.0))
    assert any("look for a broken scale" in note for note in report.notes)


def test_what_is_usual_is_measured_where_the_base_can_be_rounded():
    def notes(rounded, size):
        candidate = Table(noisy(size), reads=Reads(("weights.int8",), {"weights.int8": 10**9}))
        return Gate(Table(LOGITS), candidate, Bytes(), Margins(), silent, rounded).run(TASKS).notes

    assert notes(None, 0.03) == [], "less than any constant"
    (short, *_) = notes(lambda: Table(noisy(0.01)), 0.03)
    assert "times the" in short
    assert "that weights.int8 cost the base when it is rounded to nearest: look for a broken scale" in short
    assert notes(lambda: Table(noisy(0.12)), 0.15) == [], "beyond the constants, and usual of this base"

    def too_large():
        raise ConfigError("no memory for it")

    assert notes(too_large, 0.03) == [
        "what weights.int8 cost the base when rounded to nearest is not known: no memory for it"
    ]


def test_two_halves_of_a_short_text_give_no_verdict():
    text = TEXTS[0].text
    halves = [Document("first", text[:165]), Document("second", text[165:])]
    for candidate in (LOGITS, noisy(3.0)):
        report = run(Table(LOGITS), Table(candidate), Tasks(documents=halves))
        assert report.verdict == "INCONCLUSIVE"
        assert any("2 documents are too few" in reason for reason in report.reasons)


def test_many_tiny_documents_give_no_verdict():
    tiny = [Document(str(n), one.text[:20]) for n, one in enumerate(TEXTS)]
    report = run(Table(LOGITS), Table(LOGITS), Tasks(documents=tiny))
    assert report.verdict == "INCONCLUSIVE"
    assert any("tokens are too few" in reason for reason in report.reasons)


def test_nothing_asked_is_no_verdict():
    assert run(Table(LOGITS), Table(LOGITS), Tasks()).verdict == "INCONCLUSIVE"


def test_an_error_late_in_a_text_is_seen_at_the_longest_context_alone():
    class Late(Table):
        def predictions(self, token_ids, begin, decode_tokens):
            for piece in super().predictions(token_ids, begin, decode_tokens):
                if piece.begin >= 128:
                    piece = replace(piece, logprobs=np.roll(piece.logprobs, 1, axis=1))
                yield piece

    report = run(Table(LOGITS), Late(LOGITS))
    verdicts = {check.where: check.verdict for check in report.checks if check.rule == "kl"}
    assert verdicts == {"0-64 tokens": "PASS", "64-330 tokens": "FAIL", f"64-330 tokens, {DECODE}": "FAIL"}


def test_an_error_of_single_steps_is_seen_though_they_are_few():
    class Stepping(Table):
        def predictions(self, token_ids, begin, decode_tokens):
            late = len(token_ids) - 1 - decode_tokens
            for piece in super().predictions(token_ids, begin, decode_tokens):
                is_step = decode_tokens and piece.begin >= late
                yield replace(piece, logprobs=np.roll(piece.logprobs, 1, axis=1)) if is_step else piece

    report = run(Table(LOGITS), Stepping(LOGITS))
    assert report.verdict == "FAIL"
    assert [check.where for check in report.checks if check.verdict == "FAIL"] == [f"64-330 tokens, {DECODE}"]


def test_of_a_server_the_divergence_can_only_fail():
    report = run(Table(LOGITS), Telling(noisy(0.05)))
    assert report.verdict == "PASS"
    assert {check.verdict for check in report.checks if check.rule.startswith("kl")} == {"NOT JUDGED"}
    assert any("is a server" in note for note in report.notes)
    far = run(Table(LOGITS), Telling(noisy(2.0)))
    assert {check.verdict for check in far.checks if check.rule == "kl"} == {"FAIL"}
    assert all(text.kl_is_bound for text in far.texts)


def test_the_longest_context_is_not_silently_left_out():
    short = [Document(one.name, one.text[:100]) for one in TEXTS]
    report = run(Table(LOGITS), Table(LOGITS), replace(TASKS, documents=short))
    assert any("longest context was not measured" in note for note in report.notes)
    report = run(Table(LOGITS, max_tokens=128), Table(LOGITS), replace(TASKS, lengths=(64, 300)))
    assert any("300 tokens was asked for, the models have 128" in note for note in report.notes)
    assert [text.where for text in report.texts][:2] == ["0-64 tokens", "64-128 tokens"]


def test_other_vocabularies_are_refused():
    with pytest.raises(ConfigError, match="cannot be compared"):
        Gate(Table(LOGITS), Table(np.zeros((5, 5))), Bytes(), Margins(), silent)


# ---- what was claimed was read


def claimed(**changes):
    reads = {"weights.int8": 1000, "kv.int8": 500}
    return Reads(**{"claims": tuple(reads), "read": reads, "weights_least": 1000, "kv_least": 500, **changes})


@pytest.mark.parametrize(("reads", "told"), [
    (claimed(), None),
    (Reads(read={"weights.bfloat16": 7}), None),
    (None, None),
    (claimed(read={"weights.bfloat16": 1000, "kv.int8": 500}), "claims weights.int8, and its kernels read no byte"),
    (claimed(read={"weights.int8": 1000, "kv.bfloat16": 500}), "claims kv.int8, and its kernels read no byte"),
    (claimed(read={"weights.int8": 100, "kv.int8": 500}), "100 bytes were read, where"),
    (claimed(read={"weights.int8": 1000, "kv.int8": 1}), "1 bytes were read"),
    (claimed(kv_least=0), "no text was long enough"),
    (claimed(read={"weights.int8": 1000}, kv_least=0), "no text was long enough"),
])  # fmt: skip
def test_claims_are_borne_out_by_counters(reads, told):
    reasons = unread("it", reads)
    assert (reasons == []) is (told is None)
    assert told is None or any(told in reason for reason in reasons)


def test_an_unread_claim_fails_whatever_else_was_found():
    report = run(Table(LOGITS), Table(LOGITS, reads=claimed(read={"kv.int8": 500})))
    assert {check.verdict for check in report.checks} == {"PASS"}
    assert report.verdict == "FAIL"
    assert report.reasons == ["table claims weights.int8, and its kernels read no byte of it"]


# ---- margins


@given(st.floats(-2, 2), st.floats(0, 1), st.floats(0, 1), st.floats(0, 2))
def test_a_ceiling_and_a_floor_are_mirrors(value, below, above, limit):
    estimate = BootstrapEstimate(value, 0.1, value - below, value + above)
    mirrored = BootstrapEstimate(-value, 0.1, -value - above, -value + below)
    ceiling, floor = judge("kl", "", estimate, limit), judge("needle", "", mirrored, -limit)
    assert ceiling.verdict == floor.verdict
    want = "PASS" if value + above <= limit else "FAIL" if value - below > limit else "INCONCLUSIVE"
    assert ceiling.verdict == want


@pytest.mark.parametrize(("verdicts", "want", "code"), [
    (["PASS", "PASS"], "PASS", 0),
    (["PASS", "NOT JUDGED"], "PASS", 0),
    (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE", 2),
    (["FAIL", "INCONCLUSIVE", "PASS"], "FAIL", 1),
    (["NOT JUDGED"], "INCONCLUSIVE", 2),
    ([], "INCONCLUSIVE", 2),
])  # fmt: skip
def test_the_verdict_of_all(verdicts, want, code):
    assert overall(verdicts) == want
    assert EXIT_CODES[want] == code


def test_eight_bits_are_held_to_their_own_standard():
    assert standard(("weights.int8",)).kl < standard(("weights.int4", "weights.int8")).kl
    assert standard(("kv.int8",)).kl == standard(("weights.int8",)).kl
    assert standard(()) == standard(("weights.int4", "kv.int8")) == Margins()


@pytest.mark.parametrize("margins", [{"kl": -1.0}, {"top1": 1.5}, {"perplexity": 0.9}, {"needle": math.nan}])
def test_margins_that_no_figure_could_have_are_refused(margins):
    with pytest.raises(ConfigError, match=f"the margin of {next(iter(margins))}"):
        Margins(**margins).validate()


# ---- the report


def test_the_report_is_json_and_a_page_that_runs_nothing():
    evil = "</style><script>alert(1)</script>"
    tasks = Tasks(documents=[Document(evil, one.text) for one in TEXTS[:1]], with_needle=True)
    report = run(Table(LOGITS, name=evil), Table(LOGITS, name="b"), tasks)
    told = json.loads(as_json(report))
    assert told["verdict"] == "INCONCLUSIVE"
    assert told["checks"][0]["estimate"]["low"] is None
    page = render_html(report)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert page == render_html(report)


def test_a_histogram_counts_each_token_once():
    report = run(Table(LOGITS), Table(noisy(0.3)))
    for text in report.texts:
        assert sum(text.kl_counts) == text.tokens == sum(one.tokens for one in text.kl_by_position)
        assert sum(one.tokens for one in text.documents) == text.tokens
        assert len(text.kl_edges) == len(text.kl_counts) + 1
        whole = sum(one.tokens * one.nll_difference for one in text.documents) / text.tokens
        assert whole == pytest.approx(text.nll_difference.value)
        assert math.exp(whole) == pytest.approx(text.candidate_perplexity / text.base_perplexity)
    assert report.candidate.facts == {"made of": "a table"}
