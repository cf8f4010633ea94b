"""One question to a running server, answered in JSON, or a change of what it holds: for commands, which ask few and may
block."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from splittime.core.errors import ConfigError, EngineError, NobodyThere, NotFound
from splittime.wire.target import check_key

TIMEOUT_S = 10.0
NOBODY = "Is the server running there? Give its base address, such as http://127.0.0.1:8000."
OUTSIDE = (
    "Is the URL right? Any other server is measured from outside, by two runs, one with few requests at a time and one "
    "with many: splittime bench run URL --out light.json. Then splittime plan light.json,heavy.json."
)
UNKNOWN_CERTIFICATE = "For a certificate of your own, set SSL_CERT_FILE to its file (cert.pem)."


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
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
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
        message, code = told["message"], told["code"]
    except (ValueError, KeyError, TypeError):
        message, code = f"{url} answered {error.code}", None
    if error.code == 404:  # a splittime server says what it has not; others' codes are numbers, or there are none
        return NotFound(message) if isinstance(code, str) else foreign_server(url, 404)
    if error.code in (401, 403):
        return ConfigError(message, hint="Give the server's key with --api-key or SPLITTIME_API_KEY.")
    return EngineError(message)
