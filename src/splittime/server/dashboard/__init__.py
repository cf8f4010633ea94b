"""The files of the page at `/`, which the browser loads (`splittime.web.page_files` says how they go out).

`..routes_dashboard` makes what it is told from closed books. The page itself is the `.html`, `.css` and `.js` beside
this file: plain modules, no build step, nothing fetched from elsewhere.
"""

from functools import cache
from pathlib import Path

from splittime.web import http
from splittime.web.page_files import File, PageFiles

FOLDER = Path(__file__).parent
COLOURS = FOLDER.parents[1] / "present" / "assets" / "colours.css"  # that all pages share


@cache
def _page() -> PageFiles:
    return PageFiles([COLOURS, *sorted(FOLDER.iterdir())])


def files() -> dict[str, File]:
    """By name."""
    return _page().by_name


def paths() -> frozenset[str]:
    """Returns the paths of all files of pages, for which no key is needed."""
    return frozenset({"/docs", "/favicon.ico", *_page().urls})


async def send_file(scope: http.Scope, send: http.Send, name: str) -> None:
    """Raises `NotFound`."""
    await _page().send(scope, send, name)
