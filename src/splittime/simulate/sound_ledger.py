"""Is a ledger possible? A damaged one would make a model as well as any other, and nobody would see that it is wrong.

What is asked here holds of every honest ledger: ours, one that planned ahead, a simulated one, vLLM's, and one whose
run was cut off (`ledger.steps.verify_steps` has the laws, with more than a fit depends on). Steps that do not follow
each other by number, as those of several stretches, are not compared with each other.

A ledger has millions of steps, with tens of rows each: words are made for the one step that is refused.
"""

import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter

from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import EXECUTIONS, StepRecord

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
