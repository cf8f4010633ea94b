"""The description of the API holds: schemathesis draws requests from it, and none is answered with a 5xx."""

import pytest
from hypothesis import HealthCheck, settings

from splittime.core.sampling import SamplingParams
from splittime.server.config import ModelInfo, ServerConfig
from splittime.server.openapi import document
from splittime.server.schema import ChatBody, CompletionBody

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

schemathesis = pytest.importorskip("schemathesis")

SKIPPED = ("/metrics", "/docs")  # nothing to draw there


def test_every_sampling_parameter_is_described() -> None:
    fields = set(SamplingParams.__struct_fields__) - {"prompt_logprobs"}
    assert fields <= set(CompletionBody.__struct_fields__)
    schemas = document(ServerConfig())["components"]["schemas"]
    for kind in (CompletionBody, ChatBody):
        described = schemas[kind.__name__]
        assert set(described["properties"]) == set(kind.__struct_fields__)
        assert described["additionalProperties"] is False


def test_a_key_is_part_of_the_description() -> None:
    assert "security" not in document(ServerConfig())
    assert document(ServerConfig(api_key="k"))["security"] == [{"key": []}]


@pytest.fixture(scope="module")
def live():
    engine = FakeEngine(say("ok then"), step_s=0.0005)
    server = LiveServer(engine, ServerConfig(port=0), ModelInfo(("fake",), 512, 257, (256,)))
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("mode", "expected"), [(schemathesis.GenerationMode.POSITIVE, 200), (schemathesis.GenerationMode.NEGATIVE, 400)]
)
def test_no_request_drawn_from_the_description_gets_a_5xx(live: LiveServer, mode, expected: int) -> None:
    schema = schemathesis.openapi.from_dict(document(live.config))
    schema.config.update(base_url=live.url)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in SKIPPED:
            continue
        seen |= run_some(operation, mode, live)
    assert expected in seen
    assert not {status for status in seen if status >= 500}, seen


def run_some(operation, mode, live: LiveServer) -> set[int]:
    """Statuses of some drawn requests; none if this operation has nothing of that kind to draw."""
    statuses = set()

    @settings(max_examples=10, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @schemathesis_given(operation, mode)
    def check(case) -> None:
        response = case.call(base_url=live.url, timeout=60)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        documented = case.operation.definition.raw["responses"]
        if response.status_code != 405:
            assert str(response.status_code) in documented, (case.as_curl_command(), response.status_code)
        statuses.add(response.status_code)

    try:
        check()
    except schemathesis_unsatisfiable():
        return set()
    return statuses


def schemathesis_given(operation, mode):
    from hypothesis import given

    return given(case=operation.as_strategy(generation_mode=mode))


def schemathesis_unsatisfiable():
    from hypothesis.errors import InvalidArgument, Unsatisfiable

    return (Unsatisfiable, InvalidArgument)
