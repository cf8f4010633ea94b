"""What the doctor says of real vLLM servers that kept our books, replayed: sick ones and healthy ones.

Recorded from vLLM 0.32.0 on two cores (benchmarks/scenarios/vllm_doctor.py --record): the accounts, the steps and the
facts of each, as `splittime doctor http://...` read them after the load.
"""

import gzip
from pathlib import Path

import msgspec
import pytest
from attached import OUR_WORDS
from test_rules_attached import without_elsewhere

from benchmarks.scenarios.vllm_cases import CASES
from benchmarks.scenarios.vllm_doctor import verdict
from splittime.diagnose.books import Books, make_books
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.words import ATTACHED
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

FOLDER = Path(__file__).parent / "attached_vllm"


class Kept(msgspec.Struct):
    facts: ServerFacts
    accounts: list[ClosedAccount]
    steps: list[StepRecord]


def books(case) -> Books:
    kept = msgspec.json.decode(gzip.decompress((FOLDER / f"{case.name}.json.gz").read_bytes()), type=Kept)
    return make_books(kept.facts, kept.accounts, kept.steps, case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_comes_first_and_the_healthy_have_none(case):
    told = verdict(case, diagnose(books(case)))
    assert told["right"], told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_word_is_of_that_server(case):
    for finding in diagnose(books(case)).findings:
        assert finding.cure.command is None or finding.cure.command.startswith(ATTACHED["vllm"])
        assert not [word for word in OUR_WORDS if word in without_elsewhere(finding)]
