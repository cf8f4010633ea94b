"""`LLM` tells a diagnosis what a server does: its facts, now and in its ledger, and the parts of its prompts."""

import msgspec
import pytest

from splittime.core.clock import SystemClock
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.engine.machine_time import machine_time
from splittime.engine.tokenizer import Tokenizer
from splittime.ledger.facts import Machine, ServerFacts
from splittime.ledger.prompt_parts import prompt_parts
from splittime.llm import LLM
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.fake import FakeRunner

FOUND = Machine(cpu="fake", threads=1, read_bytes_per_s=1e9, measured_at_unix_ns=5)


@pytest.fixture
def llm(model_folder):
    engine = Engine(Scheduler(SchedulerConfig()), FakeRunner(vocab_size=256), SystemClock())
    return LLM.from_parts(engine, Tokenizer.load(model_folder))


def test_a_runner_that_knows_nothing_tells_nothing(llm):
    assert llm.facts() is None
    assert llm.ledger.facts() is None


def test_facts_with_the_ceilings_measured_when_asked(llm):
    machine = Machine(cpu="fake", threads=1)
    llm.engine.facts = ServerFacts(version="1", model="F", max_model_len=9, settings={"a": 1}, machine=machine)
    llm.engine.measuring = iter([None, None, FOUND])
    assert llm.ledger.facts().machine == machine  # the file's thread does not measure
    llm.engine.configure({"max_num_seqs": 2})
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
    assert output.account.prompt_parts == prompt_parts(prompt) != ()


def test_steps_tell_who_had_run(llm):
    if machine_time() is None:
        pytest.skip("this system does not tell who ran")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    steps = llm.ledger.steps()
    assert all(step.server_ran_ns > 0 and step.others_ran_ns >= 0 for step in steps)
