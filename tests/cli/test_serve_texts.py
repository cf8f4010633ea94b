"""`splittime serve` of the packaged model beside texts that nobody should have sent: others are served as before."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from splittime.assemble import model_source
from splittime.core.errors import ConfigError

try:
    model_source.locate(None)
except ConfigError:
    pytest.skip("no packaged model yet", allow_module_level=True)

TEMPLATE = """{% if messages[0].content == 'loop' %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% endif %}{% for m in messages %}{{ m.content }}{{ style }}{% endfor %}"""
GIANTS = ("a" * 4_100_000, " " * 4_100_000, "word " * 820_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    words = ["serve", "--port", "0", "--json", "--chat-template", str(template), "--tokenize-cpu-s", "2"]
    command = [sys.executable, "-m", "splittime.cli.main", *words, "--kv-cache-memory-bytes", "32MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, process.stderr.read()
    yield process, json.loads(line)["url"]
    process.kill()
    process.wait()


def ask(url, path, body=None, name=None):
    """(status, answer); refusals too."""
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=100) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stages(url, name):
    status, account = ask(url, f"/ledger/requests/{name}")
    assert status == 200, account
    return [(part["stage"], part["cause"]) for part in account["stages"]]


def chat(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


def test_giants_are_refused_and_nobody_waits_for_them(server):
    _, url = server
    answers = {}

    def post(name, path, body):
        answers[name] = ask(url, path, body, name)

    giants = [(f"text-{n}", "/v1/completions", {"prompt": text, "max_tokens": 2}) for n, text in enumerate(GIANTS)]
    giants += [(f"chat-{n}", "/v1/chat/completions", chat(text)) for n, text in enumerate(GIANTS)]
    threads = [threading.Thread(target=post, args=giant) for giant in giants]
    for thread in threads:
        thread.start()
    for number in range(20):
        post(f"small-{number}", "/v1/chat/completions", chat("def f(x):"))
        post(f"small-text-{number}", "/v1/completions", {"prompt": "def f(x):", "max_tokens": 2})
    for thread in threads:
        thread.join()
    for name, _, _ in giants:
        status, answer = answers[name]
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), name
    for number in range(20):
        for name in (f"small-{number}", f"small-text-{number}"):
            assert answers[name][0] == 200, answers[name]
            assert ("tokenize_queue", "texts_before") not in stages(url, name)
    for number in range(3):  # by its length alone, before anything is done with it
        assert not {"tokenize", "tokenize_queue"} & {stage for stage, _ in stages(url, f"text-{number}")}


def test_a_template_that_loops_costs_its_request_and_nobody_else(server):
    _, url = server
    answers = []
    evil = threading.Thread(target=lambda: answers.append(ask(url, "/v1/chat/completions", chat("loop"))))
    evil.start()
    for _ in range(3):
        assert ask(url, "/health")[0] == 200
        assert ask(url, "/v1/chat/completions", chat("def f(x):"))[0] == 200
    evil.join()
    assert (answers[0][0], answers[0][1]["error"]["code"]) == (400, "prompt_too_costly")


def test_sigterm_is_heeded_while_a_template_loops(server):
    process, url = server
    evil = threading.Thread(target=lambda: ask(url, "/v1/chat/completions", chat("loop")))
    evil.start()
    assert ask(url, "/tokenize", {"prompt": "ab"})[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    evil.join()
