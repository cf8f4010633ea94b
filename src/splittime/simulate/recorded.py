"""A ledger as a whole: read from a file, and a simulated one written to one.

A damaged one would make a model as well as any other, and nobody would see that it is wrong. So it is asked whether it
is possible (`require_sound_accounts`, `require_sound_steps`). What is asked holds of every honest ledger: ours, one
that planned ahead, a simulated one, vLLM's, and one whose run was cut off (`ledger.steps.verify_steps` has the laws,
with more than a fit depends on). Steps that do not follow each other by number, as those of several stretches, are not
compared with each other.

A ledger has millions of steps, with tens of rows each: words are made for the one step that is refused.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.files import SQLITE, begins_with, check_writable
from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import EXECUTIONS, StepRecord
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


LONGEST_NS = 10**14  # a day
SLACK_NS = 1_000  # honest parts sum to the step's length exactly
PARTS = ("plan_ns", "launch_ns", "device_ns", "sample_ns", "commit_ns", "offload_ns", "restore_ns")
NUM_PARTS = len(PARTS)
COUNTS = ("prefill_tokens", "decode_tokens", "kv_tokens_read", "offloaded_blocks", "restored_blocks")
NOT_BELOW_0 = (*PARTS, "host_gap_ns", "idle_ns", "hidden_ns", *COUNTS)
_VALUES = attrgetter(*NOT_BELOW_0)


def require_sound_steps(steps: Sequence[StepRecord], max_model_len: int | None = None) -> None:
    """Raises ConfigError for the first step that cannot have been. max_model_len: of the server; None: not known."""
    before: StepRecord | None = None
    most = sys.maxsize if max_model_len is None else max_model_len
    for step in steps:
        wrong = _wrong_parts(step) or _wrong_rows(step, most)
        if not wrong and before is not None and step.step_id == before.step_id + 1:
            wrong = _wrong_order(before, step)
        if wrong:
            raise _damaged(f"step {step.step_id} {wrong}")
        before = step


def require_sound_accounts(accounts: Iterable[ClosedAccount]) -> None:
    """Raises ConfigError for the first account that cannot have been."""
    for account in accounts:
        counts = (account.prompt_tokens, account.cached_tokens, account.output_tokens, account.max_tokens)
        try:
            account.verify()
        except ValueError as error:
            words = f"the account of request {account.request_id} has a gap, or ends before it starts: {error}"
            raise _damaged(words) from None
        if min(counts) < 0:
            words = f"has {counts} tokens of prompt, cache, output and room for output; none is below 0"
            raise _damaged(f"the account of request {account.request_id} {words}")


def _wrong_parts(step: StepRecord) -> str:
    values, lasted_ns = _VALUES(step), step.end_ns - step.begin_ns
    if min(values) < 0:
        name, value = next(pair for pair in zip(NOT_BELOW_0, values, strict=True) if pair[1] < 0)
        return f"has {name} {value}; it can be 0 or more"
    if not 0 < lasted_ns <= LONGEST_NS:
        return f"takes {lasted_ns} ns; it can take 1 to {LONGEST_NS}"
    if sum(values[:NUM_PARTS]) > lasted_ns + SLACK_NS:
        return f"takes {lasted_ns} ns, and its parts {sum(values[:NUM_PARTS])}; they can take at most as long"
    if (step.ahead_ns or 0) > step.plan_ns + step.hidden_ns + SLACK_NS:
        return f"is planned behind after {step.ahead_ns} ns, of {step.plan_ns + step.hidden_ns} ns of the host's"
    if step.execution not in EXECUTIONS:
        return f"is run {step.execution!r}; it can be {', '.join(EXECUTIONS)}"
    return ""


def _wrong_rows(step: StepRecord, most: int) -> str:
    tokens = positions = 0
    for _, start, count in step.rows:
        if start < 0 or count < 1 or start + count > most:
            return f"has a row of {count} tokens from position {start} on; there are positions 0 to {most}"
        tokens += count
        positions += start
    if tokens != step.prefill_tokens + step.decode_tokens:
        return f"has rows of {tokens} tokens in all, and {step.prefill_tokens} + {step.decode_tokens} tokens"
    if step.kv_tokens_read > positions + tokens:
        return f"reads {step.kv_tokens_read} KV positions; its rows allow {positions + tokens}"
    return ""


def _wrong_order(before: StepRecord, step: StepRecord) -> str:
    gap_ns = max(0, step.begin_ns - before.end_ns)
    if step.begin_ns < before.begin_ns:
        return f"begins {before.begin_ns - step.begin_ns} ns before the step before it"
    if step.host_gap_ns + step.idle_ns > gap_ns + SLACK_NS:
        return f"comes {gap_ns} ns behind the step before it, with a gap of {step.host_gap_ns + step.idle_ns} ns"
    planned_ns = before.plan_ns + before.hidden_ns  # what comes behind a step is planned before that ends
    if before.begin_ns + planned_ns > step.end_ns + SLACK_NS:
        return f"ends before the host has done what it did beside the step before it, in {planned_ns} ns"
    return ""


def _damaged(words: str) -> ConfigError:
    return ConfigError(f"{words}: that cannot be", param="ledger", hint="The ledger is damaged. Record another.")
