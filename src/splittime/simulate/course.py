"""What an engine was asked, and when, as its ledger tells it: requests, aborts, deadlines, each before its step.

A stop string is found by the server, which then has the engine end the request. The engine may have ended it by itself
meanwhile, and an account that closed before does not say so. Where steps are planned ahead, a request that ends by a
token, or is ended by the server, may have a row in the air, whose result is dropped: its last row is not its last step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import combinations, islice

import msgspec

from splittime.core.request import FinishReason
from splittime.drive.messages import Abort, ToEngine
from splittime.ledger.steps import StepRecord
from splittime.simulate.held_blocks import leases_after, num_held
from splittime.simulate.host_parts import is_queued
from splittime.simulate.trace import TracedRequest, ended_by_token, unforeseen

MOST_CHOICES = 10_000  # of which requests were gone after a step
NOT_STOPPED = (0, 0)


class Course:
    """requests: as the engine ended them. is_ahead: the engine planned ahead. block_size: tokens of a block."""

    def __init__(self, requests: Sequence[TracedRequest], records: Sequence[StepRecord], block_size: int) -> None:
        self._block_size = block_size
        self.is_ahead = records[0].ahead_ns is not None
        self._foresees_ends = not self.is_ahead and not any(record.drafts for record in records)
        self._records = records
        self._last_step = {row[0]: record for record in records for row in record.rows}
        self._last_preempted = {name: record for record in records for name in record.victims}
        self._ended_in: dict[str, StepRecord] = {}  # by the engine, as far as accounts do not say so
        self._steps_by_end = {record.end_ns: record for record in records} if self.is_ahead else {}
        self.requests = self._as_the_engine_ended_them(requests)

    def messages(self) -> list[tuple[int, ToEngine | None]]:
        """Returns what reached the engine, in order. None: a deadline, at which the engine had to look."""
        looked_ns = {record.begin_ns for record in self._records}
        if self.is_ahead:
            looked_ns |= {record.begin_ns + (record.ahead_ns or 0) for record in self._records}
        messages: list[tuple[int, tuple[int, int], ToEngine | None]] = []
        for traced in self.requests:
            account = traced.account
            messages += [(at_ns, NOT_STOPPED, message) for at_ns, message in traced.submissions()]
            gone_ns = self._abort_ns(traced)
            if gone_ns is not None and not self._is_overdue(traced, gone_ns):
                messages.append((gone_ns, self._found_in(traced), Abort(account.request_id)))
            elif account.finish_reason == FinishReason.DEADLINE and account.freed_ns not in (None, *looked_ns):
                messages.append((account.freed_ns or 0, NOT_STOPPED, None))
        messages.sort(key=lambda message: message[:2])
        return [(at_ns, message) for at_ns, _, message in messages]

    def _is_overdue(self, traced: TracedRequest, at_ns: int) -> bool:
        """Whether the server stopped it when its deadline had passed: the engine looks at that first."""
        is_unsaid = traced.stops_after is not None and traced.account.freed_ns is None
        return is_unsaid and traced.request.deadline_ns is not None and traced.request.deadline_ns <= at_ns

    def _found_in(self, traced: TracedRequest) -> tuple[int, int]:
        """Returns the step in which the stop string was found, and which of its rows that was: the server looks at one
        after the other, and tells the engine in this order."""
        name, steps = traced.request.request_id, traced.account.token_steps
        if traced.stops_after is None or not steps or steps[-1] > len(self._records):
            return NOT_STOPPED
        rows = [row[0] for row in self._records[steps[-1] - 1].rows]
        return steps[-1], rows.index(name) if name in rows else 0

    def num_taken(self) -> list[int]:
        """Returns how many requests had been taken in before the turn that ended each step: who is there after it, and
        who has ended."""
        ended_ns = sorted(map(self._ended_ns, self.requests))
        return [
            record.num_running + record.num_waiting + bisect_right(ended_ns, record.end_ns) for record in self._records
        ]

    def _as_the_engine_ended_them(self, requests: Sequence[TracedRequest]) -> list[TracedRequest]:
        """Returns the requests; one that the engine ended, while the server was telling it of the stop string that it
        had found, has as many tokens as the engine gave it. An account that closed before does not say so: after the
        step in which it ended one is missing."""
        ended_unsaid, same = self._ended_unsaid(requests), []
        for traced in requests:
            last, account = self._last_step.get(traced.request.request_id), traced.account
            if traced.stops_after is None:
                traced = traced if self._foresees_ends else unforeseen(traced)
            elif last is None:
                pass
            elif account.freed_ns is not None:
                step = self._step_that_freed(account.freed_ns, last)
                traced = traced if step is None else self._ended(traced, step)
            elif traced.request.request_id in ended_unsaid:
                traced = self._ended(traced, self._seen_in(last))
            elif self._is_whole(traced) and not self._is_told_before(traced, last):
                traced = self._ended(traced, last)
            same.append(traced)
        return same

    def _is_told_before(self, traced: TracedRequest, last: StepRecord) -> bool:
        """Whether the engine was told to end it while its last row was in the air: the stop string was found a step
        before the one behind which it was told, or its client had gone away before."""
        account = traced.account
        is_early = account.cancelled_ns is not None or max(account.token_steps, default=0) < last.step_id - 1
        return self._is_queued(last) and is_early

    def _ended_unsaid(self, requests: Sequence[TracedRequest]) -> set[str]:
        """Returns the requests that the server stopped, whose accounts closed before the engine said anything, and that
        the engine had ended by itself: after the step that it was told behind, so many more are missing."""
        received_ns = sorted(traced.received_ns for traced in requests)
        ended_ns = sorted(map(self._ended_ns, requests))
        found: set[str] = set()
        for step_id, candidates in self._maybe_ended(requests).items():
            seen = self._records[step_id - 1]
            present = seen.num_running + seen.num_waiting + bisect_right(ended_ns, seen.end_ns)
            came = bisect_right(received_ns, self._planned_ns(seen))
            sure = {name for name, is_sure in candidates.items() if is_sure}
            unsure = [name for name in candidates if name not in sure]
            num_missing = min(len(unsure), came - present - len(sure))
            found |= sure
            if num_missing == len(unsure):
                found.update(unsure)
            elif num_missing > 0:
                found |= self._missing(unsure, num_missing, seen, self._there(requests, seen, sure))
        return found

    def _maybe_ended(self, requests: Sequence[TracedRequest]) -> dict[int, dict[str, bool]]:
        """Returns the requests that the engine may have ended by itself, by the step behind which it was told to, each
        with whether it is sure: it had all its tokens then. Not one whose stop string was found behind that step: the
        server would have heard of the end with it."""
        found: dict[int, dict[str, bool]] = defaultdict(dict)
        for traced in requests:
            name, account = traced.request.request_id, traced.account
            last = self._last_step.get(name)
            if traced.stops_after is None or last is None or account.freed_ns is not None:
                continue
            if self._preempted_behind(name, last) is not None:
                continue
            seen = self._seen_in(last)
            is_sure = seen is last and self._is_whole(traced)
            is_found_before = max(account.token_steps, default=0) < seen.step_id
            if is_sure or (is_found_before and _end_of_row(traced, seen) is not None):
                found[seen.step_id][name] = is_sure
        return found

    def _there(self, requests: Sequence[TracedRequest], step: StepRecord, gone: Set[str]) -> dict[str, TracedRequest]:
        """Returns who had come and not ended when the step ended, but for these."""
        return {
            traced.request.request_id: traced
            for traced in requests
            if traced.received_ns <= step.end_ns < self._ended_ns(traced) and traced.request.request_id not in gone
        }

    def _missing(
        self, unsure: Sequence[str], count: int, step: StepRecord, there: Mapping[str, TracedRequest]
    ) -> set[str]:
        """Returns those `count` of the unsure without which as many blocks were held as the step's record says, or
        nearest to it; the first of equals."""
        leases = leases_after(self._records, step, there, step.num_running + count, self._block_size)

        def num_off(gone: Iterable[str]) -> int:
            left = leases.keys() - set(gone)
            return abs(num_held([leases[name] for name in left]) - step.blocks_used)

        return set(min(islice(combinations(unsure, count), MOST_CHOICES), key=num_off))

    def _step_that_freed(self, freed_ns: int, last: StepRecord) -> StepRecord | None:
        """Returns the step in which the engine ended it by itself; None if it was told to."""
        if self.is_ahead:
            return self._steps_by_end.get(freed_ns)
        return last if freed_ns <= last.end_ns else None

    def _ended(self, traced: TracedRequest, step: StepRecord) -> TracedRequest:
        """Returns the request as one whose last token is of this step."""
        end = _end_of_row(traced, step)
        if end is None:
            return traced
        self._ended_in[traced.request.request_id] = step
        request = traced.request
        count = max(1, end + 1 - len(request.prompt_token_ids))
        if not self._foresees_ends:
            return ended_by_token(traced, count)._replace(stops_after=None)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=count)
        return traced._replace(request=msgspec.structs.replace(request, sampling=sampling), stops_after=None)

    def _is_whole(self, traced: TracedRequest) -> bool:
        """Whether the server stopped it, and its account closed before the engine said anything, and it had all tokens
        that it may have after its last step."""
        last, request = self._last_step.get(traced.request.request_id), traced.request
        if traced.stops_after is None or traced.account.freed_ns is not None or last is None:
            return False
        if self._preempted_behind(request.request_id, last) is not None:
            return False
        end = _end_of_row(traced, last)
        return end is not None and end + 1 - len(request.prompt_token_ids) >= (request.sampling.max_tokens or end)

    def _preempted_behind(self, request_id: str, last: StepRecord) -> StepRecord | None:
        """Returns the step before which it was preempted, if it had no row since."""
        record = self._last_preempted.get(request_id)
        return record if record is not None and record.step_id > last.step_id else None

    def _seen_in(self, last: StepRecord) -> StepRecord:
        """Returns the step behind which the engine was told to end a request, at the latest, whose last row is of this
        one: ahead, that row was in the air by then."""
        if not self._is_queued(last):
            return last
        return self._records[last.step_id - 2]

    def _is_queued(self, record: StepRecord) -> bool:
        return record.step_id > 1 and is_queued(self._records[record.step_id - 2], record)

    def _planned_ns(self, record: StepRecord) -> int:
        """When the turn that ended this step planned first."""
        return record.begin_ns + (record.ahead_ns or 0) if self._is_queued(record) else record.begin_ns

    def _ended_ns(self, traced: TracedRequest) -> int:
        """When the engine was done with it. One that was aborted for a stop string was there until a step's end."""
        aborted_ns, account = self._abort_ns(traced), traced.account
        if aborted_ns is not None:
            return aborted_ns + (traced.stops_after is not None and account.freed_ns is None)
        if account.freed_ns is not None:
            return account.freed_ns
        name = traced.request.request_id
        last = self._ended_in.get(name) or self._last_step.get(name)
        return account.end_ns if last is None else last.end_ns

    def _abort_ns(self, traced: TracedRequest) -> int | None:
        """When the engine was told to end it; None if it ended by itself."""
        account = traced.account
        if traced.stops_after is not None and account.freed_ns is None:
            name = traced.request.request_id
            last = self._last_step.get(name)
            if last is None:
                return account.end_ns
            return self._seen_in(self._preempted_behind(name, last) or last).end_ns
        if traced.stops_after is not None or account.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return account.end_ns if account.freed_ns is None else account.freed_ns
        return None


def _end_of_row(traced: TracedRequest, step: StepRecord) -> int | None:
    """Returns the place behind what is right of its row in this step; None if it has none."""
    name = traced.request.request_id
    wrong = step.unverified_drafts(name)
    return next((start + count - wrong for request_id, start, count in step.rows if request_id == name), None)
