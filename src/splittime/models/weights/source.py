"""Where weights come from: what the loader asks of a checkpoint, whatever its files look like.

Names are those of Hugging Face checkpoints ("model.layers.0.self_attn.q_proj"), shapes those of the config. A source
gives each weight as a tensor, or as a `StoredWeight` where it is already integers; what a module is stored as is the
source's to know, the loader asks by module. `checkpoint.Checkpoint` reads safetensors folders, plain and quantised,
`gguf.checkpoint.GgufCheckpoint` reads GGUF files; `open_source` takes the one for a path.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from splittime.models.weights.stored import StoredWeight

if TYPE_CHECKING:
    from splittime.models.config import ModelConfig

GGUF_SUFFIX = ".gguf"
PLAIN = "safetensors"  # the format of what is not quantised


class Table(Protocol):
    """An embedding table that is not kept as floats. nbytes: what it takes in the file."""

    nbytes: int

    def look_up(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, hidden], a new tensor."""


class Source(Protocol):
    """All that is in a checkpoint, each thing handed out by name; errors are `ConfigError`s naming the tensor.

    format: "safetensors" for floats; "awq", "gptq", "compressed-tensors" or "gguf" for what has weights as integers.
    recipe: what decides the meaning of the numbers in `files` and is in none of them ("" for nothing).
    files: all that the weights depend on. content_of: the tensors' names, each with the file that holds it.
    num_parameters: of what was taken: weights count by what they stand for, scales and zero points do not count.
    """

    @property
    def format(self) -> str: ...

    @property
    def recipe(self) -> str: ...

    @property
    def files(self) -> list[Path]: ...

    @property
    def content_of(self) -> dict[str, Path]: ...

    @property
    def num_parameters(self) -> int: ...

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name` (with its ".weight" or ".bias"), floats: a norm, a bias."""

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor | StoredWeight:
        """The weight of `module` ("model.layers.0.mlp.up_proj", "lm_head", an expert, a router) [out, in]. Asking for
        one twice counts it once: a tied head is asked for as "model.embed_tokens"."""

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor | Table:
        """The embedding table, of which single rows are looked up."""

    def rows_are_paired(self, module: str) -> bool:
        """Whether the rows of this query or key projection (and its bias) already have rotary pairs as neighbours:
        those of GGUF's llama have."""

    def release(self, read: Tensor | StoredWeight) -> None:
        """Let the system drop what was read of it; it stays usable. A tensor is one from `take` and the others, or a
        part of such a one."""

    def skip(self, name: str) -> None:
        """Say that `name`, if there, is rightly left unread."""

    def not_taken(self) -> list[str]:
        """The tensors that no part of the model asked for, in order, but for those that are known to say nothing."""


def open_source(path: Path, config: "ModelConfig") -> Source:
    """Opens a folder with safetensors, or a .gguf file. Cheap: no weight is read."""
    if is_gguf(path):
        from splittime.models.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    from splittime.models.weights.checkpoint import Checkpoint

    return Checkpoint(path, config.quantization)


def read_config(path: Path, generation: str = "auto") -> "ModelConfig":
    """Reads the config of either: `config.json`, or the file's own metadata. generation: what to take of a folder's
    `generation_config.json`, see `models.generation`."""
    if is_gguf(path):
        from splittime.models.gguf.config import load_gguf_config

        return load_gguf_config(path)
    from splittime.models.config import load_config

    return load_config(path, generation)


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and not path.is_dir()
