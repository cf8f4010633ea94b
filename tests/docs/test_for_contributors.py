"""What CI, Docker, the hooks and CONTRIBUTING.md name is there, under this name."""

import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import yaml

import splittime
from splittime.cli.main import COMMANDS
from splittime.server.app import PATHS

ROOT = Path(__file__).parents[2]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MAKE = re.compile(r"\bmake(?: [A-Z]+=\S+)* ([a-z-]+)")


def text(name):
    return (ROOT / name).read_text()


def targets():
    return set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))


def test_ci_calls_targets_of_the_makefile_and_nothing_else():
    workflow = yaml.safe_load(text(".github/workflows/check.yml"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = [MAKE.fullmatch(command) for command in commands if command != ".ci/run"]
    assert (".ci/run" in commands, {call[1] for call in called}) == (True, {"check"})
    assert targets() >= {call[1] for call in called}
    assert "schedule" in workflow[True]  # YAML reads `on` as true


def test_the_hooks_call_targets_of_the_makefile():
    config = yaml.safe_load(text(".pre-commit-config.yaml"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    assert {MAKE.fullmatch(entry)[1] for entry in entries} == {"format", "lint"}


def test_what_contributing_names_exists():
    words = text("CONTRIBUTING.md")
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", words, re.MULTILINE)) <= targets()
    paths = re.findall(
        r"`((?:src|docs|tests|benchmarks)(?:/[\w.-]+)*|\.?[\w.-]+(?:/[\w.-]+)*\.(?:md|py|yml|yaml|toml|txt))`", words
    )
    assert len(paths) > 15
    not_ours = {"splittime.toml"}  # a user's file
    assert [path for path in paths if path not in not_ours and not find(path)] == []


def find(path):
    return (ROOT / path).exists() or (ROOT / "src/splittime/kernels/native/csrc" / path).exists()


def instructions():
    """The lines of the Dockerfile as (instruction, arguments)."""
    whole = re.sub(r"\\\n\s*", "", text("Dockerfile"))
    return [line.split(maxsplit=1) for line in whole.splitlines() if line and not line.startswith("#")]


def test_the_image_copies_what_is_there_and_is_not_ignored():
    patterns = text(".dockerignore").split()
    kept = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    names = {path for paths in copied for path in paths}
    assert names == kept
    assert [path for path in names if not (ROOT / path).exists()] == []
    assert names >= needed_to_build()
    assert any(fnmatch("x/_kernels.so", pattern) for pattern in patterns if not pattern.startswith("!"))


def needed_to_build():
    """What the build reads: the readme and the licences by name, and every folder of sources."""
    import tomllib

    project = tomllib.loads(text("pyproject.toml"))["project"]
    return {"pyproject.toml", "setup.py", "MANIFEST.in", "src", project["readme"], *project["license-files"]}


def test_the_image_runs_as_a_user_and_asks_the_server_whether_it_is_ready():
    by_name = {}
    for name, rest in instructions():
        by_name.setdefault(name, []).append(rest)
    order = [name for name, _ in instructions()]
    assert by_name["USER"] == ["splittime"]
    assert order.index("USER") < order.index("HEALTHCHECK") < order.index("ENTRYPOINT")
    probe = json.loads(by_name["HEALTHCHECK"][0].partition("CMD ")[2])
    compile(probe[2], "the health check", "exec")
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", probe[2])
    assert ("GET", path) in {route[:2] for route in PATHS}
    assert json.loads(by_name["ENTRYPOINT"][0]) == ["splittime"]
    command, *flags = json.loads(by_name["CMD"][0])
    assert command in COMMANDS
    shown = subprocess.run(
        [sys.executable, "-m", "splittime.cli.main", command, "--help"], capture_output=True, text=True
    )
    assert all(flag in shown.stdout for flag in flags if flag.startswith("--"))


def test_the_changelog_keeps_a_changelogs_form():
    words = text("CHANGELOG.md")
    versions = re.findall(r"^## (.*)", words, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)
    assert len(versions) == 1 or versions[1].startswith(f"[{splittime.__version__}]")
    for section in re.split(r"^## ", words, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)", section, re.MULTILINE)
        assert set(kinds) <= KINDS
        assert len(kinds) == len(set(kinds))
