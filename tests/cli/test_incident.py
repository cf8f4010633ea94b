"""`splittime incident`, as a user runs it, and `splittime doctor` on what it wrote."""

import json

import pytest
from kept import ledger_file
from test_rules_queue import poisson
from typer.testing import CliRunner
from ward import Ward

from splittime.cli.main import app


def invoke(*words: object):
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledgers")
    (folder / "notes.txt").write_text("no ledger")
    for name, books in (
        ("a", Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))),
        ("b", Ward().run(*poisson(8, 80, output=40))),
    ):
        ledger_file(books, folder / f"{name}.sqlite")
    return folder


def test_one_ledger_file(ledgers, tmp_path):
    result = invoke("incident", ledgers / "a.sqlite", "--out", "i.zip")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "ledger-1: 100 requests" in result.stderr
    assert "slot_bound" in result.stderr
    told = invoke("doctor", "i.zip", "--no-sizes")
    assert told.exit_code == 1
    assert "incident i.zip, ledger-1" in told.stdout
    assert "1. slot_bound" in told.stdout


def test_a_folder_of_them(ledgers, tmp_path):
    result = invoke("incident", ledgers, "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert [source["name"] for source in answer["manifest"]["sources"]] == ["ledger-1", "ledger-2"]
    assert (tmp_path / answer["file"]).is_file()
    assert answer["file"].startswith("incident-2")
    assert "torch" in answer["manifest"]["made_with"]
    assert "name one with --source" in invoke("doctor", answer["file"]).stderr
    assert invoke("doctor", answer["file"], "--source", "ledger-2", "--no-sizes").exit_code == 0


def test_what_cannot_be_asked_is_left_out_while_something_can(ledgers, tmp_path):
    result = invoke("incident", "http://127.0.0.1:9", ledgers / "a.sqlite", "--out", "i.zip")
    assert result.exit_code == 0
    assert "nothing answers at http://127.0.0.1:9" in result.stderr
    assert "ledger-1: 100 requests" in result.stderr


def test_a_damaged_one_in_a_folder_is_told(ledgers, tmp_path):
    folder = tmp_path / "of-both"
    folder.mkdir()
    good = (ledgers / "a.sqlite").read_bytes()
    (folder / "a.sqlite").write_bytes(good)
    (folder / "damaged.sqlite").write_bytes(good[:16] + b"\xff" * (len(good) - 16))
    result = invoke("incident", folder, "--out", "i.zip")
    assert result.exit_code == 0
    assert "damaged.sqlite" in result.stderr
    assert "ledger-1: 100 requests" in result.stderr
    (folder / "a.sqlite").write_bytes(good[:16] + b"\xff" * (len(good) - 16))
    result = invoke("incident", folder, "--out", "i.zip")
    assert result.exit_code == 2
    assert (result.stderr.count("a.sqlite"), result.stderr.count("damaged.sqlite")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("incident", "http://127.0.0.1:9"), 4, "Its ledger file tells of it too"),
        (("incident", "missing.sqlite"), 2, "no ledger file"),
        (("incident", "."), 2, "no ledger file in ."),
        (("incident", "a.sqlite", "--since", "yesterday"), 2, "'yesterday' is no time"),
        (("incident", "a.sqlite", "--since", "2026-02-01", "--until", "2026-01-01"), 2, "later than --until"),
        (("incident", "a.sqlite", "--max-bytes", "9"), 2, "bound is too small"),
        (("incident", "a.sqlite", "--max-bytes", "much"), 2, "'much' is no size"),
        (("doctor", __file__, "--source", "server-1"), 2, "is no incident"),
    ],
)
def test_what_cannot_be(words, code, told):
    result = invoke(*words)
    assert result.exit_code == code, result.stderr
    assert told in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_time_with_a_zone_is_that_instant(ledgers):
    from splittime.cli.incident import _unix_s

    assert _unix_s("2026-11-27T10:00+01:00", "since") == _unix_s("2026-11-27T09:00", "since") == 1795770000
