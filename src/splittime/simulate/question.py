"""What is asked of a process that predicts (`simulate.beside`), as lines of JSON: the `WhatIf`, accounts, steps.

Each record is a line of its own: the server that asks serves requests meanwhile, and encodes one line at a time.
"""

from collections.abc import Iterator, Sequence

import msgspec

from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.simulate.change import Change
from splittime.simulate.recorded import Recorded


class WhatIf(msgspec.Struct, frozen=True):
    """num_accounts: how many of the lines that follow are accounts."""

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
