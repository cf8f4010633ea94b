"""What a visit does differently at each endpoint: which body it reads, what that asks for, and how it is answered."""

from collections.abc import Callable
from typing import Any, NamedTuple

from splittime.api.answer import Renderer
from splittime.api.embeddings import EmbeddingBody, EmbeddingRenderer, embedding_ask
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.params import Ask, ask_of
from splittime.api.prefill import PrefillBody, PrefillRenderer, prefill_ask
from splittime.api.ranking import RankRenderer, RerankBody, ScoreBody, ScoreRenderer, rerank_ask, score_ask
from splittime.api.schema import ChatBody, CompletionBody, Strict
from splittime.ledger.account import PREFILL
from splittime.text.answer_marks import AnswerMarks
from splittime.text.tokenizer import Tokenizer


class Endpoint(NamedTuple):
    """prefix: of the id in an answer. prompts_field: of the body, from which the prompts are. ask_of: what a body asks
    for; raises `RequestError`. renderer: of the answer to an ask, under an id."""

    prefix: str
    prompts_field: str
    body: type[Strict]
    ask_of: Callable[[Any, ModelInfo, BodyLimits, bool, AnswerMarks], Ask]
    renderer: Callable[[Any, str, Tokenizer], Any]


ENDPOINTS = {
    "completions": Endpoint("cmpl", "prompt", CompletionBody, ask_of, Renderer),
    "chat": Endpoint("chatcmpl", "messages", ChatBody, ask_of, Renderer),
    "embeddings": Endpoint("embd", "input", EmbeddingBody, embedding_ask, EmbeddingRenderer),
    "rerank": Endpoint("rerank", "documents", RerankBody, rerank_ask, RankRenderer),
    PREFILL: Endpoint("prefill", "prompt", PrefillBody, prefill_ask, PrefillRenderer),
    "score": Endpoint("score", "text_2", ScoreBody, score_ask, ScoreRenderer),
}
