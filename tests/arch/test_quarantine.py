"""Second tries are few, short-lived and explained; what is not among them fails for good."""

import datetime
import json

import pytest

import quarantine

TODAY = datetime.date(2026, 11, 29)
REAL = "tests/arch/test_quarantine.py::test_the_rules_bite"


def entry(name=REAL, days=0, reason="it waits for a clock"):
    return quarantine.Entry(name, TODAY - datetime.timedelta(days), reason)


def test_the_list_keeps_the_rules():
    assert quarantine.faults(quarantine.entries(), datetime.date.today()) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([entry(f"{REAL}[{i}]") for i in range(11)], "11 tests are more than 10"),
        ([entry("tests/arch/test_gone.py::test_it")], "no such test"),
        ([entry("tests/arch/test_quarantine.py::test_gone")], "no such test"),
        ([entry(days=15)], "15 days are not within 14"),
        ([entry(days=-2)], "-2 days"),
        ([entry(reason="flaky")], "what is the reason?"),
        ([entry(), entry()], "it is there twice"),
    ],
)
def test_the_rules_bite(found, words):
    assert any(words in fault for fault in quarantine.faults(found, TODAY))


def test_what_may_be_is_let_through():
    assert quarantine.faults([entry(days=14), entry(f"{REAL}[a]")], TODAY) == []


@pytest.mark.parametrize(("failed", "status"), [([REAL], 0), ([REAL, "tests/arch/test_x.py"], 1), ([f"{REAL}[1]"], 1)])
def test_only_what_is_listed_is_tried_again(tmp_path, monkeypatch, capsys, failed, status):
    monkeypatch.setattr(quarantine, "entries", lambda: [entry()])
    lastfailed = tmp_path / "lastfailed"
    lastfailed.write_text(json.dumps(dict.fromkeys(failed, True)))
    assert quarantine.main(str(lastfailed)) == status
    told = capsys.readouterr().out
    assert "it waits for a clock" in told
    assert all((f"not quarantined: {name}" in told) == (name != REAL) for name in failed)
