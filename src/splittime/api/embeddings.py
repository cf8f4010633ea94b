"""`POST /v1/embeddings`: what may be sent, the `Ask` that it becomes, and the answer.

An embedding is asked of the engine as a request whose prompt is computed and of which no token is wanted
(`SamplingParams.pooling`); what comes back is neither cut nor normalised, which is done here (`vector_of`). Which
pooling, and whether an embedding may be cut, the model's files say (`core.facts`), not the request.

A model whose files name no pooling embeds all the same, as decoders that were made for it do, and each answer has a
notice of that: to refuse it would need a setting that does nothing but take the refusal away.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta

from splittime.api.answer import WholeRenderer
from splittime.api.answer_structs import AnyAnswer
from splittime.api.choice import Choice
from splittime.api.limits import BodyLimits, KeepLast, ModelInfo, keep_last
from splittime.api.params import (
    MAX_CACHE_SALT_CHARS,
    MAX_PRIORITY,
    Ask,
    GivenPrompts,
    Prompt,
    check_model,
    kept_of,
    listed,
    require,
)
from splittime.api.schema import Label, Strict, no_effect
from splittime.core.errors import EngineError, RequestError
from splittime.core.facts import LEAST_LENGTH, NO_FILE, NO_FILE_OF_ENCODER, Pooling
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import EMBEDDINGS
from splittime.text.answer_marks import AnswerMarks

MAX_INPUTS = 2048  # as OpenAI takes
FLOAT32 = np.dtype("<f4")
Encoding = Literal["float", "base64"]
Vector = np.ndarray[Any, np.dtype[np.float32]]


class EmbeddingBody(Strict, kw_only=True):
    input: str | list[str | int | list[int]]
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    encoding_format: Annotated[
        Encoding | None, Meta(description="float (the default), or base64: of float32 values, little-endian.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="So many first values, normalised again. A model's files may say which numbers it allows."),
    ] = None
    priority: Annotated[int | None, Meta(description="Lower goes first, under the priority policy.")] = None
    cache_salt: Annotated[Label | None, Meta(description="Cached prefixes are shared within one salt.")] = None
    add_special_tokens: Annotated[Literal[True] | None, no_effect("a text gets them.")] = None
    truncate_prompt_tokens: KeepLast = None
    user: Annotated[Label | None, no_effect("a label of the client's.")] = None


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


def usage_of(choices: Sequence[Choice]) -> EmbeddingUsage:
    counted = sum(len(choice.request.prompt_token_ids) for choice in choices)
    return EmbeddingUsage(counted, counted)


class Embeddings(AnyAnswer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingAsk(Ask):
    """dimensions: None is all that there are."""

    pooling: Pooling
    dimensions: int | None
    is_base64: bool


def embedding_ask(
    body: EmbeddingBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks
) -> EmbeddingAsk:
    """include_timing: a header asks for it. marks: of chats, and of no use here. Raises `RequestError`."""
    check_model(body.model, model)
    pooling = model.pooling
    require_pooling(pooling, model.name, body.dimensions)
    priority, salt = body.priority or 0, body.cache_salt or ""
    require(abs(priority) <= MAX_PRIORITY, "priority", str(priority), "out of range", [-MAX_PRIORITY, MAX_PRIORITY])
    require(len(salt) <= MAX_CACHE_SALT_CHARS, "cache_salt", len(salt), "is too long", MAX_CACHE_SALT_CHARS)
    kept = keep_last(body.truncate_prompt_tokens, model, 0)
    return EmbeddingAsk(
        endpoint=EMBEDDINGS,
        model=body.model or model.name,
        prompts=_inputs(body.input, model, kept),
        keep_last=kept,
        sampling=SamplingParams(pooling=pooling.kind, max_tokens=0, seed=0),
        include_timing=include_timing,
        priority=priority,
        cache_salt=salt,
        pooling=pooling,
        dimensions=body.dimensions,
        is_base64=body.encoding_format == "base64",
    )


def require_pooling(pooling: Pooling, name: str, dimensions: int | None) -> None:
    """Raises `RequestError` for a model that makes no embeddings, and for a size to which they may not be cut."""
    if pooling.refusal:
        said = f"{name} makes no embeddings here: {pooling.refusal}"
        raise RequestError(said, code="unsupported_model", param="model", value=name)
    if dimensions is None or dimensions == pooling.size:
        return
    sizes = pooling.sizes or ((pooling.size,) if not pooling.may_be_cut else ())
    if sizes and dimensions not in sizes:
        allowed = ", ".join(map(str, sizes))
        said = f"dimensions is {dimensions}; by the model's files it can be {allowed}"
        raise RequestError(said, param="dimensions", value=dimensions, limit=list(sizes), hint="or leave it out")
    most = pooling.size or dimensions
    if not 1 <= dimensions <= most:
        said = f"dimensions is {dimensions}, outside 1 to {most}"
        raise RequestError(said, param="dimensions", value=str(dimensions), limit=[1, most])


def _inputs(given: GivenPrompts, model: ModelInfo, kept: int | None) -> tuple[Prompt, ...]:
    """Returns one entry for each embedding, of which `kept` token ids stay where they are such."""
    inputs = listed(given, "input")
    why = f"has {len(inputs)} entries, more than {MAX_INPUTS}"
    require(len(inputs) <= MAX_INPUTS, "input", len(inputs), why, MAX_INPUTS)
    if isinstance(inputs[0], str):
        return tuple(inputs)
    return kept_of(inputs, kept, model.max_model_len, model, "input")


# ---- the answer


def vector_of(pooled: bytes, pooling: Pooling, dimensions: int | None = None) -> Vector:
    """Returns the embedding, float32, that an engine's answer becomes. What is cut is always normalised again. Raises
    `EngineError` where there is none."""
    if not pooled:
        raise EngineError("the engine computed no embedding", hint="this runner computes no model")
    whole = np.frombuffer(pooled, np.float32)
    vector = whole if dimensions is None else whole[:dimensions]
    if not pooling.is_normalised and len(vector) == len(whole):
        return vector
    return vector / max(float(np.linalg.norm(vector)), LEAST_LENGTH)


class EmbeddingRenderer(WholeRenderer):
    def _answer(self, choices: Sequence[Choice], **head: Any) -> Embeddings:
        data = [Embedding(index=choice.index, embedding=self._written(choice)) for choice in choices]
        return Embeddings(data=data, usage=usage_of(choices), **head)

    def _written(self, choice: Choice) -> Any:
        """Returns the embedding as it is written: bytes of JSON, or a text."""
        vector = vector_of(choice.pooled, self.ask.pooling, self.ask.dimensions)
        if self.ask.is_base64:
            return base64.b64encode(vector.astype(FLOAT32).tobytes()).decode()
        return msgspec.Raw(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))


def pooling_notices(ask: Ask) -> list[str]:
    """Returns what the client is told of how its embeddings are made, where no file of the model says it."""
    if not isinstance(ask, EmbeddingAsk) or ask.pooling.named_by:
        return []
    return [NO_FILE_OF_ENCODER if ask.pooling.is_all else NO_FILE]
