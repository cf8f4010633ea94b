"""A lane is shared by key: who asks for much waits for itself."""

import pytest

from splittime.core.errors import Overloaded
from splittime.text import workers as text_workers
from splittime.text.workers import Lane, TextQueue


class Text:
    def __init__(self, tenant: str, size: int, weight: float = 1.0, name: str = "") -> None:
        self.tenant, self.size, self.weight, self.name, self.cause = tenant, size, weight, name, None


class Worker:
    """Is there at once, and works until it is told that it is done."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.pid, self.task = lane, 1, None

    @property
    def is_idle(self) -> bool:
        return self.task is None

    def begin(self, task: Text) -> None:
        self.task = task

    def end(self) -> None:
        pass

    def done(self) -> Text:
        task, self.task = self.task, None
        self.lane.is_idle_now(self, has_served=True)
        return task


def lane_of(most_workers: int, *, is_kept: bool = False) -> Lane:
    class OwnLane(Lane):
        def add_worker(self) -> None:
            self.workers.append(Worker(self))
            self._go_on()

    return OwnLane(None, None, None, most_workers, is_kept=is_kept)


def at_work(lane: Lane) -> list[str]:
    return [worker.task.name for worker in lane.workers if worker.task is not None]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_giant_of_another_key_does_not_wait_for_twelve_of_one(is_kept: bool) -> None:
    lane = lane_of(1, is_kept=is_kept)
    for number in range(12):
        lane.add(Text("greedy", 4_000_000, name=f"g{number}"))
    assert at_work(lane) == ["g0"]
    lane.add(Text("other", 400_000, name="o"))
    assert sorted(at_work(lane)) == ["g0", "o"]
    lane.add(Text("third", 400_000, name="t"))
    next(worker for worker in lane.workers if worker.task.name == "g0").done()
    assert "t" in at_work(lane)


@pytest.mark.parametrize("most_workers", [1, 2])
def test_a_key_alone_has_as_many_workers_as_before(most_workers: int) -> None:
    lane = lane_of(most_workers)
    for number in range(5):
        lane.add(Text("", 10, name=str(number)))
    assert at_work(lane) == [str(number) for number in range(most_workers)]
    order = []
    while at_work(lane):
        order.append(lane.workers[0].done().name)
    assert order == ["0", "1", "2", "3", "4"]


def test_characters_are_shared_by_weight() -> None:
    queue = TextQueue()
    for number in range(40):
        queue.push(Text("heavy", 100, 3.0, f"h{number}"))
        queue.push(Text("light", 100, 1.0, f"l{number}"))
    first = [queue.pop().name[0] for _ in range(40)]
    assert first.count("h") == 30
    assert len(queue) == 40


def test_a_key_that_has_less_than_its_share_is_not_refused_for_anothers_texts(monkeypatch) -> None:
    monkeypatch.setattr(text_workers, "MAX_WAITING_CHARS", 1000)
    queue = TextQueue()
    for _ in range(10):
        queue.require_room(text := Text("greedy", 100))
        queue.push(text)
    with pytest.raises(Overloaded):
        queue.require_room(Text("greedy", 100))
    for _ in range(5):
        queue.require_room(text := Text("other", 100))
        queue.push(text)
    with pytest.raises(Overloaded):
        queue.require_room(Text("other", 100))


def test_a_text_that_is_tried_again_is_its_keys_next() -> None:
    queue = TextQueue()
    for name in ("a", "b"):
        queue.push(Text("k", 10, name=name))
    again = queue.pop()
    queue.push(again, is_first=True)
    assert [queue.pop().name for _ in range(2)] == ["a", "b"]
    assert queue.pop() is None
