"""The collectives of the ranks that share a model, by torch.distributed: gloo on the CPU, over loopback alone, and NCCL
between cards.

A group of its own, not torch's global one, which belongs to whoever's process this is. Ranks meet by a file in a folder
that only their user can read; ports are chosen by the system.

Every rank gets the same bits from a sum: in gloo's ring each piece is added up by one rank and copied to the others.
So what follows is computed alike everywhere, and experts are chosen alike (`test_parallel_group` compares the bits).

Nothing waits for ever: a rank that is not there after `timeout_s` is taken for hung (`RankLost`). How long ranks take
to load is not bounded here: they meet (`meet`) when each has its weights. With NCCL the host does not wait, the card
does: a dead rank's comrades are let go by `abort`, and torch's own watchdog ends a process whose time is up. (NCCL has
not been run yet: it refuses two ranks on one card.)
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from splittime.core.errors import ConfigError, EngineError
from splittime.models.weights.shards import bounds, widest
from splittime.runner import machine
from splittime.runner.config import RunnerConfig
from splittime.runner.marks import StreamMark

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 120.0
GLOO_THREADS = 2  # with one a sum of 512 numbers took 6 to 10 ms between two busy cores, with two or four 1 ms
CPU = torch.device("cpu")


class RankLost(EngineError):
    """A collective did not come about: another rank died or hangs. `members` finds out which."""


class RankGroup:
    """A `models.ranks.Ranks`. meet: called once, before the first collective: returns when every rank is about to
    connect. device: of the tensors; a card is one rank's alone."""

    def __init__(
        self,
        index: int,
        count: int,
        folder: Path,
        timeout_s: float,
        meet: Callable[[], None],
        device: torch.device = CPU,
    ) -> None:
        self.index = index
        self.count = count
        self.folder = folder
        self.device = device
        self._timeout_s = timeout_s
        self._meet = meet
        self._backend: Any = None  # a ProcessGroup of either kind
        self._spans: list[tuple[StreamMark, StreamMark]] = []

    def sum(self, part: Tensor) -> Tensor:
        backend, begin = self._connected(), StreamMark(self.device)
        self._wait(backend.allreduce([part]))
        self._note(begin)
        return part

    def join(self, columns: Tensor, total: int) -> Tensor:
        width = widest(total, self.count)
        padded = F.pad(columns, (0, width - columns.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        backend, begin = self._connected(), StreamMark(self.device)
        self._wait(backend.allgather([parts], [padded]))
        self._note(begin)
        places = (bounds(total, index, self.count) for index in range(self.count))
        return torch.cat([part[:, : end - begin] for part, (begin, end) in zip(parts, places, strict=True)], dim=1)

    def each(self, number: int) -> list[int]:
        own = torch.tensor([number], device=self.device)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        self._wait(self._connected().allgather([parts], [own]))
        return [int(part) for part in parts]

    def take_ns(self) -> int:
        """Returns what sums and joins took since it was last asked, which must be done by now; of the first rank alone,
        which is the one that is asked."""
        spans, self._spans = self._spans, []
        return sum(end.ns_since(begin) for begin, end in spans)

    def set_timeout(self, timeout_s: float) -> None:
        """How long this rank waits for the others from now on."""
        self._timeout_s = timeout_s
        if self._backend is not None:
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Another rank is dead: let a card go that waits for it. (gloo notices by itself.) Any thread."""
        if self._backend is not None and self.device.type != CPU.type:
            self._backend.abort()

    def _connected(self) -> Any:
        if self._backend is None:
            self._meet()
            try:
                self._backend = self._connect()
            except RuntimeError as error:
                raise RankLost(f"rank {self.index} cannot connect to the others: {error}") from error
            self.set_timeout(self._timeout_s)
        return self._backend

    def _connect(self) -> Any:
        store = dist.FileStore(str(self.folder / "ranks"), self.count)
        is_card = self.device.type != CPU.type
        kind: Any = dist.ProcessGroupNCCL if is_card else dist.ProcessGroupGloo
        options = kind.Options() if is_card else kind._Options()
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        if not is_card:
            options._devices, options._threads = [kind.create_device(hostname=LOOPBACK)], GLOO_THREADS
        return kind(store, self.index, self.count, options)

    def _note(self, begin: StreamMark) -> None:
        if self.index == 0:
            self._spans.append((begin, StreamMark(self.device)))

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # torch's word for all that can go wrong here
            raise RankLost(f"rank {self.index} waits for the others in vain: {error}") from error


def device_of(config: RunnerConfig, index: int) -> torch.device:
    """Returns a rank's device: where the kernels are a card's, a card of its own, by its number, which is made this
    process's; else the CPU. Raises `ConfigError` where there are fewer cards than ranks."""
    if not torch.cuda.is_available() or machine.choose_kernels(config.kernels)[0] != "triton":
        return CPU
    from splittime.kernels.triton.device import is_interpreted

    if is_interpreted():
        return CPU
    cards, count = torch.cuda.device_count(), config.tensor_parallel_size
    if cards < count:
        message = f"tensor_parallel_size is {count}, but there are {cards} cards"
        raise ConfigError(message, param="tensor_parallel_size", value=count, limit=cards)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
