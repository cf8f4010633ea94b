"""A checkpoint folder's tensors by name, out of the files that `shard_files` opens. Each is mapped, never copied.

A tensor comes in its own dtype, as a view of the file's mapping: its bytes are read when they are first touched, and
`release` lets the system forget them again. Errors name the tensor and the file: missing, or of another shape than
the config says. Weights that are already in 8 bits or fewer come as `formats` reads them; which those are
the file tells, not the config, and where both contradict each other the checkpoint is refused.
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.native import memory
from splittime.kernels.native.library import LibraryMissing
from splittime.models.names import ExpertPlace
from splittime.models.weights.formats import gptq
from splittime.models.weights.formats import read as formats
from splittime.models.weights.formats.recipe import Recipe
from splittime.models.weights.shard_files import open_files
from splittime.models.weights.source import PLAIN, StoredWeight

log = logging.getLogger("splittime.weights")

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attention.bias")  # buffers that old exports carry
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PlaceOf = Callable[[str], ExpertPlace | None]
BODY = "model."  # what is below it is saved without it where a model was saved without its head, as embedders are
TABLE = "embed_tokens.weight"
TEXT, BODY_OF_TEXT = "language_model.", "model.language_model."  # in front of what a multimodal model's text part has
BESIDE_TEXT = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    "model.visual.",
    *("model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)


def _named(stored: str, prefix: str) -> str:
    if stored.startswith(BODY_OF_TEXT):
        return BODY + stored.removeprefix(BODY_OF_TEXT)
    return stored.removeprefix(TEXT) if stored.startswith(TEXT) else prefix + stored


class Checkpoint:
    """A `source.Source`: `take` and its kin hand out each tensor; `not_taken` then says what else the checkpoint
    held. quantization: how its linear weights are stored, None for floats."""

    def __init__(
        self, folder: Path, quantization: Recipe | None = None, place_of: PlaceOf = lambda module: None
    ) -> None:
        """place_of: `LayerNames.place_of`."""
        self.folder = folder
        self.place_of = place_of
        self.format = PLAIN if quantization is None else quantization.method
        self.recipe = "" if quantization is None else msgspec.json.encode(quantization).decode()
        self.num_parameters = 0
        self._quantization = quantization
        self._handles, file_of = open_files(folder)
        prefix = BODY if TABLE in file_of and BODY + TABLE not in file_of else ""
        self._stored = dict[str, str]()
        for stored in file_of:
            if (other := self._stored.setdefault(name := _named(stored, prefix), stored)) != stored:
                message = f"weights: {other} and {stored} are both {name}"
                raise ConfigError(message, param=stored, value=other, hint="take a checkpoint that has it once")
        self._file_of = {name: file_of[stored] for name, stored in self._stored.items()}
        self._left = set(self._file_of)
        self._mappings = _Mappings({str((folder / name).resolve()) for name in self._handles})
        if quantization is not None:
            formats.check_any(self, self._file_of, quantization)

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self._handles]

    @property
    def content_of(self) -> dict[str, Path]:
        return {tensor: self.folder / name for tensor, name in self._file_of.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def is_int8(self, name: str) -> bool:
        return name in self and self._slice(name).get_dtype() == "I8"

    def is_float8(self, name: str) -> bool:
        return name in self and self._slice(name).get_dtype() == "F8_E4M3"

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._slice(name).get_shape()) if name in self else None

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(self._stored[name])

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handle(name).get_tensor(self._stored[name])
        return tensor

    def _handle(self, name: str) -> Any:
        return self._handles[self._file_of[name]]

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, as it is stored. Raises `ConfigError` if absent, of another shape, or no float."""
        stacked = None if name in self else self._take_stacked(name, shape)
        if stacked is not None:
            return stacked
        is_new = name in self._left
        tensor = self.take_stored(name, DTYPES, *shape)
        self.num_parameters += tensor.numel() if is_new else 0
        return tensor

    def _take_stacked(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Returns an expert's part of the tensor that holds all experts', if there is one."""
        module, _, kind = name.rpartition(".")
        place = self.place_of(module)
        if place is None:
            return None
        tensor = place.tensor + ("_bias" if kind == "bias" else "")
        found = self.shape_of(tensor)
        if not found or place.number >= found[0]:
            return None
        rows = shape[0] * (1 if place.part is None else 2)
        is_turned = place.stacked.is_turned and len(shape) == 2
        own = (shape[1], rows) if is_turned else (rows, *shape[1:])
        one = self.take_stored(tensor, DTYPES, found[0], *own)[place.number]
        part = place.cut(one.T if is_turned else one)
        self.num_parameters += part.numel()
        return part

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """The tensor, of one of these dtypes. It is not counted: `take_linear` counts what it stands for."""
        if name not in self:
            raise ConfigError(f"weights: tensor {name} of shape {list(shape)} is missing", param=name)
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            message = f"weights: tensor {name} has shape {list(tensor.shape)}, {self._asks()} for {list(shape)}"
            raise ConfigError(message, param=name, value=list(tensor.shape), limit=list(shape))
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise ConfigError(f"weights: tensor {name} is {tensor.dtype}, not one of {allowed}", param=name)
        self._left.discard(name)
        return tensor

    def _asks(self) -> str:
        recipe = self._quantization
        if recipe is None:
            return "the config asks"
        if recipe.scales:
            return f"the config, with e4m3 and a scale for each {recipe.scales}, asks"
        groups = f"groups of {recipe.group_size}" if recipe.group_size else "one group a row"
        return f"the config, with {recipe.bits} bits in {groups}, asks"

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        if self._quantization is not None:
            stored = formats.take(self, self._quantization, module, out_features, in_features)
            if stored is not None:
                self.num_parameters += out_features * in_features
                return stored
        return self.take(f"{module}.weight", out_features, in_features)

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor:
        return self.take(f"{module}.weight", num_rows, width)

    def rows_are_paired(self, module: str) -> bool:
        return False

    def release(self, read: Tensor | StoredWeight) -> None:
        """Let the system drop what was read of it; a tensor is one of ours or a part of such a one; it stays usable."""
        for tensor in read.tensors if isinstance(read, formats.FileWeight) else [read]:
            self._mappings.release(tensor)  # type: ignore[arg-type]  # a stored weight of ours is a FileWeight

    def skip(self, name: str) -> None:
        """Say that `name`, if there, is rightly left unread."""
        self._left.discard(name)

    def not_taken(self) -> list[str]:
        self._pass_over_scales()
        ours = (name for name in self._left if not (name.endswith(IGNORED_SUFFIXES) or name.startswith(BESIDE_TEXT)))
        return sorted(name for name in ours if not self._is_no_bias(name))

    def _pass_over_scales(self) -> None:
        """Says that scales of keys, values and activations, measured beforehand, are not used."""
        recipe = self._quantization
        scales = [name for name in self._left if recipe is not None and name.endswith(formats.KV_SCALES)]
        self._left.difference_update(scales)
        if scales:
            log.info(
                "%d stored scales of keys and values (such as %s) are not used: with kv_cache_dtype int8 or fp8 each "
                "token and head has a scale of its own", len(scales), min(scales),
            )  # fmt: skip
        if recipe is not None and recipe.has_input_scale:
            log.info("stored scales of activations (input_scale) are not used: each token has a scale of its own")

    def _is_no_bias(self, name: str) -> bool:
        """Returns whether it is a bias of zeros, which some exports of GPTQ give to every layer."""
        if self.format != gptq.METHOD or not name.endswith(".bias") or not gptq.is_stored(name[:-5], self):
            return False
        return not self._tensor(name).any()


class _Mappings:
    """Where these files are mapped. To drop pages of any other memory would be to zero them, so the system is asked."""

    def __init__(self, paths: set[str]) -> None:
        self._paths = paths
        self._spans: list[tuple[int, int]] | None = None  # read at the first use, when all files have been mapped

    def release(self, tensor: Tensor) -> None:
        begin, end = memory.extent(tensor)
        spans = self._find_spans()
        place = bisect_right(spans, (begin, 1 << 63)) - 1
        if place >= 0 and end <= spans[place][1]:
            try:
                memory.release_pages(tensor)
            except LibraryMissing:
                self._spans = []

    def _find_spans(self) -> list[tuple[int, int]]:
        if self._spans is None:
            maps = Path("/proc/self/maps")
            lines = os.fsdecode(maps.read_bytes()).splitlines() if maps.exists() else []  # any bytes may be in a name
            fields = [line.split(maxsplit=5) for line in lines]
            ours = [entry[0].split("-") for entry in fields if len(entry) == 6 and entry[5] in self._paths]
            self._spans = sorted((int(begin, 16), int(end, 16)) for begin, end in ours)
        return self._spans
