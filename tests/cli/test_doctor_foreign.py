"""`splittime doctor URL` of a live server of another kind: watched, probed only if it is idle, and never if not wanted.

The server is a small one that speaks as vLLM does; what the doctor says of real ones is replayed in
tests/diagnose/test_foreign_recorded.py.
"""

import json
import threading
import urllib.request

import pytest
from small_vllm import small_vllm
from typer.testing import CliRunner

from patience import until
from splittime.bench import observation
from splittime.cli.main import app


@pytest.fixture(autouse=True)
def soon_over(monkeypatch):
    monkeypatch.setattr(observation, "LISTEN_S", 0.3)
    monkeypatch.setattr(observation, "WATCH_S", 1.5)
    monkeypatch.setattr(observation, "PROBE_S", 60.0)
    monkeypatch.setattr(observation, "MOST_REQUESTS", 24)
    monkeypatch.setattr(observation, "SAMPLE_S", 0.02)


def asked(*words: str):
    result = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert result.stdout, result.stderr
    return result, json.loads(result.stdout)


def test_an_idle_server_is_probed_and_its_slots_are_named():
    with small_vllm(slots=2) as (url, server):
        result, found = asked(url)
        assert server.posts == observation.MOST_REQUESTS
    assert result.exit_code == 1
    assert found["findings"][0]["name"] == "reported_slots"
    assert found["findings"][0]["cure"]["command"] == "vllm serve MODEL --max-num-seqs 4"
    assert found["findings"][0]["predicted"] is None
    assert "splittime server" in found["findings"][0]["not_predicted"]
    assert "idle, probed" in found["source"]
    assert f"{observation.AT_ONCE} requests at a time" in result.stderr, "it says beforehand what it sends"
    reasons = {one["name"]: one["why"] for one in found["abstentions"]}
    assert "only a run of your load" in reasons["reported_interference"]


def test_room_for_all_is_healthy():
    with small_vllm(slots=32) as (url, _):
        result, found = asked(url)
    assert result.exit_code == 0, found
    assert found["healthy"]


def test_nothing_is_sent_where_that_is_not_wanted():
    with small_vllm(slots=2) as (url, server):
        result, found = asked(url, "--no-probe")
        assert server.posts == 0
    assert result.exit_code == 3, "nothing ran while it was watched: nothing can be told"
    assert not found["healthy"]


def test_a_server_at_work_is_watched_only():
    """Its own six users are enough to see that it has two slots."""
    with small_vllm(slots=2) as (url, server):
        is_over = threading.Event()
        users = [threading.Thread(target=_user, args=(url, is_over)) for _ in range(6)]
        for user in users:
            user.start()
        until(lambda: server.waiting)
        try:
            result, found = asked(url)
        finally:
            is_over.set()
            for user in users:
                user.join(60)
        assert "sent nothing" in found["source"]
    assert result.exit_code == 1
    assert [finding["name"] for finding in found["findings"]] == ["reported_slots"]


def _user(url: str, is_over: threading.Event) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 20, "stream": True}).encode()
    while not is_over.is_set():
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
