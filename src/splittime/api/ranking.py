"""`POST /v1/rerank` and `/v1/score`: how well texts answer a query, by a model that says yes or no (Qwen3-Reranker), or
by an encoder with a head that judges pairs (a cross-encoder).

An encoder is given both texts, and its head's number is the score, through the sigmoid if its files say so. Any other
model is asked: each pair of query and document is a chat, written by the model's own template, in which the question is
whether one meets the other. No token is generated; the score is how likely "yes" is where the answer must be "yes" or
"no":

    score = p(yes) / (p(yes) + p(no))            behind the template's last word

The words of the question are those that Qwen3-Reranker was trained on. No file of a model says whether it was; one that
was not answers all the same, as well as it can, and its scores are worth as much. A model without a chat template, or
whose vocabulary has no token for either word, is refused by name.

Both endpoints are the forms of vLLM's, Jina's and Cohere's clients; each text that is scored is a request of its own.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from splittime.api.answer import WholeRenderer
from splittime.api.answer_structs import AnyAnswer
from splittime.api.choice import Choice
from splittime.api.embeddings import EmbeddingUsage, usage_of
from splittime.api.lenient import UNSUPPORTED
from splittime.api.limits import FIELD, BodyLimits, KeepLast, ModelInfo, keep_last
from splittime.api.params import Ask, check_model, require
from splittime.api.schema import Label, Strict, no_effect
from splittime.core.errors import EngineError, RequestError
from splittime.core.sampling import LOGITS, SCORE, SamplingParams
from splittime.text.answer_marks import AnswerMarks

ANSWERS = ("no", "yes")
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MAX_ASKED_CHARS = 2**22  # of all questions together, each with its query, text and instruction
OPTIONS: dict[str, Any] = {"add_generation_prompt": True, "variables": {"enable_thinking": False}}
SeveralTexts = Annotated[list[str], Meta(min_length=1)]
MODEL = Meta(description="A name from /v1/models; default: the model served.")
TASK = Meta(description=f"What is asked of a document; default: {INSTRUCTION}.")


class RerankBody(Strict, kw_only=True):
    refusals: ClassVar[Mapping[str, str]] = {name: why for name, why in UNSUPPORTED.items() if name != "documents"}

    query: str
    documents: SeveralTexts
    model: Annotated[str | None, MODEL] = None
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="The best ones only; 0 is all.")] = None
    instruction: Annotated[str | None, TASK] = None
    return_documents: Annotated[bool | None, Meta(description="Default: true.")] = None
    truncate_prompt_tokens: KeepLast = None
    user: Annotated[Label | None, no_effect("a label of the client's.")] = None


class ScoreBody(Strict, kw_only=True):
    text_1: Annotated[str | SeveralTexts, Meta(description="A query, or one for each of text_2.")]
    text_2: Annotated[str | SeveralTexts, Meta(description="What is scored.")]
    model: Annotated[str | None, MODEL] = None
    instruction: Annotated[str | None, TASK] = None
    truncate_prompt_tokens: KeepLast = None
    user: Annotated[Label | None, no_effect("a label of the client's.")] = None


class RankedText(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class Ranking(AnyAnswer, kw_only=True):
    results: list[Ranked]
    usage: EmbeddingUsage


class OneScore(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(AnyAnswer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[OneScore]
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAsk(Ask):
    """pairs: query and document. judged_by: what becomes of what a head says (`Pooling.score`); "" where the model is
    asked. top_n: of a ranking, how many are told; with_texts: and whether their texts are."""

    pairs: tuple[tuple[str, str], ...]
    instruction: str
    judged_by: str = ""
    top_n: int = 0
    with_texts: bool = True

    @property
    def num_choices(self) -> int:
        return len(self.pairs)

    def chats(self) -> tuple[tuple[dict[str, Any], ...], ...]:
        """Returns the question about each pair."""
        asked = [f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {text}" for query, text in self.pairs]
        judge = {"role": "system", "content": JUDGE}
        return tuple((judge, {"role": "user", "content": text}) for text in asked)

    def answered_by(self, token_ids: Sequence[Sequence[int]]) -> "RankAsk":
        """Returns the ask with the tokens of `ANSWERS`. Raises `RequestError` where one is not one token."""
        for word, ids in zip(ANSWERS, token_ids, strict=True):
            if len(ids) != 1:
                said = f"{self.model} cannot rank: its vocabulary has no token for {word!r}"
                raise RequestError(said, code="unsupported_model", param="model", value=self.model)
        answers = tuple(ids[0] for ids in token_ids)
        return replace(self, sampling=SamplingParams(pooling=LOGITS, allowed_token_ids=answers, max_tokens=0, seed=0))


def rerank_ask(
    body: RerankBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks
) -> RankAsk:
    """include_timing: a header asks for it. marks: of no use to it. Raises `RequestError`."""
    pairs = [(body.query, text) for text in body.documents]
    ask = _ask(body, pairs, "documents", model, limits, include_timing)
    return replace(ask, top_n=body.top_n or 0, with_texts=body.return_documents is not False)


def score_ask(
    body: ScoreBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks
) -> RankAsk:
    """As `rerank_ask`."""
    queries = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    texts = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(queries) not in (1, len(texts)):
        said = f"text_1 has {len(queries)} texts and text_2 {len(texts)}; it can have one, or as many"
        raise RequestError(said, param="text_1", value=len(queries), limit=[1, len(texts)])
    pairs = list(zip(queries * len(texts) if len(queries) == 1 else queries, texts, strict=True))
    return _ask(body, pairs, "text_2", model, limits, include_timing)


def _ask(
    body: RerankBody | ScoreBody,
    pairs: list[tuple[str, str]],
    param: str,
    model: ModelInfo,
    limits: BodyLimits,
    include_timing: bool,
) -> RankAsk:
    check_model(body.model, model)
    judged_by = model.pooling.score
    if judged_by and body.instruction:
        raise RequestError("instruction: an encoder judges pairs as it was trained to", param="instruction")
    if not judged_by:
        model.require_generating()
        _refuse_cut(body.truncate_prompt_tokens)
    count, most = len(pairs), limits.max_choices
    require(count <= most, param, count, f"has {count} texts, more than {most}", most)
    instruction = "" if judged_by else body.instruction or INSTRUCTION
    _require_short(pairs, instruction, param)
    return RankAsk(
        endpoint="rerank" if isinstance(body, RerankBody) else "score",
        model=body.model or model.name,
        sampling=SamplingParams(max_tokens=0, pooling=SCORE if judged_by else LOGITS, seed=0),
        judged_by=judged_by,
        keep_last=keep_last(body.truncate_prompt_tokens, model, 0),
        include_timing=include_timing,
        pairs=tuple(pairs),
        instruction=instruction,
    )


def _refuse_cut(asked: int | None) -> None:
    if asked is not None:
        said, hint = f"{FIELD}: it would cut the question that a model is asked", "leave it out, and shorten the texts"
        raise RequestError(said, param=FIELD, value=asked, hint=hint)


def _require_short(pairs: Sequence[tuple[str, str]], instruction: str, param: str) -> None:
    """Raises `RequestError` for questions that are too long together: each repeats the query and the instruction, so
    that a body of 4 MB could become 500 MB of them."""
    asked = sum(len(query) + len(text) for query, text in pairs) + len(instruction) * len(pairs)
    if asked > MAX_ASKED_CHARS:
        most, hint = MAX_ASKED_CHARS, "each has the query too: send fewer texts, or shorter ones"
        said = f"{param} come to {asked} characters, each with its query and the instruction; at most {most} can be"
        raise RequestError(said, param=param, value=asked, limit=most, hint=hint)


# ---- the answer


def score_of(pooled: bytes, judged_by: str = "") -> float:
    """Returns the chance of "yes" where `ANSWERS` are all there is, or what a head's number becomes. Raises
    `EngineError` if nothing was computed."""
    if not pooled:
        raise EngineError("the engine computed no score", hint="this runner computes no model")
    *no, yes = array("f", pooled)
    return yes if judged_by == "none" else 1 / (1 + math.exp(min(sum(no) - yes, 700.0)))


class ScoreRenderer(WholeRenderer):
    def _scores(self, choices: Sequence[Choice]) -> list[float]:
        return [score_of(choice.pooled, self.ask.judged_by) for choice in choices]

    def _answer(self, choices: Sequence[Choice], **head: Any) -> AnyAnswer:
        data = [OneScore(index=index, score=score) for index, score in enumerate(self._scores(choices))]
        return ScoreList(data=data, usage=usage_of(choices), **head)


class RankRenderer(ScoreRenderer):
    """Renders a ranking, the best first."""

    def _answer(self, choices: Sequence[Choice], **head: Any) -> AnyAnswer:
        scores = self._scores(choices)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.ask.top_n or None]
        return Ranking(results=[self._ranked(at, scores[at]) for at in best], usage=usage_of(choices), **head)

    def _ranked(self, index: int, score: float) -> Ranked:
        document = RankedText(self.ask.pairs[index][1]) if self.ask.with_texts else UNSET
        return Ranked(index=index, document=document, relevance_score=score)
