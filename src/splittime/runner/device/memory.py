"""How much of a card's memory the KV cache may have: what is free once the weights are there, less what the largest
step takes beside them, which is measured by running it."""

import math

import torch

from splittime.kernels.api import AttentionBatch
from splittime.models.decoder import Decoder
from splittime.runner.config import RunnerConfig
from splittime.runner.kv_store import KvStore


def room_bytes(device: torch.device, utilization: float, step_bytes: int) -> int:
    """utilization: the share of all memory that this process may have, with what others have taken counted as ours.
    What torch keeps of freed memory, the largest step's above all, is given back first: it is in `step_bytes`."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1.0 - utilization)) - step_bytes)


@torch.inference_mode()
def largest_step_bytes(decoder: Decoder, config: RunnerConfig, kv_dtype: torch.dtype, max_model_len: int) -> int:
    """Peak of what is allocated beside weights and cache by a step of `max_num_batched_tokens` prompt tokens and logits
    of `max_num_seqs` rows; 0 where torch does not count (no card)."""
    device = decoder.ops.device
    lengths = _lengths(config.max_num_batched_tokens, max_model_len)
    blocks = [-(-length // config.block_size) for length in lengths]
    store = KvStore(decoder.kv_groups, sum(blocks), config.block_size, kv_dtype, device)
    before = _allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden = decoder.forward(torch.zeros_like(positions), positions, store, _batch(lengths, blocks, store))
    decoder.logits(hidden[: config.max_num_seqs])
    return (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0) - before


def _lengths(tokens: int, max_model_len: int) -> list[int]:
    """Returns the lengths of prompts that are so many tokens together."""
    count = math.ceil(tokens / max_model_len)
    return [tokens // count + (1 if place < tokens % count else 0) for place in range(count)]


def _batch(lengths: list[int], blocks: list[int], store: KvStore) -> AttentionBatch:
    tables = torch.full((len(lengths), max(blocks)), store.zero_block)
    first = 0
    for line, count in zip(tables, blocks, strict=True):
        line[:count] = torch.arange(first, first + count)
        first += count
    places = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return AttentionBatch(
        query_begins=[0, *torch.tensor(lengths).cumsum(0).tolist()],
        context_lens=lengths,
        block_tables=tables,
        token_blocks=tables[rows, places // store.block_size],
        token_offsets=places % store.block_size,
        num_decode_rows=0,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
