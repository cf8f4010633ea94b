"""The one contract between scheduling and computing: `StepPlan` in, `StepResult` out, `Runner` in between.

Both records hold ints, strings, tuples and errors as data, so they cross a process or a file unchanged and a recorded
plan can be replayed. A row says "compute tokens [start, start + len(token_ids)) of this request"; prefill, a chunk of
it, and decode are all rows. The KV cache of tokens [0, start) is already in the request's blocks when a row runs.

    blocks of a request:   [ 7 ][ 3 ][ 12 ]          block_size = 4
    token positions:        0..3 4..7 8..11          position p lives in block_ids[p // block_size], slot p % block_size
"""

from struct import Struct
from typing import Protocol

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.core.sampling import SamplingParams

THOUSAND = 1000  # chances are whole thousandths
PAIR = Struct("=if")  # a token's id and its logprob, which runners have as float32
PENDING = -1
"""In the place of a row's one token: the token that this request samples in the step before, which is still running."""


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request the runner must know from this step on (first admission, or again after a preemption).

    token_ids: all tokens known so far, prompt then outputs; the last `num_output_tokens` are outputs
    (penalties count them apart). `sampling.seed` is never None here.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_output_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # end-of-sequence and stop ids together; masked until min_tokens are out
    cache_salt: str = ""  # whose request it is: nothing of it may show in what another one gets
    adapter: str = ""  # the id of the adapter that computes it; "": the model alone
    tenant: str = ""  # who asks, for whom forms are kept


NO_STATE = -1
"""In the place of a slot: the state before the first token."""
CHECKPOINT_TOKENS = 64  # between two states that a prompt can go on from, or the least multiple that is whole blocks
SPARE_STATES = 2  # slots that a newcomer finds: one of its own, and the checkpoint that it goes on from


class RowState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The state slots of a row, of models whose layers keep states. The row goes on from the state in slot `read`, and
    leaves that behind its last token in slot `write`. keeps: (count, slot), the state behind so many of its tokens is
    left there too."""

    read: int
    write: int
    keeps: tuple[tuple[int, int], ...] = ()


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One request's part of a step: known tokens, then drafts of those that may follow.

    start: position of `token_ids[0]`.
    token_ids: tokens whose KV this row writes, at least one. (`PENDING`,) where the token is not known yet.
    new_block_ids: appended to the request's block table before the row runs. The table is empty at admission; after a
        row with drafts it ends with the block of the last accepted token whose KV was written.
    num_samples: so many of the row's last positions are sampled. 0: a chunk of a prompt. 1: the token that follows.
        With drafts 1 + len(draft_token_ids): the last known position and that of each draft.
    draft_token_ids: guesses of the tokens that follow. Their KV is written behind that of the known ones. The token
        sampled at a position is accepted while all drafts before it are what was sampled in their places.
    state: where a model with states keeps the request's. None: in the slot of its place in the runner.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    num_samples: int
    draft_token_ids: tuple[int, ...] = ()
    state: RowState | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the row computes, drafts among them."""
        return len(self.token_ids) + len(self.draft_token_ids)


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """What one step computes. A runner carries a plan out in this order:

    1. It forgets the `released` requests and learns the `admitted` ones; a request may be in both.
    2. It makes the `offloads`, copies of whole blocks to slots of host memory: (block, slot).
    3. It makes the `restores`, copies back: (slot, block), and the `imports`, copies of blocks that another server has
       sent: (number, block), where the runner gave the number when it received the content.
    4. It runs the rows. Each request has at most one.

    Within a kind the copies are independent of each other: no block is offloaded twice or restored into twice, and no
    slot is the target of two offloads. Between the kinds the order counts: a block may be offloaded and then restored
    into, and a slot may be copied to and then from.

    preempted: those of the released that have not ended: they come again.
    least_survival: a draft for the next step that is less likely than this to be right would not pay, by what steps
    like this one cost.
    """

    step_id: int
    rows: tuple[Row, ...]
    admitted: tuple[Admitted, ...] = ()
    released: tuple[str, ...] = ()
    offloads: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    least_survival: float = 0.0
    preempted: tuple[str, ...] = ()
    imports: tuple[tuple[int, int], ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probability of a token under the model (before temperature and filters), its rank (1 is the most likely),
    and the most likely alternatives, `PAIR` by `PAIR`: twenty as tuples take 2.2 KB."""

    token_id: int
    logprob: float
    rank: int
    packed: bytes = b""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Returns the alternatives as (token_id, logprob), best first."""
        return tuple(PAIR.iter_unpack(self.packed))


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What came of a row; results are in the order of the plan's rows.

    token_ids: the accepted tokens. None for a chunk, one without drafts, and with drafts one more than were right.
    logprobs: one for each accepted token, for requests with `sampling.logprobs`.
    prompt_logprobs: for requests with `sampling.prompt_logprobs`, one entry for each row token but the last of the
    prompt: the entry at i is the log-probability of the *next* prompt token, at position start + i + 1.
        After a preemption the same entries may come again.
    draft_token_ids: guesses of what follows `token_ids`, for the request's next row to verify. The scheduler passes on
        as many as pay, and as there are tokens and blocks to spare for.
    draft_survival: of each of these the chance that it and all before it are right, in whole thousandths: what a
        ledger keeps is what the scheduler went by. () if nobody knows.
    pooled: where the row ends the prompt of a request with `sampling.pooling`: what was asked for, as float32 values of
        the machine's byte order, not normalised. A runner that computes no model leaves it empty.
    error: this row alone failed, sampling or not (say, its logits are not finite); its request ends, the others go on.
        What the request itself is to blame for comes whole, as its client is to be told.
    is_late: what may come was not known in time, so that the row, which was to sample, gave no token. The request gets
        no row until the driver hears that it is known.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    error: str | ErrorInfo | None = None
    draft_survival: tuple[float, ...] = ()
    pooled: bytes = b""
    is_late: bool = False


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """`device_ns` is the model's forward pass, `sample_ns` choosing tokens; what else `run` took is launch.

    execution: "host": run synchronously, by the host or on cards that it waited for. On a device apart from the host:
        "eager" (kernel by kernel) or "captured" (as one launch, with `padded_rows` rows for nobody).
    gap_ns: by the device's own marks, how long it had nothing to do between the step before and this one.
    enqueue_ns: what the host took to tell the device all of it.
    collective_ns: of `device_ns` and `sample_ns`, how long this process exchanged results with the ranks that share its
        model, waiting for the slowest of them included.
    offload_ns, restore_ns: copies of blocks to host memory, and back, imports among the latter.
    draft_ns: guessing what follows, after the rest.
    mask_ns: of `sample_ns`, what forms allow: waiting for what is looked for beside the rest, and, where the host has
        the tokens by then, looking behind them, at forms and at bounds of the reasoning.
    """

    step_id: int
    rows: tuple[RowResult, ...]
    device_ns: int = 0
    sample_ns: int = 0
    execution: str = "host"
    padded_rows: int = 0
    gap_ns: int = 0
    enqueue_ns: int = 0
    collective_ns: int = 0
    offload_ns: int = 0
    restore_ns: int = 0
    draft_ns: int = 0
    mask_ns: int = 0


class Runner(Protocol):
    """What carries out a step: torch, a fake with declared delays, or the simulator's cost model.

    verifies_drafts: it runs rows with drafts. One that does not raises `EngineError` for such a row.
    """

    @property
    def verifies_drafts(self) -> bool: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class AsyncRunner(Protocol):
    """A runner that is given the next step while it computes one. Steps are carried out one after the other, in the
    order in which they were launched; `collect` waits for the oldest that was not collected, and raises what it raised.
    """

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...
