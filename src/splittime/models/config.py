"""A checkpoint's `config.json` as a frozen value: every question about the model's shape is settled here, once.

Whatever would change the arithmetic and is not implemented is refused with its name and value, and so is a number that
is larger than its bound in `fields` allows, before anything is made of it. The layers are composed by the
architecture's entry.

`generation_config.json` says which tokens end a text, and how the model's makers advise to sample.

    --generation-config auto   both apply; a field of a request wins over the advice
                        vllm   sampling is neutral unless a request says otherwise; ends of sequence apply
                        none   the file is not read

`auto` and `vllm` mean what they mean to vLLM. Its fields are read too, and no others: `do_sample` is not one of them,
so a file with `do_sample: false` and a temperature advises that temperature. `max_new_tokens` is how many tokens a
request gets that names no number itself (in vLLM it cuts off larger numbers too).
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError, RequestError
from splittime.core.facts import Pooling
from splittime.core.sampling import SamplingParams
from splittime.kernels.layer import AttentionSpec, DeltaSpec, LayerSpec, MixtureSpec, NormSpec, mlps_of
from splittime.models import architectures, parts
from splittime.models.fields import Bounds, Fields, bad, read_json
from splittime.models.pooling import read_pooling
from splittime.models.weights.formats import read as formats
from splittime.models.weights.formats.recipe import Recipe

NAME = "generation_config.json"
HINT = "--generation-config vllm leaves the file's sampling alone"
FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
FIELDS |= {"max_new_tokens": "max_tokens"}
"""Names in the file, and in `SamplingParams`."""


class GenerationAdvice(msgspec.Struct, frozen=True):
    """sampling: what is advised, by the names of `SamplingParams`."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = {}


def read_generation(folder: Path, way: str, vocab_size: int) -> GenerationAdvice:
    """Reads it from a checkpoint's folder. Raises `ConfigError` naming what cannot be meant."""
    path = folder / NAME
    if way == "none" or not path.exists():
        return GenerationAdvice()
    values = read_json(path)
    ends = Fields(values, file=NAME).ints("eos_token_id", Bounds(0, vocab_size - 1))
    return GenerationAdvice(ends, advice(values) if way == "auto" else {})


def advice(values: dict[str, Any], name: str = NAME) -> dict[str, float | int]:
    """Returns what is advised, by the names of `SamplingParams`. A null says nothing. Raises `ConfigError` with the
    file's name for what cannot be meant."""
    given = {ours: values[theirs] for theirs, ours in FIELDS.items() if values.get(theirs) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        msgspec.convert(given, SamplingParams).validate()
    except RequestError as error:
        info = error.info
        said = f"{name}: {info.message}"
        raise ConfigError(said, param=info.param, value=info.value, limit=info.limit, hint=HINT) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}", param="generation_config", value=str(given), hint=HINT) from None
    return given


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """layers: what each computes; norm: of the last layer's output. checkpoint_dtype: as config.json says, of what is
    not quantised; quantization: how the rest is stored. sampling: what the model's makers advise, by the names of
    `SamplingParams`. embedding_factor and the like: see `architectures.Ends`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Recipe | None = None
    sampling: dict[str, float | int] = {}
    pooling: Pooling = Pooling()
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_cap: float = 0.0
    layer_input_size: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_routers(self) -> bool:
        """Returns whether some layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, MixtureSpec) for layer in self.layers)

    @property
    def windows(self) -> list[int]:
        """The sliding windows of the layers that have one, in tokens."""
        return [one.window_tokens for one in self.attention if one.window_tokens is not None]

    @property
    def attention(self) -> list[AttentionSpec]:
        """The mixers of the layers that have attention."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]

    @property
    def deltas(self) -> list[DeltaSpec]:
        """The mixers of the layers that keep a state."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaSpec)]


def load_config(folder: Path, generation: str = "auto") -> ModelConfig:
    """Read `config.json`, and where they are there: `generation_config.json`, as `generation` says (see above),
    what AutoGPTQ and AutoAWQ once wrote into a file of its own (`SIDE_FILES`), and what tells how to embed."""
    values = architectures.unwrapped(read_json(folder / "config.json"))
    for name, method in formats.SIDE_FILES.items():
        if not formats.is_quantised(values) and (folder / name).exists():
            values[formats.KEY] = {"quant_method": method, **read_json(folder / name)}
    config = parse_config(values)
    said = read_generation(folder, generation, config.vocab_size)
    ends = tuple(dict.fromkeys(said.eos_token_ids + config.eos_token_ids))
    pooling = read_pooling(folder, values, config.hidden_size)
    return msgspec.structs.replace(config, eos_token_ids=ends, sampling=said.sampling, pooling=pooling)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    values = architectures.unwrapped(values)
    name = architectures.find(values)
    architecture = architectures.ARCHITECTURES[name]
    left_out = parts.NEW if values.get(parts.OLD) is not None else None  # the same in the old form is no default
    defaults = {key: value for key, value in architecture.defaults.items() if key != left_out}
    said = {key: value for key, value in values.items() if key != parts.NEW or value is not None}
    config = config_of(name, Fields({**defaults, **said}))
    _refuse_unsupported(values, config)
    return msgspec.structs.replace(config, quantization=formats.parse(values))


def config_of(name: str, fields: Fields) -> ModelConfig:
    """Returns what the fields say of a model of the architecture `name`, whose weights are floats."""
    architecture = architectures.ARCHITECTURES[name]
    layers, ends = architecture.compose(fields), architecture.ends(fields)
    fields.count("intermediate_size")  # also where every layer has experts of another size
    vocab_size = fields.count("vocab_size")
    ids = Bounds(0, vocab_size - 1)
    fields.ints("bos_token_id", ids)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=fields.count("hidden_size"),
        layers=layers,
        norm=layers[-1].norm,
        max_position_embeddings=fields.count("max_position_embeddings"),
        tie_word_embeddings=not architecture.has_head or fields.flag("tie_word_embeddings", False),
        checkpoint_dtype=parts.dtype_of(fields),
        eos_token_ids=fields.ints("eos_token_id", ids),
        **ends._asdict(),
    )


ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
"""By the names that `MlpSpec` has, those of configs."""


def _refuse_unsupported(values: dict[str, Any], config: ModelConfig) -> None:
    mlp = mlps_of(config.layers[0].feed_forward)[0]
    known, is_gemma = ACTIVATIONS[mlp.activation], mlp.activation == "gelu_tanh" and mlp.is_gated
    for key in ("hidden_act", "hidden_activation"):
        is_old_gemma = is_gemma and key == "hidden_act" and values.get(key) == "gelu"
        if not is_old_gemma and (values.get(key) or known[0]) not in known:
            raise bad(key, values[key], f"{known[0]} (the only activation implemented for this architecture)")
    of_images = "vision" if config.architecture == "Gemma4ForCausalLM" else None  # their tokens alone
    for key, want, also in (("is_causal", True, None), ("use_bidirectional_attention", False, of_images)):
        if values.get(key) not in (None, want, also):
            raise bad(key, values[key], f"{str(want).lower()}: no token attends to those behind it")
