"""`LLM` tells a diagnosis what a server does: its facts, now and in its ledger, and the parts of its prompts."""

import msgspec
import pytest

from benchmarks.fake_runner import FakeRunner
from splittime.core.facts import Machine
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import EngineParts
from splittime.drive.host_time import machine_time
from splittime.engine.engine import Engine
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import prompt_hashes
from splittime.llm import LLM
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer

FOUND = Machine(cpu="fake", threads=1, read_bytes_per_s=1e9, measured_at_unix_ns=5)


@pytest.fixture
def llm(model_folder):
    return LLM.from_parts(parts(), Tokenizer.load(model_folder))


def parts(**known) -> EngineParts:
    return EngineParts(Engine(Scheduler(SchedulerConfig())), FakeRunner(vocab_size=256), **known)


def test_a_runner_that_knows_nothing_tells_nothing(llm):
    assert llm.facts() is None
    assert llm.ledger.facts() is None


def test_facts_with_the_ceilings_measured_when_asked(model_folder):
    machine = Machine(cpu="fake", threads=1)
    told = ServerFacts(version="1", model="F", max_model_len=9, settings={"a": 1}, machine=machine)
    llm = LLM.from_parts(parts(facts=told, measuring=iter([None, None, FOUND])), Tokenizer.load(model_folder))
    assert llm.ledger.facts().machine == machine  # the file's thread does not measure
    llm.crank.configure({"max_num_seqs": 2})
    facts = llm.facts()
    assert facts.machine == FOUND
    assert (facts.model, facts.settings["a"], facts.settings["max_num_seqs"]) == ("model", 1, 2)
    [process] = facts.processes
    assert process.name == "llm"
    assert process.started_ns <= process.ready_ns
    assert llm.ledger.facts() == facts == llm.facts()
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ServerFacts) == facts


def test_accounts_hold_the_parts_of_their_prompts(llm):
    prompt = [number % 250 for number in range(300)]
    [output] = llm.generate([prompt], SamplingParams(max_tokens=2))
    assert output.account.prompt_parts == prompt_hashes(prompt).parts != ()


def test_steps_tell_who_had_run(llm):
    if machine_time() is None:
        pytest.skip("this system does not tell who ran")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    steps = llm.ledger.steps()
    assert all(step.server_ran_ns > 0 and step.others_ran_ns >= 0 for step in steps)


@pytest.mark.parametrize("num_threads", [1, None])
def test_who_loads_is_told_what_is_done_and_how_far_it_has_come(num_threads):
    told = []
    made = LLM(
        max_num_seqs=1,
        packed_cache="off",
        num_threads=num_threads,
        on_loading=lambda words, share: told.append((words, share)),
    )
    measured = ["measuring"] if num_threads is None and "measured in" in made.resolved["num_threads_reason"] else []
    assert list(dict.fromkeys(words.split()[0] for words, _ in told)) == ["layer", *measured, "warming"]
    shares = [share for _, share in told]
    assert told[0][0].startswith("layer 1 of ")
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] < 1  # the warm-up comes after the last layer
