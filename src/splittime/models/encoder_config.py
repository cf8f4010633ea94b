"""Encoders of BERT's kind, by a checkpoint's `config.json`: every token attends to every other, and nothing is
generated. What their parts cannot say is refused by name.

    BertModel                          positions 0, 1, ..; two kinds of tokens (`type_vocab_size`)
    RobertaModel, XLMRobertaModel      positions from behind `pad_token_id` on
    BertForMaskedLM, ..                the same with a head that is left unread
    BertForSequenceClassification, ..  with a head of one label, which judges a pair of texts (a cross-encoder)
    ModernBertModel, ..ForMaskedLM     positions as turns, and layers that attend to what is nearby
    Gemma3TextModel                    a decoder's layers, `use_bidirectional_attention`: EmbeddingGemma
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.facts import Pooling
from splittime.kernels.layer import MlpSpec
from splittime.models.config import ModelConfig, parse_config
from splittime.models.fields import EPSILON, LAYERS, LIMITS, THETA, Bounds, Fields, bad, read_json
from splittime.models.parts import LAYER_KINDS, dtype_of
from splittime.models.pooling import MODULES, read_pooling

_BODIES = {"Bert": "bert.", "Roberta": "roberta.", "XLMRoberta": "roberta."}  # and what its tensors' names begin with
JUDGES = "ForSequenceClassification"
_HEADS = ("Model", "ForMaskedLM", JUDGES)
MODERN = "ModernBert"
DECODERS = {"Gemma3TextModel": "use_bidirectional_attention"}  # and what says that they are encoders
ENCODERS = {f"{body}{head}": body for body in _BODIES for head in _HEADS}
ENCODERS |= {f"{MODERN}{head}": MODERN for head in ("Model", "ForMaskedLM")}
_BIASED = {"attention_bias": "attn.", "mlp_bias": "mlp.", "norm_bias": "norm"}  # and what names of these parts have
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # and how torch is to approximate it
_LIMITS = LIMITS | {
    "type_vocab_size": Bounds(1, 1024),
    "pad_token_id": Bounds(0, 1 << 24),
    "norm_eps": EPSILON,
    "local_attention": Bounds(2, 1 << 24),
    "global_attn_every_n_layers": LAYERS,
    **dict.fromkeys(("rope_theta", "global_rope_theta", "local_rope_theta"), THETA),
}


class ModernLayer(msgspec.Struct, frozen=True):
    """theta: of the turns. window: tokens to each side that a token attends to; None: all."""

    theta: float
    window: int | None


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """prefix: of its tensors' names, in a checkpoint with a head. gelu: how torch is to approximate it. padding: the
    token from behind whose number positions count; None: they count from 0. modern: the layers of a ModernBERT; () for
    other kinds. biased: parts of the names of what surely has a bias. decoder: whose layers these are."""

    architecture: str
    prefix: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_types: int
    num_positions: int
    padding: int | None
    epsilon: float
    gelu: str
    checkpoint_dtype: str
    pooling: Pooling = Pooling()
    modern: tuple[ModernLayer, ...] = ()
    biased: tuple[str, ...] = ("",)
    decoder: ModelConfig | None = None

    @property
    def is_judge(self) -> bool:
        """Returns whether it has a head that judges pairs of texts."""
        return self.architecture.endswith(JUDGES)

    @property
    def max_position_embeddings(self) -> int:
        """Tokens that a text may have."""
        return self.num_positions - (0 if self.padding is None else self.padding + 1)

    @property
    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each product of a layer."""
        width, inner = self.hidden_size, self.inner_size
        if self.decoder is not None:
            mixer = self.decoder.layers[0].attention
            mixed = mixer.query_width
            return (mixed + 2 * mixer.kv_width, width), (width, mixed), (2 * inner, width), (width, inner)
        up = 2 * inner if self.modern else inner
        return (3 * width, width), (width, width), (up, width), (width, inner)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer by which a token is multiplied."""
        return sum(outputs * inputs for outputs, inputs in self.layer_products)


def is_encoder(path: Path) -> bool:
    """Returns whether a folder's `config.json` names an encoder. Raises `ConfigError` for one that cannot be read."""
    if not (path / "config.json").is_file():
        return False
    values = read_json(path / "config.json")
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return False
    return names[0] in ENCODERS or values.get(DECODERS.get(names[0], "")) is True


def load_encoder_config(folder: Path) -> EncoderConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    values = read_json(folder / "config.json")
    config = parse_encoder_config(values)
    if config.is_judge:
        return msgspec.structs.replace(config, pooling=_judging(values, config.hidden_size))
    pooling = read_pooling(folder, values, config.hidden_size, has_dense=True)
    kind = pooling.kind if (folder / MODULES).exists() else "cls"
    return msgspec.structs.replace(config, pooling=msgspec.structs.replace(pooling, kind=kind, is_all=True))


def parse_encoder_config(values: dict[str, Any]) -> EncoderConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    (name,) = values["architectures"]
    if name in DECODERS:
        return _of_decoder(name, parse_config({**values, DECODERS[name]: False}))
    fields = Fields(values, limits=_LIMITS)
    _refuse_unsupported(values, fields)
    body = ENCODERS[name]
    padding = None if body in ("Bert", MODERN) else fields.count("pad_token_id", 1)
    epsilon, activation = ("norm_eps", "hidden_activation") if body == MODERN else ("layer_norm_eps", "hidden_act")
    config = EncoderConfig(
        architecture=name,
        prefix=_BODIES.get(body, "model."),
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        inner_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=fields.count("num_attention_heads"),
        num_types=fields.count("type_vocab_size", 2),
        num_positions=fields.count("max_position_embeddings"),
        padding=padding,
        epsilon=fields.number(epsilon, 1e-5 if body == MODERN else 1e-12),
        gelu=ACTIVATIONS[fields.text(activation, "gelu")],
        checkpoint_dtype=dtype_of(fields),
        modern=_modern_layers(values, fields) if body == MODERN else (),
        biased=tuple(part for key, part in _BIASED.items() if fields.flag(key, False)) if body == MODERN else ("",),
    )
    if config.hidden_size % config.num_heads:
        raise bad("hidden_size", config.hidden_size, f"a multiple of num_attention_heads, {config.num_heads}")
    if config.modern and config.hidden_size // config.num_heads % 2:
        raise bad("hidden_size", config.hidden_size, "an even number for each head, whose halves are turned")
    if config.max_position_embeddings < 2:
        raise bad("max_position_embeddings", config.num_positions, "room for two tokens behind pad_token_id")
    return config


def _of_decoder(name: str, decoder: ModelConfig) -> EncoderConfig:
    part = decoder.layers[0].feed_forward
    assert isinstance(part, MlpSpec)
    return EncoderConfig(
        architecture=name,
        prefix="",
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        inner_size=part.inner,
        num_layers=decoder.num_layers,
        num_heads=decoder.layers[0].attention.num_heads,
        num_types=1,
        num_positions=decoder.max_position_embeddings,
        padding=None,
        epsilon=decoder.norm.eps,
        gelu=part.activation,
        checkpoint_dtype=decoder.checkpoint_dtype,
        decoder=decoder,
    )


def _modern_layers(values: dict[str, Any], fields: Fields) -> tuple[ModernLayer, ...]:
    """Returns the layers as `layer_types` names them, else each `global_attn_every_n_layers`-th attends to all."""
    num_layers, every = fields.count("num_hidden_layers"), fields.count("global_attn_every_n_layers", 3)
    kinds = values.get("layer_types") or [LAYER_KINDS[number % every > 0] for number in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in LAYER_KINDS for kind in kinds):
        raise bad("layer_types", kinds, f"a list of {num_layers} names from {', '.join(LAYER_KINDS)}")
    nearby = fields.count("local_attention", 128) // 2
    whole = fields.number("global_rope_theta", 160_000.0)
    near = whole if values.get("local_rope_theta", 0) is None else fields.number("local_rope_theta", 10_000.0)
    known: dict[str, tuple[float, int | None]] = {"full_attention": (whole, None), "sliding_attention": (near, nearby)}
    return tuple(ModernLayer(_theta(values, kind, known[kind][0]), known[kind][1]) for kind in kinds)


def _theta(values: dict[str, Any], kind: str, default: float) -> float:
    """Returns the base of the turns of a kind of layer, of which `rope_parameters` may say more."""
    given = values.get("rope_parameters") or {}
    if not isinstance(given, dict) or not all(name in LAYER_KINDS and isinstance(given[name], dict) for name in given):
        raise bad("rope_parameters", given, f"an object with one of {' and '.join(LAYER_KINDS)} (of an encoder)")
    fields = Fields(given.get(kind, {}), f"rope_parameters.{kind}.", limits=_LIMITS)
    if fields.text("rope_type", "default") != "default":
        raise fields.bad("rope_type", fields.values["rope_type"], "default (of an encoder)")
    return fields.number("rope_theta", default)


def _judging(values: dict[str, Any], size: int) -> Pooling:
    """Returns how a pair is scored, as sentence-transformers reads it: by the sigmoid unless another is named."""
    labels = values.get("id2label")
    if not isinstance(labels, dict) or len(labels) != 1:
        raise bad("id2label", labels, "an object with one label: what has more classes does not judge a pair")
    own = values.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or values.get("sbert_ce_default_activation_function") or "Sigmoid"
    kinds = {"Sigmoid": "sigmoid", "Identity": "none"}
    kind = kinds.get(str(named).rpartition(".")[2])
    if kind is None:
        raise bad("sbert_ce_default_activation_function", named, f"one of {', '.join(kinds)}")
    refusal = f"{values['architectures'][0]} judges pairs of texts; POST /v1/rerank"
    return Pooling(size=size, refusal=refusal, is_all=True, score=kind)


def _refuse_unsupported(values: dict[str, Any], fields: Fields) -> None:
    plain, known = ("absolute",), tuple(ACTIVATIONS)
    wanted = {"hidden_act": known, "hidden_activation": known, "position_embedding_type": plain}
    for key, allowed in wanted.items():
        if fields.text(key, allowed[0]) not in allowed:
            raise bad(key, values[key], f"one of {', '.join(allowed)} (of an encoder)")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.flag(key, False):
            raise bad(key, True, "false: an encoder generates nothing")
    if values.get("rope_scaling") is not None:
        raise bad("rope_scaling", values["rope_scaling"], "absent (of an encoder)")
    if values.get("quantization_config") is not None:
        raise ConfigError(
            "config.json: quantization_config of an encoder is not implemented",
            param="quantization_config",
            hint="take the checkpoint in floats; --quantization int8 rounds it while it is loaded",
        )
