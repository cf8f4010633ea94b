"""Labels of the client's have a length: some stand in an answer more than once."""

import pytest

from splittime.api import response_answers
from splittime.api.decode import decode_body
from splittime.api.responses import ResponsesBody
from splittime.api.schema import MAX_LABEL_CHARS

from .conftest import say

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
BODIES = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 1}, ("user", "safety_identifier", "cache_salt")),
    "/v1/chat/completions": (CHAT, ("user", "prompt_cache_key", "service_tier")),
    "/v1/messages": (CHAT, ("service_tier",)),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 1},
        ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
    ),
    "/v1/embeddings": ({"input": "x"}, ("user", "cache_salt")),
    "/v1/rerank": ({"query": "x", "documents": ["x"]}, ("user",)),
    "/v1/score": ({"text_1": "x", "text_2": "x"}, ("user",)),
    "/v1/prefill": ({"prompt": "x"}, ("cache_salt",)),
}


@pytest.mark.parametrize("path", BODIES)
def test_a_long_label_is_refused_with_its_limit(launch, path: str) -> None:
    server, (body, labels) = launch(say("x")), BODIES[path]
    for label in labels:
        status, _, answer = server.post(path, {**body, label: "\n" * (MAX_LABEL_CHARS + 1)})
        told = answer["error"]
        assert status == 400
        assert f"{label} has more than {MAX_LABEL_CHARS} characters" in told["message"]
        if path != "/v1/messages":  # whose errors are a type and a message
            assert (told["code"], told["param"]) == ("string_above_max_length", label)
            assert (told["limit"], "hash" in told["hint"]) == (MAX_LABEL_CHARS, True)
        told = server.post(path, {**body, label: "\n" * MAX_LABEL_CHARS})[2]
        assert "has more than" not in str(told)


def test_what_may_be_long_of_a_response_is_written_once() -> None:
    """In the thread that reads the body, and not again with each event that repeats it."""
    long = "x" * 10_000
    form = b'{"format": {"type": "json_schema", "name": "%b", "schema": {}}}' % long.encode()
    body = decode_body(b'{"input": "x", "instructions": "%b", "text": %b}' % (long.encode(), form), ResponsesBody)
    asked = response_answers.asked_fields(body, {}, {}, is_kept=True)
    assert bytes(asked["instructions"]) == b'"%b"' % long.encode()
    assert max(len(str(value)) for value in asked.values() if not isinstance(value, bytes | memoryview)) < 200
