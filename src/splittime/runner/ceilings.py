"""The machine's ceilings, measured with the server's own number of threads: bytes read a second, operations a second of
the product that the weights use, and the most operations a second that the processor has for such numbers.

    read        each of `READ_SIZES`, over and over, and memory that was taken out of every cache before (`BEYOND`)
    product     of `TOKENS` tokens by the server's own kernels, operands in the cache: what its steps attain
    peak        the fastest instructions that the processor has for such numbers, tiles included: what they could

Reads and peak are hand loops, no kernel of ours (`kernels.native.peaks`), the fastest of several; where there are no
native kernels reads are sums by torch, and there is no peak. It is always the best pass that counts.

What they are worth: two virtual cores of one machine read 31 GB/s at one time and 18 some minutes later, for all
programs alike (a neighbour's doing), so a share of a ceiling may be wrong by a factor of 1.7 either way. A program that
runs beside the measurement takes its part of it: half of the operations, on two cores. So what counts is the best of
what was measured in `MAX_AGE_S`, and a start measures again when the last time is `RENEW_AFTER_S` ago.

Why several sizes: a step reads its weights and keys again and again, and how fast that goes depends on how many bytes
they are. The cache that the machine reports says little: a virtual machine of two cores was told of 480 MiB that it
shared with others, and read 300 MiB at 7 GB/s. What memory itself gives is therefore not measured by its size.

The figures are kept beside the packed weights, by processor, cores, threads, kernels and scheme. It takes some tenths
of a second, in pieces of some milliseconds while nobody is served (`drive.loop`): a pass reads the memory in parts of
`PART_BYTES`, each a piece, and takes the sum of their times.

The ceilings of this machine's processor, measured now, for plans of servers that were never started.

A card's ceilings: bytes a second of a copy from its memory to itself (read and written), operations a second of a
large product of the scheme that the layers are kept in. Timed by marks on its stream, the best pass of a few.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from splittime.core import files, this_process
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.native import peaks
from splittime.kernels.native.library import LibraryMissing
from splittime.models.quant.plan import QUANTIZATIONS, choose
from splittime.runner import machine
from splittime.runner.marks import StreamMark

log = logging.getLogger("splittime.runner")

FILE_NAME = "ceilings.json"
MAX_AGE_S = 3 * 24 * 3600
Found = tuple[int, tuple[float, ...], float, float]
"""When (unix ns), bytes read a second by size, operations a second of products, at the peak; 0 for what failed."""
RENEW_AFTER_S = 3600
READ_SIZES = (4 << 20, 16 << 20, 64 << 20, 256 << 20)
BEYOND = 1 << 30  # from so many bytes on, memory's own rate holds
TOUCH_BYTES = 2 << 20
TOUCH_S = 0.006  # a piece: a fresh page takes a virtual machine 1 to 4 ms a MiB
PART_BYTES = 64 << 20  # read in one piece: some milliseconds, a hundred times what it takes to wake the threads
PAGE_BYTES = 4096
PASSES = 5
READ_PASSES = 3  # of each of several loops
PEAK_S, TRIAL_ROUNDS = 0.002, 10_000  # a piece: long beside the waking of threads
TOKENS, WIDTH = 128, 1024
ARITHMETIC = {"float32": (peaks.FLOAT32,), "int8": (peaks.INT8,), "int4": (peaks.INT8,)}  # others: see `_peak`
FILLING = 60  # two of it are 0.0115 as a bfloat16: nothing here is zero, infinite or denormal


class Gauge:
    """Measures the ceilings for one backend, scheme of weights and number of threads.

    folder: where they are kept; None for nowhere."""

    def __init__(self, ops: Ops, scheme: WeightScheme, threads: int, folder: Path | None) -> None:
        self._ops, self._scheme = ops, scheme
        self._path = None if folder is None else folder / FILE_NAME
        self._loops = _loops()
        self._sizes: tuple[int, ...] = (*READ_SIZES, BEYOND) if self._loops and peaks.can_forget() else READ_SIZES
        self._plain = machine.without_ceilings(threads)
        self._key = self._make_key()

    def known(self) -> Machine:
        """The best of what earlier starts measured lately; without figures if none did."""
        return self._best(recall(self._path).get(self._key, []))

    def is_due(self) -> bool:
        """Returns whether it is time to measure again."""
        return time.time_ns() - (self.known().measured_at_unix_ns or 0) > RENEW_AFTER_S * 10**9

    def measure(self) -> Iterator[Machine | None]:
        """Each `next` is a short piece of the work, the last one yields the result and keeps it. Does not raise: what
        could not be measured is None."""
        best: list[tuple[float, ...]] = []
        for way in (self._read, self._multiply, self._peak):
            best.append(())
            try:
                for rates in way():
                    best[-1] = rates
                    yield None
            except (MemoryError, RuntimeError) as error:  # torch's words for no memory are a RuntimeError
                log.warning("a ceiling of the machine could not be measured: %s", error)
        found = (time.time_ns(), best[0] or (0.0,) * len(self._sizes), (*best[1], 0.0)[0], (*best[2], 0.0)[0])
        yield self._best(
            [found] if self._path is None or not _is_whole(found) else remember(self._path, self._key, found)
        )

    def _read(self) -> Iterator[tuple[float, ...]]:
        """Bytes a second of each size, the best so far; none while the memory is being touched."""
        memory = self._allocate(max(READ_SIZES))
        touched_s = 0.0
        for piece in memory.split(TOUCH_BYTES):
            # a page that was never written is the one page of zeros, and always in the cache
            touched_s += _seconds(partial(piece.fill_, FILLING))
            if touched_s > TOUCH_S:
                yield ()
                touched_s = 0.0
        best = dict.fromkeys(self._sizes, 0.0)
        with ThreadPoolExecutor(self._plain.threads) as threads, torch.inference_mode():
            for size in self._sizes:
                way = self._read_beyond if size == BEYOND else self._read_over_and_over
                for rate in way(memory[:size], threads):
                    best[size] = rate
                    yield ()
        yield tuple(best.values())

    def _read_over_and_over(self, memory: Tensor, threads: ThreadPoolExecutor) -> Iterator[float]:
        """Bytes a second, the best so far, after each piece. What is small is read several times in a piece."""
        best_s, times = float("inf"), max(1, PART_BYTES // len(memory) // 4)
        for reads in zip(*(self._reads(part, threads) for part in memory.split(PART_BYTES)), strict=True):
            for _ in range(READ_PASSES):
                pass_s = 0.0
                for before, read in zip((reads[-1], *reads), reads, strict=False):
                    yield len(memory) / best_s
                    _repeat(before, times)  # untimed: cores and threads wake, and the cache holds what it would then
                    pass_s += _seconds(partial(_repeat, read, times)) / times
                best_s = min(best_s, pass_s)
        yield len(memory) / best_s

    def _read_beyond(self, memory: Tensor, threads: ThreadPoolExecutor) -> Iterator[float]:
        """Read memory that no cache holds; forgetting it wakes cores and threads."""
        best_s = float("inf")
        for reads in zip(*(self._reads(part, threads) for part in memory.split(PART_BYTES)), strict=True):
            pass_s = 0.0
            for part, read in zip(memory.split(PART_BYTES), reads, strict=True):
                yield len(memory) / best_s
                _all(threads, peaks.forget, self._shares(part))
                pass_s += _seconds(read)
            best_s = min(best_s, pass_s)
        yield len(memory) / best_s

    def _reads(self, part: Tensor, threads: ThreadPoolExecutor) -> list[Callable[[], object]]:
        """Ways to read the part: one for each loop that reads."""
        if not self._loops:
            return [part.view(torch.float32).sum]  # torch has its own threads
        shares = self._shares(part)
        return [partial(_all, threads, loop.read, shares) for loop in self._loops if loop.kind == peaks.READ]

    def _shares(self, part: Tensor) -> Sequence[Tensor]:
        """Cut the part, one share for each thread, in whole pages."""
        return part.split(-(-len(part) // (self._plain.threads * PAGE_BYTES)) * PAGE_BYTES)

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._ops.name != "native":
            return torch.empty(num_bytes, dtype=torch.uint8)
        from splittime.kernels.native.memory import allocate

        return allocate(num_bytes)  # on huge pages, as weights are

    def _multiply(self) -> Iterator[tuple[float]]:
        """Operations a second, the best so far; 0 while the memory that was read is freed, and operands are made."""
        yield (0.0,)
        with torch.inference_mode():
            generator = torch.Generator().manual_seed(0)
            plain = torch.randn(WIDTH, WIDTH, generator=generator)
            yield (0.0,)
            weight = self._ops.pack_linear([plain], None, self._scheme)
            yield (0.0,)
            tokens = torch.randn(TOKENS, WIDTH, generator=generator).to(self._ops.activation_dtype)
            best_s = float("inf")
            for _ in range(1 + PASSES):
                best_s = min(best_s, _seconds(lambda: self._ops.linear(tokens, weight)))
                yield (2 * TOKENS * WIDTH * WIDTH / best_s,)

    def _peak(self) -> Iterator[tuple[float]]:
        """Operations a second of the fastest loop, the best so far; none where there are no loops. A weight of 16 bits
        may be multiplied as such or in float32, whichever is faster."""
        kinds = ARITHMETIC.get(self._scheme.name, (peaks.BFLOAT16, peaks.FLOAT32))
        best = 0.0
        with ThreadPoolExecutor(self._plain.threads) as threads:
            for loop in self._loops:
                if loop.kind not in kinds:
                    continue
                rounds = max(1, round(TRIAL_ROUNDS * PEAK_S / _seconds(partial(loop.multiply, TRIAL_ROUNDS))))
                for _ in range(PASSES):
                    begin_ns = time.monotonic_ns()
                    done = sum(threads.map(loop.multiply, [rounds] * self._plain.threads))
                    best = max(best, done / max(1, time.monotonic_ns() - begin_ns) * 1e9)
                    yield (best,)

    def _best(self, found: Sequence[Found]) -> Machine:
        if not found:
            return self._plain
        times_ns, reads, operations, most = zip(*found, strict=True)
        rates, so_far = [], 0.0
        for size, best in sorted(zip(self._sizes, map(max, zip(*reads, strict=True)), strict=True), reverse=True):
            so_far = max(so_far, best)  # fewer bytes are read as fast at the least
            rates.append((size, so_far))
        return msgspec.structs.replace(
            self._plain,
            read_rates=tuple(reversed(rates)) if rates[0][1] else (),
            read_bytes_per_s=rates[0][1] or None,
            operations_per_s=max(operations) or None,
            peak_operations_per_s=max(*operations, *most) if any(most) else None,
            measured_at_unix_ns=max(times_ns),
        )

    def _make_key(self) -> str:
        plain = self._plain
        facts: list[object] = [plain.cpu, plain.cores, plain.threads, self._sizes, asdict(self._scheme)]
        facts += [
            self._ops.name,
            self._ops.linear_name,
            str(self._ops.activation_dtype),
            machine.kernels_build(self._ops),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _loops() -> tuple[peaks.Loop, ...]:
    try:
        return peaks.loops()
    except LibraryMissing:
        return ()


def _all(threads: ThreadPoolExecutor, work: Callable[[Tensor], object], parts: Sequence[Tensor]) -> None:
    for _ in threads.map(work, parts):
        pass


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _seconds(work: Callable[[], object]) -> float:
    begin_ns = time.monotonic_ns()
    work()
    return max(1, time.monotonic_ns() - begin_ns) / 1e9


# ---- what is kept between starts


def recall(path: Path | None) -> dict[str, list[Found]]:
    """Returns what the file holds that is not too old; of a damaged one, nothing."""
    return _fresh(files.read(path))


def _fresh(memory: dict[str, Any]) -> dict[str, list[Found]]:
    oldest_ns = time.time_ns() - MAX_AGE_S * 10**9
    try:
        lists = {
            key: [
                (int(at_ns), tuple(map(float, reads)), float(own), float(most)) for at_ns, reads, own, most in entries
            ]
            for key, entries in memory.items()
        }
    except (ValueError, TypeError):
        return {}
    believed = {key: [one for one in found if one[0] > oldest_ns and _is_whole(one)] for key, found in lists.items()}
    return {key: found for key, found in believed.items() if found}


def _is_whole(found: Found) -> bool:
    """Say that neither reads nor products failed: a figure that is missing must be measured again at the next start."""
    _, reads, operations, _ = found
    return all(reads) and operations > 0


def remember(path: Path, key: str, found: Found) -> list[Found]:
    """Returns all that is known now."""
    memory = recall(path)
    known = [*memory.get(key, []), found]
    files.write(path, memory | {key: known})
    return known


def measured_processor(precision: str) -> Machine:
    """Returns what the processor reads and multiplies a second with weights in this precision, in under a second; None
    for what could not be measured. Raises ConfigError for a precision that its kernels do not have."""
    is_quantised = precision in QUANTIZATIONS
    plain = "float32" if is_quantised or precision == "float16" else precision
    scheme = choose(precision if is_quantised else None, plain).layers
    ops = _backend(getattr(torch, plain))
    ops.set_threads(this_process.num_cores())
    found = Gauge(ops, scheme, this_process.num_cores(), None)
    return [one for one in found.measure() if one is not None][-1]


def _backend(dtype: torch.dtype) -> Ops:
    try:
        return make_backend("native", dtype)
    except ConfigError:
        return make_backend("torch", dtype)


COPY_BYTES = 512 << 20  # many times a card's cache
CARD_TOKENS, CARD_WIDTH = 4096, 4096


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
            weight = self._ops.pack_linear([torch.randn(CARD_WIDTH, CARD_WIDTH)], None, self._scheme)
            tokens = torch.randn(CARD_TOKENS, CARD_WIDTH, device=self._ops.device).to(self._ops.activation_dtype)
            for seconds in self._passes(lambda: self._ops.linear(tokens, weight)):
                yield (2 * CARD_TOKENS * CARD_WIDTH * CARD_WIDTH / seconds,)

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
