"""The page's files, read once, and the headers that they go out with.

They say nothing of this server, so they are given without its API key (`paths`): the page must load to ask for one.
The Content-Security-Policy lets the browser load and run only what came from this server, so that a text of a request,
should it ever end up in the page as HTML, could do nothing.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from splittime.core.errors import NotFound
from splittime.web import http

FOLDER = Path(__file__).parent
COLOURS = FOLDER.parents[1] / "present" / "assets" / "colours.css"  # that all pages share
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


class File(NamedTuple):
    body: bytes
    content_type: bytes
    etag: bytes


@cache
def files() -> dict[str, File]:
    """By name."""
    paths = [COLOURS, *(path for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES)]
    return {path.name: _read(path) for path in paths}


def _read(path: Path) -> File:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:24].encode()
    return File(body, CONTENT_TYPES[path.suffix], b'"%b"' % digest)


def paths() -> frozenset[str]:
    """Returns the paths of all files of pages, for which no key is needed."""
    return frozenset({"/docs", "/favicon.ico", *(PREFIX + name for name in files())})


async def send_file(scope: http.Scope, send: http.Send, name: str) -> None:
    """Raises `NotFound`."""
    file = files().get(name)
    if file is None:
        raise NotFound(f"no file {name!r} of the page", value=name)
    headers = [*HEADERS, (b"etag", file.etag)]
    if file.etag.decode() in (http.header(scope, b"if-none-match") or ""):
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
    else:
        await http.respond(send, file.body, content_type=file.content_type, headers=headers)
