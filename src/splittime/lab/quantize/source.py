"""The checkpoint that is quantised: its layers as float32 by name, and what goes into the new one unchanged.

Everything is asked for once before any work begins, so that a tensor that is missing, misshapen or unknown is refused
in the first second and not in the last hour.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.lab.quantize import layer_map
from splittime.lab.quantize.tensor_file import TensorEntry
from splittime.models.config import load_config
from splittime.models.fields import read_json
from splittime.models.weights.cache import fingerprints
from splittime.models.weights.checkpoint import Checkpoint

log = logging.getLogger("splittime.lab.quantize")

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class QuantizeSource:
    """dtypes: of each tensor of a layer, by full name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values = read_json(folder / "config.json")
        if self.values.get("quantization_config") or self.values.get("compression_config"):
            raise ConfigError(
                f"{folder} is quantised already (config.json has a quantization_config)",
                param="model",
                value=str(folder),
                hint="start from the checkpoint that it was made of",
            )
        self.config = load_config(folder)
        self.checkpoint = Checkpoint(folder)
        self.dtypes: dict[str, torch.dtype] = {}
        self._check()

    def _check(self) -> None:
        for index in range(self.config.num_layers):
            prefix = layer_map.layer_prefix(index)
            for name, shape in layer_map.tensor_shapes(self.config, index).items():
                self.dtypes[prefix + name] = self.checkpoint.take(prefix + name, *shape).dtype
        self._outer()
        if self.config.tie_word_embeddings:
            self.checkpoint.skip(HEAD)
        left = self.checkpoint.not_taken()
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            log.warning("%d tensors are unknown to this architecture and are left out: %s", len(left), shown)

    def layer(self, index: int) -> dict[str, Tensor]:
        """The layer's tensors below its prefix, float32, in memory of their own. Raises `ConfigError` for NaN."""
        prefix, weights = layer_map.layer_prefix(index), {}
        for name, shape in layer_map.tensor_shapes(self.config, index).items():
            mapped = self.checkpoint.take(prefix + name, *shape)
            weights[name] = mapped.to(torch.float32, copy=True)
            self.checkpoint.release(mapped)
            if not bool(weights[name].isfinite().all()):
                raise ConfigError(
                    f"weights: tensor {prefix + name} has values that are not finite", param=prefix + name
                )
        return weights

    def embedding(self) -> Tensor:
        return self.checkpoint.take(EMBEDDING, self.config.vocab_size, self.config.hidden_size)

    def _outer(self) -> list[tuple[str, Tensor]]:
        config = self.config
        found = [(EMBEDDING, self.embedding()), (NORM, self.checkpoint.take(NORM, config.hidden_size))]
        if not config.tie_word_embeddings:
            found.append((HEAD, self.checkpoint.take(HEAD, config.vocab_size, config.hidden_size)))
        return found

    def outer_entries(self) -> list[TensorEntry]:
        """Returns what is not in a layer, as it is stored: embedding, last norm, head."""
        return [TensorEntry.of(name, tensor, self.checkpoint.release) for name, tensor in self._outer()]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.checkpoint.files)

    def identity(self, memory: Path) -> dict[str, str]:
        """Hashes of what the result depends on, by file name. memory: a folder that may remember them."""
        paths: Sequence[Path] = self.checkpoint.files
        hashes = dict(zip((path.name for path in paths), fingerprints(paths, memory), strict=True))
        text = json.dumps(self.values, sort_keys=True).encode()
        return {"config.json": hashlib.sha256(text).hexdigest(), **hashes}
