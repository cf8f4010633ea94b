"""`splittime.trace`: what it measures, what it passes on, and that nothing of it reaches the measured code."""

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from splittime.core.trace_context import MAX_TRACE_HOPS, read_traceparent
from splittime.wire.tracing import Tracer


class Keeper(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.posts.append((self.path, self.headers.get("authorization"), body))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("location", "http://127.0.0.1:9/")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


@pytest.fixture
def keeper():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeper)
    server.posts, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def trace(keeper):
    tracer = Tracer()
    tracer.to(f"http://127.0.0.1:{keeper.server_address[1]}/v1", "the-key")
    return tracer


def posted(trace, keeper) -> list[dict]:
    assert trace.flush(10)
    return [body for _, _, body in keeper.posts]


def test_hops_are_posted_once_with_the_outermost(trace, keeper):
    with trace("answer", "agent"):
        with trace("search", kind="retrieval") as search:
            headers = trace.headers()
        assert keeper.posts == []
    (body,) = posted(trace, keeper)
    assert keeper.posts[0][:2] == ("/ledger/hops", "Bearer the-key")
    inner, outer = body["hops"]
    assert read_traceparent(headers["traceparent"]) == (body["trace_id"], inner["span_id"]) == search.context
    assert (inner["name"], inner["kind"], inner["parent_id"]) == ("search", "retrieval", outer["span_id"])
    assert (outer["name"], outer["kind"]) == ("answer", "agent")
    assert "parent_id" not in outer
    assert 0 <= outer["begin_ns"] <= inner["begin_ns"]
    assert inner["begin_ns"] + inner["duration_ns"] <= outer["begin_ns"] + outer["duration_ns"]
    assert trace.headers() == {}


def test_functions_of_both_colours_are_measured_and_unchanged(trace, keeper):
    @trace
    def search(question):
        return question + "?"

    @trace("ask", kind="request")
    async def ask(question):
        """Asks."""
        await asyncio.sleep(0)
        return search(question)

    async def both():
        async with trace("answer"):
            return await asyncio.gather(ask("a"), ask("b"))

    assert (ask.__name__, ask.__doc__, search("x")) == ("ask", "Asks.", "x?")
    assert asyncio.run(both()) == ["a?", "b?"]
    alone, body = posted(trace, keeper)
    assert [hop["name"] for hop in alone["hops"]] == ["search"]
    by_span = {hop["span_id"]: hop for hop in body["hops"]}
    above = [(hop["name"], by_span[hop["parent_id"]]["name"]) for hop in body["hops"] if "parent_id" in hop]
    assert sorted(above) == [("ask", "answer"), ("ask", "answer"), ("search", "ask"), ("search", "ask")]
    assert len({hop["parent_id"] for hop in body["hops"] if hop["name"] == "search"}) == 2  # each in its own


def test_an_exception_goes_on_and_its_class_alone_is_told(trace, keeper):
    with pytest.raises(ValueError, match="secret"), trace("answer"):
        raise ValueError("secret")
    (body,) = posted(trace, keeper)
    assert body["hops"][0]["error"] == "ValueError"
    assert "secret" not in json.dumps(body)


def test_another_thread_joins_by_a_clock_of_its_own(trace, keeper):
    def work(traceparent):
        with trace("worker", joins=traceparent):
            pass

    with trace("answer") as answer:
        thread = threading.Thread(target=work, args=(answer.context.traceparent,))
        thread.start()
        thread.join()
    worker, whole = posted(trace, keeper)
    assert worker["trace_id"] == whole["trace_id"]
    assert worker["clock"] != whole["clock"]
    assert worker["hops"][0]["parent_id"] == whole["hops"][0]["span_id"]


def test_what_is_no_hop_is_refused_where_it_is_written(trace):
    for wrong in ("", "x" * 65, "a\nb", 7):
        with pytest.raises(ValueError, match="a hop's name"):
            trace(wrong)
    with pytest.raises(ValueError, match="no kind 'chain'"):
        trace("a", "chain")
    with pytest.raises(ValueError, match="url is as"):
        trace.to("file:///etc/passwd")

    with pytest.raises(TypeError, match="around the loop"):

        @trace("tokens")
        def tokens():
            yield 1

    with trace("once") as once, pytest.raises(RuntimeError, match="measured once"), once:
        pass


def test_a_trace_that_is_too_long_keeps_its_outermost_hop(trace, keeper):
    with trace("answer"):
        for _ in range(MAX_TRACE_HOPS + 5):
            with trace("tool", "tool"):
                pass
    (body,) = posted(trace, keeper)
    assert len(body["hops"]) == MAX_TRACE_HOPS
    assert body["hops"][-1]["name"] == "answer"
    assert trace.num_dropped == 6


@pytest.mark.parametrize("status", [302, 400, 500])
def test_a_refusal_is_counted_and_logged_once(trace, keeper, caplog, status):
    keeper.status = status
    for _ in range(3):
        with trace("answer"):
            pass
        assert trace.flush(10)
    assert trace.num_dropped == 3
    assert len(caplog.records) == 1
    assert len(keeper.posts) == 3  # and the key went nowhere else


def test_nobody_there_and_nowhere_to_post(trace, keeper, caplog):
    trace.to("http://127.0.0.1:9")
    with trace("answer"):
        pass
    assert trace.flush(10)
    assert trace.num_dropped == 1
    trace.to(None)
    with trace("answer"):
        assert trace.headers()
    assert trace.flush(10)
    assert (trace.num_dropped, keeper.posts) == (1, [])


def test_a_request_is_marked_by_a_hook(trace):
    request = urllib.request.Request("http://127.0.0.1:9", headers={"a": "b"})
    trace.mark(request)
    assert request.headers == {"A": "b"}
    with trace("ask", "request") as ask:
        trace.mark(request)
    assert request.headers["traceparent"] == ask.context.traceparent


def test_the_import_needs_the_standard_library_alone():
    script = (
        "import sys; before = set(sys.modules); import splittime; splittime.trace.headers();"
        "found = {name.split('.')[0] for name in set(sys.modules) - before} - {'splittime'};"
        "print(sorted(found - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_what_is_over_is_posted_before_the_interpreter_ends(keeper):
    script = "import splittime\nwith splittime.trace('answer'): pass\n"
    url = f"http://127.0.0.1:{keeper.server_address[1]}"
    environment = {"SPLITTIME_TRACE_URL": url, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert [hop["name"] for _, _, body in keeper.posts for hop in body["hops"]] == ["answer"]
