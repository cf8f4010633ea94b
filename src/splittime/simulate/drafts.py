"""The drafts of a recorded run, for a simulation of the same requests with other settings.

What is guessed hangs on texts, which a ledger does not have. It has what the scheduler was told, by request and place
(how many tokens were known), and of the drafts that were verified how many were right. So in a simulation:

    told            at a place where drafts were told, these again; at a place that lay inside an accepted run, what was
                    left there of the drafts before it; elsewhere none
    right           of those that were verified, as many as were; behind the first wrong one none
    beyond these    nobody knows. Each is right by the chance that was told of it, given those before it; where none was
                    told, by the share of this ledger's verified drafts that were right behind right ones. The draws
                    hang on seed, request and place, so that a run with a change and one without have the same luck

What the simulation cannot have: drafts that were held back since they would not have paid then, and drafts behind the
end of a recorded answer.

    step 1     abc              at place 4 the drafts e f g h are told, and d is known
    step 2     d[efg] -> e f X  two of three are right, X is sampled: the record does not stand at places 5 and 6
    elsewhere  d[e]   -> e f    at place 6 g h are left, of which g is wrong
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from splittime.core.errors import ConfigError
from splittime.core.step import THOUSAND
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord, Told, verify_drafts


class DraftsAt(NamedTuple):
    """The drafts at a place. Of the first `num_verified`, `num_right` were right."""

    told: Told
    num_verified: int = 0
    num_right: int = 0

    def behind(self, past: int) -> "DraftsAt":
        """Returns what is left where the first `past` were right and a token more is known."""
        num_verified, num_right = self.num_verified - past, self.num_right - past
        if isinstance(self.told, int):
            return DraftsAt(self.told - past, num_verified, num_right)
        before = max(1, self.told[past - 1])
        left = tuple([min(THOUSAND, round(THOUSAND * chance / before)) for chance in self.told[past:]])
        return DraftsAt(left, num_verified, num_right)

    def right_of(self, num_drafts: int, usual: float, rng: random.Random) -> int:
        """Returns how many of the first `num_drafts` are right. usual: the chance of one of which none was told."""
        if self.num_right < self.num_verified:
            return min(num_drafts, self.num_right)
        for place in range(self.num_verified, num_drafts):
            if rng.random() >= self._chance(place, usual):
                return place
        return num_drafts

    def _chance(self, place: int, usual: float) -> float:
        """Returns how likely a draft is right, where those before it are."""
        if isinstance(self.told, int):
            return usual
        return self.told[place] / max(1, self.told[place - 1] if place else THOUSAND)


NONE = DraftsAt(0)


class RequestDrafts(NamedTuple):
    """The drafts of a request. places: where some were told, in order. usual: as of `DraftsAt.right_of`."""

    places: tuple[int, ...]
    drafts: tuple[DraftsAt, ...]
    usual: float

    def at(self, place: int) -> DraftsAt:
        index = bisect_right(self.places, place) - 1
        if index < 0:
            return NONE
        found, past = self.drafts[index], place - self.places[index]
        if past == 0:
            return found
        return found.behind(past) if past <= found.num_right else NONE


class _ToldOnce(NamedTuple):
    """What one step told of a request, and when."""

    at_ns: int
    place: int
    drafts: DraftsAt


def require_known_drafts(steps: Sequence[StepRecord], max_model_len: int) -> None:
    """Raises ConfigError for steps that verified drafts of which nobody told anything, and for drafts that cannot have
    been."""
    drafted = [step for step in steps if step.verified or step.drafts]
    try:
        for step in drafted:
            verify_drafts(step)
            for request_id, told in step.told_drafts:
                num_drafts = told if isinstance(told, int) else len(told)
                if num_drafts > max_model_len:
                    raise ValueError(
                        f"step {step.step_id}: {num_drafts} drafts told for {request_id}, of {max_model_len} tokens"
                    )
    except ValueError as error:
        hint = "The ledger is damaged. Record another."
        raise ConfigError(f"{error}: that cannot be", param="ledger", hint=hint) from None
    if drafted and not any(step.drafts for step in drafted):
        words = f"step {drafted[0].step_id} verified drafts, and the ledger does not say what was told of them"
        raise ConfigError(words, param="ledger", hint="Record another: an early version wrote it.")


def drafts_of(accounts: Sequence[ClosedAccount], steps: Iterable[StepRecord]) -> list[RequestDrafts | None]:
    """Returns for each request the drafts that were told of it; None where none were. Of several with one id, each has
    those of its time."""
    told = _told_in([step for step in steps if step.verified or step.drafts])
    if not told:
        return [None] * len(accounts)
    usual = _usual_chance(one.drafts for some in told.values() for one in some)
    starts = defaultdict(list)
    for account in sorted(accounts, key=lambda each: each.start_ns):
        starts[account.request_id].append(account.start_ns)
    return [_between(told.get(one.request_id, ()), one.start_ns, starts[one.request_id], usual) for one in accounts]


def _between(told: Sequence[_ToldOnce], start_ns: int, starts_ns: Sequence[int], usual: float) -> RequestDrafts | None:
    """Returns the drafts from this start on, up to the next one's."""
    until_ns = next((at_ns for at_ns in starts_ns if at_ns > start_ns), None)
    own = [one for one in told if one.at_ns >= start_ns and (until_ns is None or one.at_ns < until_ns)]
    latest = {one.place: one.drafts for one in own}  # a preempted request may come by a place again
    places = tuple(sorted(latest))
    return RequestDrafts(places, tuple([latest[place] for place in places]), usual) if places else None


def _told_in(drafted: Sequence[StepRecord]) -> dict[str, list[_ToldOnce]]:
    """Returns what was told of each request, in order, with what became of it."""
    found: dict[str, list[_ToldOnce]] = defaultdict(list)
    for step in drafted:
        verified = {request_id: counts for request_id, *counts in step.verified}
        told = dict(step.told_drafts)
        late = dict(step.late_rows)
        for request_id, start, count in step.rows:
            if request_id in late:  # nobody looked at its drafts, and it was told none
                continue
            num_drafts, num_right = verified.get(request_id, (0, 0))
            place = start + count - num_drafts
            last = found[request_id][-1] if request_id in found else None
            if num_drafts and last is not None and last.place == place:
                found[request_id][-1] = last._replace(drafts=DraftsAt(last.drafts.told, num_drafts, num_right))
            if request_id in told:
                place += 1 + num_right
                found[request_id].append(_ToldOnce(step.begin_ns, place, DraftsAt(told[request_id])))
    return found


def _usual_chance(drafts: Iterable[DraftsAt]) -> float:
    """Returns the share of verified drafts that were right, of those behind right ones."""
    right = tried = 0
    for one in drafts:
        right += one.num_right
        tried += min(one.num_right + 1, one.num_verified)
    return right / tried if tried else 0.0
