"""`splittime serve` as its users meet it: a real process, the packaged model, the official OpenAI client, and bad luck.

One server for the module; the last tests kill its engine, and end it.
"""

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.server_process import free_port, get_json, wait_until_ready
from lazily import openai
from patience import until
from splittime.ledger.account import ClosedAccount
from splittime.ledger.store import open_readonly

PROMPT = "def read_json(path):\n"
PATIENCE_S = 150.0  # for what takes seconds where nothing else runs
pytestmark = pytest.mark.timeout(500)  # a start of the server is part of some tests


class Server:
    def __init__(self, *arguments: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port), *arguments]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until_ready(self.url, self.process, PATIENCE_S)
        self.model = get_json(f"{self.url}/v1/models")["data"][0]["id"]

    @property
    def client(self) -> "openai.OpenAI":
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def engine(self) -> dict[str, Any]:
        return get_json(f"{self.url}/stats")["engine"]

    def complete(self, **fields: Any) -> str:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields
        return self.client.completions.create(**body).choices[0].text


@contextmanager
def running(*arguments: str) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def ledger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.sqlite"


@pytest.fixture(scope="module")
def server(ledger_file: Path) -> Iterator[Server]:
    with running("--ledger-file", str(ledger_file)) as server:
        yield server


def test_streams_add_up_to_the_whole(server: Server) -> None:
    whole = server.complete(max_tokens=40)
    chunks = server.client.completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += chunk.choices[0].text if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole
    assert usage is not None
    assert usage.completion_tokens == 40


def test_chat_and_chat_stream(server: Server) -> None:
    messages = [{"role": "user", "content": "read a JSON file"}]
    ask = {"model": server.model, "messages": messages, "max_tokens": 30, "temperature": 0}
    whole = server.client.chat.completions.create(**ask)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    streamed = server.client.chat.completions.create(**ask, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content


def test_embeddings_in_a_batch_are_those_alone(server: Server) -> None:
    texts = ["read a JSON file", "import os", PROMPT * 40]
    create = server.client.embeddings.create
    batch = [one.embedding for one in create(model=server.model, input=texts).data]
    alone = [create(model=server.model, input=text).data[0].embedding for text in texts]
    assert batch == alone
    assert [math.hypot(*values) for values in batch] == pytest.approx([1, 1, 1], abs=1e-5)
    assert batch[0] != batch[1]
    accounts = get_json(f"{server.url}/ledger/requests?limit=3")["accounts"]
    assert [(one["endpoint"], one["output_tokens"], one["stages"][-2]["stage"]) for one in accounts] == [
        ("embeddings", 0, "prefill")
    ] * 3
    with pytest.raises(openai.BadRequestError, match="no token for 'yes'"):
        server.client.post("/rerank", cast_to=object, body={"query": "q", "documents": ["a"]})


def test_who_comes_with_a_prompt_that_was_computed_ahead_finds_it_and_is_told(server: Server) -> None:
    messages = [{"role": "user", "content": "computed ahead: " + "read the next file, then write it. " * 30}]
    made = server.client.post("/prefill", body={"messages": messages}, cast_to=dict[str, Any])
    assert (made["object"], made["cached_tokens"]) == ("prefill", 0)
    assert made["prompt_tokens"] > 128
    answers = [
        server.client.chat.completions.create(model=server.model, messages=messages, max_tokens=4, temperature=0)
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    first, second, warmed = (
        get_json(f"{server.url}/ledger/requests/{name}") for name in (answers[0].id, answers[1].id, made["id"])
    )
    assert first["ahead_tokens"] == first["cached_tokens"] > 64
    assert first["ahead_ns"] > 0
    assert (second["ahead_tokens"], second["cached_tokens"]) == (0, first["cached_tokens"])
    assert (warmed["endpoint"], warmed["finish_reason"]) == ("prefill", "stop")


def test_logprobs_agree_with_the_choice(server: Server) -> None:
    answer = server.client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()))


def test_three_choices_with_a_seed_are_three_and_reproducible(server: Server) -> None:
    def ask() -> list[str]:
        answer = server.client.completions.create(
            model=server.model, prompt=PROMPT, max_tokens=16, temperature=1.0, n=3, seed=7
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    with ThreadPoolExecutor(6) as pool:  # the same seed in company
        assert all(texts == first for texts in pool.map(lambda _: ask(), range(6)))


def test_errors_are_the_openai_kind(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=server.model, prompt=[1] * 100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client.completions.create(model=server.model, prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools"):
        server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_64_at_once_each_get_their_own_answer(server: Server) -> None:
    names = [f"def f{i}(x):" for i in range(64)]
    alone = {name: server.complete(prompt=name, max_tokens=6) for name in names[::16]}
    with ThreadPoolExecutor(64) as pool:
        together = dict(
            zip(names, pool.map(lambda name: server.complete(prompt=name, max_tokens=6), names), strict=True)
        )
    assert {name: together[name] for name in alone} == alone


def test_timing_is_contiguous_and_the_ledger_has_the_closed_account(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True, "stream_options": {"include_timing": True}}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    timing = next(event["timing"] for event in reversed(events) if event.get("timing"))
    ends = [0] + [stage["end_ns"] for stage in timing["stages"]]
    assert [stage["begin_ns"] for stage in timing["stages"]] == ends[:-1]
    assert ends[-1] == timing["sealed_ns"] - timing["start_ns"]
    assert 0 < timing["ttft_ns"] <= ends[-1]
    closed = get_json(f"{server.url}/ledger/requests/{events[0]['id']}")
    closed = closed["requests"][0] if "requests" in closed else closed
    assert closed["stages"][-1]["end_ns"] == closed["end_ns"] - closed["start_ns"]
    assert len(closed["tokens"]) == 8


def test_500_disconnects_leave_nothing_behind(server: Server, ledger_file: Path) -> None:
    before = server.complete(max_tokens=30)
    asyncio.run(_disconnect_at_random(server.url, 500))
    held = ("blocks_used", "num_running", "num_waiting")
    until(lambda: not any(map(server.engine().get, held)))
    assert server.complete(max_tokens=30) == before
    stats = get_json(f"{server.url}/stats")
    assert stats["server"]["open_requests"] <= 1
    assert stats["ledger"]["invalid_accounts"] == 0


async def _disconnect_at_random(url: str, count: int) -> None:
    rng = random.Random(3)

    async def leave(session: aiohttp.ClientSession) -> None:
        body = {"prompt": PROMPT * rng.randint(1, 30), "max_tokens": 300, "stream": rng.random() < 0.7}
        try:
            async with asyncio.timeout(rng.choice([0.005, 0.02, 0.05, 0.2])):
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(0, count, 25):
            await asyncio.gather(*(leave(session) for _ in range(25)))


def test_perfetto_trace_and_metrics_are_there(server: Server) -> None:
    server.complete()
    trace = get_json(f"{server.url}/ledger/trace.json")
    assert len(trace["traceEvents"]) > 10
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "splittime_"):
        assert name in text


def test_live_knobs_change_the_running_engine(server: Server) -> None:
    def patch(knobs: dict[str, Any]) -> Any:
        data = json.dumps(knobs).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/knobs", data, headers, method="PATCH")
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    patch({"policy": "priority", "max_num_seqs": 2})
    assert server.engine()["knobs"]["policy"] == "priority"
    assert server.complete()
    assert server.engine()["knobs"]["max_num_seqs"] == 2
    with pytest.raises(urllib.error.HTTPError) as caught:
        patch({"max_num_seq": 4})
    assert "max_num_seqs" in caught.value.read().decode()
    patch({"policy": "fcfs", "max_num_seqs": 64})


def test_every_account_in_the_file_verifies(server: Server, ledger_file: Path) -> None:
    """Runs before the engine is killed: all that the tests above did is in there."""
    server.complete()
    counts = get_json(f"{server.url}/stats")["ledger"]
    assert (counts["dropped"], counts["unwritten"]) == (0, 0)
    until(lambda: len(open_readonly(ledger_file).accounts(limit=10**6)) >= counts["accounts"])
    accounts: list[ClosedAccount] = open_readonly(ledger_file).accounts(limit=10**6)
    for account in accounts:
        account.verify()
        assert all(interval.stage != "unattributed" or interval.duration_ns == 0 for interval in account.intervals)


def test_engine_killed_under_load_then_serves_again(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_raw_stream, server, 1500) for _ in range(4)]
        until(lambda: server.engine()["num_running"] == 4)
        of_the_server = ["pgrep", "-P", str(server.process.pid), "-f", "splittime.assemble.worker"]
        worker = subprocess.run(of_the_server, capture_output=True, text=True, check=True)
        os.kill(int(worker.stdout), signal.SIGKILL)
        for future in asked:
            assert "error" in future.result(timeout=PATIENCE_S)
    with pytest.raises(urllib.error.HTTPError) as not_ready:
        urllib.request.urlopen(f"{server.url}/ready", timeout=60)
    assert not_ready.value.code == 503
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as response:
        assert response.status == 200
    wait_until_ready(server.url, server.process, PATIENCE_S)
    assert server.complete()


def _raw_stream(server: Server, max_tokens: int) -> str:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return response.read().decode()[-400:]


def test_sigterm_finishes_streams_and_leaves(server: Server) -> None:
    """Runs last in the module: it ends the server."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_raw_stream, server, 200)
        until(lambda: server.engine()["num_running"] or asked.done())
        server.process.terminate()
        assert "[DONE]" in asked.result(timeout=PATIENCE_S)
        assert server.process.wait(PATIENCE_S) == 0
