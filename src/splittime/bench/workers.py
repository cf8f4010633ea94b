"""Processes that make the load and nothing else; more than one when one cannot read all chunks in time.

The jobs are dealt out, the outcomes merged.

Each worker is this file as a program: it reads its share from standard input, says that it is ready, is told the begin
(CLOCK_MONOTONIC is one clock for all processes of a host), carries the share out and writes counts and outcomes to
standard output. Frames are a length and msgpack. A worker that dies makes the run say so: its requests are UNSENT, and
`Vitals.died` voids the run. Each has a session of its own, so that no signal that is meant for the run reaches it; it
ends with the pipe to the run.
"""

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from splittime.bench import event_loop
from splittime.bench.book.records import Outcome
from splittime.bench.client import unsent
from splittime.bench.event_loop import no_garbage_collection, run_loop
from splittime.bench.load import Load
from splittime.bench.schedule import Job
from splittime.bench.share import LoadCounts, LoadShare, Vitals
from splittime.core.errors import EngineError, SplittimeError
from splittime.core.this_process import num_cores

CHUNKS_PER_S_OF_ONE = 8_000.0  # what one process reads with its event loop mostly idle
NEWS_S = 0.1
START_S = 30.0


class BeginLoad(msgspec.Struct, tag=True):
    begin_ns: int


class Stop(msgspec.Struct, tag=True):
    why: str


class WorkerReady(msgspec.Struct, tag=True):
    pass


class CountsUpdate(msgspec.Struct, tag=True):
    counts: LoadCounts


class Done(msgspec.Struct, tag=True):
    outcomes: list[Outcome]
    vitals: Vitals


ToWorker = BeginLoad | Stop
FromWorker = WorkerReady | CountsUpdate | Done


def num_workers(asked: int | None, jobs: Sequence[Job]) -> int:
    """As many as asked for; else as the expected rate of chunks needs, if there are cores for them."""
    if asked is not None:
        return max(1, asked)
    return max(1, min(-(-int(expected_chunks_per_s(jobs)) // int(CHUNKS_PER_S_OF_ONE)), num_cores() - 1))


def expected_chunks_per_s(jobs: Sequence[Job]) -> float:
    """Returns what an open loop brings if each token comes as a chunk and the server keeps up; 0 for a closed loop,
    whose rate is not known."""
    instants = [job.at_ns for job in jobs if job.at_ns is not None]
    if len(instants) < 2 or max(instants) == min(instants):
        return 0.0
    tokens = sum(job.planned.output_tokens for job in jobs)
    return tokens / ((max(instants) - min(instants)) / 1e9)


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


async def read_frame(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Raises `asyncio.IncompleteReadError` at the end of the stream."""
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


class WorkerProcess:
    """One worker, seen from the run."""

    def __init__(self, share: LoadShare) -> None:
        self._share = share
        self._process: asyncio.subprocess.Process | None = None
        self._counts = LoadCounts()

    async def prepare(self) -> None:
        """Returns when it is ready for the begin. Raises `EngineError`."""
        command = [sys.executable, "-m", "splittime.bench.workers"]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=2**20, start_new_session=True
        )
        self._write(self._share)
        try:
            await asyncio.wait_for(self._read(), START_S)
        except TimeoutError:
            raise _not_started(f"it was not ready within {START_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _not_started(f"it ended with status {await self._process.wait()}") from None

    async def run(self, begin_ns: int) -> tuple[list[Outcome], Vitals]:
        assert self._process is not None
        self._write(BeginLoad(begin_ns))
        try:
            while True:
                message = await self._read()
                if isinstance(message, Done):
                    return message.outcomes, message.vitals
                if isinstance(message, CountsUpdate):
                    self._counts.add(message.counts)
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._dead(await self._process.wait())

    def take_counts(self) -> LoadCounts:
        now = self._counts
        self._counts = LoadCounts(in_flight=now.in_flight, is_measured_done=now.is_measured_done)
        return now

    def stop(self, why: str) -> None:
        self._write(Stop(why))

    def _dead(self, status: int) -> tuple[list[Outcome], Vitals]:
        share = self._share
        died = f"worker {share.worker} of the load died with status {status}"
        outcomes = [
            msgspec.structs.replace(unsent(job, share, job.at_ns or 0), error=f"{died}: not known")
            for job in share.jobs
        ]
        return outcomes, Vitals(worker=share.worker, died=died)

    async def _read(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        return await read_frame(self._process.stdout, FromWorker)

    def _write(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame(message))

    async def close(self) -> None:
        """Returns when no process is left."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _not_started(why: str) -> EngineError:
    hint = "What it said stands above. With --workers 1 there is only one."
    return EngineError(f"a worker process of the load did not start: {why}", hint=hint)


# ---- in the worker


async def work() -> None:
    """Carry out one share."""
    reader, write = await _pipes()
    share = await read_frame(reader, LoadShare)
    event_loop.allow()
    load = Load(share, is_alone=False)
    with no_garbage_collection():
        await load.prepare()
        write(WorkerReady())
        begin = await read_frame(reader, ToWorker)
        if isinstance(begin, BeginLoad):
            await _carry_out(load, begin.begin_ns, reader, write)


async def _carry_out(load: Load, begin_ns: int, reader: asyncio.StreamReader, write: Any) -> None:
    listening = asyncio.create_task(_listen(reader, load))
    telling = asyncio.create_task(_tell(write, load))
    outcomes, vitals = await load.run(begin_ns)
    listening.cancel()
    telling.cancel()
    await asyncio.gather(listening, telling, return_exceptions=True)
    write(CountsUpdate(load.take_counts()))
    write(Done(outcomes, vitals))


async def _listen(reader: asyncio.StreamReader, load: Load) -> None:
    try:
        message = await read_frame(reader, ToWorker)
        load.stop(message.why)
    except asyncio.IncompleteReadError:
        load.stop("the run went away")


async def _tell(write: Any, load: Load) -> None:
    while True:
        await asyncio.sleep(NEWS_S)
        write(CountsUpdate(load.take_counts()))


async def _pipes() -> tuple[asyncio.StreamReader, Any]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    output = os.dup(sys.stdout.fileno())

    def write(message: Any) -> None:
        data = memoryview(frame(message))
        while data:
            data = data[os.write(output, data) :]

    return reader, write


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # the run decides when to stop; if it is gone, the pipes say so
    try:
        run_loop(work())
    except SplittimeError as error:
        sys.exit(str(error))
    except (asyncio.IncompleteReadError, BrokenPipeError):
        sys.exit(1)


if __name__ == "__main__":
    main()
