"""What a visit does differently at each endpoint: which body it reads, what that asks for, and how it is answered."""

from collections.abc import Callable
from typing import Any, NamedTuple

from splittime.api.answer import Renderer
from splittime.api.embeddings import EmbeddingBody, EmbeddingRenderer, embedding_ask
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.params import Ask, ask_of
from splittime.api.ranking import RankRenderer, RerankBody, ScoreBody, ScoreRenderer, rerank_ask, score_ask
from splittime.api.schema import ChatBody, CompletionBody, Strict
from splittime.text.answer_marks import AnswerMarks
from splittime.text.tokenizer import Tokenizer


class Endpoint(NamedTuple):
    """prefix: of the id in an answer. ask_of: what a body asks for; raises `RequestError`. renderer: of the answer to
    an ask, under an id."""

    prefix: str
    body: type[Strict]
    ask_of: Callable[[Any, ModelInfo, BodyLimits, bool, AnswerMarks], Ask]
    renderer: Callable[[Any, str, Tokenizer], Any]


ENDPOINTS = {
    "completions": Endpoint("cmpl", CompletionBody, ask_of, Renderer),
    "chat": Endpoint("chatcmpl", ChatBody, ask_of, Renderer),
    "embeddings": Endpoint("embd", EmbeddingBody, embedding_ask, EmbeddingRenderer),
    "rerank": Endpoint("rerank", RerankBody, rerank_ask, RankRenderer),
    "score": Endpoint("score", ScoreBody, score_ask, ScoreRenderer),
}
