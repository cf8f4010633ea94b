"""The panel "What if": it asks for a setting or a load, shows the server's answer, and applies what can be applied."""

import pytest
from test_sized import few_slots
from ward import Ward

from splittime.diagnose.books import Books

SLOTS = 4


@pytest.fixture(scope="module")
def crowded() -> Books:
    return Ward(settings={"max_num_seqs": SLOTS}).run(*few_slots())


@pytest.fixture
def live(launch, crowded: Books):
    server = launch()
    server.engine.facts = lambda: crowded.facts
    server.engine.knobs_now = {"max_num_seqs": SLOTS, "enable_prefix_caching": True}
    ledger = server.ledger
    server.call(lambda: [*map(ledger.add_account, crowded.accounts), *map(ledger.add_step, crowded.steps)])
    return server


def ask(page, name: str, value: str) -> None:
    page.locator("#what-if").scroll_into_view_if_needed()
    page.locator("#what-if-ask:enabled").wait_for()
    page.select_option("#what-if-name", name)
    page.locator("#what-if-value input").fill(value)
    page.click("#what-if-ask")


def test_a_setting_is_simulated_then_applied(live, visit):
    page = visit(live.url)
    ask(page, "max_num_seqs", "6")
    better = page.locator("#what-if-answer tr", has_text="first token, p99").locator("td.better")
    better.wait_for()
    assert better.inner_text().startswith("0.")
    assert "The latest 200 requests" in page.locator("#what-if-note").inner_text()
    assert live.engine.knobs_now["max_num_seqs"] == SLOTS, "nothing is changed by asking"
    page.click("#what-if-apply")
    page.locator("#what-if-now", has_text="now 6").wait_for()
    assert live.engine.knobs_now["max_num_seqs"] == 6


def test_a_load_is_simulated_and_has_nothing_to_apply(live, visit):
    page = visit(live.url)
    ask(page, "load (times)", "1.5")
    page.locator("#what-if-answer tr", has_text="first token, p99").locator("td.worse").wait_for()
    assert page.locator("#what-if-apply").count() == 0
    assert page.locator("#what-if-answer").inner_text().count("null") == 0


def test_what_cannot_be_told_is_said_in_the_servers_words(live, visit):
    page = visit(live.url, expected=("409",))
    ask(page, "max_num_seqs", "64")
    page.locator("#what-if-note", has_text="none has more than").wait_for()


def test_a_switch_is_a_choice_of_two(live, visit):
    page = visit(live.url)
    page.locator("#what-if").scroll_into_view_if_needed()
    page.locator("#what-if-ask:enabled").wait_for()
    page.select_option("#what-if-name", "enable_prefix_caching")
    assert page.locator("#what-if-value option").all_inner_texts() == ["true", "false"]
    assert page.locator("#what-if-value select").input_value() == "true"


@pytest.mark.parametrize("width", [1400, 390])
def test_the_panel_fits_the_page(live, visit, width):
    page = visit(live.url, viewport={"width": width, "height": 900})
    ask(page, "max_num_seqs", "6")
    page.locator("#what-if-answer table").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    change = page.locator("#what-if-answer tr", has_text="first token, p99").locator("td").first.bounding_box()
    assert change["x"] + change["width"] <= width, "the answer is seen without scrolling"


def test_what_is_asked_differs_from_what_is(live, visit):
    page = visit(live.url)
    page.locator("#what-if").scroll_into_view_if_needed()
    page.locator("#what-if-ask:enabled").wait_for()
    page.select_option("#what-if-name", "max_num_seqs")
    assert page.locator("#what-if-value input").input_value() == str(2 * SLOTS)
    page.locator("#what-if-value input").fill(str(SLOTS))
    assert page.locator("#what-if-ask").is_disabled()
    assert page.locator("#what-if-now").inner_text() == f"now {SLOTS}; give another value to simulate"
    page.select_option("#what-if-name", "load (times)")
    assert page.locator("#what-if-ask").is_enabled()
