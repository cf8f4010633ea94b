"""What an upstream without accounts tells of its queue, and a gateway that gives it fewer for that."""

import asyncio
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from splittime.gateway import upstream_checks
from splittime.gateway.config import BreakerConfig, UpstreamConfig
from splittime.gateway.upstream_checks import waiting_at
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections
from splittime.gateway.upstreams import Upstream

from .conftest import gateway_of, upstream


@contextmanager
def telling(status: int, text: str, **headers):
    """Yields the URL of a server that answers every GET so, and the keys that it was asked with."""
    keys = []

    class Telling(BaseHTTPRequestHandler):
        def do_GET(self):
            keys.append((self.path, self.headers.get("authorization")))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Telling)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str) -> int | None:
    config = UpstreamConfig(name="u", url=url + "/v1", models=("m",), queue_wait_s=0.05)

    async def ask():
        connections = UpstreamConnections(RoundTrips())
        try:
            return await waiting_at(connections, Upstream(config, BreakerConfig(), "secret"))
        finally:
            connections.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('vllm:num_requests_waiting{engine="0",model_name="m"} 3.0\nvllm:num_requests_waiting{engine="1"} 4.0\n', 7),
        ("# HELP sglang:num_queue_reqs x\nsglang:num_queue_reqs 2\n", 2),
        ("llamacpp:requests_deferred 0\n", 0),
        ("vllm:num_requests_waiting NaN\n", None),
        ("vllm:num_requests_waiting -4\n", None),
        ("vllm:num_requests_running 3\n", None),
        ("", None),
    ],
)
def test_how_many_wait(text, count):
    with telling(200, text) as (url, keys):
        assert asked(url) == count
    assert keys == [("/metrics", "Bearer secret")]


def test_what_is_no_answer_tells_nothing(monkeypatch):
    monkeypatch.setattr(upstream_checks, "MAX_METRICS_BYTES", 1000)
    waiting = "vllm:num_requests_waiting 3\n"
    with telling(500, waiting) as (url, _):
        assert asked(url) is None
    with telling(200, waiting + "x" * 1000) as (url, _):
        assert asked(url) is None
    with telling(200, waiting) as (url, keys), telling(302, waiting, location=url) as (leading, _):
        assert asked(leading) is None
        assert not keys  # no redirect is followed
    assert asked("http://127.0.0.1:9") is None


def test_an_upstream_with_a_queue_is_given_fewer(tmp_path):
    with telling(200, "vllm:num_requests_waiting 3\n") as (url, _):
        text = upstream("told", url, max_in_flight=8, queue_wait_s=0.05) + upstream("fixed", url, max_in_flight=8)
        with gateway_of(tmp_path, text) as gateway:
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s:
                told, fixed = (one["limit"] for one in gateway.get("/stats")["upstreams"])
                if told == 5:
                    break
                time.sleep(0.05)
            assert (told, fixed) == (5, 8)
