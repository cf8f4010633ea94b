"""What `splittime --version` and `splittime doctor --self` say of an installation, and of one with faults."""

import json
import socket
from importlib import metadata

import pytest
from typer.testing import CliRunner

from splittime import __version__
from splittime.assemble import installation, model_source
from splittime.cli.main import app
from splittime.kernels.native import check, library

run = CliRunner()
NAMES = ["python", "libraries", "torch", "kernels", "threads", "memory", "model", "port"]


@pytest.fixture(autouse=True)
def no_settings_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setenv("ST_KERNELS_LIBRARY", "/nowhere/kernels.so")
    for cached in (library.library, check.choose_isa):
        cached.cache_clear()
    yield
    for cached in (library.library, check.choose_isa):
        cached.cache_clear()


def by_name(port=0):
    return {entry.name: entry for entry in installation.examine(port)}


def doctor_self():
    result = run.invoke(app, ["doctor", "--self", "--json"])
    return json.loads(result.stdout), result.exit_code


def test_every_part_is_looked_at_and_what_is_not_good_says_what_to_do():
    told, code = doctor_self()
    names = [entry["name"] for entry in told["checks"]]
    assert [name for name in dict.fromkeys(names) if not name.startswith("extra")] == NAMES
    assert told["version"] == __version__
    assert code == told["exit_code"] == any(entry["verdict"] == "bad" for entry in told["checks"])
    assert all(entry["remedy"] for entry in told["checks"] if entry["verdict"] != "ok")


def test_the_kernels_are_those_that_a_start_would_choose():
    try:
        isa, _ = check.choose_isa()
    except library.LibraryMissing:
        pytest.skip("no native kernels here")
    assert run.invoke(app, ["--version"]).stdout.splitlines()[1].startswith(f"kernels: native, {isa} (")
    assert by_name()["kernels"].verdict == "ok"


def test_without_the_kernels_it_says_why_and_how_to_get_them(no_kernels):
    assert "torch CPU kernels, which are slower: cannot load /nowhere" in run.invoke(app, ["--version"]).stdout
    result = run.invoke(app, ["doctor", "--self"], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert "bad  kernels" in result.stdout
    assert "try: apt-get install g++" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_port_that_is_taken_is_a_note_with_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = by_name(port)["port"]
    assert (found.verdict, found.remedy) == ("note", f"splittime serve --port {port + 1}")


def test_more_threads_than_cores_and_settings_that_cannot_be_read_are_bad(monkeypatch):
    monkeypatch.setenv("SPLITTIME_NUM_THREADS", "1000")
    assert by_name()["threads"].verdict == "bad"
    monkeypatch.setenv("SPLITTIME_NUM_THREADS", "many")
    found = by_name()["threads"]
    assert found.verdict == "bad"
    assert "SPLITTIME_NUM_THREADS" in found.found


def test_too_little_memory_and_a_model_that_is_not_there_are_bad(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "MIN_MEMORY_BYTES", 1 << 62)
    monkeypatch.setattr(model_source, "files", lambda _: tmp_path)
    found = by_name()
    assert {found["memory"].verdict, found["model"].verdict} == {"bad"}


REQUIRED = [
    "numpy>=1",
    "no-such-library>=2",
    "msgspec<0.1",
    'never; sys_platform == "none"',
    'matplotlib-x; extra == "plots"',
]


def test_a_library_that_is_missing_or_old_is_named_and_an_extra_is_a_note(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRED)
    found = [entry for entry in installation.examine(0) if entry.name in ("libraries", "extra plots", "extra vllm")]
    assert [(entry.verdict, entry.found.split(",")[0]) for entry in found] == [
        ("bad", "no-such-library is missing"),
        ("bad", f"msgspec is {metadata.version('msgspec')}"),
        ("note", "matplotlib-x is missing"),
    ]
    assert found[-1].remedy == "if it is wanted: pip install 'splittime[plots]'"


def test_a_folder_that_was_not_installed_is_no_fault(monkeypatch):
    def unknown(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", unknown)
    monkeypatch.setattr(metadata, "metadata", unknown)
    found = by_name()
    assert found["libraries"].verdict == "note"
    assert not [name for name in found if name.startswith("extra")]
