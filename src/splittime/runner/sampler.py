"""Choosing the next token of each row from its logits; vectorised over rows, the same whatever the batch.

Greedy rows take the argmax. Random rows, after temperature:

* A filter is a *threshold*: top_k keeps logits at or above the k-th largest, min_p those at or above max + log(min_p),
  top_p (the nucleus of Holtzman et al. 2020), over what those two leave, the smallest set of largest logits whose
  probability reaches p. Ties at a threshold are kept, so the set does not depend on how a sort breaks ties.
* The token is drawn by inverse CDF over the kept tokens in the order of their ids, with one number of `uniforms`, which
  depends on the request's seed and the index of the output alone.
* Where the backend has a kernel for all this (`Ops.draw`), it is used; the rest of this file is the same in torch.
* A threshold is looked for among the 128 largest logits, then 2048 (`CANDIDATES`); only rows whose threshold lies
  deeper (a large top_k, a flat nucleus) are sorted whole. All routes draw from the same list, so they choose the same
  token.

`uniforms` keeps no state: a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011) built from the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants by Stafford, variant 13): the seed is mixed into a key, the index steps by the golden gamma from
it, and the sum is mixed again. The top 53 bits make a uniform double in [0, 1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.kernels.api import Ops
from splittime.kernels.draw import DRAW, has_bits
from splittime.runner.marks import to_device, to_host

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """seeds, indices: int64 [N] -> float64 [N] in [0, 1)."""
    with np.errstate(over="ignore"):
        keys = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
        bits = _mix(keys + _GOLDEN_GAMMA * (indices.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


Allowed = Mapping[int, np.ndarray]
"""By line, the tokens that may be chosen, where not all may: a bit each, the lowest first, uint32 [vocab / 32]."""
EVERYTHING: Allowed = MappingProxyType({})
CANDIDATES = (128, 2048)
MIN_TEMPERATURE = 1e-5
MAX_TOP_K = 2**31 - 1  # what the kernel's integer holds; no vocabulary is larger


@dataclass(frozen=True)
class Filters:
    """Parameters of N rows as columns [N, 1]. top_k: int64, at least 1 (vocab when off)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> "Filters":
        min_p = torch.tensor([[one.min_p] for one in params])
        return Filters(
            temperature=torch.tensor([[max(one.temperature, MIN_TEMPERATURE)] for one in params]),
            top_k=torch.tensor([[min(one.top_k or vocab_size, vocab_size)] for one in params]),
            top_p=torch.tensor([[one.top_p] for one in params], dtype=torch.float64),
            log_min_p=min_p.log(),  # -inf when off
        )

    def take(self, rows: Tensor) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


def choose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    ops: Ops,
    allowed: Allowed = EVERYTHING,
) -> list[int]:
    """logits: float32 [N, vocab], finite or -inf; output_indices: of the token about to be chosen -> N token ids."""
    return [max(token, ~token) for token in _signed_tokens(logits, params, output_indices, ops, allowed)]


def choose_telling(
    logits: Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    ops: Ops,
    allowed: Allowed = EVERYTHING,
) -> tuple[list[int], list[bool]]:
    """As `choose`, and whether each row is finite, where the backend tells (`Ops.tells_finite`)."""
    told = _signed_tokens(logits, params, output_indices, ops, allowed)
    return [max(token, ~token) for token in told], [token >= 0 for token in told]


def _signed_tokens(
    logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], ops: Ops, allowed: Allowed
) -> list[int]:
    """Returns a token for each row, or its complement, which is below 0, if the backend tells that it is not finite."""
    if not allowed and all(one.is_greedy for one in params):
        return ops.argmax(logits)
    bits = np.concatenate(list(allowed.values())).reshape(len(allowed), -1) if allowed else None
    tokens = ops.draw(logits, draws(params, output_indices, allowed), bits)
    if tokens is None and allowed:  # of a backend that reads no bits
        logits = masked(logits, allowed)
        tokens = ops.draw(logits, draws(params, output_indices))
    return _choose_by_route(logits, params, output_indices) if tokens is None else tokens


def masked(logits: Tensor, allowed: Allowed) -> Tensor:
    """Returns logits [N, vocab], if need be a copy, with -inf for what is not allowed."""
    if not allowed:
        return logits
    lines = to_device(torch.tensor(list(allowed)), logits.device)
    is_allowed = torch.from_numpy(has_bits(np.stack(list(allowed.values())), logits.shape[1]))
    return logits.index_copy(0, lines, logits[lines].masked_fill_(to_device(~is_allowed, logits.device), -torch.inf))


def _choose_by_route(logits: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    tokens, routes = [0] * len(params), [_route(one) for one in params]
    for route in set(routes):
        rows = [row for row, its_route in enumerate(routes) if its_route is route]
        some = logits if len(rows) == len(params) else logits[rows]
        picked = route(some, [params[row] for row in rows], [indices[row] for row in rows])
        for row, token in zip(rows, picked, strict=True):
            tokens[row] = token
    return tokens


def _route(params: SamplingParams) -> Callable[[Tensor, list[SamplingParams], list[int]], list[int]]:
    if params.is_greedy:
        return _choose_largest
    return _draw_filtered if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else _draw_plain


def _choose_largest(logits: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    return logits.argmax(-1).tolist()


def draws(params: Sequence[SamplingParams], indices: Sequence[int], allowed: Allowed = EVERYTHING) -> np.ndarray:
    """`kernels.draw.DRAW` [N]; of greedy rows, temperature 0. Its bits are those of `allowed`, one after another."""
    draws = np.zeros(len(params), dtype=DRAW)
    draws["top_p"] = [one.top_p for one in params]
    draws["uniform"] = _uniforms(params, indices)
    draws["temperature"] = [0.0 if one.is_greedy else max(one.temperature, MIN_TEMPERATURE) for one in params]
    draws["min_p"] = [one.min_p for one in params]
    draws["top_k"] = [min(one.top_k, MAX_TOP_K) for one in params]
    if allowed:
        draws["allowed"][list(allowed)] = np.arange(1, len(allowed) + 1)
    return draws


def _uniforms(params: Sequence[SamplingParams], indices: Sequence[int]) -> np.ndarray:
    """float64 [N]."""
    seeds = np.array([one.seed for one in params], dtype=np.int64)
    return uniforms(seeds, np.array(indices, dtype=np.int64))


def _uniform_column(params: list[SamplingParams], indices: list[int]) -> Tensor:
    """float64 [N, 1]."""
    return torch.from_numpy(_uniforms(params, indices)).unsqueeze(1)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """weights: [N, V] not below 0, uniform: [N, 1] in [0, 1) -> int64 [N, 1], an index whose weight is above 0."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # rounding must not step past the end
    return torch.minimum(found, last)


def _draw_plain(logits: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    scaled = logits / Filters.of(params, logits.shape[-1]).temperature
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    return _inverse_cdf(weights, _uniform_column(params, indices)).flatten().tolist()


def _draw_filtered(logits: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    filters = Filters.of(params, logits.shape[-1])
    uniform = _uniform_column(params, indices)
    scaled = logits / filters.temperature
    tokens = torch.empty(len(params), dtype=torch.int64)
    left = torch.arange(len(params))
    for width in (*(width for width in CANDIDATES if width < logits.shape[-1]), logits.shape[-1]):
        drawn, is_complete = _draw_among_largest(scaled[left], filters.take(left), uniform[left], width)
        tokens[left] = drawn
        left = left[~is_complete]
        if not len(left):
            break
    return tokens.tolist()


def _draw_among_largest(scaled: Tensor, filters: Filters, uniform: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each row's token from its `width` largest logits: (int64 [N], bool [N] whether those held every kept one)."""
    is_whole = width == scaled.shape[-1]
    values, ids = scaled.sort(descending=True) if is_whole else scaled.topk(width)  # [N, width], largest first
    top = values[:, :1]
    floor, is_complete = _floor(scaled, values, filters)
    if is_whole:
        weights = (scaled - top).exp_().masked_fill_(scaled < floor, 0.0)
        return _inverse_cdf(weights, uniform).flatten(), torch.ones(len(scaled), dtype=torch.bool)
    by_id = ids.argsort(-1)
    weights = (values - top).exp_().masked_fill_(values < floor, 0.0)
    place = _inverse_cdf(weights.gather(1, by_id), uniform)
    return ids.gather(1, by_id.gather(1, place)).flatten(), is_complete.flatten()


def _floor(scaled: Tensor, values: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """The least logit that all three filters keep, and whether no token beyond `values` reaches it; both [N, 1]."""
    floor, total, is_known = _floor_of_counts(scaled, values, filters)
    mass = (values - values[:, :1]).exp_().double().masked_fill_(values < floor, 0.0)
    before = mass.cumsum(-1) - mass
    is_kept = (before < filters.top_p * total) & (mass > 0)
    floor = torch.where(is_kept, values, float("inf")).amin(-1, keepdim=True)  # ties with the last kept one stay
    return floor, (floor > values[:, -1:]) & is_known


def _floor_of_counts(scaled: Tensor, values: Tensor, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what top_k and min_p leave: the least logit kept, the mass kept (the largest one's is 1), if both are
    known.

    All [N, 1]. `values`: the largest logits. Unknown when what is left may go on below them.
    """
    width, top = values.shape[-1], values[:, :1]
    ratio_floor = top + filters.log_min_p
    floor = torch.maximum(values.gather(1, (filters.top_k - 1).clamp(max=width - 1)), ratio_floor)
    total = (values - top).exp().double().masked_fill_(values < floor, 0.0).sum(-1, keepdim=True)
    is_deep = floor <= values[:, -1:]  # more of the same may lie below
    is_unbounded = is_deep & (filters.top_k >= scaled.shape[-1])  # top_k is off: the whole vocabulary counts
    if bool(is_unbounded.any()):
        kept = (scaled - top).exp_().masked_fill_(scaled < ratio_floor, 0.0)
        total = torch.where(is_unbounded, kept.sum(-1, keepdim=True, dtype=torch.float64), total)
        floor = torch.where(is_unbounded, ratio_floor, floor)
    return floor, total, ~is_deep | is_unbounded


MAX_LOGITS_ELEMENTS = 1 << 24  # 64 MiB of float32


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of N rows. chosen: float32 [N], ranks: int64 [N], 1 for the likeliest. values, ids: [N, n], the
    n likeliest."""

    chosen: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor


@dataclass(frozen=True)
class LineLogprobs:
    """`found` is of these lines of a step's logits, on the host once the step's last mark is reached. counts: how many
    alternatives each wants."""

    lines: list[int]
    counts: list[int]
    found: Logprobs

    def by_line(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Returns them by line. tokens: chosen, of all lines."""
        return dict(
            zip(self.lines, token_logprobs(self.found, [tokens[line] for line in self.lines], self.counts), strict=True)
        )


def describe(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """logits: float32 [N, vocab], raw; tokens: int64 [N], chosen; all on one device."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(chosen.squeeze(1), ranks, values, ids)


def token_logprobs(found: Logprobs, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One for each of the N rows: what was described of its token, and as many alternatives as it wants."""
    pairs = torch.stack((found.ids.int(), found.values.view(torch.int32)), -1).cpu().numpy()
    return [
        TokenLogprob(token, chosen, rank, line[:count].tobytes())
        for token, count, chosen, rank, line in zip(
            tokens, counts, found.chosen.tolist(), found.ranks.tolist(), pairs, strict=True
        )
    ]


def describe_lines(raw: Tensor, tokens: Tensor | list[int], params: Sequence[SamplingParams]) -> LineLogprobs | None:
    """Returns them for the lines of raw, float32 [N, vocab], whose request wants them; None if no request does."""
    lines = [line for line, one in enumerate(params) if one.logprobs is not None]
    if not lines:
        return None
    counts = [params[line].logprobs or 0 for line in lines]
    there = to_device(torch.tensor(lines), raw.device)
    chosen = to_device(torch.tensor(tokens), raw.device) if isinstance(tokens, list) else tokens
    found = describe(raw.index_select(0, there), chosen.index_select(0, there), max(counts))
    return LineLogprobs(lines, counts, Logprobs(*map(to_host, (found.chosen, found.ranks, found.values, found.ids))))


def score_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, next_tokens: Sequence[int], num_top: int, vocab_size: int
) -> list[TokenLogprob]:
    """hidden [n, hidden], next_tokens: the n tokens that followed -> their log-probabilities."""
    chunk = max(1, MAX_LOGITS_ELEMENTS // vocab_size)
    scores: list[TokenLogprob] = []
    for begin in range(0, len(next_tokens), chunk):
        tokens = next_tokens[begin : begin + chunk]
        found = describe(logits_of(hidden[begin : begin + chunk]), torch.tensor(tokens, device=hidden.device), num_top)
        scores += token_logprobs(found, tokens, [num_top] * len(tokens))
    return scores
