"""What is answered of a prompt behind which no token is wanted (`sampling.pooling`).

An embedding is the last layer's normed output of one token, or the mean of all. A prompt may come in chunks: what is
needed of a chunk is kept in the request's slot until the last one, of `cls` the first token's output, of `mean` the sum
so far. It is summed in float64, so that the mean is the same however the prompt was cut, but for the last bit. A
preempted request has a new slot, and begins again.

Of `logits` it is what the model says of some tokens behind the prompt, in their order.
"""

import torch
from torch import Tensor

from splittime.core.sampling import AHEAD, LOGITS
from splittime.models.decoder import Decoder
from splittime.runner.batch import Batch, Slot
from splittime.runner.marks import to_device, to_host


def pool(decoder: Decoder, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
    """Returns what the prompts that end in this batch are answered with, by request: float32, of the host, complete
    when a mark after this is reached. hidden: [T, hidden], the last layer's output, not normed."""
    wanted = [index for index, slot in enumerate(batch.slots) if slot.admitted.sampling.pooling not in ("", AHEAD)]
    if not wanted:
        return {}
    scored = [index for index in wanted if _kind(batch, index) == LOGITS]
    embedded = [index for index in wanted if _kind(batch, index) != LOGITS]
    made = _embeddings(decoder, batch, hidden, embedded) if embedded else {}
    ended = [index for index in scored if _ends(batch, index)]
    return made | _logits(decoder, batch, hidden, ended) if ended else made


def _kind(batch: Batch, index: int) -> str:
    return batch.slots[index].admitted.sampling.pooling


def _ends(batch: Batch, index: int) -> bool:
    return batch.attention.context_lens[index] == batch.slots[index].prompt_len


def _logits(decoder: Decoder, batch: Batch, hidden: Tensor, rows: list[int]) -> dict[str, Tensor]:
    lines, found = decoder.logits(batch.last_of(hidden, rows)), {}
    for line, index in zip(lines, rows, strict=True):
        admitted = batch.slots[index].admitted
        token_ids = to_device(torch.tensor(admitted.sampling.allowed_token_ids), line.device)
        found[admitted.request_id] = to_host(line[token_ids])
    return found


def _embeddings(decoder: Decoder, batch: Batch, hidden: Tensor, rows: list[int]) -> dict[str, Tensor]:
    spans = [_span(batch, index) for index in rows]
    places = to_device(torch.cat([torch.arange(begin, end) for begin, end in spans]), hidden.device)
    parts = decoder.normed(hidden[places]).split([end - begin for begin, end in spans])
    for index, part in zip(rows, parts, strict=True):
        _take(batch.slots[index], part)
    ended = [batch.slots[index] for index in rows if _ends(batch, index)]
    return {slot.admitted.request_id: to_host(_embedding(slot)) for slot in ended}


def _span(batch: Batch, index: int) -> tuple[int, int]:
    """Returns which of the batch's tokens a row's embedding needs, if any: [begin, end)."""
    begin, end = batch.attention.query_begins[index : index + 2]
    kind = _kind(batch, index)
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
