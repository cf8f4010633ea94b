"""Embeddings: the last layer's normed output for a prompt, of one token or the mean of all (`sampling.pooling`).

A prompt may come in chunks. What its embedding needs of a chunk is kept in the request's slot until the last one: of
`cls` the first token's output, of `mean` the sum so far. It is summed in float64, so that the mean is the same however
the prompt was cut, but for the last bit. A preempted request has a new slot, and begins again.
"""

import torch
from torch import Tensor

from splittime.models.decoder import Decoder
from splittime.runner.batch import Batch, Slot
from splittime.runner.marks import to_device, to_host


def pool(decoder: Decoder, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
    """Returns the embeddings of the prompts that end in this batch, by request: float32 [hidden], of the host, complete
    when a mark after this is reached. hidden: [T, hidden], of which `decoder.normed` makes the outputs."""
    wanted = [index for index, slot in enumerate(batch.slots) if slot.admitted.sampling.pooling]
    if not wanted:
        return {}
    spans = [_span(batch, index) for index in wanted]
    places = to_device(torch.cat([torch.arange(begin, end) for begin, end in spans]), hidden.device)
    parts = decoder.normed(hidden[places]).split([end - begin for begin, end in spans])
    for index, part in zip(wanted, parts, strict=True):
        _take(batch.slots[index], part)
    ended = [batch.slots[index] for index in wanted if _ends(batch, index)]
    return {slot.admitted.request_id: to_host(_embedding(slot)) for slot in ended}


def _ends(batch: Batch, index: int) -> bool:
    return batch.attention.context_lens[index] == batch.slots[index].prompt_len


def _span(batch: Batch, index: int) -> tuple[int, int]:
    """Returns which of the batch's tokens a row's embedding needs, if any: [begin, end)."""
    begin, end = batch.attention.query_begins[index : index + 2]
    kind = batch.slots[index].admitted.sampling.pooling
    if kind == "cls":
        return begin, begin + (batch.rows[index].start == 0)
    if kind == "last":
        return end - _ends(batch, index), end
    return begin, end


def _take(slot: Slot, part: Tensor) -> None:
    """part: [tokens, hidden], of a row; of `last` and `cls` of one token, or none."""
    if not len(part):
        return
    total = part.double().sum(0)
    slot.pooled = total if slot.pooled is None else slot.pooled + total


def _embedding(slot: Slot) -> Tensor:
    assert slot.pooled is not None, "a prompt ended without any of its tokens"
    count = slot.prompt_len if slot.admitted.sampling.pooling == "mean" else 1
    return (slot.pooled / count).float()
