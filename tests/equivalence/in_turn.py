"""Ranks as threads of this process that compute one at a time and meet at every collective: what several processes do,
without their start, their time-outs and their noise."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from splittime.models.ranks import Ranks

PATIENCE_S = 60


class Table:
    def __init__(self, count: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(count, timeout=PATIENCE_S)
        self.parts: list[Any] = [None] * count


class Seat:
    """One rank's, a `models.ranks.Ranks`."""

    def __init__(self, table: Table, index: int, count: int) -> None:
        self.table, self.index, self.count = table, index, count

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(part.clone())
        return part.copy_(torch.stack(parts).sum(0))

    def join(self, columns: torch.Tensor, total: int) -> torch.Tensor:
        joined = torch.cat(self._exchange(columns), dim=1)
        assert joined.shape[1] == total
        return joined

    def each(self, number: int) -> list[int]:
        return self._exchange(number)

    def _exchange(self, part: Any) -> list[Any]:
        table = self.table
        table.parts[self.index] = part
        table.turn.release()
        try:
            table.barrier.wait()
            parts = list(table.parts)
            table.barrier.wait()  # none writes its next part before all have read these
        finally:
            table.turn.acquire()
        return parts


def in_turn(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns on every rank; raises what the first rank to fail raised."""
    table = Table(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def live(index: int) -> None:
        with table.turn:
            try:
                results[index] = work(Seat(table, index, count))
            except BaseException as error:
                errors.append(error)
                table.barrier.abort()

    threads = [threading.Thread(target=live, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
