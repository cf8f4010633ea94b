"""The page on `splittime serve` with the packaged model, under traffic, and through a restart."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

ANY_PORT = 0
SERVE = [sys.executable, "-m", "splittime.cli.main", "serve", "--json", "--max-num-seqs", "2", "--num-threads", "1"]


@contextlib.contextmanager
def serving(port: int = ANY_PORT) -> Iterator[str]:
    """Yields the address of a server that runs until the block ends."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*SERVE, "--port", str(port)], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            announced = process.stdout.readline()
            log.seek(0)
            assert announced, f"the server ended with {process.wait(100)}: {log.read()}"
            yield json.loads(announced)["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(100)


def complete(url: str, prompt: str, max_tokens: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        answer.read()


def is_running(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/stats", timeout=60) as answer:
        return json.load(answer)["engine"]["num_running"] > 0


def traffic(url: str, count: int) -> None:
    """Sends so many at once to two slots. A long one keeps one of the slots: who queued shared its steps with it."""
    prompts = [f"def f{i}(x):\n" * (1 + i % 5) for i in range(count)]
    threads = [threading.Thread(target=complete, args=(url, prompt, 24)) for prompt in prompts]
    threads[0] = threading.Thread(target=complete, args=(url, prompts[0], 1200))
    threads[0].start()
    while not is_running(url):
        assert threads[0].is_alive(), "the long request ended before the others began"
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(300)
def test_a_real_server_with_traffic_playground_and_restart(visit):
    with serving() as url:
        page = visit(url, expected=("ERR_CONNECTION", "ERR_EMPTY", "503"))
        traffic(url, 16)
        page.locator("#total", has_text="16 kept").wait_for()
        page.locator("#charts figure li", has_text="batch slots").wait_for()
        page.focus("#grid")
        for _ in range(6):  # past the long one, which ended last, to one that others were ahead of
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.locator("#detail .waterfall").wait_for()
        assert "queue · batch slots" in page.locator("#detail").inner_text()
        assert page.locator("#detail .neighbours:not(.waits) li").count() >= 1
        assert "batch slots" in page.locator("#detail .waits li").first.inner_text()
        assert page.locator("#detail .owners li").count() >= 3
        page.keyboard.press("Escape")
        page.click("#play-send")
        page.locator("#play-account .waterfall").wait_for()
        assert len(page.locator("#play-output").inner_text()) > 20
        assert re.search(r"First text: .* here = .* in the server", page.locator("#play-account").inner_text())
    page.locator("#banner", has_text="does not answer").wait_for()
    with serving(urllib.parse.urlsplit(url).port):
        page.locator("#state-word", has_text="live").wait_for(timeout=60_000)
        assert page.locator("#banner").is_hidden()
        assert page.locator("#total").inner_text() == "0 kept"
        time.sleep(0.1)
