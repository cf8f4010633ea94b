"""A request in a line, for the page's table; and one request with the steps it was in, for its waterfall.

Durations in ns; instants as they are kept, of the host's monotonic clock, with the wall clock beside them for display.
Texts that came from outside are shortened here and shown as text there.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import ID_PREFIXES
from splittime.server.books import OpenBook
from splittime.server.dashboard.bins import Span, spans, stage_key

MAX_STEPS = 2_000  # of one waterfall
MAX_NEIGHBOURS = 50
MAX_TEXT_CHARS = 300
NOT_TOLD = "queue:not_told"  # why a request waits comes with its first output, or when it leaves

Row = dict[str, Any]


def open_spans(book: OpenBook, now_ns: int) -> list[Span]:
    """Returns its stages up to now. The engine has said nothing of a request whose last mark is the hand-off: it waits
    there."""
    keys = [stage_key(mark.stage, mark.cause) for mark in book.marks]
    if book.marks[-1].stage is Stage.HANDOFF:
        keys[-1] = NOT_TOLD
    begins = [mark.begin_ns for mark in book.marks]
    return list(zip(keys, begins, [*begins[1:], max(now_ns, begins[-1])], strict=True))


def open_row(book: OpenBook, now_ns: int) -> Row:
    return {
        "id": book.request_id,
        "sent_as": sent_as(book.group_id),
        "endpoint": book.endpoint,
        "start_ns": book.start_ns,
        "e2e_ns": max(0, now_ns - book.start_ns),
        "prompt_tokens": book.prompt_tokens,
        "cached_tokens": book.cached_tokens,
        "output_tokens": book.output_tokens,
        "stages": _totals(open_spans(book, now_ns)),
    }


def sent_as(group_id: str) -> str:
    """Returns the X-Request-Id of a request: the response's id without its prefix."""
    prefix = next((each for each in ID_PREFIXES if group_id.startswith(each)), "")
    return group_id.removeprefix(prefix)


def account_row(account: ClosedAccount) -> Row:
    return {
        "id": account.request_id,
        "sent_as": sent_as(account.group_id),
        "endpoint": account.endpoint,
        "started_unix_ms": account.started_at_unix_ns // 1_000_000,
        "start_ns": account.start_ns,
        "end_ns": account.end_ns,
        "e2e_ns": derive.e2e_ns(account),
        "ttft_ns": derive.ttft_ns(account),
        "tpot_ns": derive.tpot_ns(account),
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "preemptions": account.num_preemptions,
        "finish_reason": account.finish_reason,
        "error": account.error.message[:MAX_TEXT_CHARS] if account.error is not None else None,
        "stages": _totals(spans(account.intervals)),
    }


def _totals(book: Sequence[Span]) -> list[tuple[str, int]]:
    """Time by stage and cause, in the order in which they first occur."""
    totals_ns: dict[str, int] = {}
    for key, begin_ns, end_ns in book:
        totals_ns[key] = totals_ns.get(key, 0) + end_ns - begin_ns
    return [(key, ns) for key, ns in totals_ns.items() if ns]


def waterfall(account: ClosedAccount, records: Sequence[StepRecord]) -> Row:
    """The account, the steps that ran while the engine had it, and with whom it shared those it was in."""
    shown = account_json(account)
    within = [r for r in records if r.end_ns > account.start_ns and r.begin_ns < account.end_ns]
    shown["num_steps"] = len(within)
    shown["steps"] = [_step(account, record) for record in within[:MAX_STEPS]]
    shown["neighbours"] = _neighbours(account.request_id, within)
    return shown


def _step(account: ClosedAccount, record: StepRecord) -> Row:
    own = sum(tokens for request_id, _, tokens in record.rows if request_id == account.request_id)
    one_token_rows = sum(1 for request_id, _, tokens in record.rows if request_id != account.request_id and tokens == 1)
    others = sum(tokens for request_id, _, tokens in record.rows if request_id != account.request_id)
    return {
        "step_id": record.step_id,
        "begin_ns": record.begin_ns - account.start_ns,
        "end_ns": record.end_ns - account.start_ns,
        "device_ns": record.device_ns,
        "own_tokens": own,
        "other_decode_tokens": min(one_token_rows, record.decode_tokens),
        "other_prefill_tokens": others - min(one_token_rows, record.decode_tokens),
        "rows": len(record.rows),
        "waiting": record.num_waiting,
        "victims": list(record.victims),
    }


def _neighbours(request_id: str, records: Sequence[StepRecord]) -> list[Row]:
    """Returns who was in the same steps: those that brought most tokens first."""
    steps: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for record in records:
        names = [name for name, _, _ in record.rows]
        if request_id in names:
            steps.update(name for name in names if name != request_id)
            tokens.update({name: count for name, _, count in record.rows if name != request_id})
    most = tokens.most_common(MAX_NEIGHBOURS)
    return [{"id": name, "steps": steps[name], "tokens": count} for name, count in most]
