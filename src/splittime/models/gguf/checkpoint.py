"""A GGUF file as the loader's `Source`: modules by their Hugging Face names, floats as views of the mapping, integers
as `StoredWeight`s that turn a few rows at a time from blocks into `RoundedRows`.

An embedding table of integers stays in the file as it is: the rows that are looked up are unpacked, a few kilobytes a
token. An expert is one matrix of a three-dimensional tensor. What was read of a weight is released behind it.

What the loader calls a module (as Hugging Face checkpoints do), and what GGUF calls its tensor:

model.embed_tokens  token_embd      model.layers.N.self_attn.q_proj  blk.N.attn_q      (k_proj, v_proj alike)
model.norm          output_norm     model.layers.N.mlp.gate_proj     blk.N.ffn_gate    (up_proj, down_proj alike)
lm_head             output          model.layers.N....experts.E.w1   matrix E of blk.N.ffn_gate_exps
"""

import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows
from splittime.kernels.native import memory
from splittime.kernels.native.library import LibraryMissing
from splittime.models.gguf import blocks
from splittime.models.gguf.file import GgufFile, TensorPlace, open_model
from splittime.models.names import LayerNames
from splittime.models.weights.source import StoredWeight

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    **{"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output", "qkv": "attn_qkv"},
    **{"query_norm": "attn_q_norm", "key_norm": "attn_k_norm"},
    "router": "ffn_gate_inp",
    "correction": "exp_probs_b",
    "sinks": "attn_sinks",
    "shared_gate": "ffn_gate_inp_shexp",
    "gate_up": "ffn_up",
}
"""By the fields of `LayerNames`."""
MLP = ("ffn_gate", "ffn_up", "ffn_down")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

AFTER = {"norm_after_mixer": "post_attention_norm", "norm_after_mlp": "post_ffw_norm"}
"""The same of norms behind the parts, where an architecture has them; what it calls so may be another's norm before."""
BEHIND_ATTENTION = ("olmo2", "exaone4", "seed_oss", "glm4moe", "gpt-oss")
"""Those whose norm between the parts is called as if it stood behind the first, as some have it."""
PAIRED = ("llama", "smollm3", "granite", "granitemoe", "mistral3")
"""Those in whose files the rows of queries and keys have rotary pairs as neighbours."""


@cache
def _modules(names: LayerNames, architecture: str) -> dict[str, str]:
    """By the name of a module below its layer; an expert's number is N in it."""
    fields = IN_LAYER if names.norm_after_mixer == names.mlp_norm else IN_LAYER | AFTER
    found = {getattr(names, field): own for field, own in fields.items()} | {
        names.norm_after_mlp: AFTER["norm_after_mlp"]
    }
    if architecture in BEHIND_ATTENTION:
        found[names.mlp_norm] = AFTER["norm_after_mixer"]
    for mlp, prefix, suffix in (
        (names.mlp, "", ""),
        (names.shared, "", "_shexp"),
        (names.expert, names.experts.format("N"), "_exps"),
    ):
        found |= {prefix + name: own + suffix for name, own in zip(astuple(mlp), MLP, strict=True)}
    return found


def split_name(name: str, names: LayerNames) -> tuple[str, str]:
    """A tensor's name as its module and "weight" or "bias"."""
    module, _, part = name.rpartition(".")
    if name.endswith((names.correction, names.sinks)):
        return name, "weight" if name.endswith(names.sinks) else "bias"
    if part not in ("weight", "bias"):
        raise ConfigError(f"weights: {name} is neither a weight nor a bias", param=name)
    return module, part


def gguf_name(module: str, names: LayerNames, architecture: str = "") -> tuple[str, int | None]:
    """The tensor's name without ".weight", and which of its matrices it is, for an expert. architecture: the file's."""
    if module in WHOLE:
        return WHOLE[module], None
    layer = _LAYER.fullmatch(module)
    within = "" if layer is None else layer[2]
    number = re.search(r"(?<=\.)\d+(?=\.)", within)
    own = _modules(names, architecture).get(
        within if number is None else f"{within[: number.start()]}N{within[number.end() :]}"
    )
    if layer is None or own is None:
        raise ConfigError(f"weights: {module} has no name in GGUF", param=module)
    return f"blk.{layer[1]}.{own}", None if number is None else int(number[0])


CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read by `config`


class GgufCheckpoint:
    """Satisfies `models.weights.source.Source`."""

    def __init__(self, path: Path, names: LayerNames) -> None:
        """names: what the loader calls a layer's modules."""
        self._model, self._names = open_model(path), names
        self._architecture = str(self._model.metadata.get("general.architecture"))
        self.files = [file.path for file in self._model.files]
        self.content_of = {name: file.path for name, file in self._model.file_of.items()}
        self.num_parameters = 0
        self.recipe = ""  # all is in the file
        names_read = [name for name in self.content_of if name not in CONFIG_TENSORS and not self._is_behind(name)]
        self._left = {key for name in names_read for key in self._keys(name)}
        self._maps = [_Map.of(file) for file in self._model.files]

    @property
    def format(self) -> str:
        """ "gguf" if any matrix is integers, "safetensors" (floats) if none is."""
        has_integers = any(self._place(name).type.has_integers for name in self.content_of)
        return "gguf" if has_integers else "safetensors"

    def take(self, name: str, *shape: int) -> Tensor:
        own, matrix = self._own(name)
        tensor = self._find(own, matrix, shape)
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"weights: tensor {own} is {self._place(own).type.name}, must be floats", param=own)
        is_whole = self._names.norms_less_one and name.endswith("norm.weight")  # converters have added the 1
        return tensor - 1 if is_whole else tensor

    def take_linear(self, module: str, out_features: int, in_features: int) -> "Tensor | GgufWeight":
        own, matrix = gguf_name(module, self._names, self._architecture)
        return self._find(f"{own}.weight", matrix, (out_features, in_features))

    def take_table(self, module: str, num_rows: int, width: int) -> "Tensor | GgufTable":
        found = self.take_linear(module, num_rows, width)
        return found if isinstance(found, Tensor) else GgufTable(found.blocks, found.kind)

    def rows_are_paired(self, module: str) -> bool:
        return module.endswith((".q_proj", ".k_proj")) and self._architecture in PAIRED

    def release(self, read: Tensor | StoredWeight) -> None:
        tensor = read if isinstance(read, Tensor) else self._blocks_of(read)
        begin, end = memory.extent(tensor)
        if any(each.begin <= begin and end <= each.end for each in self._maps):
            try:
                memory.release_pages(tensor)
            except LibraryMissing:
                self._maps = []

    def skip(self, name: str) -> None:
        own, matrix = self._own(name)
        self._left.discard((own, matrix or 0))

    def not_taken(self) -> list[str]:
        """A stack of matrices is named where one of them is left."""
        return sorted({name for name, _ in self._left})

    def _own(self, name: str) -> tuple[str, int | None]:
        """What the file calls it, and which of a stack's it is."""
        module, part = split_name(name, self._names)
        own, matrix = gguf_name(module, self._names, self._architecture)
        return f"{own}.{part}", matrix

    def _is_behind(self, name: str) -> bool:
        """Whether it is of a layer behind the others, which predicts tokens after the next one."""
        number, metadata = re.match(r"blk\.(\d+)\.", name), self._model.metadata
        num_behind = metadata.get(f"{self._architecture}.nextn_predict_layers", 0)
        num_blocks = np.max(metadata.get(f"{self._architecture}.block_count", 0))
        return number is not None and num_behind > 0 and int(number[1]) >= num_blocks - num_behind

    @staticmethod
    def _blocks_of(read: StoredWeight) -> Tensor:
        assert isinstance(read, GgufWeight)
        return read.blocks

    def _place(self, name: str) -> TensorPlace:
        return self._model.file_of[name].tensors[name]

    def _keys(self, name: str) -> list[tuple[str, int]]:
        """One for each matrix of a stack, or each of its biases, one for any other tensor."""
        shape = self._place(name).shape
        is_stack = len(shape) == 3 or name.endswith("_exps.bias")
        return [(name, number) for number in range(shape[0] if is_stack else 1)]

    def _find(self, name: str, matrix: int | None, shape: tuple[int, ...]) -> "Tensor | GgufWeight":
        """The whole tensor of that shape, or so shaped a matrix of a stack."""
        if name not in self.content_of:
            raise ConfigError(f"weights: tensor {name} of shape {list(shape)} is missing", param=name)
        place = self._place(name)
        one = place.shape if matrix is None else place.shape[1:]
        if one not in (shape, shape[shape[0] == 1 :]) or (matrix is not None and matrix >= place.shape[0]):
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
