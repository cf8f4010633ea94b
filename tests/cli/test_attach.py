"""`splittime attach`: what it starts, and what it refuses before anything is started."""

import json

import pytest
from typer.testing import CliRunner

from splittime.attach import command, versions
from splittime.attach.mail import FOLDER, LEDGER_FILE
from splittime.cli.main import app
from splittime.core.errors import ConfigError
from splittime.ledger.store import Ledger


def run(*arguments: str):
    return CliRunner().invoke(app, ["attach", "vllm", *arguments])


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.32.0")


def test_the_command_has_two_flags_more(vllm):
    told = json.loads(run("--dry-run", "--json", "--", "serve", "MODEL", "--port", "1").stdout)
    assert told[3:] == [
        "serve", "MODEL", "--port", "1",
        "--scheduler-cls", "splittime.attach.vllm_scheduler.scheduler",
        "--middleware", "splittime.attach.middleware.WithBooks",
    ]  # fmt: skip


def test_the_ledgers_file_is_named_in_the_environment(vllm, tmp_path):
    found = command.command_of(["serve", "M"], {"A": "b"}, str(tmp_path / "x.sqlite"))
    folder = found.environment[FOLDER]
    assert found.environment == {"A": "b", FOLDER: folder, LEDGER_FILE: str(tmp_path / "x.sqlite")}
    other = command.command_of(["serve", "M"], found.environment)
    assert other.environment[FOLDER] != folder  # two servers share none, whatever is inherited


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["bench", "serve"], "books are kept of `vllm serve`"),
        (["serve", "M", "--scheduler-cls", "a.b"], "names another scheduler"),
        (["serve", "M", "--scheduler-cls=a.b"], "names another scheduler"),
    ],
)
def test_what_cannot_have_books_is_refused(vllm, asked, why):
    with pytest.raises(ConfigError, match=why):
        command.command_of(asked, {})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "not installed"),
        ("0.99.0", "never tested"),
        ("0.2.0", "never tested"),
        ("0.32.1.dev17+g0a1b2c3d4", "this build is none"),
        ("0.32.0rc1", "this build is none"),
    ],
)
def test_a_release_that_no_test_has_run_is_refused(monkeypatch, found, why):
    monkeypatch.setattr(versions, "vllm_version", lambda: found)
    with pytest.raises(ConfigError, match=why):
        versions.require_known()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0.post1"])
def test_a_release_that_tests_have_run_is_taken_whatever_it_was_built_for(monkeypatch, found):
    monkeypatch.setattr(versions, "vllm_version", lambda: found)
    assert versions.require_known() == found


def test_an_untested_release_can_be_tried(monkeypatch):
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.99.0")
    monkeypatch.setenv(versions.UNTESTED, "1")
    assert versions.require_known() == "0.99.0"


def test_a_ledger_that_another_server_writes_is_refused(vllm, tmp_path):
    path = tmp_path / "one.sqlite"
    ledger = Ledger(path)
    result = run("--dry-run", "--ledger-file", str(path), "--", "serve", "M")
    ledger.close()
    assert result.exit_code == 2
    assert run("--dry-run", "--ledger-file", str(path), "--", "serve", "M").exit_code == 0
