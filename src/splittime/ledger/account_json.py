"""A closed account as JSON: what `GET /ledger/requests/ID` answers and `explain` reads back.

Times inside are relative to `start_ns`, for people to read; `start_ns` itself is of the host's monotonic clock.
`stages` are contiguous and end at `end_ns - start_ns`. `derived` holds the figures of `ledger.derive`, nothing else.
`prompt_parts` are [hash, start, num_tokens] each, both kinds of prefixes are base64.
`account_from_json(account_json(a)) == a`.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.attempts import Attempt, RouteDecision
from splittime.ledger.stages import Cause, Stage

_PLAIN_FIELDS = (
    *("request_id", "group_id", "model", "endpoint", "started_at_unix_ns", "start_ns", "end_ns", "finish_reason"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "num_preemptions", "first_chunk_tokens"),
)

_ATTEMPT_INSTANTS = ("begin_ns", "end_ns", "first_byte_ns")


def account_json(account: ClosedAccount) -> dict[str, Any]:
    return {
        **{name: getattr(account, name) for name in _PLAIN_FIELDS},
        "error": msgspec.to_builtins(account.error) if account.error is not None else None,
        "ttft_ns": derive.ttft_ns(account),
        "stages": stages_json(account.intervals, account.start_ns),
        "tokens": _tokens_json(account),
        "cancelled_ns": _relative(account.cancelled_ns, account.start_ns),
        "freed_ns": _relative(account.freed_ns, account.start_ns),
        "prompt_parts": account.prompt_parts,
        "prefixes": b64encode(account.prefixes).decode(),
        "answer_prefixes": b64encode(account.answer_prefixes).decode(),
        "cache_salt": account.cache_salt,
        "computes_prompt": account.computes_prompt,
        "unseen_ns": account.unseen_ns,
        "host_tokens": account.host_tokens,
        "ahead_tokens": account.ahead_tokens,
        "ahead_ns": account.ahead_ns,
        "reasoning_tokens": account.reasoning_tokens,
        "most_reasoning_tokens": account.most_reasoning_tokens,
        "render_ns": account.render_ns,
        "tenant": account.tenant,
        "max_tokens": account.max_tokens,
        "priority": account.priority,
        "weight": account.weight,
        "deadline_ns": _relative(account.deadline_ns, account.start_ns),
        "lookup_guesses": account.lookup_guesses,
        "lookup_right": account.lookup_right,
        "trace_id": account.trace_id,
        "parent_id": account.parent_id,
        "degraded": account.degraded,
        "attempts": [_attempt_json(attempt, account.start_ns) for attempt in account.attempts],
        "routing": msgspec.to_builtins(account.routing),
        "config_version": account.config_version,
        "derived": _derived_json(account),
    }


def stages_json(intervals: Iterable[StageInterval], start_ns: int) -> list[dict[str, Any]]:
    """`[{stage, cause, begin_ns, end_ns}]` with times from `start_ns`, as in a response's `timing`."""
    return [
        {
            "stage": interval.stage.value,
            "cause": interval.cause.value if interval.cause is not None else None,
            "begin_ns": interval.begin_ns - start_ns,
            "end_ns": interval.end_ns - start_ns,
        }
        for interval in intervals
    ]


def account_from_json(data: dict[str, Any]) -> ClosedAccount:
    """The account that `account_json` described."""
    start_ns, tokens = data["start_ns"], data["tokens"]
    return ClosedAccount(
        **{name: data[name] for name in _PLAIN_FIELDS},
        error=msgspec.convert(data["error"], ErrorInfo | None),
        intervals=tuple(_interval(entry, start_ns) for entry in data["stages"]),
        token_steps=tuple(token["step_id"] for token in tokens),
        token_ready_ns=tuple(start_ns + token["ready_ns"] for token in tokens),
        token_written_ns=tuple(start_ns + t["written_ns"] for t in tokens if t["written_ns"] is not None),
        cancelled_ns=_absolute(data["cancelled_ns"], start_ns),
        freed_ns=_absolute(data["freed_ns"], start_ns),
        prompt_parts=tuple(tuple(part) for part in data.get("prompt_parts", ())),
        prefixes=b64decode(data.get("prefixes", "")),
        answer_prefixes=b64decode(data.get("answer_prefixes", "")),
        cache_salt=data.get("cache_salt", ""),
        computes_prompt=data.get("computes_prompt", False),
        unseen_ns=data.get("unseen_ns", 0),
        host_tokens=data.get("host_tokens", 0),
        ahead_tokens=data.get("ahead_tokens", 0),
        ahead_ns=data.get("ahead_ns", 0),
        reasoning_tokens=data.get("reasoning_tokens", 0),
        most_reasoning_tokens=data.get("most_reasoning_tokens"),
        render_ns=data.get("render_ns", 0),
        tenant=data.get("tenant", ""),
        max_tokens=data.get("max_tokens", 0),
        priority=data.get("priority", 0),
        weight=data.get("weight", 1.0),
        deadline_ns=_absolute(data.get("deadline_ns"), start_ns),
        lookup_guesses=data.get("lookup_guesses"),
        lookup_right=data.get("lookup_right"),
        trace_id=data.get("trace_id", ""),
        parent_id=data.get("parent_id", ""),
        degraded=data.get("degraded", ""),
        attempts=tuple(_attempt(entry, start_ns) for entry in data.get("attempts", ())),
        routing=msgspec.convert(data.get("routing"), RouteDecision | None),
        config_version=data.get("config_version", ""),
    )


def _attempt_json(attempt: Attempt, start_ns: int) -> dict[str, Any]:
    instants = {name: _relative(getattr(attempt, name), start_ns) for name in _ATTEMPT_INSTANTS}
    return {**msgspec.to_builtins(attempt), **instants}


def _attempt(entry: dict[str, Any], start_ns: int) -> Attempt:
    instants = {name: _absolute(entry[name], start_ns) for name in _ATTEMPT_INSTANTS}
    return msgspec.convert({**entry, **instants}, Attempt)


def _tokens_json(account: ClosedAccount) -> list[dict[str, Any]]:
    tokens = zip_longest(account.token_steps, account.token_ready_ns, account.token_written_ns)
    return [
        {
            "index": index,
            "step_id": step_id,
            "ready_ns": _relative(ready_ns, account.start_ns),
            "written_ns": _relative(written_ns, account.start_ns),
        }
        for index, (step_id, ready_ns, written_ns) in enumerate(tokens)
    ]


def _derived_json(account: ClosedAccount) -> dict[str, Any]:
    itl_ns, send_lag_ns = derive.itl_ns(account), derive.send_lag_ns(account)
    stall = derive.max_stall(account)
    return {
        "e2e_ns": derive.e2e_ns(account),
        "ttft_ns": derive.ttft_ns(account),
        "tpot_ns": derive.tpot_ns(account),
        "itl_ns": derive.percentiles(itl_ns),
        "max_stall": msgspec.to_builtins(stall) if stall is not None else None,
        "send_lag_ns": derive.percentiles(send_lag_ns),
        "cancel_to_freed_ns": derive.cancel_to_freed_ns(account),
        "stage_ns": {stage.value: ns for stage, ns in derive.stage_ns(account).items()},
        "queue_by_cause": [
            {"cause": cause.value if cause is not None else None, "duration_ns": ns}
            for cause, ns in derive.queue_ns_by_cause(account).items()
        ],
    }


def _interval(entry: dict[str, Any], start_ns: int) -> StageInterval:
    cause = Cause(entry["cause"]) if entry["cause"] is not None else None
    return StageInterval(Stage(entry["stage"]), cause, start_ns + entry["begin_ns"], start_ns + entry["end_ns"])


def _relative(instant_ns: int | None, start_ns: int) -> int | None:
    return instant_ns - start_ns if instant_ns is not None else None


def _absolute(offset_ns: int | None, start_ns: int) -> int | None:
    return start_ns + offset_ns if offset_ns is not None else None
