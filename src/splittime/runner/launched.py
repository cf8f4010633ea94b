"""A step under way: what it will leave for the host, and what that means for its rows. The one place where rows become
results, however they were computed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from splittime.core.step import RowResult, StepPlan, StepResult, TokenLogprob
from splittime.runner.batch import Batch
from splittime.runner.execution import Chosen, Flags
from splittime.runner.host_store import CopyMarks
from splittime.runner.marks import StreamMark
from splittime.runner.slots import Slot

NOT_FINITE = "what the model computes for this request is not finite"


@dataclass(slots=True)
class ComputedRows:
    """What a batch leaves, on the host, once `end` is reached.

    silent, sampling: rows of the batch, by whether they sample; is_silent_finite and chosen are of these, None where
        there are none.
    previous: the end of the step before, where that may have left the device idle. padded_rows: None for a step that
        was not captured. enqueue_ns: what the host took to launch it on a device apart from it.
    """

    batch: Batch
    silent: list[int]
    sampling: list[int]
    begin: StreamMark
    forward: StreamMark
    is_silent_finite: Flags | None
    chosen: Chosen | None
    prompt_scores: dict[str, tuple[TokenLogprob, ...]]
    end: StreamMark
    padded_rows: int | None
    previous: StreamMark | None = None
    enqueue_ns: int = 0


@dataclass(slots=True)
class Launched:
    """kind: `Execution.kind`. results: by request id; before `fetch`, of rows that failed before the launch. computed:
    None if all rows did. moved: copies of blocks to host memory and back, before the rows. broken: the blocks of each
    request for which something was computed that is not finite."""

    plan: StepPlan
    kind: str
    block_size: int
    results: dict[str, RowResult] = field(default_factory=dict)
    computed: ComputedRows | None = None
    moved: CopyMarks | None = None
    broken: list[list[int]] = field(default_factory=list)
    is_fetched: bool = False

    def fetch(self) -> None:
        """Wait for it, and let its requests know their tokens. Once; then it does nothing."""
        if self.is_fetched:
            return
        self.is_fetched = True
        if self.moved is not None:
            self.moved.end.wait()
        if self.computed is not None:
            self.computed.end.wait()
            self._settle(self.computed)

    def result(self) -> StepResult:
        """After `fetch`."""
        rows = tuple(self.results[row.request_id] for row in self.plan.rows)
        found = self.computed
        if found is None:
            result = StepResult(self.plan.step_id, rows, execution=self.kind)
        else:
            result = StepResult(
                self.plan.step_id,
                rows,
                device_ns=found.forward.ns_since(found.begin if self.moved is None else self.moved.end),
                sample_ns=found.end.ns_since(found.forward),
                execution=self.kind if found.padded_rows is None else "captured",
                padded_rows=found.padded_rows or 0,
                gap_ns=0 if found.previous is None else max(0, found.begin.ns_since(found.previous)),
                enqueue_ns=found.enqueue_ns,
            )
        return result if self.moved is None else self.moved.told(result)

    def _settle(self, found: ComputedRows) -> None:
        if found.is_silent_finite is not None:
            for index, is_fine in zip(found.silent, found.is_silent_finite(), strict=True):
                if is_fine:
                    self._tell(found, found.batch.slots[index], (), ())
                else:
                    self._fail(found.batch.slots[index])
        if found.chosen is not None:
            self._settle_sampling(found, found.chosen)

    def _settle_sampling(self, found: ComputedRows, chosen: Chosen) -> None:
        tokens, is_finite, batch = chosen.tokens(), chosen.is_finite(), found.batch
        logprobs = {} if chosen.logprobs is None else chosen.logprobs.told(tokens)
        lines: Sequence[int] = range(len(tokens))
        if not all(is_finite):
            for index, is_fine in zip(found.sampling, is_finite, strict=True):
                if not is_fine:
                    self._fail(batch.slots[index])
            lines = [line for line in lines if is_finite[line]]
        for slot, accepted in _accepted(found, lines, tokens, self.block_size):
            told = tuple(logprobs[line] for line in accepted if line in logprobs) if logprobs else ()
            self._tell(found, slot, tuple([tokens[line] for line in accepted]), told)

    def _tell(
        self, found: ComputedRows, slot: Slot, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        request_id = slot.admitted.request_id
        self.results[request_id] = RowResult(request_id, tokens, logprobs, found.prompt_scores.get(request_id, ()))

    def _fail(self, slot: Slot) -> None:
        request_id = slot.admitted.request_id
        self.results[request_id] = RowResult(request_id, error=NOT_FINITE)
        self.broken.append(list(slot.block_ids))  # of which drafts may lose some


def _accepted(
    found: ComputedRows, lines: Sequence[int], tokens: list[int], block_size: int
) -> Iterator[tuple[Slot, list[int]]]:
    """The lines of `found.sampling` whose tokens are accepted, of these, by request, which learns them."""
    batch, sampling, contexts = found.batch, found.sampling, found.batch.attention.context_lens
    if not batch.has_drafts:
        for line in lines:
            index = sampling[line]
            batch.slots[index].learn_sampled(contexts[index], tokens[line])
            yield batch.slots[index], [line]
        return
    accepted: dict[Slot, list[int]] = {}
    for line in sorted(lines, key=lambda line: contexts[sampling[line]]):
        index = sampling[line]
        slot = batch.slots[index]
        if slot.knows(contexts[index] - 1, batch.rows[index].token_ids[-1]):  # else a draft was wrong
            slot.learn_sampled(contexts[index], tokens[line])
            accepted.setdefault(slot, []).append(line)
    for slot, num_rows in Counter(batch.slots).items():
        if num_rows > 1:
            slot.drop_blocks(block_size)
    yield from accepted.items()
