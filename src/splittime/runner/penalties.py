"""Penalties, biases and masks on logits: what a request's parameters do before anything is chosen.

Definitions, as OpenAI's and vLLM's APIs have them: for a token t that occurs c times among the *outputs*,
logit -= presence_penalty * (c > 0) + frequency_penalty * c. Repetition (Keskar et al. 2019, CTRL, section 4.1, in the
sign-aware form that transformers uses) covers *prompt and outputs*: a seen token's logit is divided by the penalty if
positive, else multiplied by it. Order: repetition, then frequency and presence, then logit_bias, then the mask of stop
ids while fewer than `min_tokens` are out, then the mask of the grammar or of the request's lists (`listed`), which
leaves the stop ids where it leaves nothing else. Where a bound of the reasoning says what comes, its mask is the one.

What a bound of the reasoning says must come (`ReasoningBound`) is known before anything is computed, like what a form
leaves no choice about, and told as drafts that cannot be wrong.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splittime.core.sampling import SamplingParams
from splittime.kernels.draw import has_bit, has_bits, one_bit
from splittime.runner.sampler import Allowed
from splittime.runner.slot import Slot, TokenCounts


def must_come(slot: Slot, num_outputs: int) -> tuple[int, ...]:
    """Returns the tokens that must follow so many outputs of a request, drafts among them; () where nothing must."""
    end = slot.prompt_len + num_outputs
    return () if slot.reasoning_bound is None else slot.reasoning_bound.must_come(slot.tokens[slot.prompt_len : end])


def may_hold(slot: Slot, num_outputs: int) -> bool:
    """Returns whether the bound of its reasoning may say what follows so many outputs, known or not."""
    known = slot.tokens[slot.prompt_len : slot.num_known]
    return slot.reasoning_bound is not None and slot.reasoning_bound.may_hold(num_outputs, known)


def has_bounds(slots: Sequence[Slot]) -> bool:
    return any(slot.reasoning_bound is not None for slot in slots)


def hold_to_bounds(slots: Sequence[Slot], counts: Sequence[int], vocab_size: int, allowed: Allowed) -> Allowed:
    """Returns which tokens may come: as `allowed` has it, and only one where a bound says which must. What a form does
    not allow waits until it does: a character may have to be whole before."""
    if not has_bounds(slots):
        return allowed
    held = dict(allowed)
    for line, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        following = must_come(slot, count)
        if following and (line not in held or has_bit(held[line], following[0])):
            held[line] = one_bit(following[0], vocab_size)
    return held


_LARGEST = 1e30  # a tiny penalty makes logits infinite; divided by the least temperature, 1e-5, this still is not


def changes_logits(sampling: SamplingParams, num_outputs: int) -> bool:
    """Returns whether a request with so many outputs out changes its logits, if not by a bound of its reasoning."""
    return bool(sampling.grammar) or changes_more(sampling, num_outputs)


def changes_more(sampling: SamplingParams, num_outputs: int) -> bool:
    """Returns whether it changes them by more than a form's mask."""
    has_mask = sampling.is_listed or num_outputs < sampling.min_tokens
    return has_mask or sampling.has_penalties or bool(sampling.logit_bias)


def changed(slots: Sequence[Slot], num_outputs: Sequence[int]) -> list[int]:
    """The lines whose request changes its logits."""
    return [
        line
        for line, (slot, count) in enumerate(zip(slots, num_outputs, strict=True))
        if changes_logits(slot.admitted.sampling, count) or may_hold(slot, count)
    ]


def adjusted(raw: Tensor, slots: Sequence[Slot], num_outputs: Sequence[int], forms: Allowed) -> Tensor:
    """raw: float32 [N, vocab]; itself when no request changes its logits, else a copy. Counts lie on the host: on a
    device, a line that changes goes there and back. forms: what forms and bounds of the reasoning allow; who chooses
    leaves out the others, so that a line with nothing else is as it was."""
    logits = raw
    for line, (slot, count) in enumerate(zip(slots, num_outputs, strict=True)):
        if not changes_more(slot.admitted.sampling, count):
            continue
        logits = raw.clone() if logits is raw else logits
        allowed = has_bits(forms[line], raw.shape[1]) if line in forms else slot.listed_at(count)
        one = logits[line].cpu()  # on the CPU, the line itself
        adjust(one, slot.admitted.sampling, slot.counts_at(count), slot.admitted.stop_token_ids, count, allowed)
        if logits.device != one.device:
            logits[line] = one.to(logits.device)
    return logits


def adjust(
    logits: Tensor,
    sampling: SamplingParams,
    counts: TokenCounts | None,
    stop_token_ids: tuple[int, ...],
    num_outputs: int,
    allowed: np.ndarray | None = None,
) -> None:
    """Change one row's logits [vocab] in place. allowed: bool [vocab]; None: all are."""
    if counts is not None:
        _penalise(logits, sampling, counts)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        logits.index_add_(0, ids, torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype))
    held_back = np.zeros(0, dtype=np.int64)
    if num_outputs < sampling.min_tokens and stop_token_ids:
        held_back = np.array([token for token in stop_token_ids if token < logits.shape[0]], dtype=np.int64)
    if allowed is not None:
        kept = allowed.copy()
        kept[held_back] = False
        kept = kept if kept.any() else allowed  # an answer that is whole ends, however short
        logits.masked_fill_(torch.from_numpy(~kept), float("-inf"))
    elif len(held_back):
        logits[torch.from_numpy(held_back)] = float("-inf")


def _penalise(logits: Tensor, sampling: SamplingParams, counts: TokenCounts) -> None:
    penalty = sampling.repetition_penalty
    if penalty != 1.0:
        scaled = torch.where(logits > 0, logits / penalty, logits * penalty).clamp_(-_LARGEST, _LARGEST)
        logits.copy_(torch.where(counts.seen, scaled, logits))
    if sampling.frequency_penalty:
        logits.sub_(counts.outputs, alpha=sampling.frequency_penalty)
    if sampling.presence_penalty:
        logits.sub_((counts.outputs > 0).to(logits.dtype), alpha=sampling.presence_penalty)
