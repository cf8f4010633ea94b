"""A ledger as a whole: read from a file, and a simulated one written to one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.files import SQLITE, begins_with, check_writable
from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger, open_readonly
from splittime.simulate.change import Change

LENGTHS = ("input_tokens", "output_tokens")
OWN_LENGTHS = ("lengths_file", "trace", "dataset", "workload")  # such a load says all lengths


class Mix(NamedTuple):
    """rows: tokens of prompt and answer of each request. cached_share: of all prompts' tokens, those that were found
    in the prefix cache."""

    rows: tuple[tuple[int, int], ...]
    cached_share: float = 0.0

    def load(self, load: dict[str, Any]) -> dict[str, Any]:
        """Returns the load, with as much in common among its prompts as there was, if their lengths are the mix's."""
        said = {"input_tokens", "prefix_share", *OWN_LENGTHS} & set(load)
        return load if said or not self.cached_share else {"prefix_share": self.cached_share, **load}

    def words(self, load: dict[str, Any]) -> str:
        """Returns for people what the load takes of the mix; nothing if it says all itself."""
        taken = [] if set(OWN_LENGTHS) & set(load) else [name for name in LENGTHS if name not in load]
        if not taken:
            return ""
        of = "" if len(taken) > 1 else "prompts of " if taken == ["input_tokens"] else "answers of "
        shared = self.load(load).get("prefix_share") if "prefix_share" not in load else None
        cached = f", and {shared:.0%} of the prompts' tokens cached" if shared else ""
        return f"as the {of}{len(self.rows):,} requests that it served{cached}"


def mix_of(served: Iterable[ClosedAccount]) -> Mix | None:
    """Returns the mix of a ledger's requests. Of one that broke off nobody knows how long it would have been: it counts
    where no other is."""
    known = [account for account in served if account.prompt_tokens]
    whole = [a for a in known if a.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)] or known
    if not whole:
        return None
    rows = tuple((account.prompt_tokens, account.output_tokens) for account in whole)
    cached = sum(account.cached_tokens for account in whole)
    return Mix(rows, cached / sum(prompt for prompt, _ in rows))


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


class WhatIf(msgspec.Struct, frozen=True):
    """What is asked of a process that predicts (`simulate.beside`): a line of JSON, then one for each record, since the
    server that asks serves meanwhile. num_accounts: how many of the lines that follow are accounts."""

    facts: ServerFacts
    change: Change
    draws: int
    num_accounts: int


def question(recorded: Recorded, change: Change, draws: int) -> Iterator[bytes]:
    """Yields the lines."""
    encode = msgspec.json.Encoder().encode
    yield encode(WhatIf(recorded.facts, change, draws, len(recorded.accounts)))
    yield from map(encode, recorded.accounts)
    yield from map(encode, recorded.steps)


def read_question(lines: Sequence[bytes]) -> tuple[WhatIf, Recorded]:
    """Raises msgspec.ValidationError for what `question` did not write."""
    asked = msgspec.json.decode(lines[0], type=WhatIf)
    until = 1 + asked.num_accounts
    of_account, of_step = msgspec.json.Decoder(ClosedAccount), msgspec.json.Decoder(StepRecord)
    accounts, steps = map(of_account.decode, lines[1:until]), map(of_step.decode, lines[until:])
    return asked, Recorded(list(accounts), list(steps), asked.facts)
