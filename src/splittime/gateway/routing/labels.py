"""Prompts with what two models' answers to them were worth: the file of `labels`, and what `gateway evaluate` reads.

Each line is a JSON object. `prompt` is a text, or `messages` a chat; `small_right` says whether the small model's
answer was good enough: true, false, or a number from 0 to 1 of a judge. `large_right` says the same of the large one's,
and the costs, in any unit, and `small_logprob` (the mean of the small one's first tokens) are there if they are known.
Other names mean nothing here. Errors name a line and never its text.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.small_file import read_small
from splittime.gateway.endpoints import CHAT, MESSAGES, RESPONSES

MAX_BYTES = 16 * 2**20
MAX_PROMPTS = 10_000
LEAST_PROMPTS = 50
DIGEST_CHARS = 16
USER = "user"


class LabelledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. Worth is from 0 to 1."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    small_right: float | bool
    large_right: float | bool | None = None
    small_cost: float | None = None
    large_cost: float | None = None
    small_logprob: float | None = None

    @property
    def text(self) -> str:
        return self.prompt if self.prompt is not None else text_of_messages(self.messages)


class LabelledFile(msgspec.Struct, frozen=True):
    """digest: the beginning of the SHA-256 of its bytes; two alike decide alike."""

    prompts: tuple[LabelledPrompt, ...]
    digest: str


def read_labels(path: Path, param: str) -> LabelledFile:
    """Returns what the file says. Raises `ConfigError` that names `param` for one that cannot be read or used."""
    try:
        data = read_small(path, MAX_BYTES)
    except OSError as error:
        hint = "JSONL: prompt, small_right and large_right a line"
        raise ConfigError(f"{param}: cannot read {path}: {error}", param=param, value=str(path), hint=hint) from error
    prompts = tuple(_prompts(data, param))
    if not LEAST_PROMPTS <= len(prompts) <= MAX_PROMPTS:
        message, limit = f"{param}: {path} has {len(prompts)} prompts", [LEAST_PROMPTS, MAX_PROMPTS]
        hint = "label more" if len(prompts) < LEAST_PROMPTS else "take a sample of its lines"
        raise ConfigError(message, param=param, value=len(prompts), limit=limit, hint=hint)
    return LabelledFile(prompts, sha256(data).hexdigest()[:DIGEST_CHARS])


def _prompts(data: bytes, param: str) -> Iterator[LabelledPrompt]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=LabelledPrompt)
            fault = _fault(found)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fault = str(error)
        if fault:
            hint = 'a line is as {"prompt": "...", "small_right": true}'
            raise ConfigError(f"{param}: line {number}: {fault}", param=param, value=number, hint=hint)
        yield found


def _fault(line: LabelledPrompt) -> str:
    if not line.text.strip():
        return "neither a prompt nor messages with a user's text"
    worth = (line.small_right, 0.0 if line.large_right is None else line.large_right)
    if not all(0 <= one <= 1 for one in worth):
        return "small_right and large_right are true, false, or from 0 to 1"
    return "" if all(one is None or one >= 0 for one in (line.small_cost, line.large_cost)) else "a cost is below 0"


# ---- what is looked at


def text_of_request(path: str, body: Mapping[str, Any]) -> str:
    """Returns the text by which a request is judged: of a chat the latest of the user, else the prompt; "" for none,
    as of token ids or pictures."""
    if path in (CHAT, MESSAGES):
        return text_of_messages(body.get("messages"))
    if path == RESPONSES and not isinstance(body.get("input"), str):
        return text_of_messages(body.get("input"))
    prompt = body.get("input" if path == RESPONSES else "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return prompt[0]
    return prompt if isinstance(prompt, str) else ""


def text_of_messages(messages: object) -> str:
    """Returns the text of a user's latest message."""
    if not isinstance(messages, list):
        return ""
    of_users = (one for one in reversed(messages) if isinstance(one, dict) and one.get("role") == USER)
    content = next((one.get("content") for one in of_users), "")
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""
