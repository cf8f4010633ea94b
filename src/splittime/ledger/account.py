"""An account: one request's book of (stage, cause, begin_ns), from arrival to last byte. It owns no clock.

It promises that the intervals are contiguous and that their sum is end - start exactly: entering a stage closes the
last one at the same integer nanosecond, so the sum telescopes. A mark out of order is refused, never repaired.
`verify()` checks a closed account.
"""

from collections.abc import Iterable

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.ledger.attempts import Attempt, RouteDecision
from splittime.ledger.stages import Cause, Stage

REFUSED = "refused"  # finish reason of a request that never reached the engine
EMBEDDINGS, PREFILL = "embeddings", "prefill"
WITHOUT_TOKENS = frozenset(
    {EMBEDDINGS, "rerank", "score", PREFILL}
)  # endpoints at which a prompt is computed, and no token
TRY_AGAIN = 429
VLLM_IS_FULL = "http_503"  # vLLM's answer at --max-num-queued-reqs and --max-num-queued-tokens, as its books have it
LIMITS_OF_A_KEY = ("max_open_requests", "requests_per_minute", "tokens_per_minute")  # the codes of such a refusal


class Mark(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """From `begin_ns` on, the request is in `stage` because of `cause`."""

    stage: Stage
    cause: Cause | None
    begin_ns: int


class StageInterval(msgspec.Struct, frozen=True, gc=False):
    """A stage with both its ends, in ns of the host's monotonic clock."""

    stage: Stage
    cause: Cause | None
    begin_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


class Account:
    """The open book of one request. stage, cause: those of the last mark, which each step asks of each request."""

    __slots__ = ("cause", "end_ns", "marks", "request_id", "stage", "start_ns")

    def __init__(self, request_id: str, start_ns: int, stage: Stage) -> None:
        self.request_id = request_id
        self.start_ns = start_ns
        self.stage = stage
        self.cause: Cause | None = None
        self.marks: list[Mark] = [Mark(stage, None, start_ns)]
        self.end_ns: int | None = None

    def enter(self, stage: Stage, now_ns: int, cause: Cause | None = None) -> None:
        """Close the current stage at `now_ns` and open `stage`; nothing happens if that is the current one."""
        if self.stage is stage and self.cause is cause:
            return
        if self.end_ns is not None:
            raise ValueError(f"account {self.request_id} is closed; cannot enter {stage}")
        last_ns = self.marks[-1].begin_ns
        if now_ns < last_ns:
            raise ValueError(f"account {self.request_id}: {stage} at {now_ns} is before {self.stage} at {last_ns}")
        self.stage, self.cause = stage, cause
        self.marks.append(Mark(stage, cause, now_ns))

    def extend(self, marks: Iterable[Mark]) -> None:
        """Take over marks made elsewhere (the engine's part of the book), in order."""
        for mark in marks:
            self.enter(mark.stage, mark.begin_ns, mark.cause)

    def close(self, now_ns: int) -> None:
        """Close the book. Closing twice or before the last mark is refused."""
        if self.end_ns is not None:
            raise ValueError(f"account {self.request_id} is already closed")
        if now_ns < self.marks[-1].begin_ns:
            raise ValueError(f"account {self.request_id}: end {now_ns} is before its last mark")
        self.end_ns = now_ns

    def intervals(self, until_ns: int | None = None) -> list[StageInterval]:
        """The stages so far, contiguous, the last one ending at `until_ns` (default: the account's end)."""
        end_ns = until_ns if until_ns is not None else self.end_ns
        if end_ns is None:
            raise ValueError(f"account {self.request_id} is open: say until when")
        ends = [mark.begin_ns for mark in self.marks[1:]] + [end_ns]
        return [StageInterval(m.stage, m.cause, m.begin_ns, e) for m, e in zip(self.marks, ends, strict=True)]

    def verify(self) -> None:
        """Raise ValueError unless the account is closed, contiguous, and sums to its wall time exactly."""
        verify_intervals(self.intervals(), self.start_ns, self.end_ns)


def verify_intervals(intervals: list[StageInterval], start_ns: int, end_ns: int | None) -> None:
    """The ledger's first law on plain intervals: contiguous from start to end, none negative. So their sum is exact."""
    expected_ns = start_ns
    for interval in intervals:
        if interval.begin_ns != expected_ns or interval.end_ns < interval.begin_ns:
            raise ValueError(
                f"{interval.stage} runs {interval.begin_ns}..{interval.end_ns}, expected from {expected_ns}"
            )
        expected_ns = interval.end_ns
    if expected_ns != end_ns:
        raise ValueError(f"intervals end at {expected_ns}, account at {end_ns}")


class ClosedAccount(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A closed book with the facts of its request; all times in ns of the host's monotonic clock.

    started_at_unix_ns: wall-clock time of `start_ns`, for display only; never subtracted from anything.
    cached_tokens: prompt tokens that were found in the prefix cache; host_tokens: of these, the ones that were copied
        back from host memory. ahead_tokens: of these, the ones that were there only because a prefill had computed
        them (`server.service`), and ahead_ns: how long it computed them.
    token_steps, token_ready_ns: for each output token, the step that made it and the instant it was ready.
    token_written_ns: for each output token, the instant the chunk that holds it had been given to the socket;
        shorter than `token_steps` if the client went away.
    first_chunk_tokens: output tokens in the first chunk written (TPOT's divisor leaves them out).
    prompt_parts: (hash, start, num_tokens) of the prompt's parts, cut by content (`ledger.prompt_parts`); () for a
        short one, and for one that was refused before it was tokenised. prefixes: hashes of its beginnings, by which
        two prompts are compared block for block. answer_prefixes: those that end in the answer, of prompt and answer.
    cache_salt: a hash of the salt that the request was under; empty for none. computes_prompt: nothing of its prompt
        was looked up in the cache, because the log-probabilities of all of it were asked for.
    unseen_ns: how long before `start_ns` the request lay in its socket, because the server's event loop was busy, as
        the kernel says (`web.connection`); 0 below 8 ms. Part of no sum: the account begins when it is seen.
    render_ns: how long its chat template took, of the stage `tokenize`; 0 for none.
    tenant: the name of the key that asked (`web.tenants`); empty where none is asked for. weight: of its share.
    cancelled_ns, freed_ns: when the client's going away was noticed, and when its blocks were free again.
    max_tokens: output tokens that it had room for; 0: not known (an earlier version's book, or a request that never
        reached the engine). priority, deadline_ns: as in `core.request.Request`.
    trace_id, parent_id: of the client's `traceparent`: the trace that it is of, and the span there that it lies in
        (`ledger.hops`); empty where it sent none.
    attempts: of a gateway, which upstreams were asked, in order; () in a server's account.
    lookup_guesses, lookup_right: tokens of the answer that a lookup in the request's own text would have guessed, and
        of these the ones that it would have guessed right (`ledger.prompt_parts`); None where that was not counted.
    reasoning_tokens: output tokens of reasoning, with its marks; most_reasoning_tokens: behind so many of them, without
        the marks, the reasoning was to be closed; None: no bound.
    degraded: of a gateway, the stage of its ladder that made the answer a lesser one; "" for none.
    routing: what a gateway's rules said of it. config_version: number and hash of the gateway's config that it was
        served under.
    """

    request_id: str
    group_id: str  # what the client saw as the response's id; n > 1 or several prompts share it
    model: str
    endpoint: str
    started_at_unix_ns: int
    start_ns: int
    end_ns: int
    intervals: tuple[StageInterval, ...]
    finish_reason: str
    error: ErrorInfo | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    first_chunk_tokens: int = 0
    token_steps: tuple[int, ...] = ()
    token_ready_ns: tuple[int, ...] = ()
    token_written_ns: tuple[int, ...] = ()
    cancelled_ns: int | None = None
    freed_ns: int | None = None
    prompt_parts: tuple[tuple[int, int, int], ...] = ()
    prefixes: bytes = b""
    answer_prefixes: bytes = b""
    cache_salt: str = ""
    computes_prompt: bool = False
    unseen_ns: int = 0
    host_tokens: int = 0
    tenant: str = ""
    max_tokens: int = 0
    priority: int = 0
    weight: float = 1.0
    deadline_ns: int | None = None
    attempts: tuple[Attempt, ...] = ()
    lookup_guesses: int | None = None
    lookup_right: int | None = None
    trace_id: str = ""
    parent_id: str = ""
    degraded: str = ""
    routing: RouteDecision | None = None
    config_version: str = ""
    ahead_tokens: int = 0
    ahead_ns: int = 0
    reasoning_tokens: int = 0
    most_reasoning_tokens: int | None = None
    render_ns: int = 0

    @property
    def is_refused(self) -> bool:
        return self.finish_reason == REFUSED

    @property
    def is_turned_away(self) -> bool:
        """Refused with 429 for want of room. A key that is over a limit of its own is refused however much there is."""
        if self.error is None:
            return False
        is_full = self.error.status == TRY_AGAIN and self.error.code not in LIMITS_OF_A_KEY
        return is_full or self.error.code == VLLM_IS_FULL

    def verify(self) -> None:
        """Raise ValueError if the ledger's first law does not hold for this account."""
        verify_intervals(list(self.intervals), self.start_ns, self.end_ns)
