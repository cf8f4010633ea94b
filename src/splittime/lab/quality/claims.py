"""What a model claims to keep in fewer bits, for `splittime quality`: read from its files' headers, from their config,
and from what was asked, beside what the loader says that it made of them.

A claim must be borne out by the kernels' counters (`quality.reads`). Were it the loader's alone, a loader that fell
back to floats would claim nothing, and nothing would be missed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from splittime.kernels.layer import MixtureSpec
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.formats import read as formats

if TYPE_CHECKING:
    from splittime.models.config import ModelConfig
    from splittime.runner.config import Resolved

EIGHT_BITS_OR_FEWER, SMALL_CACHES = ("int4", "int8", "fp8"), ("int8", "float8_e4m3fn")
WIDER = {"weights.int4": "int8", "weights.fp8": "float32"}
"""What some kernels keep a stored weight in, exactly, which has no more of the claim: `formats.stored`, `packing`."""


@dataclass(frozen=True)
class Stored:
    """What the headers say of the layers' linear weights. step_bytes: the integers (or e4m3) that a token needs."""

    claim: str
    method: str
    bits: int
    modules: int
    floats: int
    step_bytes: int

    def describe(self) -> str:
        """For the report."""
        told = f"{self.method}, {self.bits} bits: {self.modules} of {self.modules + self.floats} linear weights"
        return f"{told} of the layers"


def stored(path: Path, config: "ModelConfig") -> Stored | None:
    """None for what has no `quantization_config`: floats, and GGUF, whose tensors each name their own type."""
    recipe = config.quantization
    if recipe is None:
        return None
    checkpoint = Checkpoint(path, recipe)
    kept, floats = formats.split(checkpoint, checkpoint.content_of, recipe)
    routers = (part.router for part in (layer.feed_forward for layer in config.layers) if isinstance(part, MixtureSpec))
    share = next((router.num_chosen / router.num_experts for router in routers), 1.0)
    sizes = (_num_bytes(checkpoint, module) * (share if ".experts." in module else 1.0) for module in kept)
    claim = "fp8" if recipe.scales else f"int{recipe.bits}"
    return Stored(f"weights.{claim}", recipe.method, recipe.bits, len(kept), len(floats), int(sum(sizes)))


def _num_bytes(checkpoint: Checkpoint, module: str) -> int:
    """Returns the size of the integers: words of 32 bits, or a byte each."""
    for suffix, width in (("qweight", 4), ("weight_packed", 4), ("weight", 1)):
        shape = checkpoint.shape_of(f"{module}.{suffix}")
        if shape is not None:
            return width * shape[0] * shape[-1]
    return 0


def claims(kept: Stored | None, resolved: "Resolved") -> tuple[str, ...]:
    """By the names of `Ops.bytes_read`."""
    weights = resolved.weights.split(": ", 1)[-1]
    found = [f"weights.{name}" for name in EIGHT_BITS_OR_FEWER if name in weights]
    if kept is not None and kept.claim not in found and WIDER.get(kept.claim, "-") not in weights:
        found.insert(0, kept.claim)
    return (*found, *([f"kv.{resolved.kv_cache_dtype}"] if resolved.kv_cache_dtype in SMALL_CACHES else []))
