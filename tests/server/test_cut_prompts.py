"""`truncate_prompt_tokens` at each endpoint: what reaches the engine, and what is counted."""

import pytest

from splittime.core.facts import Pooling

TEXT = "abcdefghij"
USER = [{"role": "user", "content": TEXT}]
LAST = tuple(b"hij")
NAMED = Pooling(kind="mean", size=8, named_by="1_Pooling/config.json")


def submitted(live) -> list[tuple[int, ...]]:
    return [one.prompt_token_ids for one in live.engine.submitted]


@pytest.mark.parametrize("prompt", [TEXT, list(TEXT.encode()), [TEXT, "j"], [list(TEXT.encode()), [106]]])
def test_of_completions_the_last_tokens_are_kept_counted_and_echoed(launch, prompt: object) -> None:
    live = launch()
    asked = {"prompt": prompt, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1}
    status, _, answer = live.post("/v1/completions", asked)
    others = [(106,)] if isinstance(prompt[1], str | list) and len(prompt) == 2 else []
    assert (status, submitted(live)) == (200, [LAST, *others])
    assert answer["usage"]["prompt_tokens"] == 3 + len(others)
    assert answer["choices"][0]["text"].startswith("hij")
    assert [account.prompt_tokens for account in live.ledger.accounts()] == [3, 1][: 1 + len(others)]


def test_of_a_chat_the_last_tokens_of_what_the_template_writes_are_kept(launch) -> None:
    live = launch()
    status, _, answer = live.post("/v1/chat/completions", {"messages": USER, "truncate_prompt_tokens": 14})
    assert (status, submitted(live)) == (200, [tuple(b"\n<|assistant|>")])
    assert answer["usage"]["prompt_tokens"] == 14


def test_minus_one_leaves_room_for_what_is_asked(launch) -> None:
    live = launch(model={"max_model_len": 64})
    long = TEXT * 10
    for more, kept in (({}, 48), ({"max_tokens": 10}, 54), ({"max_tokens": 63}, 1)):
        status, _, _ = live.post("/v1/completions", {"prompt": long, "truncate_prompt_tokens": -1, **more})
        assert (status, submitted(live)[-1]) == (200, tuple(long.encode())[-kept:])
    live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": -1})
    assert len(submitted(live)[-1]) == 63
    assert live.post("/v1/completions", {"prompt": long})[0] == 400
    asked = {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 64}
    status, _, answer = live.post("/v1/completions", asked)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_cut_text_may_be_longer_than_the_context_could_ever_be(launch) -> None:
    live = launch(model={"max_model_len": 64})
    assert live.post("/v1/completions", {"prompt": "a" * 100_000 + TEXT, "truncate_prompt_tokens": 3})[0] == 200
    assert submitted(live) == [LAST]
    status, _, answer = live.post("/v1/completions", {"prompt": TEXT * 10, "truncate_prompt_tokens": 64})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("given", [TEXT, list(TEXT.encode())])
def test_of_what_is_embedded_the_last_tokens_are_kept_and_counted(launch, given: object) -> None:
    live = launch(model={"pooling": NAMED, "max_model_len": 64})
    status, _, answer = live.post("/v1/embeddings", {"input": given, "truncate_prompt_tokens": 3})
    assert (status, submitted(live), answer["usage"]["prompt_tokens"]) == (200, [LAST], 3)
    assert answer["notices"] == ["the prompt was cut from 10 to 3 tokens"]
    long = TEXT * 10 if isinstance(given, str) else given * 10
    live.post("/v1/embeddings", {"input": [long], "truncate_prompt_tokens": -1})
    assert submitted(live)[-1] == tuple((TEXT * 10).encode())[-64:]


def test_of_pairs_the_longer_text_loses_first(launch) -> None:
    live = launch(model={"pooling": Pooling(score="sigmoid"), "max_model_len": 64})
    asked = {"query": "q", "documents": [TEXT, "a"], "truncate_prompt_tokens": 4}
    status, _, answer = live.post("/v1/rerank", asked)
    assert (status, submitted(live)) == (200, [tuple(b"qhij"), tuple(b"qa")])
    assert answer["usage"]["prompt_tokens"] == 6


def test_a_cut_is_told(launch) -> None:
    live = launch()
    for prompt, notice in (
        (TEXT, ["the prompt was cut from 10 to 3 tokens"]),
        (list(TEXT.encode()), ["the prompt was cut from 10 to 3 tokens"]),
        ([TEXT, "j", TEXT * 2], ["2 of 3 prompts were cut from 30 to 6 tokens"]),
        ([list(TEXT.encode()), [106], list(TEXT.encode())], ["2 of 3 prompts were cut from 20 to 6 tokens"]),
        ("abc", None),
        (list(b"abc"), None),
    ):
        answer = live.post("/v1/completions", {"prompt": prompt, "truncate_prompt_tokens": 3})[2]
        assert answer.get("notices") == notice


def test_what_is_cut_teaches_admission_what_it_was_and_is_estimated_as_what_is_kept(launch) -> None:
    live, entered = launch(), []
    admission, enter = live.service.admission, live.service.admission.enter
    admission.enter = lambda *where, **what: (entered.append(what["tokens"]), enter(*where, **what))[1]
    before = admission.estimate_tokens(10_000)
    live.post("/v1/completions", {"prompt": TEXT * 100, "truncate_prompt_tokens": 3})
    assert admission.estimate_tokens(10_000) > before  # a token has one byte here, and not 333
    assert entered == [3]


def test_the_question_that_a_model_is_asked_is_not_cut(launch) -> None:
    asked = {"query": "q", "documents": [TEXT], "truncate_prompt_tokens": 4}
    status, _, answer = launch().post("/v1/rerank", asked)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
