"""What has become of a request since it was asked. Only the scheduler holds and changes these."""

from typing import TYPE_CHECKING

from splittime.core.request import FinishReason, Request
from splittime.core.step import Row, RowResult, TokenLogprob
from splittime.kv.cache import Lease
from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage

if TYPE_CHECKING:
    from splittime.scheduler.queue import CauseLog

DECODE = Stage.DECODE  # looked up once: Python 3.11 calls a function for each look at a member of an enumeration

Rank = tuple[int, float, int]  # (0 once overdue else 1, the policy's key, order of arrival): lower goes first


class RequestState:
    """A request in the engine: waiting (in the queue, or held beside it), or running (holds blocks, gets rows).

    token_ids: prompt, then outputs. The KV of the first `num_computed` is in the lease's blocks, or will be when the
        steps that were planned have run; these sample `num_promised` tokens that are not known yet. Of drafts, all
        count as computed and promised until the step's result says how many were accepted.
    draft_token_ids: guesses of what follows `token_ids`, for the next row.
    plan_until: it gets no row while it has so many tokens, promised ones included. The most that it may have, since the
        last of them is never computed; 0 while its next row has to wait for what is accepted.
    recompute_until: after a preemption, tokens [0, recompute_until) had been computed before.
    """

    __slots__ = (
        "account",
        "arrival",
        "cause_log",
        "draft_token_ids",
        "is_known_to_runner",
        "is_overtaken",
        "lease",
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
        self.max_num_tokens = min(self.num_prompt + (sampling.max_tokens or max_model_len), max_model_len)
        eos_ids = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset(eos_ids) | frozenset(sampling.stop_token_ids)
        self.num_computed = 0
        self.num_promised = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.plan_until = self.max_num_tokens
        self.recompute_until = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # entries passed on, for positions 1 to this
        self.num_cached_tokens: int | None = None
        self.num_host_tokens = 0  # of these, the ones that were in host memory
        self.is_known_to_runner = False
        self.lease = Lease(request.cache_salt)
        self.account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        self.num_marks_sent = 0
        self.cause_log: CauseLog | None = None  # of the queue, which says why it waits; None: its account says it
        self.next_cause = 0  # the entry of that log to read next
        self.is_overtaken = False  # it waits, and a younger one has had its turn
        self.pushed = 0  # which push into the queue is the valid one; 0: not queued

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens, known or promised, whose KV is not computed; 1 while decoding."""
        return len(self.token_ids) + self.num_promised - self.num_computed

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
        """Its row for the next `num_tokens` pending tokens, all known; they count as computed from now on."""
        start, end = self.num_computed, self.num_computed + num_tokens
        num_samples = int(end == len(self.token_ids))
        self.num_computed, self.num_promised = end, num_samples
        return Row(self.request_id, start, tuple(self.token_ids[start:end]), self.lease.unsent(), num_samples)

    def cut_at_end(self, num_new: int) -> tuple[FinishReason | None, int]:
        """Cut off what follows the token that ends the request, if one of the last `num_new` does. Returns why it ends,
        and how many of them are left."""
        begin = len(self.token_ids) - num_new
        for end, token_id in enumerate(self.token_ids[begin:], begin + 1):
            is_free_to_stop = end - self.num_prompt >= self.request.sampling.min_tokens
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
        """It runs and gets no row. While it recomputes, it stalls in what the preemption interrupted, prefill or
        decode."""
        self.account.enter(Stage.DECODE_STALL if self.num_output else Stage.PREFILL_STALL, now_ns, cause)

    def resume(self, now_ns: int) -> None:
        """It gets a row for one token: if it stalled, it does no longer."""
        if self.account.stage is Stage.DECODE_STALL:
            self.account.enter(DECODE, now_ns)
        elif self.account.stage is Stage.PREFILL_STALL:  # one token of its prompt is left
            self.account.enter(self.computing_stage, now_ns)

    def new_marks(self) -> tuple[Mark, ...]:
        """The account's marks since the last call."""
        new = tuple(self.account.marks[self.num_marks_sent :])
        self.num_marks_sent += len(new)
        return new
