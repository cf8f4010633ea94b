"""What an engine was asked before each of its steps, as its ledger tells it, and the requests as it ended them.

A step's record says in which order the engine took in who came, went on and left (`StepRecord.comings`); what they
asked for, and when they came, their accounts say. A request whose stop string the server found may have been ended by
the engine meanwhile, some tokens later: its record says of how many.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from splittime.core.errors import ConfigError
from splittime.drive.messages import Abort, Hold, MaskFound, Release, Submit, ToEngine
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import CAME, FAILED, HELD, LEFT, RELEASED, UNTOLD, WENT_ON, StepRecord
from splittime.scheduler.requests import CAUSES
from splittime.simulate.trace import TracedRequest, ended_by_token, unforeseen, was_taken_in


class Course:
    """requests: as the engine ended them. Raises ConfigError where the records do not tell who came when."""

    def __init__(self, requests: Sequence[TracedRequest], records: Sequence[StepRecord]) -> None:
        _require_told(records)
        num_tokens = {name: what for name, what in _words(records) if isinstance(what, int)}
        taken_in = [traced for traced in requests if was_taken_in(traced.account)]
        self.requests = [_as_ended(traced, num_tokens.get(traced.request.request_id)) for traced in taken_in]
        self._by_id = {traced.request.request_id: traced for traced in self.requests}
        self._seen: set[str] = set()

    def before(self, record: StepRecord) -> Iterator[tuple[int, ToEngine | None]]:
        """Yields what the engine was asked before this step, in order. None: at this instant it had nothing that it
        could plan. Ask for one step after the other."""
        for coming in record.told_comings:
            if isinstance(coming, int):
                yield coming, None
            elif coming[1] in (CAME, HELD, RELEASED, WENT_ON, LEFT):
                yield self._message(self._by_id[coming[0]], str(coming[1]))

    def _message(self, traced: TracedRequest, what: str) -> tuple[int, ToEngine]:
        request, received_ns = traced.request, traced.received_ns
        name = request.request_id
        is_new = name not in self._seen
        self._seen.add(name)
        if what == CAME:
            return received_ns, Submit(request)
        if what == HELD:
            return received_ns, Submit(request, Cause.GRAMMAR) if is_new else Hold(name, Cause.GRAMMAR)
        if what == RELEASED:
            return _held_until_ns(traced), Release(name)
        return received_ns, MaskFound(name) if what == WENT_ON else Abort(name)


def num_came(records: Sequence[StepRecord]) -> Counter[str]:
    """Returns how many requests came under each name that is told of. Who is held and is not here comes held."""
    came, here = Counter[str](), set[str]()
    for name, what in _words(records):
        came[name] += what == CAME or (what == HELD and name not in here)
        (here.discard if isinstance(what, int) or what in (LEFT, FAILED) else here.add)(name)
    return came


def _words(records: Sequence[StepRecord]) -> list[tuple[str, str | int]]:
    return [one for record in records for one in record.told_comings if not isinstance(one, int)]


def _require_told(records: Sequence[StepRecord]) -> None:
    if not any(record.comings for record in records):
        words = "the ledger does not say in which order requests came and went"
        raise ConfigError(words, param="ledger", hint="Record another: an early version wrote it.")
    for record in records:
        if ("", UNTOLD) in record.told_comings:
            words = f"more came and went before step {record.step_id} than a record keeps"
            raise ConfigError(words, param="ledger", hint="Replay another: one whose engine was not paused for long.")


def _as_ended(traced: TracedRequest, num_tokens: int | None) -> TracedRequest:
    """Returns the request as the engine ended it by itself, with so many tokens, its prompt's among them."""
    if num_tokens is None:
        return unforeseen(traced)
    return ended_by_token(traced, num_tokens - len(traced.request.prompt_token_ids))


def _held_until_ns(traced: TracedRequest) -> int:
    queued = [each for each in traced.account.intervals if each.stage is Stage.QUEUE and each.cause in CAUSES]
    return max((each.end_ns for each in queued), default=traced.received_ns)
