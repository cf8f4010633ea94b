"""How the weights are changed: Muon for the matrices of the layers, AdamW for the embedding, the head and the norms.

Owns the split of the weights between the two, and the learning-rate schedule. A Muon update is the momentum of the
gradient made near-orthogonal by a Newton-Schulz iteration, so that every direction of a matrix learns at one rate
(Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; AdamW: Loshchilov and Hutter 2019,
arXiv:1711.05101).

`torch.optim.Muon` computes the same updates, but one matrix after the other and in bfloat16, which processors without
instructions for it emulate. On two cores it took 2.6 and 9 times as long, in two runs, for the layers of a small Llama.
"""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
WARM_UP, FLOOR = 0.03, 0.01  # of the learning rate: shares of the run, and of its peak
LAYERS = ("model.layers.", "model.mtp_layers.")


def learning_rate_scale(progress: float) -> float:
    """Factor on the peak learning rate at `progress` in [0, 1]: linear warm-up, then a cosine down to `FLOOR`."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    share = min((progress - WARM_UP) / (1 - WARM_UP), 1.0)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share))


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the closest orthogonal matrix to each of [count, rows, columns]."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT, iterations).mT
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Muon over matrices; those of one shape are updated together, and the shapes in parallel."""

    def __init__(self, weights: Iterable[Tensor], learning_rate: float, weight_decay: float) -> None:
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for weight in weights:
            self.groups.setdefault(tuple(weight.shape), []).append(weight)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    @torch.no_grad()
    def step_group(self, shape: tuple[int, ...], scale: float) -> None:
        """Update the matrices of one shape."""
        gradient = torch.stack([weight.grad for weight in self.groups[shape] if weight.grad is not None])
        momentum = self.momentum[shape].mul_(MUON_MOMENTUM).add_(gradient)
        update = orthogonalise(gradient.add_(momentum, alpha=MUON_MOMENTUM))
        rate = self.learning_rate * scale
        for weight, change in zip(self.groups[shape], update, strict=True):
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(change, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    def step(self, scale: float, workers: Executor) -> None:
        """Update every matrix, at `scale` times the peak learning rate."""
        list(workers.map(lambda shape: self.step_group(shape, scale), self.groups))


class Optimizer:
    """Both optimisers behind one step; `kind` is `muon` or, for comparison, `adamw` for every weight."""

    def __init__(self, model: nn.Module, kind: str, matrix_rate: float, other_rate: float) -> None:
        weights = dict(model.named_parameters())
        muon_names = {n for n, w in weights.items() if kind == "muon" and w.ndim == 2 and n.startswith(LAYERS)}
        self.weights = list(weights.values())
        self.muon = Muon((weights[name] for name in muon_names_in_order(weights, muon_names)), matrix_rate, 0.05)
        others = [weight for name, weight in weights.items() if name not in muon_names]
        decay = [{"params": [w for w in others if w.ndim == 2], "weight_decay": 0.1}]
        no_decay = [{"params": [w for w in others if w.ndim < 2], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(decay + no_decay, lr=other_rate, betas=ADAM_BETAS, eps=1e-10)
        self.other_rate = other_rate

    def step(self, scale: float, workers: Executor, clip: float = 1.0) -> float:
        """Clip the gradients, update every weight, and return the gradients' norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.weights, clip)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * scale
        self.adam.step()
        self.muon.step(scale, workers)
        return float(norm)

    def state_dict(self) -> dict[str, object]:
        """Returns what a resumed run needs."""
        return {"adam": self.adam.state_dict(), "momentum": self.muon.momentum}

    def load_state_dict(self, state: dict) -> None:
        """Take up the state of a stopped run."""
        self.adam.load_state_dict(state["adam"])
        self.muon.momentum = state["momentum"]


def muon_names_in_order(weights: Mapping[str, Tensor], chosen: set[str]) -> list[str]:
    """The chosen names in the model's order, so that the saved momentum lines up when a run resumes."""
    return [name for name in weights if name in chosen]
