"""The student: its shape from a config.json, its weights from another folder or by chance, and its folder at the end.

What is trained is a plain Llama (`distill.llama`); a config that asks for more is refused by name. A folder is
bfloat16 safetensors with the config as it was given and the teacher's tokenizer files, so that every loader takes it.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.layer import MlpSpec
from splittime.lab.distill.llama import Llama, Shape
from splittime.lab.quantize import tensor_file
from splittime.lab.quantize.tensor_file import TensorEntry
from splittime.models.config import ModelConfig, parse_config
from splittime.models.fields import read_json
from splittime.models.weights.checkpoint import Checkpoint

ARCHITECTURE = "LlamaForCausalLM"
STUDENT_WORDS = ("a student", "the teacher may be any model; the student is a plain Llama")
HEAD_WORDS = ("a head on a teacher", "a head is for a plain Llama; any model can teach a draft model: --student CONFIG")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class StudentPlan:
    """values: config.json as it was given."""

    shape: Shape
    values: Mapping[str, Any]


def read_plan(path: Path, of_head: bool = False) -> StudentPlan:
    """Reads the plan from a config.json, or from a folder that holds one. of_head: it is a teacher's, for a head on it.
    Raises `ConfigError`."""
    values = read_json(path / "config.json" if path.is_dir() else path)
    config = parse_config(values)
    _refuse(config, *(HEAD_WORDS if of_head else STUDENT_WORDS))
    layer = config.layers[0]
    assert isinstance(layer.feed_forward, MlpSpec)
    shape = Shape(
        hidden_size=config.hidden_size,
        intermediate_size=layer.feed_forward.inner,
        num_hidden_layers=config.num_layers,
        num_attention_heads=layer.attention.num_heads,
        num_key_value_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=layer.norm.eps,
        rope_theta=layer.attention.position.theta,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    return StudentPlan(shape, values)


def _refuse(config: ModelConfig, what: str, hint: str) -> None:
    """Whatever `distill.llama` does not compute."""
    mixer, part = config.attention[0], config.layers[0].feed_forward
    biases = mixer.qkv_bias or mixer.output_bias or (isinstance(part, MlpSpec) and part.has_bias)
    rope_type = mixer.position.rope_type
    wrong = {
        "architectures": (config.architecture, ARCHITECTURE, config.architecture != ARCHITECTURE),
        "attention_bias": (True, False, biases),
        "rope_scaling": (rope_type, "default", rope_type != "default"),
        "quantization_config": ("quantised weights", "none", config.quantization is not None),
    }
    for key, (value, limit, is_wrong) in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{what} cannot be trained with {key} {value!r}; it must be {limit!r}",
                param=key,
                value=value,
                limit=limit,
                hint=hint,
            )


def same_vocabulary(student_size: int, teacher_size: int) -> None:
    """Raises `ConfigError` where student and teacher do not speak of the same tokens."""
    if student_size != teacher_size:
        raise ConfigError(
            f"the student has {student_size:,} tokens and the teacher {teacher_size:,}: a student learns the "
            "teacher's probabilities token by token, so both need one tokenizer",
            param="student",
            value=student_size,
            limit=teacher_size,
            hint=f"set vocab_size to {teacher_size} in the student's config.json",
        )


def same_shape(folder: Path, shape: Shape) -> None:
    """Raises `ConfigError` naming what differs between a folder's model and the student."""
    found = read_plan(folder).shape
    for name, value in vars(shape).items():
        if getattr(found, name) != value:
            said = f"{folder} has {name} {getattr(found, name)}, the student {value}"
            raise ConfigError(said, param="start_from", value=getattr(found, name), limit=value)


def read_weights(folder: Path, shape: Shape) -> dict[str, Tensor]:
    """float32, of a folder of this very shape. Raises `ConfigError`."""
    same_shape(folder, shape)
    checkpoint = Checkpoint(folder)
    with torch.device("meta"):
        wanted = Llama(shape).state_dict()
    return {name: checkpoint.take(name, *tensor.shape).to(torch.float32, copy=True) for name, tensor in wanted.items()}


def write_folder(folder: Path, plan: StudentPlan, weights: Mapping[str, Tensor], teacher: Path) -> None:
    """All files of a model folder; each appears when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    tensor_file.write(folder / "model.safetensors", [TensorEntry.of(name, tensor) for name, tensor in rounded.items()])
    config = {key: value for key, value in plan.values.items() if key not in ("dtype", "_name_or_path")}
    tensor_file.write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})
    for name in TOKENIZER_FILES:
        if (teacher / name).is_file():
            shutil.copyfile(teacher / name, folder / name)
