"""The table of vLLM's releases is of runs of tests, and what is said to be tested is in it."""

import importlib.util
import json
from pathlib import Path

import pytest

from splittime.attach.versions import TESTED

SCRIPT = Path(__file__).parents[2] / "docs" / "vllm_versions.py"


@pytest.fixture(scope="module")
def vllm_versions():
    spec = importlib.util.spec_from_file_location("vllm_versions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(vllm_versions):
    assert vllm_versions.PAGE.read_text() == vllm_versions.page(json.loads(vllm_versions.KNOWN.read_text()))


def test_tested_releases_passed_all_tests_of_the_books(vllm_versions):
    found = json.loads(vllm_versions.KNOWN.read_text())
    assert {version.rpartition(".")[0] for version in found} == set(TESTED)
    for version, parts in found.items():
        for part in ("test_vllm_causes", "test_vllm"):
            assert parts[part]["passed"] > 5, version
            assert parts[part]["failed"] == 0, version


def test_a_failing_part_is_told_as_one(vllm_versions):
    text = vllm_versions.page({"0.9.0": {"test_vllm": {"passed": 3, "failed": 1}}})
    assert "| 0.9.0 | not tried | 3 of 4 tests | not tried |" in text
