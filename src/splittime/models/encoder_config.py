"""Encoders of BERT's kind, by a checkpoint's `config.json`: every token attends to every other, and nothing is
generated. What their parts cannot say is refused by name.

    BertModel                          positions 0, 1, ..; two kinds of tokens (`type_vocab_size`)
    RobertaModel, XLMRobertaModel      positions from behind `pad_token_id` on
    BertForMaskedLM, ..                the same with a head that is left unread
    BertForSequenceClassification, ..  with a head of one label, which judges a pair of texts (a cross-encoder)
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.pooling import Pooling
from splittime.models.config import dtype_of
from splittime.models.fields import EPSILON, LIMITS, Bounds, Fields, bad, read_json
from splittime.models.pooling import MODULES, read_pooling

_BODIES = {"Bert": "bert.", "Roberta": "roberta.", "XLMRoberta": "roberta."}  # and what its tensors' names begin with
JUDGES = "ForSequenceClassification"
_HEADS = ("Model", "ForMaskedLM", JUDGES)
ENCODERS = {f"{body}{head}": body for body in _BODIES for head in _HEADS}
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # and how torch is to approximate it
_LIMITS = LIMITS | {
    "layer_norm_eps": EPSILON,
    "type_vocab_size": Bounds(1, 1024),
    "pad_token_id": Bounds(0, 1 << 24),
}


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """prefix: of its tensors' names, in a checkpoint with a head. gelu: how torch is to approximate it. padding: the
    token from behind whose number positions count; None: they count from 0."""

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

    @property
    def is_judge(self) -> bool:
        """Whether it has a head that judges pairs of texts."""
        return self.architecture.endswith(JUDGES)

    @property
    def max_position_embeddings(self) -> int:
        """Tokens that a text may have."""
        return self.num_positions - (0 if self.padding is None else self.padding + 1)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer by which a token is multiplied."""
        return self.hidden_size * (4 * self.hidden_size + 2 * self.inner_size)


def is_encoder(path: Path) -> bool:
    """Whether a folder's `config.json` names an encoder. Raises `ConfigError` for one that cannot be read."""
    if not (path / "config.json").is_file():
        return False
    names = read_json(path / "config.json").get("architectures")
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in ENCODERS


def load_encoder_config(folder: Path) -> EncoderConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    values = read_json(folder / "config.json")
    config = parse_encoder_config(values)
    if config.is_judge:
        return msgspec.structs.replace(config, pooling=_judging(values, config.hidden_size))
    pooling = read_pooling(folder, values, config.hidden_size)
    kind = pooling.kind if (folder / MODULES).exists() else "cls"
    return msgspec.structs.replace(config, pooling=msgspec.structs.replace(pooling, kind=kind, is_all=True))


def parse_encoder_config(values: dict[str, Any]) -> EncoderConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    (name,) = values["architectures"]
    fields = Fields(values, limits=_LIMITS)
    _refuse_unsupported(values, fields)
    padding = None if ENCODERS[name] == "Bert" else fields.count("pad_token_id", 1)
    config = EncoderConfig(
        architecture=name,
        prefix=_BODIES[ENCODERS[name]],
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        inner_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=fields.count("num_attention_heads"),
        num_types=fields.count("type_vocab_size", 2),
        num_positions=fields.count("max_position_embeddings"),
        padding=padding,
        epsilon=fields.number("layer_norm_eps", 1e-12),
        gelu=ACTIVATIONS[fields.text("hidden_act", "gelu")],
        checkpoint_dtype=dtype_of(fields),
    )
    if config.hidden_size % config.num_heads:
        raise bad("hidden_size", config.hidden_size, f"a multiple of num_attention_heads, {config.num_heads}")
    if config.max_position_embeddings < 2:
        raise bad("max_position_embeddings", config.num_positions, "room for two tokens behind pad_token_id")
    return config


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
    wanted = {"hidden_act": tuple(ACTIVATIONS), "position_embedding_type": ("absolute",)}
    for key, allowed in wanted.items():
        if fields.text(key, allowed[0]) not in allowed:
            raise bad(key, values[key], f"one of {', '.join(allowed)} (of an encoder)")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.flag(key, False):
            raise bad(key, True, "false: an encoder generates nothing")
    if values.get("quantization_config") is not None:
        raise ConfigError(
            "config.json: quantization_config of an encoder is not implemented",
            param="quantization_config",
            hint="take the checkpoint in floats; --quantization int8 rounds it while it is loaded",
        )
