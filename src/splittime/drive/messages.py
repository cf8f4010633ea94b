"""What crosses between a client and the engine. Values only (msgspec), in both directions.

Client to engine: `Submit`, `Abort`, `Configure`, `Sleep`, `Wake`, `LoadAdapter`, `UnloadAdapter`, `Export`, `Ping`;
`Release`, `Fail`, `Hold` and `BlocksArrived` come from the gates beside the engine's loop, `MaskFound` from the
runner's looks at forms. Engine to client: `Loading` now and then, `Ready` once, then one `StepOutput` for each step
(and for each change while idle), `Measured` when the machine's ceilings are known, `ConfigureDone`, `SleepDone`,
`AdapterLoaded`, `Exported`, `Pong`, `Fatal` as the last word before it dies.
"""

from typing import Any

import msgspec

from splittime.core.engine import BlocksAsk, BlocksTold, EngineStats, Rest, SleepAsk, SleepReport
from splittime.core.errors import ErrorInfo
from splittime.core.facts import Machine
from splittime.core.request import Request
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause
from splittime.ledger.steps import StepRecord
from splittime.scheduler.events import RequestOutput


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All that one step (or one change while idle: then `record` is None) has to tell.

    step_id, ready_ns: the step whose tokens these are, and the instant they were ready (after commit).
    pauses: (begin, duration) in ns of the long collections of garbage since the last output.
    """

    step_id: int
    ready_ns: int
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    record: StepRecord | None = None
    pauses: tuple[tuple[int, int], ...] = ()

    def counted_on(self, num_before: int) -> "StepOutput":
        """This output with its steps counted on from its predecessors', since each engine counts from 1."""
        if not num_before or self.record is None:
            return self
        step_id = self.step_id + num_before
        record = msgspec.structs.replace(self.record, step_id=step_id)
        return msgspec.structs.replace(self, step_id=step_id, record=record)


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What a start is doing, for a person to read ("layer 3 of 16, 120 MB"), and its share of all."""

    progress: str
    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine can serve. `resolved` is what the machine decided (blocks, backend, dtype, ...); `timeline` is
    (phase, begin_ns, end_ns) of its start-up. `facts` name the model's architecture for want of a name: what it is
    called is the server's to say."""

    resolved: dict[str, Any]
    timeline: tuple[tuple[str, int, int], ...]
    stats: EngineStats
    facts: ServerFacts | None = None


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The ceilings of the machine, when they were not known at `Ready`."""

    machine: Machine


class ConfigureDone(msgspec.Struct, frozen=True, tag="configured"):
    call_id: int
    knobs: dict[str, Any] = {}
    error: ErrorInfo | None = None


class SleepDone(msgspec.Struct, frozen=True, tag="slept"):
    """The answer to `Sleep` and to `Wake`: a report or an error, and what the engine is now. stats: no step comes to
    bring them."""

    call_id: int
    rest: Rest
    stats: EngineStats
    report: SleepReport | None = None
    error: ErrorInfo | None = None


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on. `trace` is for the log; `error` is there if it is the settings' fault."""

    message: str
    trace: str = ""
    error: ErrorInfo | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there? Answered by the receiving thread, also while a step runs."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """I am."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """held_for: the request waits for this beside the queue, until `Release`."""

    request: Request
    held_for: Cause | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """What the request was held for is there."""

    request_id: str


class MaskFound(msgspec.Struct, frozen=True, tag="mask_found"):
    """What may come in the answer of a request that runs is known now: its row was late."""

    request_id: str


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """What the request was held for cannot be: end it with this error."""

    request_id: str
    error: ErrorInfo


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Change knobs of the live engine; unknown names or bad values change nothing and come back as an error."""

    call_id: int
    knobs: dict[str, Any]


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Fall asleep; `SleepDone` comes when it is, or when it will not be. See `drive.residency`."""

    call_id: int
    ask: SleepAsk


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    call_id: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """A request that is held waits for this from now on."""

    request_id: str
    cause: Cause


class BlocksArrived(msgspec.Struct, frozen=True, tag="arrived"):
    """Blocks of another server are here: their names, and the numbers of their contents at the runner."""

    names: tuple[bytes, ...]
    numbers: tuple[int, ...]


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Another server asks for blocks; `Exported` answers."""

    call_id: int
    ask: BlocksAsk


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """told: None where this engine gives none."""

    call_id: int
    told: BlocksTold | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read the adapter in this folder; `AdapterLoaded` comes when requests may name its id, or when they never will."""

    call_id: int
    adapter_id: str
    folder: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter. No request that names it comes after this."""

    adapter_id: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded"):
    """The answer to `LoadAdapter`, which the engine's loop passes on: the number of parameters, or why there is no such
    adapter."""

    call_id: int
    num_parameters: int = 0
    error: ErrorInfo | None = None


ToEngine = (
    Submit
    | Release
    | MaskFound
    | Fail
    | Abort
    | Configure
    | Sleep
    | Wake
    | LoadAdapter
    | UnloadAdapter
    | Export
    | Ping
    | Hold
    | BlocksArrived
    | AdapterLoaded
)
FromEngine = (
    StepOutput | Loading | Ready | Measured | ConfigureDone | SleepDone | AdapterLoaded | Exported | Fatal | Pong
)
