"""Penalties, biases and masks on logits: what a request's parameters do before anything is chosen.

Definitions, as OpenAI's and vLLM's APIs have them: for a token t that occurs c times among the *outputs*,
logit -= presence_penalty * (c > 0) + frequency_penalty * c. Repetition (Keskar et al. 2019, CTRL, section 4.1, in the
sign-aware form that transformers uses) covers *prompt and outputs*: a seen token's logit is divided by the penalty if
positive, else multiplied by it. Order: repetition, then frequency and presence, then logit_bias, then the mask of stop
ids while fewer than `min_tokens` are out, then the mask of the grammar or of the request's lists (`listed`), which
leaves the stop ids where it leaves nothing else. Where a bound of the reasoning says what comes, its mask is the one.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import RequestError
from splittime.core.sampling import SamplingParams
from splittime.kernels.draw import has_bits
from splittime.runner.reasoning_bound import may_hold
from splittime.runner.sampler import Allowed

if TYPE_CHECKING:
    from splittime.runner.batch import Slot

_LARGEST = 1e30  # a tiny penalty makes logits infinite; divided by the least temperature, 1e-5, this still is not


class TokenCounts:
    """How often each token occurred. outputs: float32 [vocab]; seen: bool [vocab], in the prompt or the outputs."""

    def __init__(self, vocab_size: int, prompt: np.ndarray) -> None:
        self.outputs = torch.zeros(vocab_size)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.seen[torch.from_numpy(prompt)] = True

    def add_outputs(self, token_ids: np.ndarray) -> None:
        ids = torch.from_numpy(token_ids)
        self.outputs.index_add_(0, ids, torch.ones(len(token_ids)))
        self.seen[ids] = True

    def followed_by(self, token_ids: np.ndarray) -> "TokenCounts":
        """A copy that counts these outputs too."""
        other = copy.copy(self)
        other.outputs, other.seen = self.outputs.clone(), self.seen.clone()
        other.add_outputs(token_ids)
        return other


def changes_logits(sampling: SamplingParams, num_outputs: int) -> bool:
    """Returns whether a request with so many outputs out changes its logits, if not by a bound of its reasoning."""
    return bool(sampling.grammar) or changes_more(sampling, num_outputs)


def changes_more(sampling: SamplingParams, num_outputs: int) -> bool:
    """Returns whether it changes them by more than a form's mask."""
    has_mask = sampling.is_listed or num_outputs < sampling.min_tokens
    return has_mask or sampling.has_penalties or bool(sampling.logit_bias)


def listed_at_all(sampling: SamplingParams, vocab_size: int) -> np.ndarray | None:
    """Returns which tokens `allowed_token_ids` has, bool [vocab]; None where the request has no list of tokens."""
    if not sampling.is_listed:
        return None
    found = np.full(vocab_size, not sampling.allowed_token_ids)
    found[list(sampling.allowed_token_ids)] = True
    return found


def listed(sampling: SamplingParams, at_all: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Returns which tokens may follow these outputs, bool [vocab]: those of `listed_at_all`, but for the last token of
    any of `bad_token_ids` whose others are there. Raises RequestError where nothing is left.

    outputs: int64 [N], drafts among them; a run that began in the prompt is none."""
    found = at_all.copy()
    for *begin, last in sampling.bad_token_ids:
        if len(begin) <= len(outputs) and outputs[len(outputs) - len(begin) :].tolist() == begin:
            found[last] = False
    if not found.any():
        words, hint = "allowed_token_ids and bad_words leave no token here", "allow more tokens, or forbid fewer words"
        raise RequestError(words, param="bad_words", hint=hint)
    return found


def changed(slots: "Sequence[Slot]", num_outputs: Sequence[int]) -> list[int]:
    """The lines whose request changes its logits."""
    return [
        line
        for line, (slot, count) in enumerate(zip(slots, num_outputs, strict=True))
        if changes_logits(slot.admitted.sampling, count) or may_hold(slot, count)
    ]


def adjusted(raw: Tensor, slots: "Sequence[Slot]", num_outputs: Sequence[int], forms: Allowed) -> Tensor:
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
