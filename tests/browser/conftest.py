"""The page in headless Chromium. Without a browser or playwright these tests are skipped, and say what to install.

Every page must end without a message in the console: a 404, a refused script or an exception fails the test.
"""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from server.conftest import launch  # noqa: F401 (a fixture)

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="package")  # no longer than needed: playwright keeps this thread's event loop running
def browser() -> Iterator:
    hint = "pip install playwright; it needs no browser download"
    playwright_api = pytest.importorskip("playwright.sync_api", reason=hint)
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium, or say where it is in CHROMIUM")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(browser) -> Iterator[Callable]:
    """Open a page; at the test's end its console must be empty. `expected` are parts of messages that may be there."""
    contexts, messages = [], []
    allowed: list[str] = []

    def open_page(url: str, *, expected: tuple[str, ...] = (), **options):
        allowed.extend(expected)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(100_000)  # what it waits for may be simulated at the least priority
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text} {message.location}"))
        page.on("pageerror", lambda error: messages.append(f"exception: {error}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [m for m in messages if not any(part in m for part in allowed)] == []
