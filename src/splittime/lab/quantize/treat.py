"""One layer: which inputs to look at in which order, what to fold into what came before, how to round.

    awq     from the last group to the first, so that rows a later group divides by its scales (v, up) are not yet
            rounded; inputs are those of the layer as it was
    w8a8    the same, with SmoothQuant's scales, into norms only
    gptq    from the first group to the last, each seeing the inputs that the groups before it now produce
    wanda   the same
    others  no inputs are needed; where there is text it serves to measure the error

A norm is stored in the checkpoint's own type, so what it is divided by is worked out backwards from what it became
(`_fold_norm`): folding is then exact, whatever the type. Groups whose gram matrices fit in `GRAM_BYTES` together are
gathered in one pass over the text.

AWQ (Lin et al. 2023, arXiv:2306.00978) makes the channels that see large activations finer: Q(W diag(s)) diag(s)^-1 x
with s = mean|x|^a, where a is searched on a grid for the least error of the outputs (equations 4 and 5), a = 0 being
plain rounding. Then each group's range is cut where that makes its part of the output better (section on clipping).
Errors are taken from `Moments`: tr(D gram D^T) over all rows, or `MAX_ROWS` of them evenly spaced, as all rows share s.
Clipping takes the group's own block of the gram matrix.

SmoothQuant moves what is hard to round from activations into weights, so that an outlier channel no longer sets the
scale of the whole token (Xiao et al. 2022, arXiv:2211.10438, equation 4): s_j = max|x_j|^a / max|W_j|^(1 - a).

Which weights to make zero. Ties keep the first column, so that a result depends on nothing but its input.

* magnitude: |W_ij|; unstructured, over the whole weight.
* wanda: |W_ij| times the norm of input j, compared within each row (Sun et al. 2023, arXiv:2306.11695, section 3).
* 2:4: of each four neighbouring columns the two with the lower scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splittime.lab.quantize import layer_map, rounding
from splittime.lab.quantize.forward import Moments, relative_error
from splittime.lab.quantize.layer_map import INPUT_NORM, MLP_NORM, K, LinearGroup, Q, V
from splittime.lab.quantize.rounding import (
    LAYOUTS,
    Grid,
    Rounded,
    RoundedFloats,
    pack,
    round_to_e4m3,
    round_to_nearest,
    round_values,
)
from splittime.lab.quantize.settings import WHOLE_ROW, QuantizeSettings
from splittime.models.config import ModelConfig

GRAM_BYTES = 512 << 20
NORMS = (INPUT_NORM, MLP_NORM)
Gather = Callable[[Mapping[str, Tensor], Mapping[str, int]], Mapping[str, Moments | None]]
OnStep = Callable[[str], None]
STEPS = 20
MAX_ROWS = 1024  # of each weight, in the search for scales
MIN_SCALE = 1e-4
SMALLEST_SHARE, CLIP_STEPS = 0.5, 10
SMALLEST_MAX = 1e-5


def grid_of(settings: QuantizeSettings, checkpoint_dtype: torch.dtype) -> Grid:
    """The grid of resolved settings with a scheme. Scales: float16 in AWQ and GPTQ files, and of 4 bits (kernels keep
    them so) where the checkpoint is float32; float32 of fp8 where it is float16, since a small row's 448th is below
    what that holds; else of the checkpoint's type."""
    assert settings.bits is not None
    group = 0 if settings.group_size in (None, WHOLE_ROW) else settings.group_size or 0
    is_half = settings.scheme in ("awq", "gptq") or (settings.bits == 4 and checkpoint_dtype == torch.float32)
    is_small = settings.scheme == "fp8" and checkpoint_dtype == torch.float16
    dtype = torch.float16 if is_half else torch.float32 if is_small else checkpoint_dtype
    return Grid(settings.bits, group, settings.scheme != "awq", dtype)


def is_sequential(settings: QuantizeSettings) -> bool:
    """Returns whether a layer's inputs are those that the finished layers before it produce."""
    return settings.scheme == "gptq" or settings.metric == "wanda"


@dataclass
class Treatment:
    """original: as read; weights: as they become. gather: the moments of taps under some weights; None without text."""

    settings: QuantizeSettings
    grid: Grid | None
    config: ModelConfig
    index: int
    original: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    gather: Gather | None
    on_step: OnStep
    errors: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, Rounded | RoundedFloats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = dict(self.original)
        self._in_features = {name: shape[1] for name, shape in layer_map.linear_shapes(self.config, self.index).items()}

    def run(self) -> None:
        """Treat every linear; `weights`, `rounded` and `errors` are then whole."""
        sequential = is_sequential(self.settings)
        found = layer_map.groups(self.config, self.index, joint=not sequential)
        for batch in self._batches(found if sequential else found[::-1]):
            widths = {group.tap: self._in_features[group.linears[0]] for group in batch}
            seen: Mapping[str, Moments | None] = {}
            if self.gather is not None:
                self.on_step(f"text through {', '.join(layer_map.kind_of(tap) for tap in widths)}")
                seen = self.gather(self.weights if sequential else self.original, widths)
            for group in batch:
                self._treat(group, seen.get(group.tap))

    def errors_in_order(self) -> dict[str, float]:
        """In the order of the layer, whatever the order of work was."""
        return {name: self.errors[name] for name in self._in_features}

    def tensors(self) -> dict[str, Tensor]:
        """Returns what the new checkpoint holds of this layer, by full name."""
        prefix = layer_map.layer_prefix(self.index)
        found: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            linear = name.removesuffix(".weight")
            if linear in self.rounded:
                assert self.grid is not None
                packed = pack(LAYOUTS[self.settings.scheme or ""], self.rounded[linear], self.grid)
                found |= {f"{prefix}{linear}.{suffix}": tensor for suffix, tensor in packed.items()}
            else:
                found[prefix + name] = weight.to(self.dtypes[prefix + name])
        return found

    def _batches(self, groups: Sequence[LinearGroup]) -> Iterator[list[LinearGroup]]:
        """Sequential groups of one MLP wait for each other; experts of one kind do not."""
        batch: list[LinearGroup] = []
        taken_bytes = 0
        for group in groups:
            need = 4 * self._in_features[group.linears[0]] ** 2
            must_wait = is_sequential(self.settings) and batch and not _same_kind(batch[-1], group)
            if batch and (must_wait or taken_bytes + need > GRAM_BYTES):
                yield batch
                batch, taken_bytes = [], 0
            batch.append(group)
            taken_bytes += need
        if batch:
            yield batch

    def _treat(self, group: LinearGroup, moments: Moments | None) -> None:
        if moments is not None and group.source is not None:
            scales = self._scales(group, moments)
            if scales is not None:
                scales = self._fold(group, group.source, scales)
                moments = moments.divided(scales)
        for name in group.linears:
            self.on_step(name)
            weight = self.weights[f"{name}.weight"]
            kept = self._pruned(weight, moments) if self.grid is None else self._rounded(name, weight, moments)
            self.errors[name] = relative_error(weight, kept, moments)
            self.weights[f"{name}.weight"] = kept

    def _rounded(self, name: str, weight: Tensor, moments: Moments | None) -> Tensor:
        assert self.grid is not None
        scheme = self.settings.scheme
        found: Rounded | RoundedFloats
        if scheme == "fp8":
            found = round_to_e4m3(weight, self.grid.scale_dtype)
        elif scheme == "gptq" and moments is not None:
            settings = self.settings
            found = rounding.gptq(weight, moments.gram, self.grid, settings.act_order, settings.static_groups)
        elif scheme == "awq" and moments is not None and name not in (Q, K):
            found = round_to_nearest(awq_clip(weight, moments.gram, self.grid), self.grid)
        else:
            found = round_to_nearest(weight, self.grid)
        self.rounded[name] = found
        return found.values()

    def _pruned(self, weight: Tensor, moments: Moments | None) -> Tensor:
        by_row = self.settings.metric == "wanda"
        score = scores(weight, moments.gram.diagonal() if by_row and moments is not None else None)
        if self.settings.prune == "2:4":
            return semi_structured(weight, score)
        return unstructured(weight, score, self.settings.sparsity or 0.0, by_row)

    def _scales(self, group: LinearGroup, moments: Moments) -> Tensor | None:
        """Returns what to divide the group's input by, if this scheme and group do so."""
        weights = [self.weights[f"{name}.weight"] for name in group.linears]
        if self.settings.scheme == "w8a8" and self.settings.smooth and group.source in NORMS:
            return smooth_scales(weights, moments, self.settings.smooth)
        if self.settings.scheme == "awq":
            assert self.grid is not None
            return awq_scales(weights, moments, self._typical(group, moments.mean_abs), self.grid)
        return None

    def _typical(self, group: LinearGroup, mean_abs: Tensor) -> Tensor:
        """Query heads that read one value head must share its scales: they get their mean."""
        return self._by_value_head(mean_abs, group).mean(1, keepdim=True).expand(-1, self._sharing(group), -1).flatten()

    def _by_value_head(self, channels: Tensor, group: LinearGroup) -> Tensor:
        """[value heads, query heads of each, head_dim]; [1, 1, in] for what is not attention's output."""
        if group.source != V:
            return channels.view(1, 1, -1)
        mixer = self.config.attention[self.index]
        return channels.view(mixer.num_kv_heads, self._sharing(group), mixer.head_dim)

    def _sharing(self, group: LinearGroup) -> int:
        mixer = self.config.attention[self.index]
        return mixer.num_heads // mixer.num_kv_heads if group.source == V else 1

    def _fold(self, group: LinearGroup, source: str, scales: Tensor) -> Tensor:
        """Divide the group's input by these scales where it is made, and multiply its weights; -> what it came to."""
        if source in NORMS:
            scales = self._fold_norm(source, scales)
        else:
            rows = self._by_value_head(scales, group)[:, 0].flatten()
            for name, shape in ((f"{source}.weight", (-1, 1)), (f"{source}.bias", (-1,))):
                if name in self.weights:
                    self.weights[name] = self.weights[name] / rows.view(shape)
        for name in (*group.linears, *group.others):
            self.weights[f"{name}.weight"] = self.weights[f"{name}.weight"] * scales
        return scales

    def _fold_norm(self, source: str, scales: Tensor) -> Tensor:
        name = f"{source}.weight"
        norm, dtype = self.weights[name], self.dtypes[layer_map.layer_prefix(self.index) + name]
        folded = (norm / scales).to(dtype).float()
        is_usable = folded.isfinite() & (folded != 0)
        self.weights[name] = torch.where(is_usable, folded, norm)
        return torch.where(is_usable, norm / self.weights[name], 1.0)


def _same_kind(left: LinearGroup, right: LinearGroup) -> bool:
    return [layer_map.kind_of(name) for name in left.linears] == [layer_map.kind_of(name) for name in right.linears]


def awq_scales(weights: Sequence[Tensor], moments: Moments, typical: Tensor, grid: Grid) -> Tensor:
    """One scale for each input channel of these weights [out_i, in]: float32 [in]. typical: mean|x|, or what several
    channels share where their scales must be equal."""
    sampled = torch.cat([_evenly(weight) for weight in weights])
    best, best_error = torch.ones_like(typical), _error(sampled, torch.ones_like(typical), moments, grid)
    for step in range(1, STEPS + 1):
        scales = _scales(typical, step / STEPS)
        error = _error(sampled, scales, moments, grid)
        if error < best_error:
            best, best_error = scales, error
    return best


def _scales(typical: Tensor, power: float) -> Tensor:
    """typical^power, around 1; channels that are never touched stay as they are."""
    alive = typical > 0
    scales = torch.where(alive, typical, 1.0).pow(power).clamp_(min=MIN_SCALE)
    if not bool(alive.any()):
        return scales
    middle = (scales[alive].max() * scales[alive].min()).sqrt()
    return torch.where(alive, scales / middle, 1.0)


def _error(weight: Tensor, scales: Tensor, moments: Moments, grid: Grid) -> float:
    change = round_values(weight * scales, grid).div_(scales).sub_(weight)
    return float(((change @ moments.gram) * change).sum(dtype=torch.float64))


def _evenly(weight: Tensor) -> Tensor:
    if len(weight) <= MAX_ROWS:
        return weight
    return weight[torch.linspace(0, len(weight) - 1, MAX_ROWS, dtype=torch.float64).long()]


def awq_clip(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """weight [out, in] with each group's range cut to what is best for its outputs."""
    width = grid.width(weight.shape[1])
    groups = weight.unflatten(1, (-1, width)).transpose(0, 1)  # [groups, out, width]
    blocks = torch.stack([gram[at : at + width, at : at + width] for at in range(0, weight.shape[1], width)])
    limits = groups.abs().amax(-1, keepdim=True)
    best, best_error = limits, _clip_error(groups, limits, blocks, grid)
    for step in range(1, CLIP_STEPS + 1):
        cut = limits * (1 - step / CLIP_STEPS * (1 - SMALLEST_SHARE))
        error = _clip_error(groups, cut, blocks, grid)
        best = torch.where(error < best_error, cut, best)
        best_error = torch.minimum(error, best_error)
    return torch.clamp(groups, -best, best).transpose(0, 1).flatten(1)


def _clip_error(groups: Tensor, limits: Tensor, blocks: Tensor, grid: Grid) -> Tensor:
    """[groups, out, 1]."""
    cut = torch.clamp(groups, -limits, limits).flatten(0, 1)
    whole_rows = Grid(grid.bits, 0, grid.symmetric, grid.scale_dtype)
    change = round_values(cut, whole_rows).view_as(groups) - groups
    return ((change @ blocks) * change).sum(-1, keepdim=True)


def smooth_scales(weights: Sequence[Tensor], moments: Moments, strength: float) -> Tensor:
    """float32 [in], 1 where a channel or its weights are nothing."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    is_alive = (moments.max_abs > 0) & (largest > 0)
    found = moments.max_abs.clamp(min=SMALLEST_MAX).pow(strength) / largest.clamp(min=SMALLEST_MAX).pow(1 - strength)
    return torch.where(is_alive, found.clamp_(min=SMALLEST_MAX), 1.0)


def scores(weight: Tensor, mean_squares: Tensor | None) -> Tensor:
    """mean_squares: E[x_j^2], float32 [in], for wanda."""
    return weight.abs() if mean_squares is None else weight.abs() * mean_squares.sqrt()


def semi_structured(weight: Tensor, score: Tensor) -> Tensor:
    """2:4; the columns are a multiple of 4."""
    fours = score.unflatten(1, (-1, 4))
    ranks = fours.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return torch.where((ranks < 2).flatten(1), weight, 0.0)


def unstructured(weight: Tensor, score: Tensor, sparsity: float, by_row: bool) -> Tensor:
    """The share `sparsity` of each row, or of the whole weight, made zero (rounded down)."""
    rows = score if by_row else score.reshape(1, -1)
    dropped = int(sparsity * rows.shape[1])
    ranks = rows.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    kept = (ranks < rows.shape[1] - dropped).view_as(score)
    return torch.where(kept, weight, 0.0)
