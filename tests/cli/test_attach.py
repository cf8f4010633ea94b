"""`splittime attach`: what it starts, and what it refuses before anything is started."""

import json
import subprocess

import books
import pytest
from typer.testing import CliRunner

from splittime.attach import versions
from splittime.attach.mail import FOLDER
from splittime.attach.versions import config_of, ledger_of
from splittime.cli import attach
from splittime.cli.main import app
from splittime.core.errors import ConfigError
from splittime.ledger.store import Ledger, LedgerConfig, open_readonly


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


def test_the_ledgers_file_is_named_in_the_environment(vllm, tmp_path, monkeypatch):
    path, ledger = str(tmp_path / "x.sqlite"), LedgerConfig(ledger_file="x.sqlite", max_file_bytes=2**20)
    monkeypatch.chdir(tmp_path)
    found = versions.command_of(["serve", "M"], {"A": "b"}, ledger)
    folder = found.environment[FOLDER]
    assert {name: found.environment[name] for name in ("A", FOLDER)} == {"A": "b", FOLDER: folder}
    assert config_of(found.environment) == LedgerConfig(ledger_file=path, max_file_bytes=2**20)
    other = versions.command_of(["serve", "M"], found.environment)
    assert other.environment[FOLDER] != folder  # two servers share none, whatever is inherited


def test_a_file_is_bounded_in_bytes_unless_one_says_otherwise():
    assert config_of({}) == LedgerConfig()
    told = {"SPLITTIME_MAX_FILE_BYTES": "512MiB", "SPLITTIME_MAX_FILE_STEPS": "7", "SPLITTIME_VLLM_UNTESTED": "1"}
    assert config_of(told) == LedgerConfig(max_file_bytes=2**29, max_file_steps=7)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("MAX_FILE_BYTES", "much", "MAX_FILE_BYTES is 'much'"),
        ("MAX_FILE_STEPS", "1.5", "MAX_FILE_STEPS is '1.5'"),
        ("MAX_FILE_BYTES", "1k", "must be at least"),
        ("MAX_FILE_ACCOUNTS", "0", "must be at least 1"),
    ],
)
def test_a_bound_that_cannot_be_is_refused(name, text, why):
    with pytest.raises(ConfigError, match=why):
        config_of({f"SPLITTIME_{name}": text})


def test_each_process_and_engine_has_a_file_within_the_bounds(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITTIME_LEDGER_FILE", str(tmp_path / "l.sqlite"))
    monkeypatch.setenv("SPLITTIME_MAX_FILE_STEPS", "3")
    for client, engine in ((0, 0), (1, 0), (0, 1), (1, 1)):
        ledger = ledger_of(client, engine)
        for i in range(9):
            ledger.add_step(books.step(i, i * 100))
        ledger.close()
    names = {"l.sqlite", "l.sqlite.1", "l.sqlite.engine1", "l.sqlite.1.engine1"}
    assert {each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")} == names
    for name in names:
        file = open_readonly(tmp_path / name)
        assert [step.step_id for step in file.steps()] == [6, 7, 8]
        file.close()


def test_a_flag_goes_before_the_environment(vllm, monkeypatch, tmp_path):
    """What vLLM's process would read, seen by a command in its place."""
    monkeypatch.setenv("SPLITTIME_MAX_FILE_STEPS", "5")
    monkeypatch.setenv("SPLITTIME_MAX_FILE_ACCOUNTS", "6")
    shown = tmp_path / "seen.json"
    program = f"import json, os; json.dump(dict(os.environ), open({str(shown)!r}, 'w'))"
    monkeypatch.setattr(
        attach.os, "execve", lambda path, arguments, env: subprocess.run([path, "-c", program], env=env)
    )
    assert run("--max-file-steps", "7", "--max-file-bytes", "3GiB", "--", "serve", "M").exit_code == 0
    found = config_of(json.loads(shown.read_text()))
    assert found == LedgerConfig(max_file_steps=7, max_file_accounts=6, max_file_bytes=3 * 2**30)
    assert run("--max-file-bytes", "3", "--", "serve", "M").exit_code == 2


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
        versions.command_of(asked, {})


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
