"""What books keep of an error has no word of the request that it was about."""

import msgspec
import pytest

from splittime.core.errors import (
    DeadlineExceeded,
    EngineError,
    NotFound,
    Overloaded,
    RequestError,
    UpstreamError,
    for_books,
)

SECRET = "my password is hunter2"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            NotFound(f"no model {SECRET!r} here", code="model_not_found", param="model", value=SECRET),
            "model: model_not_found",
        ),
        (RequestError(f"{SECRET}: no such field", code="unknown_field", param=SECRET), "unknown_field"),
        (RequestError("stands twice", code="duplicate_field", param="hunter2"), "duplicate_field"),
        (
            RequestError("x", param=f"tools[3].{SECRET}", value=SECRET, limit=[SECRET], hint=SECRET),
            "tools: invalid_value",
        ),
        (RequestError("x", param=f"[{SECRET}]"), "invalid_value"),
        (EngineError(f"the model's tokenizer failed: {SECRET}", code="tokenizer_failed"), "tokenizer_failed"),
        (UpstreamError(f"upstream 'a' answered 400: {SECRET}", code="upstream_400"), "upstream_400"),
        (UpstreamError(f"inside the stream: {SECRET}", code="upstream_error_event"), "upstream_error_event"),
    ],
)
def test_words_of_a_request_are_left_out(error, message: str) -> None:
    kept = for_books(error.info)
    assert kept.message == message
    assert b"hunter2" not in msgspec.json.encode(kept)
    assert (kept.kind, kept.code, kept.status) == (error.info.kind, error.info.code, error.info.status)
    assert for_books(kept) == kept


def test_numbers_and_what_we_say_ourselves_stay() -> None:
    assert for_books(RequestError("x", param="n", value=99, limit=16).info).limit == 16
    for own in (
        Overloaded("256 wait", code="queued_requests", limit=256, retry_after_s=2.0),
        DeadlineExceeded.before("it reached the engine"),
        EngineError("the engine process died", hint="try again"),
        UpstreamError("upstream 'a' did not answer", code="upstream_unreachable"),
    ):
        assert for_books(own.info) is own.info
