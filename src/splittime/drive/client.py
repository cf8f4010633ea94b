"""What the rest of the world may ask of an engine. `drive.process.ProcessClient` is the one the server uses.

A stream yields `(step_id, ready_ns, RequestOutput)` until the output with a `finish_reason`, which always comes: if the
engine process dies it is made here, with finish reason `error`.
"""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from splittime.core.engine_stats import EngineStats
from splittime.core.request import Request
from splittime.core.sleep import Rest, SleepAsk, SleepReport
from splittime.ledger.facts import ServerFacts
from splittime.scheduler.events import RequestOutput


class StreamItem(NamedTuple):
    step_id: int
    ready_ns: int
    output: RequestOutput


class EngineClient(Protocol):
    @property
    def is_ready(self) -> bool:
        """The engine process is up and warmed; false from its death until its successor is ready."""
        ...

    @property
    def rest(self) -> Rest:
        """Whether it is awake: `submit` refuses unless it is. One that died in its sleep is asleep, and not up."""
        ...

    def submit(self, request: Request) -> None:
        """Hand a request over. Raises `Overloaded` (503) if no engine is up or it is not awake, `Conflict` for an id in
        flight."""
        ...

    def stream(self, request_id: str) -> AsyncIterator[StreamItem]:
        """The outputs of a submitted request, to be read by one reader, ending with the terminal one."""
        ...

    def abort(self, request_id: str) -> None:
        """Ask for its end. Its stream still ends with a terminal output (`abort`, or whatever came first)."""
        ...

    def stats(self) -> EngineStats:
        """The latest gauges, without asking the engine."""
        ...

    def facts(self) -> ServerFacts | None:
        """What the engine is, with its knobs as of now; None before it has said so."""
        ...

    async def configure(self, knobs: dict[str, Any], *, lasts: bool = True) -> dict[str, Any]:
        """Change knobs of the live engine; returns all knobs as they are now. Raises `RequestError` on a bad one.
        A process that succeeds a dead engine is told of what `lasts`."""
        ...

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        """Returns when it is asleep. Raises what kept it awake, `RequestError` for what cannot be asked."""
        ...

    async def wake(self) -> SleepReport:
        """Returns when it serves again. Raises what keeps it asleep."""
        ...
