"""What only a card runs of `benchmarks.gpu.card` and `profiled`, over stand-ins for events, graphs and the profiler."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import card
from benchmarks.gpu.profiled import profiled


class Event:
    """The stream's time is how many launches there were, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Graph:
    """Replays as many launches as were captured."""

    captured = 0

    def replay(self) -> None:
        Event.now += self.captured


def launch() -> None:
    Event.now += 1


@pytest.fixture
def stand_ins(monkeypatch):
    @contextlib.contextmanager
    def capture(graph):
        before = Event.now
        yield
        graph.captured, Event.now = Event.now - before, before

    for name, made in {"is_available": lambda: True, "Event": Event, "CUDAGraph": Graph, "graph": capture,
                       "synchronize": lambda: None, "empty_cache": lambda: None}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, made)


def test_a_launch_is_timed_without_the_host(stand_ins):
    assert card.scale() is card.CARD
    assert card.median_us(launch) == pytest.approx(1000)
    assert card.median_us(launch, launches=3) == pytest.approx(1000)
    assert card.median_event_us(lambda: (launch(), launch())) == pytest.approx(2000)
    assert card.some(range(9)) == list(range(9))
    assert card.place() == torch.device("cuda")
    card.forget()


def test_a_process_that_compiles_runs_its_share_once(stand_ins, monkeypatch):
    monkeypatch.setattr(card, "compiling", [card.Share(1, 3)])
    ran = []
    assert [card.median_us(lambda number=number: ran.append(number)) for number in range(7)] == [1.0] * 7
    assert ran == [1, 4]


class Profiler:
    def __init__(self, activities) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def events(self):
        def event(name, begin, end, kind):
            return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=begin, end=end))

        on_card, off_it = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
        return [event("a", 0, 10, on_card), event("cudaLaunch", 0, 90, off_it), event("b", 30, 40, on_card)]


def test_what_the_profiler_saw(stand_ins, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    found: dict = {}
    with profiled(found):
        launch()
    assert found == {"idle": pytest.approx(0.5), "ms": 0.04, "kernels_ms": {"a": 0.01, "b": 0.01}}


def test_a_profiler_that_may_not_look_is_told(stand_ins, monkeypatch, capsys):
    class Refused(Profiler):
        def start(self) -> None:
            raise RuntimeError("no counters")

    monkeypatch.setattr(torch.profiler, "profile", Refused)
    found: dict = {}
    with profiled(found):
        launch()
    assert found == {}
    assert "no counters" in capsys.readouterr().err
