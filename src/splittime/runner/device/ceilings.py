"""A card's ceilings: bytes a second of a copy from its memory to itself (read and written), operations a second of a
large product of the scheme that the layers are kept in. Timed by marks on its stream, the best pass of a few."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from splittime.core.facts import Machine
from splittime.kernels.api import Ops, WeightScheme
from splittime.runner.ceilings import Gauge
from splittime.runner.marks import StreamMark

COPY_BYTES = 512 << 20  # many times a card's cache
TOKENS, WIDTH = 4096, 4096
PASSES = 5


class CardGauge(Gauge):
    """A `ceilings.Gauge` of the card that `ops` runs on. `cores` are its multiprocessors."""

    def __init__(self, ops: Ops, scheme: WeightScheme, threads: int, folder: Path | None) -> None:
        super().__init__(ops, scheme, threads, folder)
        card = torch.cuda.get_device_properties(ops.device)
        self._plain = Machine(
            cpu=card.name, cores=card.multi_processor_count, threads=threads, cache_bytes=card.L2_cache_size
        )
        self._sizes = (COPY_BYTES,)
        self._loops = ()
        self._key = self._make_key()

    def _read(self) -> Iterator[tuple[float, ...]]:
        with torch.inference_mode():
            source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._ops.device)
            target = torch.empty_like(source)
            for seconds in self._passes(lambda: target.copy_(source)):
                yield (2 * COPY_BYTES / seconds,)

    def _multiply(self) -> Iterator[tuple[float]]:
        with torch.inference_mode():
            weight = self._ops.pack_linear([torch.randn(WIDTH, WIDTH)], None, self._scheme)
            tokens = torch.randn(TOKENS, WIDTH, device=self._ops.device).to(self._ops.activation_dtype)
            for seconds in self._passes(lambda: self._ops.linear(tokens, weight)):
                yield (2 * TOKENS * WIDTH * WIDTH / seconds,)

    def _passes(self, work: Callable[[], object]) -> Iterator[float]:
        """Seconds, the best so far; the first pass, which compiles, does not count."""
        work()
        best_s = float("inf")
        for _ in range(PASSES):
            begin = StreamMark(self._ops.device)
            work()
            end = StreamMark(self._ops.device)
            end.wait()
            best_s = min(best_s, max(1, end.ns_since(begin)) / 1e9)
            yield best_s
