"""What is measured at start: the number of threads, and how many prompt tokens fit in a slice of time."""

import pytest
import tiny_checkpoint

from splittime.runner import threads
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner


@pytest.fixture
def runner(tmp_path):
    tiny_checkpoint.write(tmp_path)
    return TorchRunner.load(RunnerConfig(model_path=str(tmp_path), num_threads=1))


class FakeClock:
    """A step takes what the table says for the threads that are set, in a time of its own."""

    def __init__(self, monkeypatch, ms_by_threads):
        self.ms_by_threads, self.now_ns, self.set = ms_by_threads, 0, None
        monkeypatch.setattr(threads.time, "monotonic_ns", lambda: self.now_ns)

    def set_threads(self, count):
        self.set = count

    def step(self):
        self.now_ns += int(self.ms_by_threads[self.set] * 1e6)


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
    count, reason = threads.choose((clock.step, clock.step), clock.set_threads, cores)
    assert count == clock.set == want
    assert all(f"{tried}: {ms:.2f} and {ms:.2f} ms" in reason for tried, ms in ms_by_threads.items())


def test_what_one_kind_of_step_gains_the_other_may_lose(monkeypatch):
    """The geometric mean decides."""
    for decode_ms, prompt_ms, want in (({1: 1, 2: 1}, {1: 4, 2: 2}, 2), ({1: 1, 2: 2.2}, {1: 4, 2: 2}, 1)):
        decode, prompt = FakeClock(monkeypatch, decode_ms), FakeClock(monkeypatch, prompt_ms)
        clocks = (decode, prompt)
        monkeypatch.setattr(threads.time, "monotonic_ns", lambda clocks=clocks: sum(one.now_ns for one in clocks))

        def set_threads(count, clocks=clocks):
            for clock in clocks:
                clock.set_threads(count)

        assert threads.choose((decode.step, prompt.step), set_threads, 2)[0] == want


def test_prefill_tokens_follow_the_time_that_a_step_takes(runner, monkeypatch):
    assert runner.prefill_tokens_within(10.0) > runner.prefill_tokens_within(1e-9) == 1
    monkeypatch.setattr(threads, "shortest_ns", lambda step, repeats: 10**9)
    assert runner.prefill_tokens_within(0.5) == min(32, runner.resolved.max_model_len) // 2
    assert not len(runner.slots)


def test_measuring_leaves_no_trace(runner):
    runner.choose_threads(2)
    assert runner.resolved.num_threads in (1, 2)
    assert not len(runner.slots)
    for layer in runner.store.layers:
        assert not layer.data[-1].any()  # the block that padding reads
