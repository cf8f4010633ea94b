"""Decode steps captured once and replayed: on a card a CUDA graph for each of some numbers of rows.

A step of decode rows alone is a chain of a few hundred launches that depend on nothing but how many rows there are.
Captured, the chain is one launch. It reads its inputs from buffers that stay: `run` writes a step's numbers there and
replays the smallest capture that has room; rows that are left over have context 0 and write nowhere (see
`kernels.triton.attention_plan`), and what is computed for them is not looked at.

Without a card there is nothing to capture: the chain is run again over the same buffers, which is what tests need.
Captured from token ids to logits; tokens are chosen outside, since how depends on who is served.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splittime.kernels import reads
from splittime.kernels.triton import attention
from splittime.models.decoder import Decoder
from splittime.runner.batch import Batch
from splittime.runner.device.marks import Mark, to_device
from splittime.runner.device.sizes import worth_keeping
from splittime.runner.kv_store import KvStore

REPLAYS = 5  # of each size when it is timed
ALIGNED = 4  # ints: 16 bytes
Computed = tuple[Tensor, Tensor]  # hidden states [rows, hidden], logits float32 [rows, vocab]


class Buffers:
    """A step's numbers on the device, each in its place. rows, blocks: capacities."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        width = -(-(rows + 1) // ALIGNED) * ALIGNED
        self.rows = rows
        self.lines = torch.zeros(6, width, dtype=torch.int32, device=device)
        self.tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.query_begins = torch.arange(rows + 1, dtype=torch.int32, device=device)
        names = ("ids", "places", "positions", "context_lens", "token_blocks", "token_offsets")
        self.by_name = {name: line[:rows] for name, line in zip(names, self.lines, strict=True)}

    def write(self, batch: Batch) -> None:
        """Rows beyond the batch's: context 0, block -1."""
        host = torch.zeros(self.lines.shape, dtype=torch.int32)
        host[4] = -1
        count, step = len(batch.rows), batch.attention
        host[0, :count] = batch.token_ids
        host[1, :count] = torch.tensor([slot.place for slot in batch.slots])
        host[2, :count] = batch.positions
        host[3, :count] = torch.tensor(step.context_lens)
        host[4, :count], host[5, :count] = step.token_blocks, step.token_offsets
        device = self.lines.device
        self.lines.copy_(to_device(host, device))
        tables = to_device(step.block_tables.to(torch.int32), device)
        self.tables[:count, : tables.shape[1]].copy_(tables)


@dataclass(frozen=True)
class Captured:
    """read: bytes of weights that a replay reads, by scheme."""

    buffers: Buffers
    replay: Callable[[], None]
    computed: Computed
    plans: dict[int | None, attention.Plan]
    read: Counter[str]


class DecodeGraphs:
    """latest: int64, the token that each slot sampled last; where a row's id is below 0, its token is there."""

    def __init__(self, decoder: Decoder, store: KvStore, latest: Tensor, max_model_len: int) -> None:
        self._decoder, self._store, self._latest = decoder, store, latest
        self._max_model_len = max_model_len
        self._captured: dict[int, Captured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._captured)

    def capture(self, sizes: Sequence[int]) -> None:
        """The largest first: the memory of its intermediate results then serves the others too."""
        pool = None
        for size in sorted(sizes, reverse=True):
            captured, pool = self._capture(size, pool)
            self._captured[size] = captured
        self._captured = dict(sorted(self._captured.items()))

    def drop_needless(self) -> None:
        """Keep the sizes that are `worth_keeping`, by replays of empty rows."""
        kept = worth_keeping({size: self._replay_ns(captured) for size, captured in self._captured.items()})
        self._captured = {size: self._captured[size] for size in kept}

    def has_room_for(self, batch: Batch) -> bool:
        """Decode rows only, and not too many."""
        count = len(batch.rows)
        is_decode = batch.attention.num_decode_rows == count == len(batch.token_ids)
        return is_decode and any(size >= count for size in self._captured)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """And the number of rows beyond the batch's. What is returned stays until the next run."""
        count = len(batch.rows)
        captured = next(one for size, one in self._captured.items() if size >= count)
        captured.buffers.write(batch)
        captured.replay()
        self._count(captured, batch)
        hidden, logits = captured.computed
        return hidden[:count], logits[:count], captured.buffers.rows - count

    def _replay_ns(self, captured: Captured) -> float:
        captured.replay()
        begin = Mark(self._latest.device)
        for _ in range(REPLAYS):
            captured.replay()
        end = Mark(self._latest.device)
        end.wait()
        return end.ns_since(begin) / REPLAYS

    def _capture(self, size: int, pool: Any) -> tuple[Captured, Any]:
        shape = self._store.shape
        buffers = Buffers(size, -(-self._max_model_len // shape.block_size), self._latest.device)
        buffers.by_name["token_blocks"].fill_(-1)
        plans = {window: self._plan(buffers, window) for window in dict.fromkeys(self._decoder.config.layer_windows)}

        def compute() -> Computed:
            ids = buffers.by_name["ids"].to(torch.int64)
            known = self._latest.index_select(0, buffers.by_name["places"])
            ids = torch.where(ids < 0, known, ids)
            hidden = self._decoder.compute(ids, buffers.by_name["positions"], self._store.layers, plans)
            return hidden, self._decoder.logits(hidden)

        before = Counter(reads.total())
        compute()  # compiles what was not compiled, which cannot be captured
        read = Counter(reads.total()) - before
        replay, computed, pool = _captured(compute, pool) if self._latest.is_cuda else _repeated(compute)
        return Captured(buffers, replay, computed, plans, read), pool

    def _plan(self, buffers: Buffers, window_tokens: int | None) -> attention.Plan:
        lines = buffers.by_name
        return attention.Plan(
            self._store.shape,
            window_tokens,
            buffers.query_begins,
            lines["context_lens"],
            buffers.tables,
            lines["token_blocks"],
            lines["token_offsets"],
            num_decode_rows=buffers.rows,
            max_context_tokens=self._max_model_len,
        )

    def _count(self, captured: Captured, batch: Batch) -> None:
        """A replay runs none of the code that counts."""
        if self._latest.is_cuda:  # the repeated chain has counted its weights itself
            reads.add(captured.read)
        contexts = batch.attention.context_lens
        for window, store in zip(self._decoder.config.layer_windows, self._store.layers, strict=True):
            positions = attention.positions_read(contexts, [1] * len(contexts), window)
            reads.count_kv_bytes(store.data.dtype, attention.kv_bytes(captured.plans[window], store, positions))


def _captured(compute: Callable[[], Computed], pool: Any) -> tuple[Callable[[], None], Computed, Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        computed = compute()
    return graph.replay, computed, graph.pool()


def _repeated(compute: Callable[[], Computed]) -> tuple[Callable[[], None], Computed, None]:
    """The same with no graph: what is computed goes where it went the first time."""
    kept = compute()

    def replay() -> None:
        for place, tensor in zip(kept, compute(), strict=True):
            place.copy_(tensor)

    return replay, kept, None
