"""Where the longest gap between two tokens of a request went, from the books of the steps.

Tokens are ready within a step, near its end; so the gap begins inside the step before and ends inside the last one:

    before      [======t|end]                                           t: the token before is ready
    between                  host | idle
    during                                [step][..][======t            t: the token is ready

`parts_ns` says what of it was what, in integers: the parts sum to the gap. A step whose record is no longer kept leaves
its time in `unrecorded`.
"""

from collections.abc import Sequence

from splittime.ledger.steps import StepRecord

SENTENCE = {
    "steps": "in these steps",
    "before": "at the end of the step before",
    "host": "between steps, of the host's own work",
    "idle": "between steps, with nothing to do",
    "unrecorded": "of which no record is kept",
}


def parts_ns(begin_ns: int, end_ns: int, steps: Sequence[StepRecord], after_id: int) -> dict[str, int]:
    """The gap in parts, by the keys of `SENTENCE`. after_id: the step that made the token before it."""
    parts = dict.fromkeys(SENTENCE, 0)
    for step in steps:
        parts["steps" if step.step_id > after_id else "before"] += _within(step.begin_ns, step.end_ns, begin_ns, end_ns)
        between_ns = step.host_gap_ns + step.idle_ns
        between_ns = _within(step.begin_ns - between_ns, step.begin_ns, begin_ns, end_ns)
        idle_ns = min(step.idle_ns, between_ns)
        parts["idle"] += idle_ns
        parts["host"] += between_ns - idle_ns
    parts["unrecorded"] = max(0, end_ns - begin_ns - sum(parts.values()))
    return parts


def told(parts: dict[str, int]) -> str:
    """One sentence, the longest part first; what is nothing is left out."""
    shown = [f"{ns / 1e6:.3f} ms {SENTENCE[name]}" for name, ns in sorted(parts.items(), key=lambda p: -p[1]) if ns]
    return f"Of the gap: {'; '.join(shown)}." if shown else ""


def _within(begin_ns: int, end_ns: int, from_ns: int, until_ns: int) -> int:
    return max(0, min(end_ns, until_ns) - max(begin_ns, from_ns))
