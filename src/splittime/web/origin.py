"""Which names the server may be called by, and which pages may call it: a browser's `Host`, `Origin`, `Sec-Fetch-*`.

A browser lets every page send requests to 127.0.0.1. What keeps a page of another site from reading a server without a
key, or from putting it to sleep, are headers that a page cannot write:

- `Host` is the name in the page's own address. A page that has its name lead to 127.0.0.1 after it was loaded (DNS
  rebinding) is of the same origin for the browser, and calls the server by that name. So a server on loopback takes
  only the names that it listens on, and those of `allowed_hosts`. A server on another address asks for a key, which no
  rebound page has: it takes any name (balancers and services call by their own), unless `allowed_hosts` says which.
  The port is not compared: it differs behind `ssh -L` or `docker -p`, and says nothing of the page.
- `Origin` is the page that asks. It must be this server's own, which is where `Host` leads, port included, or one of
  `cors_origins`. Programs send none.
- Without `Origin`, `Sec-Fetch-Site` says whether the page is another's (`same-site` is: another port of this machine).
  It may link here, no more.

Probes (`/health`, `/ready`, `/ping`) are taken by any name, as Kubernetes has only a pod's address; they tell nothing.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from splittime.core.errors import ConfigError, RequestError
from splittime.web.http import Scope

ANY = "*"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = ("GET", "HEAD")
FROM_WHERE = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
OTHER_SITES = ("cross-site", "same-site")
MAX_QUOTED_CHARS = 64
KEPT_HOSTS = 1024

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+?)\.?)(?::\d{1,5})?")
_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9._-]+|[0-9a-f:.]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@]+")


class Names:
    """Checks both of each request. Raises `ConfigError` for names that could match nothing."""

    def __init__(self, host: str, allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()) -> None:
        _check_all("allowed_hosts", allowed_hosts, _PATTERN, "a host name without port, *.example, or *")
        _check_all("cors_origins", cors_origins, _ORIGIN, "an origin such as https://app.example:8443, or *")
        self._is_any_host = ANY in allowed_hosts or not (allowed_hosts or is_loopback(host))
        self._hosts = {*LOOPBACK_NAMES, host.lower(), *map(str.lower, allowed_hosts)}
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._is_own_host = lru_cache(KEPT_HOSTS)(self._looks_like_ours)
        self._is_any_origin = ANY in cors_origins
        self._origins = frozenset(map(str.lower, cors_origins))

    def check(self, scope: Scope) -> None:
        """Raises `RequestError` (403) for a request that some other site's page sent."""
        sent = _origin_headers(scope)
        hosts, origins = sent.get(b"host", ()), sent.get(b"origin", ())
        own_address = (scope.get("server") or ("",))[0]  # the address that this very connection came to
        if len(hosts) > 1 or not self._is_own_host("".join(hosts), own_address):
            raise _wrong_host(", ".join(hosts))
        if self._is_any_origin:
            return
        if not origins and _is_led_from_elsewhere(scope["method"], sent):
            raise _cross_site(None)
        if origins and self._is_foreign(", ".join(origins), "".join(hosts)):
            raise _cross_site(", ".join(origins))

    def _looks_like_ours(self, given: str, own_address: str) -> bool:
        match = _HOST.fullmatch(given.lower())
        if self._is_any_host or match is None:
            return self._is_any_host
        name = match[1] or match[2]
        return name in self._hosts or name == own_address or name.endswith(self._suffixes)

    def _is_foreign(self, origin: str, host: str) -> bool:
        return origin.lower() not in self._origins and _authority(origin.lower()) != host.lower()


def _origin_headers(scope: Scope) -> dict[bytes, list[str]]:
    """Returns what a browser says of where a request comes from. One pass, as refused requests are checked too."""
    sent: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        if name in FROM_WHERE:
            sent.setdefault(name, []).append(value.decode("latin-1"))
    return sent


def _is_led_from_elsewhere(method: str, sent: dict[bytes, list[str]]) -> bool:
    """Does another site's page ask for more than a link does?"""
    is_linked = method in SAFE_METHODS and sent.get(b"sec-fetch-mode") == ["navigate"]
    return not is_linked and any(site in OTHER_SITES for site in sent.get(b"sec-fetch-site", ()))


def _authority(origin: str) -> str | None:
    """Returns host and port, as `Host` has them of a page of this origin; None for the origin `null`."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:  # no address at all
        return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_all(name: str, values: Sequence[str], pattern: re.Pattern[str], wanted: str) -> None:
    for value in values:
        if not pattern.fullmatch(value.lower()):
            hint = "give the flag once for each; the environment variable has spaces between them"
            raise ConfigError(f"{name}: {value!r} is not {wanted}", param=name, value=value, hint=hint)


def _wrong_host(given: str) -> RequestError:
    message = f"this server is not called {given[:MAX_QUOTED_CHARS]!r}: only by the names it listens on"
    hint = "use its own address, or start it with --allowed-hosts NAME"
    return RequestError(
        message, code="host_not_allowed", status=403, param="Host", value=given[:MAX_QUOTED_CHARS], hint=hint
    )


def _cross_site(origin: str | None) -> RequestError:
    message = "a page of another site may link to this server, no more"
    value = None if origin is None else origin[:MAX_QUOTED_CHARS]
    hint = "ask from this server's own page or a program, or start it with --cors-origins ORIGIN"
    return RequestError(message, code="cross_site", status=403, param="Origin", value=value, hint=hint)
