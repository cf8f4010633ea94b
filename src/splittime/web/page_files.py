"""The files of a page, read once, and the headers that they go out with.

They say nothing of the server, so they are given without its API key: the page must load to ask for one. The
Content-Security-Policy lets the browser load and run only what came from this server, so that a text of a request,
should it ever end up in the page as HTML, could do nothing.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from splittime.core.errors import NotFound
from splittime.web import http

PREFIX = "/dashboard/static/"
CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS: http.Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # kept, but asked after: a new version is seen at once, an old one costs a 304
    (b"vary", b"accept"),
]
NO_STORE: http.Headers = [(b"cache-control", b"no-store"), *HEADERS[:2]]  # of what the page asks for


class File(NamedTuple):
    body: bytes
    content_type: bytes
    etag: bytes


class PageFiles:
    """paths: of the files; of two with one name the later counts. Those of other types are left out."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(path for path in paths if path.suffix in CONTENT_TYPES)

    @cached_property
    def by_name(self) -> dict[str, File]:
        return {path.name: _read(path) for path in self._paths}

    @property
    def urls(self) -> frozenset[str]:
        """The paths of all files in an address, for which no key is needed."""
        return frozenset(PREFIX + name for name in self.by_name)

    async def send(self, scope: http.Scope, send: http.Send, name: str) -> None:
        """Raises `NotFound`."""
        file = self.by_name.get(name)
        if file is None:
            raise NotFound(f"no file {name!r} of the page", value=name)
        headers = [*HEADERS, (b"etag", file.etag)]
        if file.etag.decode() in (http.header(scope, b"if-none-match") or ""):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await http.respond(send, file.body, content_type=file.content_type, headers=headers)


def _read(path: Path) -> File:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:24].encode()
    return File(body, CONTENT_TYPES[path.suffix], b'"%b"' % digest)
