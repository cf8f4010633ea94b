"""Books inside a real vLLM, started as a user would. Runs where vLLM is installed: `make check-vllm`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from benchmarks.server_process import free_port
from splittime.assemble import model_source
from splittime.ledger.account import ClosedAccount
from splittime.ledger.derive import stage_ns
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.ledger.store import open_readonly

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL = model_source.locate(None)
SLOTS, BLOCKS, MAX_MODEL_LEN = 4, 17, 512  # the least number of blocks of 32 tokens for such a length, and one more
TEXT = "def read_json(path):\n    return json.load(open(path))\n"


class Served:
    """A vLLM server with books, and its ledger file."""

    def __init__(self, folder: Path, *flags: str) -> None:
        port = free_port()
        self.url, self.ledger, self.log = f"http://127.0.0.1:{port}", folder / "run.sqlite", folder / "log.txt"
        asked = ["serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags]
        started = [
            sys.executable,
            "-m",
            "splittime.cli.main",
            "attach",
            "vllm",
            "--ledger-file",
            str(self.ledger),
            "--",
        ]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*started, *asked], stdout=log, stderr=log, env=environment)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"vLLM ended: {self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"vLLM did not come up: {self.log.read_text()[-3000:]}")

    def get(self, path: str) -> object:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def load(self, *jobs) -> list:
        """Runs coroutines that are given a session, all at once."""

        async def all_of_them():
            async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0)) as session:
                return await asyncio.gather(*(job(session) for job in jobs), return_exceptions=True)

        return asyncio.run(asyncio.wait_for(all_of_them(), 500))

    def accounts(self, least: int) -> list[ClosedAccount]:
        """Waits until so many are in the file."""
        until = time.monotonic() + 60
        found: list[ClosedAccount] = []
        while time.monotonic() < until and len(found) < least:
            time.sleep(0.2)
            file = open_readonly(self.ledger)
            found = list(file.accounts(limit=10**6))
            file.close()
        return found

    def steps(self) -> list:
        file = open_readonly(self.ledger)
        try:
            return list(file.steps(limit=10**6))
        finally:
            file.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    blocks = ("--num-gpu-blocks-override", str(BLOCKS), "--block-size", "32")
    flags = ("--max-num-seqs", str(SLOTS), "--max-model-len", str(MAX_MODEL_LEN), *blocks)
    server = Served(tmp_path_factory.mktemp("vllm"), *flags)
    yield server
    server.stop()


def asked(name: str, **body):
    """Returns a job that asks for a completion, and answers with the response's chunks or its body."""
    given = {"model": str(MODEL), "prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    headers = {"X-Request-Id": name}

    async def job(session: aiohttp.ClientSession):
        async with session.post("/v1/completions", json=given, headers=headers) as response:
            return response.status, response.headers, await response.read()

    return job


def leaving(name: str, after_s: float):
    """Returns a job that hangs up after so long."""
    given = {"model": str(MODEL), "prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def job(session: aiohttp.ClientSession):
        async with session.post("/v1/completions", json=given, headers={"X-Request-Id": name}) as response:
            begin = time.monotonic()
            async for _ in response.content:
                if time.monotonic() - begin > after_s:
                    return

    return job


def test_a_streamed_completion(served):
    begin_ns = time.monotonic_ns()
    ((status, headers, body),) = served.load(asked("one", stream=True))
    felt_ns = time.monotonic_ns() - begin_ns
    assert status == 200
    assert "receive;dur=" in headers["server-timing"]
    account = next(each for each in served.accounts(1) if each.group_id == "cmpl-one")
    account.verify()
    named = list(dict.fromkeys(interval.stage for interval in account.intervals))
    assert [name.value for name in named] == [
        "receive", "tokenize", "admit", "handoff", "queue", "prefill", "decode", "deliver",
    ]  # fmt: skip
    assert account.output_tokens == len(account.token_written_ns) == len(account.token_steps) == 8
    assert account.end_ns - account.start_ns <= felt_ns
    assert body.count(b"data: ") > 2
    assert account.token_ready_ns[0] <= account.token_written_ns[0]


def test_a_server_that_nobody_asks_is_idle(served):
    """vLLM still plans once when the last request has ended, without rows: that is no work."""
    served.load(asked("before"))
    time.sleep(1)
    served.load(asked("behind"))
    served.accounts(3)
    first = next(s for s in sorted(served.steps(), key=lambda s: s.step_id) if s.rows[0][0].startswith("cmpl-behind"))
    assert first.idle_ns > 900_000_000


def test_answers_with_their_own_account(served):
    answers = served.load(asked("whole"), asked("two", n=2, temperature=1.0, stream=True))
    plain = served.load(asked("plain"))[0]
    assert b"timing" not in plain[2]
    assert all(answer[0] == 200 for answer in answers)

    async def timed(session):
        given = {"model": str(MODEL), "prompt": TEXT, "max_tokens": 4}
        async with session.post("/v1/completions", json=given, headers={"X-Include-Timing": "1"}) as response:
            return await response.json()

    (told,) = served.load(timed)
    stages = told["timing"]["stages"]
    assert [stages[0]["stage"], stages[-1]["stage"]] == ["receive", "deliver"]
    assert {"prefill", "decode"} <= {stage["stage"] for stage in stages}
    assert all(before["end_ns"] == after["begin_ns"] for before, after in pairwise(stages))
    two = [each for each in served.accounts(4) if each.group_id == "cmpl-two"]
    assert len(two) == 2
    assert {each.output_tokens for each in two} == {8}


def test_chat_refusals_and_the_page(served):
    async def chat(session):
        given = {"model": str(MODEL), "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        async with session.post("/v1/chat/completions", json=given, headers={"X-Request-Id": "talk"}) as response:
            return response.status

    (status,) = served.load(chat)
    (refused,) = served.load(asked("wrong", max_tokens=-5))
    assert refused[0] == 400
    found = served.accounts(3)
    assert any(each.error is not None and each.error.status == 400 for each in found)
    if status == 200:
        assert any(each.group_id == "chatcmpl-talk" and each.endpoint == "chat" for each in found)
    with urllib.request.urlopen(urllib.request.Request(f"{served.url}/", headers={"Accept": "text/html"})) as page:
        assert b"<!doctype html>" in page.read()[:200].lower()
    facts = served.get("/ledger/facts")
    assert facts["engine"].startswith("vllm 0.")
    assert facts["settings"]["max_num_seqs"] == SLOTS
    assert served.get("/dashboard/data")["engine"]["num_steps"] > 0


def test_a_crowd_with_everything_in_it(served):
    """Slots and blocks are short: waits, preemptions, shared prompts, several answers, clients that leave."""
    before = len(served.accounts(1))
    jobs = []
    for number in range(48):
        name = f"crowd-{number}"
        if number % 8 == 7:
            jobs.append(leaving(name, 0.05 * (number % 3)))
        else:
            prompt = TEXT * (4 + number % 3) + (str(number) if number % 2 else "")
            more = {"n": 2, "temperature": 1.0} if number % 8 == 3 else {}
            jobs.append(asked(name, prompt=prompt, max_tokens=20 + 3 * number, stream=bool(number % 2), **more))
    answers = served.load(*jobs)
    assert not [each for each in answers if isinstance(each, Exception)]
    assert [each[0] for each in answers if each is not None] == [200] * 42
    found = served.accounts(before + 54)[before:]
    assert len(found) == 54  # 36 answers of one, 6 of two, 6 that were left
    for account in found:
        account.verify()
        assert not stage_ns(account).get(Stage.UNATTRIBUTED)
        assert len(account.token_steps) == account.output_tokens
    steps = served.steps()
    verify_steps(steps)
    by_id = {step.step_id: step for step in steps}
    for account in found:
        for step_id, ready_ns in zip(account.token_steps, account.token_ready_ns, strict=True):
            assert account.request_id in {name for name, _, _ in by_id[step_id].rows}
            assert by_id[step_id].begin_ns <= ready_ns <= by_id[step_id].end_ns
    causes = Counter(i.cause for a in found for i in a.intervals if i.stage in (Stage.QUEUE, Stage.PREEMPTED))
    assert causes[Cause.BATCH_SLOTS]
    assert causes[Cause.KV_BLOCKS]
    assert sum(len(step.victims) for step in steps) == sum(account.num_preemptions for account in served.accounts(1))
    assert sum(account.num_preemptions for account in found) > 0
    assert sum(account.cached_tokens for account in found) > 0
    assert all(len(step.rows) <= SLOTS for step in steps)
    left = [account for account in found if account.cancelled_ns is not None]
    assert left
    assert all(account.freed_ns is not None for account in left)


def test_vllm_counts_the_same(served):
    """The books beside vLLM's own counters."""
    with urllib.request.urlopen(f"{served.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()

    def told(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    accounts, steps = served.accounts(1), served.steps()
    assert sum(len(step.victims) for step in steps) == told("vllm:num_preemptions_total")
    finished = [account for account in accounts if account.finish_reason in ("stop", "length")]
    assert len(finished) == told("vllm:request_success_total") - told_of_reason(lines, "abort")


def told_of_reason(lines: list[str], reason: str) -> float:
    of_it = [line for line in lines if line.startswith("vllm:request_success_total{") and f'"{reason}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in of_it)


def test_it_stops_without_a_trace(served):
    served.stop()
    text = served.log.read_text()
    assert "the books of this engine end here" not in text
    assert "could not be used" not in text
