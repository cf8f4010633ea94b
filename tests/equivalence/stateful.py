"""A decoder whose layers keep states, driven without a scheduler: who goes on from which slot is said by the test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from splittime.kernels.api import AttentionBatch, StateBatch
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import state_floats
from splittime.models.quant.plan import choose
from splittime.models.weights.load import Loaded, load_decoder, read_config
from splittime.runner.kv_store import KvStore

BLOCK_SIZE, BLOCKS_EACH, SEQUENCES = 16, 32, 4
Keep = tuple[int, int, int]  # row, count, slot


def load(
    folder: Path, kernels: str = "torch", dtype: str = "float32", quantization: str | None = None, **more: object
) -> Loaded:
    config = read_config(folder)
    plan = choose(quantization, dtype)
    ops = make_backend(kernels, getattr(torch, dtype))
    with torch.inference_mode():
        return load_decoder(folder, config, ops, plan, 512, **more)  # type: ignore[arg-type]


class Stateful:
    """Sequences 0 to `SEQUENCES` - 1, each with blocks of its own and the slot of its number; slots behind them are for
    keeping."""

    def __init__(self, loaded: Loaded, num_slots: int = 2 * SEQUENCES) -> None:
        self.decoder = loaded.decoder
        sizes = SEQUENCES * BLOCKS_EACH, BLOCK_SIZE, loaded.decoder.ops.activation_dtype
        floats = state_floats(loaded.decoder.config.layers)
        self.store = KvStore(self.decoder.kv_groups, *sizes, state_floats=floats, num_state_slots=num_slots)
        for states in self.store.states:
            states.fill_(float("nan"))  # that nobody has written
        self.num_tokens = [0] * SEQUENCES

    def begin(self, sequence: int) -> None:
        self.num_tokens[sequence] = 0

    @torch.inference_mode()
    def step(
        self, work: dict[int, list[int]], keeps: Sequence[Keep] = (), reads: Mapping[int, int] = MappingProxyType({})
    ) -> list[torch.Tensor]:
        """work: the next tokens of each sequence. reads: slots to go on from that are not their own -> the logits of
        each."""
        sizes = [len(tokens) for tokens in work.values()]
        begins = torch.tensor([0, *sizes]).cumsum(0).tolist()
        tables = torch.arange(SEQUENCES * BLOCKS_EACH).view(SEQUENCES, -1)[list(work)]
        starts = [self.num_tokens[one] for one in work]
        positions = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        rows = torch.arange(len(work)).repeat_interleave(torch.tensor(sizes))
        own = [reads.get(one, one if start else -1) for one, start in zip(work, starts, strict=True)]
        for one, size in zip(work, sizes, strict=True):
            self.num_tokens[one] += size
        batch = AttentionBatch(
            query_begins=begins,
            context_lens=[self.num_tokens[one] for one in work],
            block_tables=tables,
            token_blocks=tables[rows, positions // BLOCK_SIZE],
            token_offsets=positions % BLOCK_SIZE,
            num_decode_rows=next((place for place, size in enumerate(sizes) if size > 1), len(sizes)),
            states=StateBatch(own, list(work), keeps),
        )
        ids = torch.tensor([token for tokens in work.values() for token in tokens])
        hidden = self.decoder.forward(ids, positions, self.store, batch)
        return list(self.decoder.logits(hidden).split(sizes))

    def prompt(self, tokens: list[int], cut: int = 0, sequence: int = 0) -> torch.Tensor:
        """The logits of all of them, computed in steps of `cut`."""
        self.begin(sequence)
        cut = cut or len(tokens)
        parts = [tokens[begin : begin + cut] for begin in range(0, len(tokens), cut)]
        return torch.cat([self.step({sequence: part})[0] for part in parts])

    def generate(self, tokens: list[int], count: int, sequence: int = 0) -> list[int]:
        """Greedy."""
        found = [int(self.prompt(tokens, 0, sequence)[-1].argmax())]
        while len(found) < count:
            found.append(int(self.step({sequence: found[-1:]})[0][-1].argmax()))
        return found
