"""Asking a server over HTTP for anything but a generation: one GET, JSON, and Prometheus' text form.

A server that lacks a path, answers something else or does not answer in time gives None or {}: what is not told is
absent, and whoever asked says so in a note. Only `ask` touches the network. It reads at most `max_bytes` of an answer,
and follows redirects on the server itself only: the load follows none, so one that leads away, or round in a circle,
is handed back as it is, and `ask_first` names it.

    parse(text)             every sample by its name with labels, as the server wrote it, labels in alphabetical order
    parse(text, names)      a few names only, at little cost: for scraping while a load runs
    labels(samples, name)   what a server tells in labels, such as its settings
    values(samples, name)   the samples of one name: of all its label values, or of those asked for

(prometheus_client's own parser gives counters other names than the server does, and takes five times as long.)
"""

import asyncio
import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import aiohttp
import orjson

from splittime.core.errors import ConfigError, EngineError
from splittime.present.terminal import clipped
from splittime.wire.get_json import NOBODY, UNKNOWN_CERTIFICATE
from splittime.wire.sse import body_text
from splittime.wire.target import Target, check_key

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 16 * 2**20
MAX_REDIRECTS = 5

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")  # name {labels} value time stamp
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, float]


class Response(NamedTuple):
    """`is_too_long`: there was more than the asker takes; what was read is not kept."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_too_long: bool = False

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none, or the answer was no success."""
        if self.status != 200 or self.is_too_long:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def samples(self) -> "Samples":
        """The body as metrics; {} if the answer was no success."""
        return parse(self.body.decode("utf-8", "replace")) if self.status == 200 else {}


async def ask(
    session: aiohttp.ClientSession, target: Target, path: str, timeout_s: float, max_bytes: int = MAX_BODY_BYTES
) -> Response:
    """One GET. Raises what aiohttp does if no answer came."""
    url = target.base_url + path
    async with asyncio.timeout(timeout_s):
        for _ in range(MAX_REDIRECTS):
            answer = await _ask_once(session, target, url, max_bytes)
            follows = _on_the_same_server(url, answer)
            if follows is None:
                break
            url = follows
    return answer


def _on_the_same_server(url: str, answer: Response) -> str | None:
    """Where a redirect leads, if it stays on the server."""
    if not is_redirect(answer):
        return None
    try:
        follows = urljoin(url, answer.headers["Location"])
        return follows if urlsplit(follows)[:2] == urlsplit(url)[:2] else None
    except ValueError:
        return None


async def _ask_once(session: aiohttp.ClientSession, target: Target, url: str, max_bytes: int) -> Response:
    headers = {"Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > max_bytes:
                response.close()
                return Response(response.status, response.headers, b"", is_too_long=True)
        return Response(response.status, response.headers, bytes(body))


def is_redirect(answer: Response) -> bool:
    return answer.status in (301, 302, 303, 307, 308) and "Location" in answer.headers


async def get(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BODY_BYTES,
) -> Response | None:
    """One GET; None if no answer came."""
    try:
        return await ask(session, target, path, timeout_s, max_bytes)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def get_json(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BODY_BYTES,
) -> Any:
    """The JSON at a path, or None."""
    answer = await get(session, target, path, timeout_s, max_bytes)
    return answer.json if answer is not None else None


def _reason(error: Exception) -> str:
    """Returns what the system said; aiohttp's own sentence speaks of TLS where there is none."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return str(error.strerror or error)
    return str(error)


async def ask_first(session: aiohttp.ClientSession, target: Target, path: str = "/v1/models") -> Response:
    """The first question to a server. Raises `EngineError` if nothing can be done with what answers there, and
    `ConfigError` for a key that it does not take."""
    base = target.base_url
    check_key(target.api_key)
    try:
        answer = await ask(session, target, path, TIMEOUT_S)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = f"no answer within {TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else clipped(_reason(error))
        is_unknown = isinstance(error, aiohttp.ClientConnectorCertificateError)
        hint = UNKNOWN_CERTIFICATE if is_unknown else NOBODY
        raise EngineError(f"nothing answers at {base}: {why}", param="url", value=target.url, hint=hint) from None
    if is_redirect(answer):
        where = clipped(answer.headers["Location"])
        what = f"{base} answers with a redirect (status {answer.status}) to {where}"
        hint = "A load follows no redirects. Give the address that it leads to, if it leads anywhere."
        raise EngineError(what, param="url", value=target.url, hint=hint)
    if answer.is_too_long:
        what = f"{base}{path} answers with more than {MAX_BODY_BYTES:,} bytes"
        hint = "That is no list of models. Is the address right?"
        raise EngineError(what, param="url", value=target.url, limit=MAX_BODY_BYTES, hint=hint)
    if answer.status in (401, 403):
        text = body_text(answer.body)
        what = f"{base} refuses the API key" + (f": {text}" if text else "")
        raise ConfigError(what, param="api_key", hint="Give the server's key: --api-key, or SPLITTIME_API_KEY.")
    return answer


def parse(text: str, names: tuple[str, ...] | None = None) -> Samples:
    """Every sample, or those of some names, by name with labels. Lines that are no samples are passed over."""
    found: Samples = {}
    for line in text.split("\n"):
        if names is not None and not line.startswith(names):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or (names is not None and match[1] not in names):
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if math.isfinite(value):  # NaN, as a summary has it that saw nothing yet, tells nothing; JSON has no word
                found[_key(match[1], match[2])] = value
    return found


def _key(name: str, labels: str | None) -> str:
    """`name{a="1",b="2"}`, or the bare name."""
    pairs = sorted(_LABEL.findall(labels)) if labels else []
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name


def labels(samples: Samples, name: str) -> dict[str, str]:
    """The labels of the first sample of this name; {} if there is none."""
    key = next((key for key in samples if key.startswith(name + "{")), "")
    return dict(_LABEL.findall(key))


def values(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
    """What samples of this name say, of all label values or of those with these."""
    pairs = [f'{label}="{value}"' for label, value in (labels or {}).items()]

    def is_wanted(key: str) -> bool:
        rest = key.removeprefix(name)
        is_of_name = key == name or (len(rest) < len(key) and rest.startswith("{"))
        return is_of_name and all("{" + pair in rest or "," + pair in rest for pair in pairs)

    return [value for key, value in samples.items() if is_wanted(key)]
