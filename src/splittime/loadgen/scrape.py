"""Asking a server over HTTP for anything but a generation: one GET, JSON, and Prometheus' text form.

A server that lacks a path, answers something else or does not answer in time gives None or {}: what is not told is
absent, and whoever asked says so in a note. Only `get` touches the network.

    parse(text)             every sample by its name with labels, as the server wrote it, labels in alphabetical order
    parse(text, names)      a few names only, at little cost: for scraping while a load runs
    values(samples, name)   the samples of one name: of all its label values, or of those asked for

(prometheus_client's own parser gives counters other names than the server does, and takes five times as long.)
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson

TIMEOUT_S = 10.0

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")  # name {labels} value time stamp
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, float]


class Target(Protocol):
    """Where a server is and what it wants to be told: the address, its key, the model's name."""

    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def model(self) -> str | None: ...


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none, or the answer was no success."""
        if self.status != 200:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


def base_url(target: Target) -> str:
    """The server's address without `/v1`, which some people give and some do not, and with a scheme."""
    url = target.url.rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


async def get(session: aiohttp.ClientSession, target: Target, path: str, timeout_s: float = TIMEOUT_S) -> Answer | None:
    """One GET; None if no answer came."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(base_url(target) + path, headers=headers, timeout=timeout) as response:
            return Answer(response.status, response.headers, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def get_json(session: aiohttp.ClientSession, target: Target, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON at a path, or None."""
    answer = await get(session, target, path, timeout_s)
    return answer.json if answer is not None else None


async def scrape(session: aiohttp.ClientSession, target: Target, path: str = "/metrics") -> Samples:
    """All of a server's metrics; {} if it has none."""
    answer = await get(session, target, path)
    return parse(answer.body.decode("utf-8", "replace")) if answer is not None and answer.status == 200 else {}


def parse(text: str, names: tuple[str, ...] | None = None) -> Samples:
    """Every sample, or those of some names, by name with labels. Lines that are no samples are passed over."""
    found: Samples = {}
    for line in text.split("\n"):
        if names is not None and not line.startswith(names):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or (names is not None and match[1] not in names):
            continue
        try:
            found[_key(match[1], match[2])] = float(match[3])
        except ValueError:
            continue
    return found


def _key(name: str, labels: str | None) -> str:
    """`name{a="1",b="2"}`, or the bare name."""
    pairs = sorted(_LABEL.findall(labels)) if labels else []
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name


def values(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
    """What samples of this name say, of all label values or of those with these."""
    pairs = [f'{label}="{value}"' for label, value in (labels or {}).items()]

    def is_wanted(key: str) -> bool:
        rest = key.removeprefix(name)
        is_of_name = key == name or (len(rest) < len(key) and rest.startswith("{"))
        return is_of_name and all("{" + pair in rest or "," + pair in rest for pair in pairs)

    return [value for key, value in samples.items() if is_wanted(key)]
