"""The page on `splittime serve` with the packaged model, under traffic, and through a restart."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

SERVE = [sys.executable, "-m", "splittime.cli.main", "serve", "--json", "--max-num-seqs", "2", "--num-threads", "1"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(port: int) -> Iterator[str]:
    process = subprocess.Popen([*SERVE, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(100)


def complete(url: str, prompt: str) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 24, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        answer.read()


def traffic(url: str, count: int) -> None:
    """So many at once, on two slots: most of them queue."""
    threads = [threading.Thread(target=complete, args=(url, f"def f{i}(x):\n" * (1 + i % 5))) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(300)
def test_a_real_server_with_traffic_playground_and_restart(visit):
    port = free_port()
    with serving(port) as url:
        page = visit(url, expected=("ERR_CONNECTION", "ERR_EMPTY", "503"))
        traffic(url, 16)
        page.locator("#total", has_text="16 kept").wait_for()
        page.locator("#charts figure li", has_text="batch slots").wait_for()
        page.focus("#grid")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.locator("#detail .waterfall").wait_for()
        assert "queue · batch slots" in page.locator("#detail").inner_text()
        assert page.locator("#detail .neighbours li").count() >= 1
        page.keyboard.press("Escape")
        page.click("#play-send")
        page.locator("#play-account .waterfall").wait_for()
        assert len(page.locator("#play-output").inner_text()) > 20
        assert re.search(r"First text: .* here = .* in the server", page.locator("#play-account").inner_text())
    page.locator("#banner", has_text="does not answer").wait_for()
    with serving(port):
        page.locator("#state-word", has_text="live").wait_for(timeout=60_000)
        assert page.locator("#banner").is_hidden()
        assert page.locator("#total").inner_text() == "0 kept"
        time.sleep(0.1)
