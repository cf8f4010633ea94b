"""`POST /v1/rerank` and `/v1/score`: what is asked of the model, what comes out, what is refused and how."""

import math

import pytest
from tokenizers import AddedToken

from splittime.api.ranking import INSTRUCTION, JUDGE, score_of
from splittime.core.errors import EngineError
from splittime.core.facts import Pooling
from splittime.text.tokenizer import Tokenizer

from . import conftest
from .conftest import TEMPLATE, LiveServer

YES, NO = 257, 258
MANY, LONG = ["a"] * 128, "q" * 40_000
THINKING = TEMPLATE.replace("<|assistant|>", "<|assistant|>{% if enable_thinking is false %}<>{% endif %}")


def with_answers(template: str, _marks: tuple[str, ...]) -> Tokenizer:
    made = conftest.plain_tokenizer(template)
    made._backend.add_tokens([AddedToken("yes"), AddedToken("no")])
    return Tokenizer(made._backend, config={"eos_token": "<|end|>"}, chat_template=template)


@pytest.fixture
def live(launch, monkeypatch) -> LiveServer:
    monkeypatch.setattr(conftest, "plain_tokenizer", conftest.byte_tokenizer, raising=False)
    monkeypatch.setattr(conftest, "byte_tokenizer", with_answers)
    return launch(model={"vocab_size": 259}, template=THINKING)


def asked(query: str, text: str, instruction: str = INSTRUCTION) -> str:
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    return f"<|system|>{JUDGE}\n<|user|>{body}\n<|assistant|><>"


def score(prompt: str, live: LiveServer) -> float:
    """What the scripted engine's logits of a prompt are worth."""
    count = len(live.service.tokenizer.encode(prompt, add_special_tokens=False))
    return pytest.approx(1 / (1 + math.exp(3 - count / 100)), abs=1e-6)


def test_a_ranking_is_of_the_question_that_the_template_writes(live: LiveServer) -> None:
    texts = ["red", "a very long answer", "mid sized"]
    status, headers, answer = live.post("/v1/rerank", {"query": "q", "documents": texts}, {"X-Request-Id": "r1"})
    assert status == 200
    assert [each["index"] for each in answer["results"]] == [1, 2, 0]
    for each in answer["results"]:
        assert each["document"] == {"text": texts[each["index"]]}
        assert each["relevance_score"] == score(asked("q", texts[each["index"]]), live)
    prompts = [live.service.tokenizer.decode(one.prompt_token_ids) for one in live.engine.submitted]
    assert prompts == [asked("q", text) for text in texts]
    assert {one.sampling.allowed_token_ids for one in live.engine.submitted} == {(NO, YES)}
    tokens = sum(len(one.prompt_token_ids) for one in live.engine.submitted)
    assert (answer["id"], answer["usage"]) == ("rerank-r1", {"prompt_tokens": tokens, "total_tokens": tokens})
    assert "prefill" in headers["server-timing"]
    accounts = live.ledger.accounts()
    assert {(one.endpoint, one.finish_reason, one.output_tokens) for one in accounts} == {("rerank", "stop", 0)}
    for one in accounts:
        one.verify()


def test_the_best_alone_without_their_texts(live: LiveServer) -> None:
    body = {"query": "q", "documents": ["a", "bbb", "cc"], "top_n": 2, "return_documents": False, "instruction": "I"}
    status, _, answer = live.post("/v1/rerank", body)
    assert (status, [each["index"] for each in answer["results"]]) == (200, [1, 2])
    assert all(set(each) == {"index", "relevance_score"} for each in answer["results"])
    assert live.service.tokenizer.decode(live.engine.submitted[0].prompt_token_ids) == asked("q", "a", "I")


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a", "bb"], [("q", "a"), ("q", "bb")]),
        (["q", "r"], ["a", "bb"], [("q", "a"), ("r", "bb")]),
    ],
)
def test_scores_of_pairs(live: LiveServer, text_1: object, text_2: object, pairs: list) -> None:
    status, _, answer = live.post("/v1/score", {"text_1": text_1, "text_2": text_2})
    assert (status, answer["object"]) == (200, "list")
    assert [each["score"] for each in answer["data"]] == [score(asked(*pair), live) for pair in pairs]
    assert [each["index"] for each in answer["data"]] == list(range(len(pairs)))


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("rerank", {"query": "q", "documents": []}, "documents", "length"),
        ("rerank", {"query": "q", "documents": ["a"] * 129}, "documents", "129 texts, more than 128"),
        ("rerank", {"documents": ["a"]}, "query", "missing"),
        ("rerank", {"query": "q", "documents": ["a"], "rank_fields": ["a"]}, "rank_fields", "no such field"),
        ("rerank", {"query": "q", "documents": ["a"], "model": "x"}, "model", "no model"),
        ("rerank", {"query": "q", "documents": ["a" * 5000]}, "documents", "at most 4096"),
        ("rerank", {"query": "q", "documents": ["a", "a" * 5000]}, "documents[1]", "at most 4096"),
        ("score", {"text_1": "q", "text_2": ["a", "a" * 5000]}, "text_2[1]", "at most 4096"),
        ("score", {"text_1": ["q", "r"], "text_2": ["a"]}, "text_1", "can have one, or as many"),
        ("rerank", {"query": LONG, "documents": MANY}, "documents", "characters, each with its query"),
        ("rerank", {"query": "q", "documents": MANY, "instruction": LONG}, "documents", "at most 4194304 can be"),
        ("score", {"text_1": LONG, "text_2": MANY}, "text_2", "at most 4194304 can be"),
    ],
)
def test_refusals_name_the_field(live: LiveServer, path: str, body: dict, param: str, words: str) -> None:
    status, _, answer = live.post(f"/v1/{path}", body)
    assert (status // 100, answer["error"]["param"]) == (4, param)
    assert words in answer["error"]["message"]
    assert not live.engine.submitted


def test_a_model_that_cannot_be_asked_says_why(launch) -> None:
    status, _, answer = launch().post("/v1/rerank", {"query": "q", "documents": ["a"]})
    assert (status, answer["error"]["code"]) == (400, "unsupported_model")
    assert "no token for 'no'" in answer["error"]["message"]


def test_a_score_needs_an_answer() -> None:
    with pytest.raises(EngineError, match="computed no score"):
        score_of(b"")


def judged(launch, kind: str, **more) -> LiveServer:
    return launch(model={"pooling": Pooling(is_all=True, score=kind, refusal="it judges"), **more})


@pytest.mark.parametrize("kind", ["sigmoid", "none"])
def test_a_head_judges_pairs_of_texts_as_they_are(launch, kind: str) -> None:
    live = judged(launch, kind)
    texts = ["red", "a very long answer"]
    status, _, answer = live.post("/v1/rerank", {"query": "q", "documents": texts})
    assert status == 200
    assert [each["index"] for each in answer["results"]] == [1, 0]
    for each in answer["results"]:
        raw = len("q" + texts[each["index"]]) / 100
        assert each["relevance_score"] == pytest.approx(raw if kind == "none" else 1 / (1 + math.exp(-raw)), abs=1e-6)
    assert {bytes(one.prompt_token_ids).decode() for one in live.engine.submitted} == {"q" + text for text in texts}
    assert {one.sampling.pooling for one in live.engine.submitted} == {"score"}
    status, _, answer = live.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "dd"]})
    assert (status, len(answer["data"])) == (200, 2)


def test_what_a_head_is_not_asked(launch) -> None:
    live = judged(launch, "sigmoid", max_model_len=16)
    asked = {"query": "q", "documents": ["a"], "instruction": "find"}
    assert live.post("/v1/rerank", asked)[2]["error"]["param"] == "instruction"
    assert live.post("/v1/completions", {"prompt": "a"})[2]["error"]["hint"] == "POST /v1/rerank"
    assert live.post("/v1/embeddings", {"input": "a"})[2]["error"]["code"] == "unsupported_model"
    status, _, answer = live.post("/v1/rerank", {"query": "q" * 9, "documents": ["a", "b" * 9]})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (
        400,
        "context_length_exceeded",
        "documents[1]",
    )
