"""Spans: what a collector is told of a request, whom an upstream is told that it works for, and what is dropped."""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from patience import until
from splittime.core.errors import ConfigError
from splittime.gateway.config import TracingConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.tracing import QUEUE_FULL, SpanExporter, is_sampled, num_spans, spans_of
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.attempts import Attempt, NestedStage
from splittime.ledger.stages import Stage

from .conftest import DEAD, gateway_of, upstream

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ORDER = (Stage.RECEIVE, Stage.ROUTE, Stage.UPSTREAM, Stage.NETWORK, Stage.DELIVER)


class Collector:
    """A collector, and an upstream too: it keeps what it is sent."""

    def __init__(self, status: int = 200) -> None:
        told = self.told = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                told.append((self.path, dict(self.headers.items()), body))
                answer = json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}).encode()
                self.send_response(status if self.path == "/v1/traces" else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def at(self, path: str):
        return [(headers, body) for where, headers, body in self.told if where == path]

    def spans(self):
        resources = [one for _, body in self.at("/v1/traces") for one in body["resourceSpans"]]
        return [span for one in resources for scope in one["scopeSpans"] for span in scope["spans"]]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.stop()


def attributes(span):
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def account(trace_id: str = TRACE, start_ns: int = 1000) -> ClosedAccount:
    at = [start_ns + 100 * number for number in range(len(ORDER) + 1)]
    intervals = tuple(StageInterval(stage, None, at[i], at[i + 1]) for i, stage in enumerate(ORDER))
    nested = (NestedStage(Stage.QUEUE, None, 0, 40), NestedStage(Stage.DECODE, None, 40, 100))
    attempt = Attempt(upstream="a", request_id="try", considered=(), begin_ns=at[2], end_ns=at[5], nested=nested)
    return ClosedAccount(
        request_id="mine",
        group_id="chatcmpl-try",
        model="m",
        endpoint="chat",
        started_at_unix_ns=10**18,
        start_ns=at[0],
        end_ns=at[-1],
        intervals=intervals,
        finish_reason="stop",
        attempts=(attempt,),
        trace_id=trace_id,
        parent_id=PARENT,
    )


def test_stages_are_nested_and_sum_to_the_request():
    spans = spans_of(account())
    assert len(spans) == num_spans(account()) == len({one["spanId"] for one in spans})
    by_name = {one["name"]: one for one in spans if one["kind"] == 1}
    root, attempt = (next(one for one in spans if one["kind"] == kind) for kind in (2, 3))
    assert (root["parentSpanId"], attempt["parentSpanId"]) == (PARENT, root["spanId"])
    assert by_name["receive"]["parentSpanId"] == by_name["deliver"]["parentSpanId"] == root["spanId"]
    assert by_name["network"]["parentSpanId"] == by_name["upstream"]["parentSpanId"] == attempt["spanId"]
    assert by_name["decode"]["parentSpanId"] == by_name["upstream"]["spanId"]
    lengths = {name: int(one["endTimeUnixNano"]) - int(one["startTimeUnixNano"]) for name, one in by_name.items()}
    assert sum(lengths[stage.value] for stage in ORDER) == 500
    assert lengths["queue"] + lengths["decode"] == lengths["upstream"]
    assert int(root["startTimeUnixNano"]) == 10**18
    assert by_name["queue"]["startTimeUnixNano"] == by_name["upstream"]["startTimeUnixNano"]


@pytest.mark.parametrize(
    ("ending", "has_failed"),
    [
        ("", False),
        ("cancelled", False),
        ("tied_lost", False),
        ("unsure", False),
        ("logprobs_refused", False),
        ("upstream_died", True),
    ],
)
def test_an_attempt_that_somebody_ended_is_no_error(ending, has_failed):
    made = account()
    attempts = tuple(msgspec.structs.replace(one, error=ending) for one in made.attempts)
    (span,) = (one for one in spans_of(msgspec.structs.replace(made, attempts=attempts)) if one["kind"] == 3)
    assert ("status" in span, attributes(span).get("error.type")) == (has_failed, ending if has_failed else None)
    assert attributes(span).get("splittime.ending") == (None if has_failed or not ending else ending)


def test_a_collector_is_told_and_the_upstream_works_for_the_attempt(collector, tmp_path):
    text = upstream("m", collector.url) + f'[tracing]\nurl = "{collector.url}"\nkey_env = "COLLECTOR"\n'
    with gateway_of(tmp_path, text, COLLECTOR="collector-key") as gateway:
        gateway.ask("m", {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"})
        gateway.ask("m", {"x-request-id": "other"})
        gateway.stop()
        assert gateway.process.wait(timeout=30) == 0, "what waits is posted at the end"
    assert collector.at("/v1/traces")[0][0]["authorization"] == "Bearer collector-key"
    roots = {attributes(one)["splittime.request_id"]: one for one in collector.spans() if one["kind"] == 2}
    assert set(roots) == {"mine", "other"}
    assert (roots["mine"]["traceId"], roots["mine"]["parentSpanId"]) == (TRACE, PARENT)
    assert roots["mine"]["name"] == "chat m"
    assert attributes(roots["mine"])["gen_ai.operation.name"] == "chat"
    attempts = {one["traceId"]: one["spanId"] for one in collector.spans() if one["kind"] == 3}
    sent = [headers["traceparent"].split("-") for headers, _ in collector.at("/v1/chat/completions")]
    assert {trace: span for _, trace, span, _ in sent} == attempts
    assert "parentSpanId" not in roots["other"]
    assert '"x"' not in json.dumps(collector.spans()), "no text of a prompt or an answer"


def test_a_collector_that_is_not_there_costs_spans_and_no_request(collector, tmp_path):
    text = upstream("m", collector.url) + f'[tracing]\nurl = "{DEAD}"\n'
    with gateway_of(tmp_path, text) as gateway:
        assert gateway.ask("m")[0] == 200
        until(lambda: dropped(gateway) != 0)
        assert dropped(gateway) == num_spans_of_one(gateway)


def dropped(gateway) -> float:
    text = urllib.request.urlopen(f"{gateway.url}/metrics").read().decode()
    line = next(one for one in text.splitlines() if one.startswith('splittime_gateway_spans_total{result="not_taken"}'))
    return float(line.split()[-1])


def num_spans_of_one(gateway) -> int:
    told = gateway.get("/ledger/requests")["accounts"][0]
    return 1 + len(told["stages"]) + len(told["attempts"])


def test_what_has_no_room_is_dropped_and_counted():
    one = num_spans(account())
    connections = UpstreamConnections(RoundTrips())
    exporter = SpanExporter(TracingConfig(url=DEAD, max_queue=2 * one), None, connections, pool=None)
    for _ in range(5):
        exporter.note(account())
    assert exporter.spans[QUEUE_FULL] == 3 * one


def test_a_share_of_the_traces_is_the_same_whoever_decides():
    ids = [f"{number:032x}" for number in range(0, 2**56, 2**48)]
    assert sum(is_sampled(one, 0.25) for one in ids) == len(ids) // 4
    assert all(is_sampled(one, 1.0) for one in ids)
    assert not any(is_sampled(one, 0.0) for one in ids)


def test_an_address_with_more_in_it_is_refused():
    told = {"upstream": [{"name": "a", "url": DEAD, "models": ["a"]}], "tracing": {"url": "http://me:secret@host"}}
    with pytest.raises(ConfigError, match=r"tracing\.url") as refused:
        config_of(told)
    assert "secret" not in str(refused.value)
