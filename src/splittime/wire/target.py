"""Where the load goes and how a run is to be carried out: two values, made by the command line or by hand.

`get_json` and its like ask a running server one question, or change what it holds: for commands, which may block.
"""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from splittime.core.errors import ConfigError, EngineError, NobodyThere, NotFound

PORTS = {"http": 80, "https": 443}
_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.%]+\]):\d+(/\S*)?")
TIMEOUT_S = 10.0
NOBODY = "Is the server running there? Give its base address, such as http://127.0.0.1:8000."
OUTSIDE = (
    "Is the URL right? Any other server is measured from outside, by two runs, one with few requests at a time and one "
    "with many: splittime bench run URL --out light.json. Then splittime plan light.json,heavy.json."
)
GIVE_KEY = "Give the server's key with --api-key or SPLITTIME_API_KEY."
UNKNOWN_CERTIFICATE = "For a certificate of your own, set SSL_CERT_FILE to its file (cert.pem)."


def is_url(source: str) -> bool:
    """Whether this names a server, and no file: it has a scheme, or a port where no file is called so."""
    return "://" in source or (_HOST_AND_PORT.fullmatch(source) is not None and not Path(source).exists())


def base_of(url: str) -> str:
    """Returns a server's address with a scheme and without `/v1`, which some people give and some do not. Raises
    `ConfigError` for what is no HTTP URL."""
    parts = _parts(url)
    return f"{parts.scheme}://{parts.netloc}{_path(parts)}"


def _parts(url: str) -> SplitResult:
    hint = "a server is named as in http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}", param="url", value=url, hint=hint) from None
    if parts.scheme not in PORTS or not parts.hostname or port == 0 or any(map(str.isspace, url)):
        raise ConfigError(f"{url!r} is no HTTP URL", param="url", value=url, hint=hint)
    return parts


def _path(parts: SplitResult) -> str:
    return parts.path.rstrip("/").removesuffix("/v1").rstrip("/")


def check_key(key: str | None) -> None:
    """Raises `ConfigError` for one that would be more than one header."""
    if key is not None and not key.isprintable():
        hint = "Was it read from a file with its line end?"
        raise ConfigError("the key has a character that no header can have", param="api_key", hint=hint)


class Address(NamedTuple):
    """A URL's parts, as a connection needs them. `path` is what stands before `/v1`, without a slash at its end."""

    is_tls: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One server: its URL with or without `/v1` at the end, its key, the model to name (the server's first if None)."""

    url: str
    api_key: str | None = None
    model: str | None = None

    @property
    def base_url(self) -> str:
        """As of `base_of`."""
        return base_of(self.url)

    @property
    def address(self) -> Address:
        """Raises `ConfigError` for what is no HTTP URL."""
        parts = _parts(self.url)
        return Address(parts.scheme == "https", parts.hostname or "", parts.port or PORTS[parts.scheme], _path(parts))


class Interleave(StrEnum):
    """How two servers are compared in one run.

    PAIRED, the rule: each request goes to both at the same intended instant, the first place alternating. Both see the
    same arrivals and the same weather, and differences can be taken request by request. Both work at the same time, so
    it is for servers that do not share a machine's cores.
    BLOCKS: the same stretch of the schedule goes to one and then to the other, the order alternating (A B B A ...), so
    that a slow drift of the machine cancels. For servers on one machine; it takes twice as long, and a rate of either
    is over the whole time, of which it was asked during half.
    """

    PAIRED = "paired"
    BLOCKS = "blocks"


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to carry out a schedule.

    timeout_s: of each request, from the moment it is turned to. max_in_flight: of an open loop, at most so many at a
        time; what it holds back is recorded (`Outcome.held_ns`) and reported as lateness, not hidden.
    workers: processes that make the load; 0: the caller's own; None: as many as the expected rate of chunks needs.
    sample_interval_s: how often the server's metrics are asked during the run.
    stop_on_saturation: of an open loop, end the run once the test of `saturation` says that it is overloaded.
    slo, label, settings: kept in the run, for whoever reads it.
    """

    timeout_s: float = 600.0
    max_in_flight: int | None = None
    workers: int | None = 0
    sample_interval_s: float = 0.5
    stop_on_saturation: bool = False
    interleave: Interleave = Interleave.PAIRED
    block_s: float = 10.0
    slo: dict[str, float] = {}
    label: str = ""
    settings: dict[str, Any] = {}

    def validate(self) -> None:
        """Raises `ConfigError` for a value out of range."""
        for name in ("timeout_s", "sample_interval_s", "block_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0", param=name, value=getattr(self, name), limit=0)
        for name, least in (("max_in_flight", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}", param=name, value=value, limit=least)


def get_json(url: str, api_key: str | None, nobody: str = NOBODY) -> Any:
    """Returns what a running server answers to a GET. nobody: the hint where none answers.

    Raises `NotFound`, `ConfigError` (the key is refused), `NobodyThere` or `EngineError`, each with what a user can do.
    """
    return _answered(urllib.request.Request(url), api_key, nobody)


def get_text(url: str, api_key: str | None, nobody: str = NOBODY) -> str:
    """Returns the text that a running server answers to a GET, as `/metrics` is. Raises as `get_json` does."""
    return _answered(urllib.request.Request(url), api_key, nobody, lambda response: response.read().decode())


def patch_json(url: str, body: Any, api_key: str | None, nobody: str = NOBODY) -> Any:
    """Returns what a running server answers to a PATCH of this body. Raises as `get_json` does."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    return _answered(urllib.request.Request(url, data, headers, method="PATCH"), api_key, nobody)


def _answered(
    request: urllib.request.Request, api_key: str | None, nobody: str, read: Callable[[Any], Any] = json.load
) -> Any:
    url = request.full_url
    check_key(api_key)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return read(response)
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from None
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLError):
            hint = UNKNOWN_CERTIFICATE if isinstance(reason, ssl.SSLCertVerificationError) else nobody
            raise EngineError(f"cannot ask {url}: {reason}", hint=hint) from None
        why = getattr(reason, "strerror", None) or reason
        raise NobodyThere(f"nothing answers at {url}: {why}", hint=nobody) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"cannot ask {url}: {error}", hint=nobody) from None


def foreign_server(url: str, status: int) -> NotFound:
    """Returns the error of a page that every splittime server has, and this one has not."""
    return NotFound(f"no splittime server: {url} answered {status}", param="url", value=url, hint=OUTSIDE)


def _refused(error: urllib.error.HTTPError, url: str) -> Exception:
    try:
        told = json.load(error)["error"]
        message, code, hint = told["message"], told["code"], told.get("hint")  # the message ends with it
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, hint = f"{url} answered {error.code}", None, None
    if error.code == 404:  # a splittime server says what it has not; others' codes are numbers, or there are none
        return NotFound(message) if isinstance(code, str) else foreign_server(url, 404)
    if error.code in (401, 403):
        return ConfigError(message, hint=None if hint and error.code == 403 else GIVE_KEY)
    return EngineError(message)
