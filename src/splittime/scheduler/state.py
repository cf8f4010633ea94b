"""What has become of a request since it was asked, its rank, and what is said of it. Only the scheduler changes these.

Policies say who goes first among the waiting, and so, in reverse, who is preempted first among the running. Each
policy is one key function; lower goes first, ties go by arrival. Whatever the policy, a request that has waited longer
than the starvation bound goes before all that have not, the longest wait first, and keeps that rank while it runs, so
that it is not preempted at once for what the policy would have preferred.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from splittime.core.errors import DeadlineExceeded, EngineError, ErrorInfo, RequestError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD
from splittime.core.shares import KeyShare
from splittime.core.step import Row, RowResult, TokenLogprob
from splittime.kv.cache import Lease
from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput

MOST_GONE = 64  # readers of a log that have left and stand behind one that has not, before they are looked for
DECODE = Stage.DECODE  # looked up once: Python 3.11 calls a function for each look at a member of an enumeration

Rank = tuple[int, float, int]  # (0 overdue, 1, or 2 ahead; the policy's key; order of arrival): lower goes first


class CauseReader(Protocol):
    """What waits. waiting_stage: does not change while it reads a log. cause_log: which it reads; None: its account
    says why it waits. next_cause: the entry that it has not read yet."""

    account: Account
    cause_log: "CauseLog | None"
    next_cause: int

    @property
    def waiting_stage(self) -> Stage: ...


class CauseLog:
    """What the waiting wait for, as (since_ns, cause), and up to where each of them has copied it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Cause | None]] = deque()
        self._num_dropped = 0
        self._readers: deque[tuple[int, CauseReader]] = deque()  # by the entry each will read next
        self.num_readers = 0

    @property
    def _end(self) -> int:
        return self._num_dropped + len(self._entries)

    @property
    def cause(self) -> Cause | None:
        """Returns what its readers wait for now."""
        return self._entries[-1][1]

    def states(self, cause: Cause | None) -> bool:
        return bool(self._entries) and self._entries[-1][1] is cause

    def state_cause(self, now_ns: int, cause: Cause | None) -> None:
        if self.states(cause):
            return
        if not self._readers:  # nobody will ever read what was
            self._num_dropped += len(self._entries)
            self._entries.clear()
        self._entries.append((now_ns, cause))

    def join(self, state: CauseReader, now_ns: int) -> None:
        """From `now_ns` on, `state` waits for the log's last cause and whatever follows it."""
        state.account.enter(state.waiting_stage, now_ns, self._entries[-1][1])
        state.cause_log, state.next_cause = self, self._end
        self._readers.append((self._end, state))
        self.num_readers += 1

    def leave(self, state: CauseReader) -> None:
        """Copy what the log says since `state` joined into its account; it reads no further."""
        for i in range(state.next_cause - self._num_dropped, len(self._entries)):
            since_ns, cause = self._entries[i]
            state.account.enter(state.waiting_stage, since_ns, cause)
        state.cause_log = None
        self.num_readers -= 1
        self._forget_read_entries()
        if len(self._readers) > 2 * self.num_readers + MOST_GONE:
            self._readers = deque(reader for reader in self._readers if self._reads(*reader))

    def _forget_read_entries(self) -> None:
        while self._readers and not self._reads(*self._readers[0]):
            self._readers.popleft()
        keep_from = self._readers[0][0] if self._readers else self._end
        while self._num_dropped < keep_from - 1:  # the last entry is the current cause
            self._entries.popleft()
            self._num_dropped += 1

    def _reads(self, next_cause: int, state: CauseReader) -> bool:
        return state.cause_log is self and state.next_cause == next_cause


def leave_log(state: CauseReader) -> None:
    if state.cause_log is not None:
        state.cause_log.leave(state)


class RequestState:
    """A request in the engine: waiting (in the queue, or held beside it), or running (holds blocks, gets rows).

    token_ids: prompt, then outputs. The KV of the first `num_computed` is in the lease's blocks, or will be when the
        steps that were planned have run; these sample `num_promised` tokens that are not known yet. Of drafts, all
        count as computed and promised until the step's result says how many were accepted.
    draft_token_ids: guesses of what follows `token_ids`, for the next row. draft_survival: as `RowResult` has it.
    least_behind: with so many pending tokens it catches up, in a chunk. 2, since the last of one that samples is what a
        decode row computes; 1 where the prompt is pooled, after which nothing follows.
    plan_until: it gets no row while it has so many tokens, promised ones included. The most that it may have, since the
        last of them is never computed; 0 while its next row has to wait for what is accepted.
    recompute_until: after a preemption, or a late row, tokens [0, recompute_until) had been computed before.
    spared_until: with no more tokens than these it is not preempted for another key.
    """

    __slots__ = (
        "account",
        "arrival",
        "cause_log",
        "draft_survival",
        "draft_token_ids",
        "is_ahead",
        "is_known_to_runner",
        "is_overtaken",
        "lease",
        "least_behind",
        "max_num_tokens",
        "next_cause",
        "num_cached_tokens",
        "num_computed",
        "num_host_tokens",
        "num_marks_sent",
        "num_preemptions",
        "num_promised",
        "num_prompt",
        "num_prompt_logprobs",
        "plan_until",
        "pushed",
        "rank",
        "recompute_until",
        "request",
        "request_id",
        "share",
        "spared_until",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int, rank: Rank, max_model_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.rank = rank
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        most_output = 0 if sampling.pooling else sampling.max_tokens or max_model_len
        self.max_num_tokens = min(self.num_prompt + most_output, max_model_len)
        eos_ids = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset(eos_ids) | frozenset(sampling.stop_token_ids)
        self.num_computed = 0
        self.num_promised = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.draft_survival: tuple[float, ...] = ()
        self.least_behind = 1 if sampling.pooling else 2
        self.plan_until = self.max_num_tokens
        self.recompute_until = 0
        self.num_preemptions = 0
        self.spared_until = 0
        self.num_prompt_logprobs = 0  # entries passed on, for positions 1 to this
        self.num_cached_tokens: int | None = None
        self.num_host_tokens = 0  # of these, the ones that were in host memory
        self.is_ahead = sampling.pooling == AHEAD
        self.is_known_to_runner = False
        self.lease = Lease(request.cache_salt, request.adapter)
        self.account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        self.num_marks_sent = 0
        self.cause_log: CauseLog | None = None  # of the queue, which says why it waits; None: its account says it
        self.next_cause = 0  # the entry of that log to read next
        self.is_overtaken = False  # it waits, and a younger one has had its turn
        self.share = KeyShare(
            request.tenant, request.weight
        )  # until it queues: then its key's, whose requests share one
        self.pushed = 0  # which push into the queue is the valid one; 0: not queued

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens, known or promised, whose KV is not computed; 1 while decoding."""
        return len(self.token_ids) + self.num_promised - self.num_computed

    @property
    def gets_row(self) -> bool:
        """Returns whether it has something to compute in a step that is planned now."""
        num_tokens = len(self.token_ids) + self.num_promised
        return num_tokens - self.num_computed >= self.least_behind or num_tokens < self.plan_until

    @property
    def is_recomputing(self) -> bool:
        return self.num_computed < self.recompute_until

    @property
    def waiting_stage(self) -> Stage:
        return Stage.PREEMPTED if self.num_preemptions else Stage.QUEUE

    @property
    def computing_stage(self) -> Stage:
        """The stage of a request that catches up with its known tokens."""
        return Stage.RECOMPUTE if self.is_recomputing else Stage.PREFILL

    def next_row(self, num_tokens: int) -> Row:
        """Makes the row for the next `num_tokens` pending tokens, all known; they count as computed from now on."""
        start, end = self.num_computed, self.num_computed + num_tokens
        num_samples = 0 if self.request.sampling.pooling else int(end == len(self.token_ids))
        self.num_computed, self.num_promised = end, num_samples
        return Row(self.request_id, start, tuple(self.token_ids[start:end]), self.lease.unsent(), num_samples)

    def cut_at_end(self, num_new: int) -> tuple[FinishReason | None, int]:
        """Cut off what follows the token that ends the request, if one of the last `num_new` does. Returns why it ends,
        and how many of them are left."""
        begin, sampling = len(self.token_ids) - num_new, self.request.sampling
        least = 0 if sampling.grammar else sampling.min_tokens  # a grammar's answer ends where nothing else may come
        for end, token_id in enumerate(self.token_ids[begin:], begin + 1):
            is_free_to_stop = end - self.num_prompt >= least
            is_stop = token_id in self.stop_ids and is_free_to_stop
            if is_stop or end >= self.max_num_tokens:
                del self.token_ids[end:]
                return (FinishReason.STOP if is_stop else FinishReason.LENGTH), end - begin
        return None, num_new

    def new_prompt_logprobs(self, row: Row, row_result: RowResult) -> tuple[TokenLogprob, ...]:
        """A row's prompt log-probabilities, without those that were passed on before a preemption."""
        new = row_result.prompt_logprobs[self.num_prompt_logprobs - row.start :]
        self.num_prompt_logprobs += len(new)
        return new

    def stall(self, cause: Cause, now_ns: int) -> None:
        """Note that it runs and gets no row. While it recomputes, it stalls in what the preemption interrupted,
        prefill or decode."""
        self.account.enter(Stage.DECODE_STALL if self.num_output else Stage.PREFILL_STALL, now_ns, cause)

    def resume(self, now_ns: int) -> None:
        """Note that it gets a row for one token, which ends a stall."""
        if self.account.stage is Stage.DECODE_STALL:
            self.account.enter(Stage.RECOMPUTE if self.is_recomputing else DECODE, now_ns)
        elif self.account.stage is Stage.PREFILL_STALL:  # one token of its prompt is left
            self.account.enter(self.computing_stage, now_ns)

    def new_marks(self) -> tuple[Mark, ...]:
        """The account's marks since the last call."""
        new = tuple(self.account.marks[self.num_marks_sent :])
        self.num_marks_sent += len(new)
        return new


POLICIES: dict[str, Callable[[Request], float]] = {
    "fcfs": lambda request: 0.0,
    "priority": lambda request: float(request.priority),
    "shortest_prefill": lambda request: float(len(request.prompt_token_ids)),
    "deadline": lambda request: float("inf") if request.deadline_ns is None else float(request.deadline_ns),
}


def rank(policy: str, request: Request, arrival: int) -> Rank:
    """Returns who goes first, and last is preempted; what is computed ahead comes behind all."""
    if request.sampling.pooling == AHEAD:
        return (2, 0.0, arrival)
    return (1, POLICIES[policy](request), arrival)


def overdue_rank(arrival: int) -> Rank:
    return (0, 0.0, arrival)


def is_overdue(rank: Rank) -> bool:
    return rank[0] == 0


Logprobs = tuple[TokenLogprob, ...]


def progress_output(
    state: RequestState, token_ids: tuple[int, ...], logprobs: Logprobs, prompt_logprobs: Logprobs
) -> RequestOutput:
    """The request goes on: its new tokens, its new marks, and what it found in the prefix cache."""
    return RequestOutput(
        request_id=state.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        marks=state.new_marks(),
        num_cached_tokens=state.num_cached_tokens,
        num_host_tokens=state.num_host_tokens,
        num_preemptions=state.num_preemptions,
    )


def end_output(
    state: RequestState,
    reason: FinishReason,
    now_ns: int,
    error: ErrorInfo | None,
    token_ids: tuple[int, ...],
    logprobs: Logprobs,
    prompt_logprobs: Logprobs,
    pooled: bytes,
) -> RequestOutput:
    """The terminal event; its blocks are free, its account is closed."""
    return msgspec.structs.replace(
        progress_output(state, token_ids, logprobs, prompt_logprobs),
        finish_reason=reason,
        error=error,
        freed_ns=now_ns,
        stop_token_id=token_ids[-1] if token_ids and reason is FinishReason.STOP else None,
        pooled=pooled,
    )


def row_error(row_result: RowResult) -> ErrorInfo:
    if isinstance(row_result.error, ErrorInfo):
        return row_result.error
    return EngineError(f"request {row_result.request_id} failed: {row_result.error}", code="row_failed").info


def deadline_error(state: RequestState, late_ns: int) -> ErrorInfo:
    where = "while it ran" if state.is_known_to_runner else "while it waited"
    return DeadlineExceeded(
        f"the request's deadline passed {where} (noticed {late_ns / 1e6:.1f} ms later)",
        hint="ask for fewer tokens, allow more time (X-Request-Deadline-Ms), or retry when the server is less busy",
    ).info


def check_prompt_length(num_prompt: int, max_model_len: int, least_tokens: int = 1) -> None:
    """Raise RequestError for an empty prompt, and for one that leaves no room for so many tokens of output."""
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt", value=0, limit=1)
    most = max_model_len - least_tokens
    if num_prompt > most:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; the model takes at most {most}{' and one of output' * least_tokens}",
            code="context_length_exceeded",
            param="prompt",
            value=num_prompt,
            limit=most,
        )
