"""A ledger as a whole: read from a file, and a simulated one written to one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.whole_file import SQLITE, begins_with, check_writable
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger, open_readonly

ALL, ANY_BYTES = 10**9, 2**60
BATCH = 10_000  # records; the file's queue holds five times as many
FLUSH_S = 60.0


class Recorded(msgspec.Struct, frozen=True):
    """What was kept of a run, real or simulated."""

    accounts: Sequence[ClosedAccount]
    steps: Sequence[StepRecord]
    facts: ServerFacts


def is_ledger(path: Path) -> bool:
    """Whether the file has the format of a ledger."""
    return begins_with(path, SQLITE)


def read_ledger(path: Path | str) -> Recorded:
    """Raises NotFound, and ConfigError for a file that is no ledger or does not say what its server was."""
    file = open_readonly(path)
    try:
        facts = file.facts()
        if facts is None:
            hint = "It is of a server that never got ready, or of an early version."
            raise ConfigError(f"{path} does not say what its server was", param="ledger", hint=hint)
        return Recorded(file.accounts(limit=ALL), file.steps(limit=ALL), facts)
    finally:
        file.close()


def latest_run(recorded: Recorded) -> Recorded:
    """Returns what the latest server wrote with the settings that it has: a file may hold former ones', whose last
    step's number is not followed by this one's first, and what came before a knob was turned."""
    return _since(_of_latest_server(recorded), recorded.facts.knobs_changed_ns)


def _since(recorded: Recorded, at_ns: int) -> Recorded:
    """Returns the requests and the steps that began then or later."""
    if not at_ns:
        return recorded
    accounts = [account for account in recorded.accounts if account.start_ns >= at_ns]
    return Recorded(accounts, [step for step in recorded.steps if step.begin_ns >= at_ns], recorded.facts)


def _of_latest_server(recorded: Recorded) -> Recorded:
    steps = recorded.steps
    first = next((i for i in range(len(steps) - 1, 0, -1) if steps[i].step_id != steps[i - 1].step_id + 1), 0)
    if not first:
        return recorded
    since = steps[first]
    accounts = [
        a
        for a in recorded.accounts
        if a.end_ns >= since.begin_ns and min(a.token_steps, default=since.step_id) >= since.step_id
    ]
    return Recorded(accounts, steps[first:], recorded.facts)


def plans_ahead(recorded: Recorded) -> bool:
    """Returns whether the engine planned ahead. Raises ConfigError if it did, and the ledger does not say when."""
    told = [step.ahead_ns is not None for step in recorded.steps]
    if not all(told) and (any(told) or recorded.facts.settings.get("async_scheduling")):
        hint = "Record another: an early version wrote it."
        raise ConfigError("an engine plans ahead whose ledger does not say when", param="ledger", hint=hint)
    return any(told)


class LedgerSink:
    """Takes records for a file as they come, and waits for the file every `BATCH` of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._num_records = ledger, 0

    def add_account(self, account: ClosedAccount) -> None:
        self._ledger.add_account(account)
        self._count()

    def add_step(self, step: StepRecord) -> None:
        self._ledger.add_step(step)
        self._count()

    def _count(self) -> None:
        self._num_records += 1
        if not self._num_records % BATCH:
            self._ledger.flush(FLUSH_S)


def require_new(path: Path) -> None:
    """Raises ConfigError for a file that is there already, or cannot be written."""
    if path.exists():
        hint = "Name another file, or move this one away."
        raise ConfigError(f"{path} is there already", param="out", value=str(path), hint=hint)
    check_writable(path)


@contextmanager
def written_ledger(facts: ServerFacts, path: Path) -> Iterator[LedgerSink]:
    """Yields what takes the records of a new file. Raises ConfigError for one that is there already, or could not be
    written whole."""
    require_new(path)
    ledger = Ledger(
        path, max_accounts=1, max_steps=1, max_file_accounts=ALL, max_file_steps=ALL, max_file_bytes=ANY_BYTES
    )
    ledger.describe_by(lambda: facts)
    try:
        yield LedgerSink(ledger)
        ledger.flush(FLUSH_S)
    except BaseException:  # half a run is none
        ledger.close()
        path.unlink(missing_ok=True)
        raise
    ledger.close()
    if ledger.counts().unwritten or ledger.counts().dropped:
        raise ConfigError(f"{path} could not be written whole: see the log", param="out", value=str(path))
