"""What starts remember: the same model on the same machine is measured once, another one anew."""

import json
import logging

import pytest
import tiny_checkpoint

from splittime.core import this_process
from splittime.runner import machine, start_memory
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.start_memory import StartMemory, ThreadCount, prefill_tokens_within


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """The machine is as quiet as these tests say, not as it is."""
    others = [0.0]
    monkeypatch.setattr(machine.Others, "busy_cores", lambda self: others[0])
    return others


@pytest.fixture
def memory(tmp_path):
    return lambda facts=("a cpu", 2), **settings: StartMemory(tmp_path / "made" / "start.json", facts, **settings)


def counted():
    """What measures, and what it has been asked."""
    calls = []

    def measure():
        calls.append(len(calls))
        return ThreadCount(2, "so")

    return measure, calls


def ask(memory, measure, what="threads", more=()):
    return memory.get(what, more, ThreadCount, measure)


def test_the_second_start_asks_no_machine(memory):
    measure, calls = counted()
    assert ask(memory(), measure)[1] == "remembered for the next start"
    again, told = ask(memory(), measure)
    assert again == ThreadCount(2, "so")
    assert told.startswith("remembered from 2")
    assert len(calls) == 1


def test_another_machine_or_model_or_question_is_measured(memory):
    measure, calls = counted()
    for facts, what, more in ((("a cpu", 2), "threads", ()), (("b", 2), "threads", ()), (("a cpu", 2), "prefill", ())):
        ask(memory(facts), measure, what, more)
    ask(memory(), measure, more=(4,))
    assert len(calls) == 4


def test_asked_to_it_measures_again_and_remembers_that(memory):
    measure, calls = counted()
    ask(memory(), measure)
    ask(memory(remeasure=True), lambda: ThreadCount(7, "anew"))
    assert ask(memory(), measure)[0].threads == 7
    assert len(calls) == 1


def test_what_was_measured_beside_others_is_not_kept(memory, calm):
    measure, calls = counted()
    calm[0] = 0.8
    assert "measured beside 0.8 busy cores of others: maybe off, and not kept" in ask(memory(), measure)[1]
    calm[0] = 0.0
    assert ask(memory(), measure)[1] == "remembered for the next start"
    assert len(calls) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"threads x": 1}', "\x00\xff"])
def test_a_damaged_file_is_ignored_with_a_word(tmp_path, caplog, text):
    path = tmp_path / "start.json"
    path.write_text(text)
    measure, calls = counted()
    with caplog.at_level(logging.WARNING):
        ask(StartMemory(path, ()), measure)
    assert len(calls) == 1
    assert bool(caplog.records) == (text[1:2] != '"')
    kept = [entry for entry in json.loads(path.read_text()).values() if isinstance(entry, dict)]
    assert [entry["found"]["threads"] for entry in kept] == [2]


@pytest.mark.parametrize("found", [None, {}, {"threads": 0, "reason": ""}, {"threads": "two", "reason": "so"}])
def test_an_entry_that_makes_no_sense_is_measured_anew(tmp_path, found):
    path = tmp_path / "start.json"
    ask(StartMemory(path, ()), lambda: ThreadCount(2, "so"))
    path.write_text(json.dumps({key: {"at": "then", "found": found} for key in json.loads(path.read_text())}))
    assert ask(StartMemory(path, ()), lambda: ThreadCount(3, "anew"))[0].threads == 3


def test_five_starts_of_a_runner_decide_the_same(tmp_path, monkeypatch):
    tiny_checkpoint.write(tmp_path)
    config = RunnerConfig(model_path=str(tmp_path), packed_cache=str(tmp_path / "cache"))
    monkeypatch.setattr(this_process, "num_cores", lambda: 2)
    found = []
    for _ in range(5):
        runner = load_torch_runner(config)
        found.append((runner.resolved.num_threads, prefill_tokens_within(runner, 0.25)))
        # nobody measures from the second on
        for name in ("quickest_count", "measure_prefill"):
            monkeypatch.setattr(start_memory, name, None)
    assert len(set(found)) == 1
    assert start_memory.NAME in {path.name for path in (tmp_path / "cache").iterdir()}
