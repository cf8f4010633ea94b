"""The page's files: its own, and those of the server's page that it is made with."""

from functools import cache
from pathlib import Path

from splittime.web.page_files import PageFiles

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parents[1]
SHARED = (
    *("api.js", "app.css", "bar.js", "dom.js", "format.js", "icon.svg"),
    *("poll.js", "standing.js", "theme.js", "words.js"),
)
INDEX = "gateway.html"


@cache
def page() -> PageFiles:
    shared = [PACKAGE / "server" / "dashboard" / name for name in SHARED]
    return PageFiles([PACKAGE / "present" / "assets" / "colours.css", *shared, *sorted(FOLDER.iterdir())])
