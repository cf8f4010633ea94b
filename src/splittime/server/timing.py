"""What an answer says of its own time: the account so far, sealed at the instant the last bytes are made.

The account itself closes a little later, when those bytes have been given to the socket; `/ledger/requests/ID` has it.
"""

from typing import Any

from splittime.engine.choice import Choice
from splittime.ledger.account import Interval
from splittime.ledger.export.account_json import stages_json
from splittime.ledger.export.server_timing import header


def timing(choice: Choice, now_ns: int) -> dict[str, Any]:
    """`{start_ns, sealed_ns, ttft_ns, stages}`; begin and end from the start, contiguous, up to `sealed_ns`.

    A first token that is only now being written counts as written at `sealed_ns`.
    """
    account = choice.account
    sealed_ns = now_ns if account.end_ns is None else account.end_ns
    first_written_ns = choice.written_ns[0] if choice.written_ns else sealed_ns if choice.token_ids else None
    return {
        "start_ns": account.start_ns,
        "sealed_ns": sealed_ns,
        "ttft_ns": None if first_written_ns is None else first_written_ns - account.start_ns,
        "first_token_ready_ns": choice.ready_ns[0] - account.start_ns if choice.ready_ns else None,
        "stages": stages_json(account.intervals(sealed_ns), account.start_ns),
    }


def server_timing(choice: Choice, now_ns: int) -> bytes:
    """The `Server-Timing` header of an answer: what is known of the choice by now."""
    intervals: list[Interval] = choice.account.intervals(now_ns)
    return header(intervals, choice.account.start_ns).encode("latin-1")


def last_ended(choices: list[Choice]) -> Choice:
    """The choice that the response waited for."""
    return max(choices, key=lambda choice: choice.ready_ns[-1] if choice.ready_ns else 0)
