"""Two tenants on `splittime serve` with the packaged model: what one has sent, the other's answers do not tell."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

import forked
from benchmarks.server_process import free_port, wait_until_ready

pytestmark = pytest.mark.timeout(500)
SECRET = "def launch_code():\n    return 'seven green bottles'\n" * 8
FILE = """
[[key]]
name = "operations"
key = "ops"
operator = true
[[key]]
name = "a"
key = "key-of-a"
[[key]]
name = "b"
key = "key-of-b"
"""


def call(url: str, key: str, body: dict | None = None) -> tuple[int, dict]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=150) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys.toml").write_text(FILE)
    port = free_port()
    flags = [
        "--port",
        str(port),
        "--num-threads",
        "1",
        "--block-size",
        "4",
        "--api-keys-file",
        str(folder / "keys.toml"),
    ]
    names = ["--served-model-name", "first", "--served-model-name", "second", "--root-path", "/llm"]
    command = [sys.executable, "-m", "splittime.cli.main", "serve", *flags, *names]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(url, process, 150)
    yield url
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=150)


def cached(url: str, key: str, prompt: str, **more: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    status, answer = call(f"{url}/v1/completions", key, body)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_tell_a_tenant_of_its_own_prompts_alone(url: str) -> None:
    assert cached(url, "key-of-a", SECRET) == 0
    assert cached(url, "key-of-a", SECRET) > 50
    guesses = [SECRET + f"# {number}" for number in range(4)]  # each under a salt of its own, so b finds none of b's
    for guess, salt in zip(guesses, ("", "key:a", "a", "key:a\0"), strict=True):
        assert cached(url, "key-of-b", guess, cache_salt=salt) == 0, "b was told of a's prompt"
    assert cached(url, "key-of-a", SECRET, cache_salt="mine") == 0


def test_books_of_a_tenant_are_its_own_and_the_operators(url: str) -> None:
    status, answer = call(f"{url}/v1/completions", "key-of-a", {"prompt": "x", "max_tokens": 1})
    assert status == 200
    for key, expected in (("key-of-a", 200), ("ops", 200), ("key-of-b", 404)):
        assert call(f"{url}/ledger/requests/{answer['id']}", key)[0] == expected
    assert call(f"{url}/ledger/requests/{answer['id']}", "ops")[1]["tenant"] == "a"
    assert call(f"{url}/ledger/steps", "key-of-a")[0] == 403
    assert call(f"{url}/ledger/steps", "ops")[0] == 200


def test_several_names_are_served_and_a_root_path_is_taken_with_and_without(url: str) -> None:
    status, answer = call(f"{url}/llm/v1/models", "key-of-b")
    assert (status, [model["id"] for model in answer["data"]]) == (200, ["first", "second"])
    for name in ("first", "second"):
        status, answer = call(f"{url}/v1/completions", "key-of-b", {"model": name, "prompt": "x", "max_tokens": 1})
        assert (status, answer["model"]) == (200, name)
    assert call(f"{url}/v1/completions", "key-of-b", {"model": "third", "prompt": "x"})[0] == 404


def test_a_tenant_explains_its_own_request_without_the_steps(url):
    status, answer = call(f"{url}/v1/completions", "key-of-a", {"prompt": "def mine():", "max_tokens": 3})
    assert status == 200
    words = ["explain", answer["id"], "--url", url, "--api-key"]
    own = forked.run([*words, "key-of-a"])
    assert own.returncode == 0, own.stderr
    assert "the operator's to read" in own.stderr
    assert "decode" in own.stdout
    others = forked.run([*words, "key-of-b"])
    assert others.returncode != 0
    assert "def mine" not in others.stdout + others.stderr
