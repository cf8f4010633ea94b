"""The one contract between scheduling and computing: `StepPlan` in, `StepResult` out, `Runner` in between.

Both records hold ints, strings and tuples only, so they cross a process or a file unchanged and a recorded plan can be
replayed. A row says "compute tokens [start, start + len(token_ids)) of this request"; prefill, a chunk of it, and
decode are all rows. The KV cache of tokens [0, start) is already in the request's blocks when a row runs.

    blocks of a request:   [ 7 ][ 3 ][ 12 ]          block_size = 4
    token positions:        0..3 4..7 8..11          position p lives in block_ids[p // block_size], slot p % block_size
"""

from typing import Protocol

import msgspec

from splittime.core.sampling import SamplingParams

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


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One request's part of a step.

    start: position of `token_ids[0]`.
    token_ids: tokens whose KV this row writes; the last one's logits are sampled if `samples`. (`PENDING`,) where the
        token is not known yet.
    new_block_ids: appended to the request's block table before the row runs; the table is empty at admission.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    samples: bool
    draft_token_ids: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """What one step computes. `released` requests are forgotten first, then `admitted` are learnt, `offloads` of whole
    blocks to host memory (block, slot) are made, then `restores` from there (slot, block), then `copies` (source,
    target), then the rows run. Each request has at most one row. No block is in two offloads or the target of two
    restores, no slot the target of two offloads: each kind may be made at once. A block may be offloaded and then
    restored into, a slot be copied to and then from."""

    step_id: int
    rows: tuple[Row, ...]
    admitted: tuple[Admitted, ...] = ()
    released: tuple[str, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    offloads: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probability of a token under the model (before temperature and filters), its rank (1 is the most likely),
    and the most likely alternatives as (token_id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RowResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What came of a row: the accepted tokens (none for a chunk that does not sample), in the order of the plan's rows.

    prompt_logprobs: for requests with `sampling.prompt_logprobs`, one entry for each row token but the last of the
    prompt: the entry at i is the log-probability of the *next* prompt token, at position start + i + 1.
        After a preemption the same entries may come again.
    error: this row alone failed, sampling or not (say, its logits are not finite); its request ends, the others go on.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """`device_ns` is the model's forward pass, `sample_ns` choosing tokens; what else `run` took is launch.

    execution: how it was computed: by the "host" itself (or on cards that it waited for all the while), or on a device
        apart from it, "eager" (kernel by kernel) or "captured" (as one launch, with `padded_rows` rows for nobody).
    gap_ns: by the device's own marks, how long it had nothing to do between the step before and this one.
    enqueue_ns: what the host took to tell the device all of it.
    collective_ns: of `device_ns` and `sample_ns`, how long this process exchanged results with the ranks that share its
        model, waiting for the slowest of them included.
    offload_ns, restore_ns: copies of blocks to host memory, and back.
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


class Runner(Protocol):
    """What carries out a step: torch, a fake with declared delays, or the simulator's cost model."""

    def run(self, plan: StepPlan) -> StepResult: ...


class AsyncRunner(Protocol):
    """A runner that is given the next step while it computes one. Steps are carried out one after the other, in the
    order in which they were launched; `collect` waits for the oldest that was not collected, and raises what it raised.
    """

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...
