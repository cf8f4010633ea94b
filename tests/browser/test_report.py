"""The report in headless Chromium, from disk and offline: it reads in both lights, on any screen, and runs nothing that
came with a run. Its console must stay empty."""

import pytest
from client_runs import drawn_run
from test_html_report import both_books, evil_run

from splittime.bench.report.html import write_html

from .test_page import WORST_CONTRAST


@pytest.fixture
def show(visit, tmp_path):
    def open_report(run, **options):
        write_html(run, tmp_path / "report.html")
        return visit((tmp_path / "report.html").as_uri(), offline=True, **options)

    return open_report


def test_nothing_of_a_run_runs(show):
    page = show(evil_run())
    assert page.locator("h1").inner_text().startswith("</script>")
    assert page.locator("img").count() == 0
    assert page.title().startswith("VOID: </script>")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_lights(show, scheme):
    page = show(both_books(), color_scheme=scheme)
    assert page.evaluate(WORST_CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_moves_sideways(show, width):
    page = show(both_books(), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_dot_says_which_request_it_is(show):
    run = drawn_run(3, size=200)
    page = show(run)
    plot = page.locator(".stack .plot").first
    x_low, x_high, _, y_low, y_high, is_log = map(float, plot.get_attribute("data-scales").split())
    assert is_log == 0
    chosen = max(run.outcomes, key=lambda outcome: outcome.chunk_ns[0] - outcome.intended_ns)
    room = plot.locator(".room").bounding_box()
    across = (chosen.intended_ns / 1e9 - x_low) / (x_high - x_low)
    down = 1 - (chosen.chunk_ns[0] - chosen.intended_ns - y_low) / (y_high - y_low)
    page.mouse.move(room["x"] + across * room["width"], room["y"] + down * room["height"])
    said = page.locator(".stack .answer").inner_text()
    assert said.startswith(f"#{chosen.index} at ")
    assert chosen.request_id in said
    page.mouse.move(0, 0)
    assert page.locator(".stack .answer").is_hidden()


def test_all_panels_look_closer_together(show):
    page = show(drawn_run(3, size=200))
    whole = page.locator(".stack svg").first.get_attribute("viewBox")
    room = page.locator(".stack .room").first.bounding_box()
    page.mouse.move(room["x"] + room["width"] * 0.25, room["y"] + 50)
    page.mouse.down()
    page.mouse.move(room["x"] + room["width"] * 0.5, room["y"] + 60)
    page.mouse.up()
    boxes = {svg.get_attribute("viewBox") for svg in page.locator(".stack svg").all()}
    assert len(boxes) == 1
    left, _, width, _ = map(float, boxes.pop().split())
    assert (left, width) == (pytest.approx(25_000, abs=500), pytest.approx(25_000, abs=500))
    assert page.locator(".stack .x span").count() >= 3
    page.keyboard.press("Escape")
    assert page.locator(".stack svg").first.get_attribute("viewBox") == whole


@pytest.mark.sweep
def test_ten_thousand_requests_can_be_read_and_zoomed(show):
    page = show(drawn_run(1, size=10_000))
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000
    page.locator(".stack").focus()
    page.keyboard.press("+")
    assert page.locator(".stack svg").first.get_attribute("viewBox") == "25000 0 50000 1000"
