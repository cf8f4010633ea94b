"""A GGUF file as the loader's `Source`: modules by their Hugging Face names, floats as views of the mapping, integers
as `StoredWeight`s that turn a few rows at a time from blocks into `RoundedRows`.

An embedding table of integers stays in the file as it is: the rows that are looked up are unpacked, a few kilobytes a
token. An expert is one matrix of a three-dimensional tensor. What was read of a weight is released behind it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows
from splittime.kernels.native import memory
from splittime.kernels.native.library import LibraryMissing
from splittime.models.gguf import blocks
from splittime.models.gguf.file import GgufFile, TensorPlace
from splittime.models.gguf.names import gguf_name, split_name
from splittime.models.gguf.shards import open_model
from splittime.models.weights.source import StoredWeight

CONFIG_TENSORS = ("rope_freqs.weight",)  # read by `config`
PAIRED_ARCHITECTURES = ("llama",)


class GgufCheckpoint:
    """Satisfies `models.weights.source.Source`."""

    def __init__(self, path: Path) -> None:
        self._model = open_model(path)
        self.files = [file.path for file in self._model.files]
        self.content_of = {name: file.path for name, file in self._model.file_of.items()}
        self.num_parameters = 0
        self.recipe = ""  # all is in the file
        self._left = {key for name in self.content_of for key in self._keys(name)} - {
            (name, 0) for name in CONFIG_TENSORS
        }
        self._maps = [_Map.of(file) for file in self._model.files]

    @property
    def format(self) -> str:
        """ "gguf" if any matrix is integers, "safetensors" (floats) if none is."""
        has_integers = any(self._place(name).type.has_integers for name in self.content_of)
        return "gguf" if has_integers else "safetensors"

    def take(self, name: str, *shape: int) -> Tensor:
        module, part = split_name(name)
        own = f"{gguf_name(module)[0]}.{part}"
        tensor = self._find(own, None, shape)
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"weights: tensor {own} is {self._place(own).type.name}, must be floats", param=own)
        return tensor

    def take_linear(self, module: str, out_features: int, in_features: int) -> "Tensor | GgufWeight":
        own, matrix = gguf_name(module)
        return self._find(f"{own}.weight", matrix, (out_features, in_features))

    def take_table(self, module: str, num_rows: int, width: int) -> "Tensor | GgufTable":
        found = self.take_linear(module, num_rows, width)
        return found if isinstance(found, Tensor) else GgufTable(found.blocks, found.kind)

    def rows_are_paired(self, module: str) -> bool:
        is_turned = module.endswith((".q_proj", ".k_proj"))
        return is_turned and self._model.metadata.get("general.architecture") in PAIRED_ARCHITECTURES

    def release(self, read: Tensor | StoredWeight) -> None:
        tensor = read if isinstance(read, Tensor) else self._blocks_of(read)
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if tensor.is_contiguous() and any(each.begin <= begin and end <= each.end for each in self._maps):
            try:
                memory.release_pages(tensor)
            except LibraryMissing:
                self._maps = []

    def skip(self, name: str) -> None:
        module, part = split_name(name)
        self._left.discard((f"{gguf_name(module)[0]}.{part}", 0))

    def not_taken(self) -> list[str]:
        """A stack of matrices is named where one of them is left."""
        return sorted({name for name, _ in self._left})

    @staticmethod
    def _blocks_of(read: StoredWeight) -> Tensor:
        assert isinstance(read, GgufWeight)
        return read.blocks

    def _place(self, name: str) -> TensorPlace:
        return self._model.file_of[name].tensors[name]

    def _keys(self, name: str) -> list[tuple[str, int]]:
        """One for each matrix of a stack, one for any other tensor."""
        shape = self._place(name).shape
        return [(name, number) for number in range(shape[0] if len(shape) == 3 else 1)]

    def _find(self, name: str, matrix: int | None, shape: tuple[int, ...]) -> "Tensor | GgufWeight":
        """The whole tensor of that shape, or so shaped a matrix of a stack."""
        if name not in self.content_of:
            raise ConfigError(f"weights: tensor {name} of shape {list(shape)} is missing", param=name)
        place = self._place(name)
        one = place.shape if matrix is None else place.shape[1:]
        if one != shape or (matrix is not None and matrix >= place.shape[0]):
            wanted = f"{list(shape)}" if matrix is None else f"at least {matrix + 1} times {list(shape)}"
            message = f"weights: tensor {name} has shape {list(place.shape)}, the metadata asks for {wanted}"
            raise ConfigError(message, param=name, value=list(place.shape), limit=list(shape))
        self._note_taken((name, matrix or 0), shape)
        content = torch.from_numpy(self._model.file_of[name].bytes_of(name))
        if matrix is not None:
            content = content.unflatten(0, (place.shape[0], -1))[matrix]
        if not place.type.has_integers:
            return content.view(blocks.FLOATS[place.type.name]).view(shape)
        return GgufWeight(self, content.view(shape[0], -1), place.type.name)

    def _note_taken(self, key: tuple[str, int], shape: tuple[int, ...]) -> None:
        if key in self._left:
            self._left.discard(key)
            self.num_parameters += torch.Size(shape).numel()


class GgufWeight:
    """A `StoredWeight` over blocks of the mapping, uint8 [out, bytes of a row]."""

    def __init__(self, checkpoint: GgufCheckpoint, content: Tensor, kind: str) -> None:
        self.blocks = content
        self.kind = kind
        self.out_features = content.shape[0]
        self.in_features = blocks.num_values(content.shape[1], kind)
        self.scheme = blocks.SCHEMES[kind]
        self.columns: Tensor | None = None
        self._checkpoint = checkpoint

    def rows(self, begin: int, end: int) -> RoundedRows:
        mine = self.blocks[begin:end]
        found = blocks.rounded(mine, self.kind)
        self._checkpoint.release(mine)
        return found


class GgufTable:
    """A `Table` over blocks of the mapping, uint8 [rows, bytes of a row]."""

    def __init__(self, content: Tensor, kind: str) -> None:
        self.nbytes = content.numel()
        self._blocks = content
        self._kind = kind

    def look_up(self, token_ids: Tensor) -> Tensor:
        return blocks.unpack(self._blocks.index_select(0, token_ids), self._kind).floats()


@dataclass(frozen=True)
class _Map:
    """Where a file is mapped. To drop pages of any other memory would be to zero them."""

    begin: int
    end: int

    @staticmethod
    def of(file: GgufFile) -> "_Map":
        begin = torch.frombuffer(file.content, dtype=torch.uint8).data_ptr()
        return _Map(begin, begin + len(file.content))
