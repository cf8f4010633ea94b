"""What is measured at start: the number of threads, and what a prompt's token takes; by a clock of its own."""

import random

import msgspec
import pytest
import tiny_checkpoint

from splittime.runner import start_memory
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.start_memory import choose_threads, prefill_tokens_within


@pytest.fixture
def runner(tmp_path):
    tiny_checkpoint.write(tmp_path)
    return load_torch_runner(RunnerConfig(model_path=str(tmp_path), num_threads=1, packed_cache="off"))


class FakeClock:
    """A step takes what the table says for the threads that are set, times what `noise` says of the moment."""

    def __init__(self, monkeypatch, ms_by_threads, noise=lambda: 1.0):
        self.ms_by_threads, self.now_ns, self.set, self.noise = ms_by_threads, 0, None, noise
        monkeypatch.setattr(start_memory.time, "monotonic_ns", lambda: self.now_ns)

    def set_threads(self, count):
        self.set = count

    def step(self):
        self.now_ns += int(self.ms_by_threads[self.set] * self.noise() * 1e6)


def choose(clock, cores=2):
    return start_memory.quickest_count({"a step": clock.step, "another": clock.step}, clock.set_threads, cores)


@pytest.mark.parametrize(
    ("ms_by_threads", "cores", "want"),
    [
        ({1: 10}, 1, 1),
        ({1: 10, 2: 6}, 2, 2),
        ({1: 10, 2: 9.5}, 2, 1),  # not worth a core
        ({1: 10, 2: 300}, 2, 1),
        ({1: 10, 2: 6, 4: 3.5, 6: 3.4}, 6, 4),  # the last one is not a power of two
        ({1: 10, 2: 12, 4: 5}, 4, 4),  # worse, then better
    ],
)
def test_as_many_threads_as_pay(monkeypatch, ms_by_threads, cores, want):
    clock = FakeClock(monkeypatch, ms_by_threads)
    found = choose(clock, cores)
    reason = found.reason
    assert found.threads == clock.set == want
    assert all(f"{tried}: {ms:.2f} and {ms:.2f} ms" in reason for tried, ms in ms_by_threads.items())


def test_what_one_kind_of_step_gains_the_other_may_lose(monkeypatch):
    """The geometric mean decides."""
    for decode_ms, prompt_ms, want in (({1: 1, 2: 1}, {1: 4, 2: 2}, 2), ({1: 1, 2: 2.2}, {1: 4, 2: 2}, 1)):
        decode, prompt = FakeClock(monkeypatch, decode_ms), FakeClock(monkeypatch, prompt_ms)
        clocks = (decode, prompt)
        monkeypatch.setattr(start_memory.time, "monotonic_ns", lambda clocks=clocks: sum(one.now_ns for one in clocks))

        def set_threads(count, clocks=clocks):
            for clock in clocks:
                clock.set_threads(count)

        found = start_memory.quickest_count({"decode": decode.step, "prompt": prompt.step}, set_threads, 2)
        assert found.threads == want


@pytest.mark.parametrize(("ms_by_threads", "want"), [({1: 1, 2: 0.98}, 1), ({1: 1, 2: 1.05}, 1), ({1: 1, 2: 0.6}, 2)])
def test_noise_does_not_choose(monkeypatch, ms_by_threads, want):
    """Fifty starts on a machine where a third of all steps takes up to three times its time."""
    dice = random.Random(0)

    def noise():
        return dice.uniform(1, 3) if dice.random() < 0.3 else dice.uniform(1, 1.05)

    assert {choose(FakeClock(monkeypatch, ms_by_threads, noise)).threads for _ in range(50)} == {want}


def test_a_clear_case_is_short_and_a_doubtful_one_ends(monkeypatch):
    clear = FakeClock(monkeypatch, {1: 10, 2: 6})
    assert f"in {start_memory.MIN_ROUNDS} rounds" in choose(clear).reason
    turns = iter(range(10**6))
    doubtful = FakeClock(monkeypatch, {1: 10, 2: 9}, lambda: 1.2 if next(turns) // 8 % 2 else 0.9)
    choose(doubtful)
    assert doubtful.now_ns < (start_memory.ROUNDS_BUDGET_S + 0.2) * 1e9


def test_prefill_tokens_follow_the_time_that_a_step_takes(runner, monkeypatch):
    assert prefill_tokens_within(runner, 10.0) > prefill_tokens_within(runner, 1e-9) == 1
    monkeypatch.setattr(start_memory, "_time_ns", lambda step, num_threads: 1e9)
    assert prefill_tokens_within(runner, 0.5) == 128 // 2  # the longest that this model takes
    assert "took 1000.00 ms, the shortest of 3 runs, the next 0% more" in runner.resolved.prefill_reason
    assert not len(runner.slots)


def test_a_prompt_is_timed_until_its_shortest_is_confirmed(runner, monkeypatch):
    taken_ms = iter([300, 500, 500, 310, 400, 302, 990])  # of 32 tokens and 64, then of 32
    monkeypatch.setattr(start_memory, "_time_ns", lambda step, num_threads: next(taken_ms) * 1e6)
    prefill_tokens_within(runner, 1.0)
    assert "took 302.00 ms, the shortest of 4 runs" in runner.resolved.prefill_reason


def test_a_prompt_is_doubled_while_that_makes_it_cheaper(runner, monkeypatch):
    taken_ms = iter([60, 70, 105, 200, 100, 100, 100])  # of 32, 64, 128 and 256 tokens, then three of 128
    monkeypatch.setattr(start_memory, "_time_ns", lambda step, num_threads: next(taken_ms) * 1e6)
    runner.resolved = msgspec.structs.replace(runner.resolved, max_model_len=1024, max_num_batched_tokens=1024)
    assert prefill_tokens_within(runner, 1.0) == 1280
    assert "a prompt of 128 tokens took 100.00 ms" in runner.resolved.prefill_reason
    assert not len(runner.slots)


def test_no_prompt_is_timed_that_a_step_could_not_have(runner, monkeypatch):
    monkeypatch.setattr(start_memory, "_time_ns", lambda step, num_threads: 1e9)
    for limit in ("max_num_batched_tokens", "max_model_len"):
        limits = {"max_num_batched_tokens": 1024, "max_model_len": 1024, limit: 40}
        runner.resolved = msgspec.structs.replace(runner.resolved, **limits)
        assert prefill_tokens_within(runner, 1.0) == 32
    runner.resolved = msgspec.structs.replace(runner.resolved, max_num_batched_tokens=8)
    assert prefill_tokens_within(runner, 1.0) == 8


def test_measuring_leaves_no_trace(runner):
    choose_threads(runner, 2)
    assert runner.resolved.num_threads in (1, 2)
    assert "ms of a decode step of 1, of 16, a prompt of 32 by threads" in runner.resolved.num_threads_reason
    assert not len(runner.slots)
    for layer in runner.store.layers:
        assert not layer.data[-1].any()  # the block that padding reads
