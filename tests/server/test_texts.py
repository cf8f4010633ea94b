"""Prompts as the server sees them: refused by length before anything is done, counted by their own text, and told why
they wait."""

import json
import socket

import pytest
import tokenizers
from tokenizers import models

from patience import until
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.admission import INITIAL_BYTES_PER_TOKEN, Admission, QueueLimits
from splittime.text import process
from splittime.text.foreign_code import TokenBound
from splittime.text.tokenizer import Tokenizer

from .conftest import say

SHORT = {"prompt": "hello", "max_tokens": 1}
MESSAGES = [{"role": "user", "content": "hi"}]


def stages(server, number: int = -1) -> list[tuple[Stage, Cause | None]]:
    account = server.ledger.accounts()[number]
    account.verify()
    return [(interval.stage, interval.cause) for interval in account.intervals]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(launch, monkeypatch) -> None:
    server = launch()
    monkeypatch.setattr(server.service.texts, "submit", None)
    monkeypatch.setattr(server.service.tokenizer, "encode", None)
    status, _, answer = server.post("/v1/completions", {"prompt": "a" * 1_000_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["value"] > answer["error"]["limit"] == 4095
    assert Stage.TOKENIZE not in dict(stages(server))
    assert server.service.admission.queued_prompt_tokens == 0


def test_without_a_bound_a_worker_finds_out(launch) -> None:
    server = launch()
    server.service.tokenizer.bound = None
    status, _, answer = server.post("/v1/completions", {"prompt": "a" * 1_000_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert Stage.TOKENIZE in dict(stages(server))


def test_a_bound_that_counts_no_spaces_lets_them_pass() -> None:
    text = " word" * 100 + " " * 100_000
    assert TokenBound(4, counts_spaces=False).least_tokens(text) == 99
    assert TokenBound(4).least_tokens(text) > 25_000


def test_waiting_for_a_worker_is_a_stage_with_its_cause(launch) -> None:
    """The first chat finds no worker yet; the next finds it idle."""
    server = launch()
    for expected in ([(Stage.TOKENIZE_QUEUE, Cause.WORKER_START), (Stage.TOKENIZE, None)], [(Stage.TOKENIZE, None)]):
        assert server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})[0] == 200
        found = stages(server)
        assert [pair for pair in found if pair[0] in (Stage.TOKENIZE_QUEUE, Stage.TOKENIZE)] == expected
    assert "splittime_stage_seconds" in server.get("/metrics")[2].decode()
    assert 'stage="tokenize_queue",cause="worker_start"' in server.get("/metrics")[2].decode()


def test_a_deadline_ends_the_wait_for_a_worker(launch) -> None:
    server = launch(model={"max_model_len": 10_000_000})
    body = {"prompt": "a" * 3_000_000, "max_tokens": 1}
    status, _, answer = server.post("/v1/completions", body, {"x-request-deadline-ms": "20"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert Stage.HANDOFF not in dict(stages(server))


def test_a_broken_template_is_refused_and_the_server_lives(launch) -> None:
    server = launch(template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    for _ in range(2):
        status, _, answer = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert (status, answer["error"]["code"]) == (400, "chat_template_error")
    assert server.post("/v1/completions", SHORT)[0] == 200


# ---- the estimate of tokens


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_teach_nothing_but_their_prompts(launch, path: str) -> None:
    """Megabytes in a field that is not the prompt made giants look like ten tokens."""
    server = launch()
    for _ in range(3):
        body = {"metadata": {"note": "u" * 4_000_000}, "max_tokens": 1}
        body |= {"prompt": "hello world"} if path == "/v1/completions" else {"messages": MESSAGES}
        assert server.post(path, body)[0] == 200
    assert server.service.admission.estimate_tokens(1000) >= 1000 / INITIAL_BYTES_PER_TOKEN


def test_what_is_learnt_stays_plausible() -> None:
    admission = Admission(QueueLimits(10, 1000))
    for _ in range(1000):
        admission.learn_ratio(4_000_000, 1)
    assert admission.estimate_tokens(8000) >= 1000
    for _ in range(1000):
        admission.learn_ratio(1, 4_000_000)
    assert admission.estimate_tokens(1000) <= 1001


def test_prompts_count_as_what_they_are(launch) -> None:
    """In the queue: ids as many as there are, a text as its estimate, a body's other fields as nothing."""
    server = launch(say("x" * 50, end=False), max_running=1, step_s=0.2)
    seen: list[int] = []
    enter = server.service.admission.enter
    server.service.admission.enter = lambda *args, **how: seen.append(how["tokens"]) or enter(*args, **how)
    for prompt in ([65] * 40, "a" * 400, "a" * 20_000):
        server.post("/v1/completions", {"prompt": prompt, "metadata": {"note": "u" * 10_000}, "max_tokens": 1})
    assert seen == [40, 100, 0]


def test_a_long_text_needs_room_once_its_length_is_known(launch) -> None:
    server = launch(config={"max_queued_prompt_tokens": 5000}, model={"max_model_len": 50_000})
    server.engine.paused = True
    waits = server.events_later("/v1/completions", {"prompt": [65] * 9, "max_tokens": 1})
    while server.service.admission.queued_prompt_tokens != 9:
        server.call(lambda: None)
    status, _, answer = server.post("/v1/completions", {"prompt": "a" * 20_000, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (429, "queued_prompt_tokens")
    assert server.service.admission.queued_prompt_tokens == 9
    server.engine.paused = False
    waits.join()
    assert server.post("/v1/completions", {"prompt": "a" * 20_000, "max_tokens": 1})[0] == 200  # alone it may stand


# ---- what templates are told


ECHO = "{{ messages[-1].content }}|{{ add_generation_prompt }}|{{ thinks }}|{% if thinks %}<think>{% endif %}."


def rendered(server, body: dict, path: str = "/tokenize") -> str:
    status, _, answer = server.post(path, body)
    assert status == 200, answer
    return bytes(answer["tokens"]).decode()


def test_options_reach_the_template(launch) -> None:
    server = launch(template=ECHO)
    assert rendered(server, {"messages": MESSAGES}) == "hi|True||."
    told = {"add_generation_prompt": False, "chat_template_kwargs": {"thinks": True}}
    assert rendered(server, {"messages": MESSAGES, **told}) == "hi|False|True|<think>."
    assert server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **told})[0] == 200
    assert bytes(server.engine.submitted[-1].prompt_token_ids) == b"hi|False|True|<think>."


def test_the_final_message_can_be_continued(launch) -> None:
    server = launch()
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert rendered(server, body) == "<|user|>hi\n<|assistant|>Once upon "
    assert rendered(server, {"messages": messages, "continue_final_message": True}).endswith("Once upon ")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    status, _, answer = server.post("/v1/chat/completions", {"messages": messages, **both})
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "range", "raise_exception", "eos_token"]
)
def test_a_variable_does_not_hide_what_the_template_reads(launch, name: str) -> None:
    server = launch()
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert name in json.dumps(answer)


@pytest.mark.parametrize("value", ["1" + "0" * 40, "[" * 900 + "]" * 900])
def test_a_variable_that_cannot_be_handed_on_is_refused(launch, value: str) -> None:
    server = launch()
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{"a":{value}}},"max_tokens":1}}'
    assert server.post("/v1/chat/completions", body.encode())[0] in (200, 400)
    assert server.post("/v1/completions", SHORT)[0] == 200


def test_a_text_to_count_is_given_up_when_its_client_goes(launch) -> None:
    server = launch()
    lane = server.service.texts.lanes[0]
    lane._most_workers = 0  # it waits for ever
    body = b'{"prompt": "x"}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: len(lane.waiting) == 1)
    until(lambda: not lane.waiting)


def test_how_large_a_chat_is_is_found_out_once(launch, monkeypatch) -> None:
    server, asked = launch(), []
    usual = process._text_size
    monkeypatch.setattr(process, "_text_size", lambda value: asked.append(value) or usual(value))
    message = {"role": "user", "content": "hi"}
    assert server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})[0] == 200
    assert len(asked) == 2, asked  # of the message and of the template's options
    assert asked[0] == message


def test_how_texts_are_worked_on_is_known_before_the_first_request(launch) -> None:
    server = launch()
    assert "bound" in vars(server.service.tokenizer)
    facts = server.get("/ledger/facts")[2]
    assert facts["settings"]["texts"].startswith("refused by length: a token has at most ")


def test_a_tokenizer_that_proves_nothing_says_so() -> None:
    told = Tokenizer(tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))).shortcuts
    assert "no bound is proved" in told
    assert "no place to cut is proved" in told
    assert "none on the event loop" in told
