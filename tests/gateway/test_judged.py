"""What a refusal of an upstream is taken for: of the path, or of what was asked for there."""

import json

import pytest

from splittime.gateway.endpoints import EMBEDDINGS
from splittime.gateway.failures import LacksEndpoint, PassedAnswer
from splittime.gateway.forwarded import forwarded
from splittime.gateway.judged import judged

ASKED = forwarded(EMBEDDINGS, b'{"model": "m"}', 256)


def failure(status: int, body: object):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return judged("a", ASKED, PassedAnswer(status, [], raw))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b""),
        (404, b"<html>no</html>"),
        (404, b"404 page not found"),
        (404, {"detail": "Not Found"}),
        (404, {"error": {"message": "no such path: /v1/embeddings", "code": "not_found", "param": None}}),
        (405, {"detail": "Method Not Allowed"}),
        (501, b""),
    ],
)
def test_a_path_that_is_not_there(status, body):
    assert isinstance(failure(status, body), LacksEndpoint)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "error", "error": {"type": "not_found_error", "message": "File not found: file_1"}},
        {"error": {"message": "model 'x' not found", "type": "not_found_error", "param": None, "code": None}},
        {"object": "error", "message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404},
        {"error": {"message": "Response with id 'resp_1' not found.", "type": "invalid_request_error", "code": 404}},
        {"error": {"message": "no such response", "code": "not_found", "param": "previous_response_id"}},
        {"error": "model 'x' not found"},
        {"detail": "model x not found"},
    ],
)
def test_what_was_asked_for_is_not_there(body):
    """It is the client's, and says nothing of the path."""
    assert failure(404, body) is None


@pytest.mark.parametrize("status", [600, 999, 304])
def test_a_status_that_is_no_answer(status):
    found = failure(status, b"")
    assert (found.error.info.code, found.is_retryable) == ("upstream_bad_answer", False)
