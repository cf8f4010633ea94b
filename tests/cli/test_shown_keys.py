"""A key in a command line is warned of, of whatever kind it is, and no key is repeated."""

import pytest

import forked
from splittime.cli.main import warning_of


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--api-key", "hunter2"], "--api-key"),
        (["serve", "--api-key=hunter2"], "--api-key"),
        (["serve", "M", "--metrics-api-key", "hunter2"], "--metrics-api-key"),
        (["serve", "--kv-peer-key", "hunter2"], "--kv-peer-key"),
        (["attach", "vllm", "--", "serve", "M", "--hf-token=hunter2"], "--hf-token"),
        (["bench", "run", "http://me:hunter2@there:80/"], "a URL with a password"),
        (["bench", "run", "URL", "--header", "Authorization: Bearer hunter2"], "a header with a key"),
        (["serve", "--api-key", "a", "--metrics-api-key", "hunter2", "--api-key", "b"], "--api-key, --metrics-api-key"),
    ],
)
def test_a_key_that_others_can_read_is_warned_of(words: list[str], named: str) -> None:
    said = warning_of(words) or ""
    assert said.startswith(f"warning: {named}: ")
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--ssl-keyfile", "key.pem", "--api-keys-file", "keys.toml", "--max-tokens", "5"],
        ["bench", "run", "http://there:80/a@b", "--ttft-per-token", "1ms", "--api-key-file", "x"],
        ["run", "what is my api key: tell me"],
    ],
)
def test_nothing_else_is(words: list[str]) -> None:
    assert warning_of(words) is None


def test_the_command_says_it_beside_its_output() -> None:
    done = forked.run(["explain", "x", "--url", "http://127.0.0.1:9", "--api-key", "hunter2"])
    assert "warning: --api-key: " in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
