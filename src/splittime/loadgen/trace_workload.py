"""Prompts for a trace that has none: as long as it says, and beginning alike where its block ids do.

A block id stands for fixed tokens (`prompts.BlockIds`), so what the trace's own users had in common is in common again.
With lengths scaled by f, block i of a prompt spans tokens [round(512 f i), round(512 f (i + 1))): the edges depend on
its place alone, so equal ids still give equal beginnings. A trace that is used up begins again with other tokens.
Warm-up takes the rows' lengths and new tokens: it warms every shape and leaves the prefix cache as it was.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from splittime.ledger.client_book import Phase
from splittime.loadgen.content import Content, Conversation
from splittime.loadgen.lengths import Fitter, Rows
from splittime.loadgen.prompts import Alphabet, BlockIds, Ids, Salt
from splittime.loadgen.randomness import stream
from splittime.loadgen.spec import LoadSpec
from splittime.loadgen.traces import BLOCK_TOKENS, Trace
from splittime.loadgen.workload import rendered


class TraceWorkload:
    """The rows in order, from the row `begin`."""

    def __init__(self, spec: LoadSpec, trace: Trace, alphabet: Alphabet, salt: Salt, fitter: Fitter) -> None:
        self._spec, self._trace, self._alphabet, self._salt, self._fitter = spec, trace, alphabet, salt, fitter
        self._rows = trace.rows.scaled(spec.length_scale)
        self._most_rows = 0
        self._blocks: dict[int, BlockIds] = {}

    def draw(self, phase: Phase, count: int, begin: int = 0) -> list[Conversation]:
        if phase is Phase.WARM_UP:
            rows = self._rows.draw(stream(self._spec.seed, "lengths", phase), count, evenly=True)
            places = None
        else:
            places = np.arange(begin, begin + count)
            rows = Rows(*(one[places % len(self._trace)] for one in self._rows))
            self._most_rows = max(self._most_rows, begin + count) if phase is Phase.MEASURED else self._most_rows
        rows = Rows(*self._fitter.fit(rows.inputs, rows.outputs))
        prompts = self._prompts(phase, rows.inputs, None if places is None else places.tolist())
        return [[self._content(*one)] for one in zip(prompts, rows.outputs.tolist(), strict=True)]

    def notes(self) -> list[str]:
        rows, used = len(self._trace), self._most_rows
        again = [f"{used} requests were measured over the trace's {rows} rows: some rows came again"]
        return self._fitter.note() + (again if used > rows else [])

    def _prompts(self, phase: Phase, inputs: np.ndarray, places: Sequence[int] | None) -> list[Ids]:
        if not len(inputs):
            return []
        every = self._alphabet.draw(stream(self._spec.seed, "prompts", phase), int(inputs.sum()))
        prompts = np.split(every, np.cumsum(inputs)[:-1])
        salts = self._salt.ids(self._alphabet, phase, count=len(prompts))
        for ids, salt_ids in zip(prompts, salts, strict=True):
            self._salt.put_on(ids, salt_ids)
        if places is not None and self._trace.blocks is not None:
            for ids, place in zip(prompts, places, strict=True):
                self._put_blocks(ids, *divmod(place, len(self._trace)))
        return prompts

    def _put_blocks(self, ids: Ids, again: int, row: int) -> None:
        """Over the drawn tokens, as far as the row names blocks."""
        assert self._trace.blocks is not None
        tokens_per_block = BLOCK_TOKENS * self._spec.length_scale
        place = 0
        for first_id, count in runs(self._trace.blocks[row]):
            for block in self._source(again).of(first_id, count):
                room = ids[round(tokens_per_block * place) : round(tokens_per_block * (place + 1))]
                room[:] = block[: len(room)]
                place += 1

    def _source(self, again: int) -> BlockIds:
        if again not in self._blocks:
            most = int(BLOCK_TOKENS * self._spec.length_scale) + 1
            self._blocks[again] = BlockIds(self._alphabet, self._salt, most, str(again))
        return self._blocks[again]

    def _content(self, ids: Ids, output_tokens: int) -> Content:
        exact = self._spec.exact_output is not False
        may_hit = self._trace.blocks is not None
        asked = Content(output_tokens=output_tokens, exact_output=exact, may_hit=may_hit)
        return rendered(asked, self._spec.prompt_form or "ids", self._alphabet, [ids])


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of ids that follow one another."""
    begin = 0
    for i in range(1, len(block_ids) + 1):
        if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1:
            yield block_ids[begin], i - begin
            begin = i
