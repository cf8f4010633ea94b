"""What has become of a request since it was asked. Only the scheduler holds and changes these."""

from typing import TYPE_CHECKING

from splittime.core.plan import Row, RowResult, TokenLogprob
from splittime.core.request import Request
from splittime.kv.cache import Lease
from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage

if TYPE_CHECKING:
    from splittime.scheduler.queue import CauseLog

Rank = tuple[int, float, int]  # (0 once overdue else 1, the policy's key, order of arrival): lower goes first


class RequestState:
    """A request in the engine: waiting (in the queue), or running (holds blocks, gets rows).

    token_ids: prompt, then outputs. The KV of the first `num_computed` is in the lease's blocks, or will be when the
        steps that were planned have run; these sample `num_promised` tokens that are not known yet.
    recompute_until: after a preemption, tokens [0, recompute_until) had been computed before.
    """

    __slots__ = (
        "account",
        "arrival",
        "cause_log",
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
    def computing_stage(self) -> Stage:
        """The stage of a request that catches up with its known tokens."""
        return Stage.RECOMPUTE if self.is_recomputing else Stage.PREFILL

    def next_row(self, num_tokens: int) -> Row:
        """Its row for the next `num_tokens` pending tokens, all known; they count as computed from now on."""
        start, end = self.num_computed, self.num_computed + num_tokens
        samples = end == len(self.token_ids)
        self.num_computed, self.num_promised = end, int(samples)
        return Row(self.request_id, start, tuple(self.token_ids[start:end]), self.lease.unsent(), samples)

    def new_prompt_logprobs(self, row: Row, row_result: RowResult) -> tuple[TokenLogprob, ...]:
        """A row's prompt log-probabilities, without those that were passed on before a preemption."""
        new = row_result.prompt_logprobs[self.num_prompt_logprobs - row.start :]
        self.num_prompt_logprobs += len(new)
        return new

    def stall(self, cause: Cause, now_ns: int) -> None:
        """It runs and gets no row. A recomputation that stalls is a stall of what the preemption interrupted."""
        self.account.enter(Stage.DECODE_STALL if self.num_output else Stage.PREFILL_STALL, now_ns, cause)

    def new_marks(self) -> tuple[Mark, ...]:
        """The account's marks since the last call."""
        new = tuple(self.account.marks[self.num_marks_sent :])
        self.num_marks_sent += len(new)
        return new
