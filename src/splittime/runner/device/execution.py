"""Steps on a card's stream: they are launched, and the engine plans meanwhile.

Tokens stay on the device: each slot's latest lies in `latest`, where the next step's rows find it (`PENDING`), and the
host learns it when it collects. Steps run in the order of the stream, so a block that is given to another request, or
a place in `latest`, may be written by the step before without harm.

What does wait, because it is worked out on the host: penalties, biases and masks on logits, which need the tokens of
the step before, and prompt log-probabilities. A step with such a row is one step after the other.

Before the first request, kernels are compiled beside those of warm-up steps, captured ones and the largest one
(`compile_first_calls`). Triton compiles a kernel for each set of its constants, a second or so each, and some depend on
how large a step is: on how many rows draw a token, on how many tokens choose experts, on how long a chunk and its
context are. Each is launched once, over the empty cache; what is computed is not looked at.

A step of decode rows alone is a chain of a few hundred launches that depend on nothing but how many rows there are.
Captured, the chain is one launch. It reads its inputs from buffers that stay: `run` writes a step's numbers there and
replays the smallest capture that has room; rows that are left over have context 0 and write nowhere (see
`kernels.triton.attention_plan`), and what is computed for them is not looked at.

Without a card there is nothing to capture: the chain is run again over the same buffers, which is what tests need.
Captured from token ids to logits; tokens are chosen outside, since how depends on who is served.

More sizes are less padding, but each keeps memory and takes start-up time. Which pay depends on the model and the card:
where a step is as long as reading the weights takes, 5 rows cost what 8 cost. So candidates are captured, replayed and
timed, and one is kept only if the next larger one that is kept would take noticeably longer.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING
from splittime.kernels import plain
from splittime.kernels.api import AttentionBatch, KvShape
from splittime.kernels.layer import AttentionSpec, KvGroup, Weighing
from splittime.kernels.triton import attention, attention_prefill, grouped, sampling
from splittime.kernels.triton.mixture import MixtureLayer
from splittime.kernels.triton.ops import TritonOps
from splittime.models.decoder import Decoder
from splittime.runner import sampler
from splittime.runner.batch import Batch
from splittime.runner.config import Resolved
from splittime.runner.execution import Chosen, Flags, Forward
from splittime.runner.kv_store import KvStore
from splittime.runner.marks import StreamMark, to_device, to_host
from splittime.runner.sampler import Allowed, describe_lines
from splittime.runner.slot import Slot

CANDIDATES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
LEAST_SAVING = 0.02
"""The least saving that counts, of a step's time: less is within the spread of replays."""
REPLAYS = 5  # of each size when it is timed
ALIGNED = 4  # ints: 16 bytes
Graph = torch.cuda.CUDAGraph
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
    plans: list[attention.PagedPlan]
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
        other = None
        for size in sorted(sizes, reverse=True):
            captured, other = self._capture(size, other)
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
        """Returns what was computed, and the number of rows beyond the batch's. It stays until the next run."""
        count = len(batch.rows)
        captured = next(one for size, one in self._captured.items() if size >= count)
        captured.buffers.write(batch)
        captured.replay()
        self._count(captured, batch)
        hidden, logits = captured.computed
        return hidden[:count], logits[:count], captured.buffers.rows - count

    def _replay_ns(self, captured: Captured) -> float:
        captured.replay()
        begin = StreamMark(self._latest.device)
        for _ in range(REPLAYS):
            captured.replay()
        end = StreamMark(self._latest.device)
        end.wait()
        return end.ns_since(begin) / REPLAYS

    def _capture(self, size: int, other: Graph | None) -> tuple[Captured, Graph | None]:
        buffers = Buffers(size, -(-self._max_model_len // self._store.block_size), self._latest.device)
        buffers.by_name["token_blocks"].fill_(-1)
        groups = zip(self._decoder.kv_groups, self._store.shapes, strict=True)
        plans = [self._plan(buffers, group, shape) for group, shape in groups]

        def compute() -> Computed:
            ids = buffers.by_name["ids"].to(torch.int64)
            known = self._latest.index_select(0, buffers.by_name["places"])
            ids = torch.where(ids < 0, known, ids)
            hidden = self._decoder.embedded(ids)
            given, positions = self._decoder.given(ids, hidden), buffers.by_name["positions"]
            hidden = self._decoder.through(hidden, positions, self._store.layers, plans, given=given)
            return hidden, self._decoder.logits(hidden)

        before = Counter(plain.total())
        compute()  # compiles what was not compiled, which cannot be captured
        read = Counter(plain.total()) - before
        replay, computed, graph = _captured(compute, other) if self._latest.is_cuda else _repeated(compute)
        return Captured(buffers, replay, computed, plans, read), graph

    def _plan(self, buffers: Buffers, group: KvGroup, shape: KvShape) -> attention.PagedPlan:
        lines = buffers.by_name
        return attention.PagedPlan(
            shape,
            group.window_tokens,
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
            plain.add(captured.read)
        contexts = batch.attention.context_lens
        for group, plan in zip(self._decoder.kv_groups, captured.plans, strict=True):
            positions = attention.positions_read(contexts, [1] * len(contexts), group.window_tokens)
            for store in (self._store.layers[layer] for layer in group.layers):
                plain.count_kv_bytes(store.data.dtype, attention.kv_bytes(plan, store, positions))


def _captured(compute: Callable[[], Computed], other: Graph | None) -> tuple[Callable[[], None], Computed, Graph]:
    """other: a graph whose memory may be used again."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None if other is None else other.pool()):
        computed = compute()
    return graph.replay, computed, graph


def _repeated(compute: Callable[[], Computed]) -> tuple[Callable[[], None], Computed, None]:
    """Returns what replays without a graph: it computes again, and the result goes where it went the first time."""
    kept = compute()

    def replay() -> None:
        for place, tensor in zip(kept, compute(), strict=True):
            place.copy_(tensor)

    return replay, kept, None


def candidates(max_num_seqs: int) -> tuple[int, ...]:
    """Up to the smallest that holds as many as may run, if there is one."""
    below = [size for size in CANDIDATES if size < max_num_seqs]
    return (*below, *[size for size in CANDIDATES if size >= max_num_seqs][:1])


def worth_keeping(times_ns: Mapping[int, float], least_saving: float = LEAST_SAVING) -> tuple[int, ...]:
    """Returns the sizes to keep, whose replays take so long: the largest, and each that saves enough beside the
    next."""
    kept: list[int] = []
    for size in sorted(times_ns, reverse=True):
        if not kept or times_ns[size] <= (1 - least_saving) * times_ns[kept[-1]]:
            kept.append(size)
    return tuple(reversed(kept))


DRAWN = (SamplingParams(temperature=0.0, seed=0), SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9))
LONG_CONTEXT = 2048  # of which a short chunk's keys are shared by programs


@torch.inference_mode()
def compile_first_calls(decoder: Decoder, store: KvStore, resolved: Resolved) -> None:
    assert isinstance(decoder.ops, TritonOps)
    _draw(decoder.ops, resolved)
    _choose_experts(decoder)
    _attend(decoder, store, resolved.max_model_len)


def _draw(ops: TritonOps, resolved: Resolved) -> None:
    for rows in sampling.lines(resolved.max_num_seqs, resolved.vocab_size):
        logits = torch.zeros(rows, resolved.vocab_size, device=ops.device)
        for kind in DRAWN:
            ops.draw_tokens(logits, sampler.draws([kind] * rows, [0] * rows))


def _choose_experts(decoder: Decoder) -> None:
    """By one layer, as the others are like it."""
    layer = next((one for one in decoder.layers if isinstance(one, MixtureLayer)), None)
    if layer is None:
        return
    ops, experts = decoder.ops, layer.experts
    for tokens in grouped.lines(experts, layer.spec.num_chosen):
        x = torch.zeros(tokens, experts.down.out_features, dtype=ops.activation_dtype, device=ops.device)
        layer.feed_forward(x, x, torch.zeros(tokens, dtype=torch.int32, device=ops.device))


def _attend(decoder: Decoder, store: KvStore, max_model_len: int) -> None:
    """Chunks of some tokens, with no context before them and after a long one, all of it the first block."""
    ops = decoder.ops
    for group, shape in zip(decoder.kv_groups, store.shapes, strict=True):
        mixer, kv = decoder.config.layers[group.layers[0]].mixer, store.layers[group.layers[0]]
        assert isinstance(mixer, AttentionSpec)
        sharing, longest = mixer.num_heads // mixer.num_kv_heads, min(LONG_CONTEXT, max_model_len)
        for tokens in attention_prefill.lines(shape, sharing, ops.activation_dtype.itemsize):
            length = min(tokens, longest)
            q = torch.zeros(length, mixer.num_heads, mixer.head_dim, dtype=ops.activation_dtype, device=ops.device)
            for context in sorted({length, longest}):
                tables = torch.zeros(1, -(-context // shape.block_size), dtype=torch.int64)
                nowhere = torch.full((length,), -1)
                batch = AttentionBatch([0, length], [context], tables, nowhere, nowhere, num_decode_rows=0)
                ops.attention(q, kv, ops.plan_attention(batch, shape, group.window_tokens), Weighing(1.0))


MAX_SLOTS = 1 << 16


class DeviceExecution:
    """An `Execution` over `TritonOps`. captures: `prepare` captures decode steps, where there is a card."""

    kind = "eager"
    is_apart = True
    verifies_drafts = False  # a token that is not known lies on the card, one a request

    def __init__(self, ops: TritonOps, captures: bool) -> None:
        self._ops, self._captures = ops, captures
        self.device = ops.device
        self.latest = torch.zeros(MAX_SLOTS, dtype=torch.int64, device=ops.device)
        self.graphs: DecodeGraphs | None = None

    def forward(self, decoder: Decoder, store: KvStore, batch: Batch) -> Forward:
        if self.graphs is not None and self.graphs.has_room_for(batch):
            return Forward(*self.graphs.run(batch))
        token_ids, positions = to_device(batch.token_ids, self.device), to_device(batch.positions, self.device)
        if (batch.token_ids == PENDING).any():
            places = torch.tensor([slot.place for slot in batch.slots])
            lengths = torch.tensor(batch.attention.query_begins).diff()
            known = self.latest.index_select(0, to_device(places.repeat_interleave(lengths), self.device))
            token_ids = torch.where(token_ids == PENDING, known, token_ids)
        return Forward(decoder.forward(token_ids, positions, store, batch.attention))

    def finite(self, computed: Tensor) -> Flags:
        return to_host(self._ops.finite_flags(computed)).tolist

    def choose(
        self, slots: Sequence[Slot], counts: Sequence[int], raw: Tensor, logits: Tensor, allowed: Allowed
    ) -> Chosen:
        params = [slot.admitted.sampling for slot in slots]
        tokens = self._ops.draw_tokens(sampler.masked(logits, allowed), sampler.draws(params, list(counts)))
        places = torch.tensor([slot.place for slot in slots])
        self.latest.index_copy_(0, to_device(places, self.device), tokens)
        return Chosen(self.finite(raw), to_host(tokens).tolist, describe_lines(raw, tokens, params))

    def prepare(self, decoder: Decoder, store: KvStore, resolved: Resolved) -> tuple[int, ...]:
        """On a card, compile what steps of other sizes will need, and capture decode steps."""
        if not self.latest.is_cuda:
            return ()
        compile_first_calls(decoder, store, resolved)
        if not self._captures:
            return ()
        return self.capture(decoder, store, resolved, candidates(resolved.max_num_seqs), keep_all=False)

    @torch.inference_mode()
    def capture(
        self, decoder: Decoder, store: KvStore, resolved: Resolved, sizes: Sequence[int], keep_all: bool
    ) -> tuple[int, ...]:
        graphs = DecodeGraphs(decoder, store, self.latest, resolved.max_model_len)
        graphs.capture(sizes)
        if not keep_all:
            graphs.drop_needless()
        self.graphs = graphs
        return graphs.sizes

    def drop_captured(self) -> tuple[int, ...]:
        graphs, self.graphs = self.graphs, None
        return () if graphs is None else graphs.sizes

    def forget_weights(self) -> None:
        self._ops.forget_experts()
