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
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING
from splittime.kernels.api import AttentionBatch
from splittime.kernels.triton import attention_prefill, grouped, sampling
from splittime.kernels.triton.mixture import MixtureLayer
from splittime.kernels.triton.ops import TritonOps
from splittime.models.decoder import Decoder
from splittime.runner import sampler
from splittime.runner.batch import Batch, Slot
from splittime.runner.config import Resolved
from splittime.runner.device.graphs import DecodeGraphs, candidates
from splittime.runner.execution import Chosen, Flags, Forward
from splittime.runner.kv_store import KvStore
from splittime.runner.marks import to_device, to_host
from splittime.runner.sampler import Allowed, describe_lines

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
        sharing, longest = mixer.num_heads // mixer.num_kv_heads, min(LONG_CONTEXT, max_model_len)
        for tokens in attention_prefill.lines(shape, sharing, ops.activation_dtype.itemsize):
            length = min(tokens, longest)
            q = torch.zeros(length, mixer.num_heads, mixer.head_dim, dtype=ops.activation_dtype, device=ops.device)
            for context in sorted({length, longest}):
                tables = torch.zeros(1, -(-context // shape.block_size), dtype=torch.int64)
                nowhere = torch.full((length,), -1)
                batch = AttentionBatch([0, length], [context], tables, nowhere, nowhere, num_decode_rows=0)
                ops.attention(q, kv, ops.plan_attention(batch, shape, group.window_tokens), 1.0)


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
