"""What the doctor says of twelve real servers of another kind, replayed: nine sick ones and three healthy ones.

Recorded from vLLM 0.32.0 on two cores (benchmarks/scenarios/foreign_servers.py --record): a run of the load, a look at
the live server meanwhile (gauges and counters only), and a look at the idle server after it, which is probed.
"""

import gzip
from pathlib import Path

import msgspec
import pytest

from benchmarks.scenarios.foreign_cases import CASES
from benchmarks.scenarios.foreign_servers import WAYS, told
from splittime.bench.book.records import Run
from splittime.diagnose.books import books_from_run
from splittime.diagnose.doctor import diagnose

FOLDER = Path(__file__).parent / "foreign"
SICK = [case for case in CASES if not case.is_healthy]
WELL = [case for case in CASES if case.is_healthy]
OPPOSED = (
    {"reported_budget", "reported_interference"},
    {"reported_slots", "reported_kv"},
    {"reported_slots", "reported_queue"},
    {"reported_kv", "reported_queue"},
)


def books(case, way: str):
    runs = msgspec.json.decode(gzip.decompress((FOLDER / f"{case.name}.json.gz").read_bytes()), type=dict[str, Run])
    return books_from_run(runs[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", WELL, ids=lambda case: case.name)
def test_a_healthy_server_is_healthy(case, way):
    diagnosis = diagnose(books(case, way))
    assert [finding.name for finding in diagnosis.illnesses] == []
    assert diagnosis.could_tell


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", SICK, ids=lambda case: case.name)
@pytest.mark.sample(9)
def test_the_cause_of_a_sick_one_comes_first(case, way):
    """With its own flag in the cure. On an idle server what a load would show is told as worth knowing, or is not
    there."""
    answer = told(case, books(case, way), way)
    assert answer["right"], answer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sample(9)
def test_nothing_contradicts_itself(case, way):
    names = {finding.name for finding in diagnose(books(case, way)).illnesses}
    assert not any(pair <= names for pair in OPPOSED), names


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sample(9)
def test_every_cure_is_of_that_server(case, way):
    for finding in diagnose(books(case, way)).findings:
        assert finding.cure.command is None or finding.cure.command.startswith("vllm serve MODEL ")
