"""The gateway's page, of a gateway that has served, refused and failed: what it shows, and what it never runs."""

import pytest

from gateway.conftest import DEAD, gateway_of, hostile, upstream  # noqa: F401 (hostile is a fixture)

EVIL = "<img src=x onerror=document.title='owned'>"
KEYS = """
[[tenant]]
name = "operations"
key_env = "OPERATIONS"
operator = true
weight = 3.0

[[tenant]]
name = "search"
key_env = "SEARCH"
requests_per_minute = 2
"""


@pytest.fixture
def busy(hostile, tmp_path):  # noqa: F811
    """A gateway with a good upstream, one that keeps accounts, and one that is dead, whose breaker is open."""
    text = "[breaker]\nfailures = 1\nopen_s = 600.0\n[retries]\nmax_attempts = 1\n" + KEYS
    text += upstream("fine", hostile.url("fine"), max_in_flight=4)
    text += upstream("honest", hostile.url("honest"), kind="splittime") + upstream("dead", DEAD)
    with gateway_of(tmp_path, text, OPERATIONS="operations-key", SEARCH="search-key") as gateway:
        asked = {"authorization": "Bearer operations-key"}
        for model in ("fine", "honest", "dead"):
            gateway.ask(model, {**asked, "x-request-id": f"of-{model}"})
        gateway.ask("fine", {**asked, "x-request-id": EVIL})
        for _ in range(4):
            gateway.ask("fine", {"authorization": "Bearer search-key"})
        yield gateway


def open_with_key(visit, url: str, **options):
    page = visit(url, expected=("401",), **options)
    page.locator("#key-input").fill("operations-key")
    page.locator("#key-form button").click()
    page.locator("#slowest-rows tbody tr").first.wait_for()
    return page


def row_of(page, table: str, name: str) -> str:
    return page.locator(f"#{table} tbody tr", has_text=name).first.inner_text()


def test_it_shows_how_the_gateway_stands(busy, visit):
    page = open_with_key(visit, busy.url)
    assert page.locator("#state-word").inner_text() == "live"
    assert "takes requests" in row_of(page, "upstream-rows", "fine")
    assert "breaker open, asked again in" in row_of(page, "upstream-rows", "dead")
    assert "0 / 4" in row_of(page, "upstream-rows", "fine")
    assert row_of(page, "refusal-rows", "requests_per_minute").split()[-1] == "2"
    assert "75 %" in row_of(page, "tenant-rows", "operations"), "3 of the 4 that all weights are"
    ways = page.locator("#time .stage-list").first.inner_text()
    assert {"receive", "admit", "route", "upstream", "network", "deliver"} <= set(ways.split())
    assert page.locator("#time .stage-list").count() == 2, "its own, and that of the upstream that keeps accounts"
    assert page.title().endswith("splittime gateway"), "and nobody owns it"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_in_light_and_dark(busy, visit, width, scheme):
    page = open_with_key(visit, busy.url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 380) == (scheme == "dark")
