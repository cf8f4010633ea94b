"""The playground: an answer that streams, its account beside it, and what goes wrong on the way."""

from server.conftest import say

EVIL = "<img src=x onerror=document.title='owned'>"


def test_streams_and_shows_the_account_beside_it(launch, visit):
    live = launch(say("hello from the engine"), step_s=0.02)
    page = visit(live.url)
    page.click("#play-send")
    page.locator("#play-output", has_text="hel").wait_for()
    assert page.locator("#play-stop").is_enabled()
    page.locator("#play-account .waterfall").wait_for()
    assert page.locator("#play-output").inner_text() == "hello from the engine"
    words = page.locator("#play-account").inner_text()
    assert "in the server +" in words
    assert "decode" in words
    assert page.locator("#play-stop").is_disabled()


def test_stops_and_the_engine_hears_of_it(launch, visit):
    live = launch(say("x" * 4000), step_s=0.02)
    page = visit(live.url)
    page.fill("[name=max_tokens]", "3000")
    page.click("#play-send")
    page.locator("#play-output", has_text="xxx").wait_for()
    page.click("#play-stop")
    page.locator("#play-account dd", has_text="abort").wait_for()
    assert len(live.engine.aborts) == 1


def test_chat_and_an_answer_that_is_html(launch, visit):
    live = launch(say(EVIL))
    page = visit(live.url)
    page.select_option("[name=kind]", "chat")
    page.click("#play-send")
    page.locator("#play-account .waterfall").wait_for()
    assert page.locator("#play-output").inner_text() == EVIL
    assert page.locator("img[src=x]").count() == 0
    assert "owned" not in page.title()


def test_a_refusal_is_shown_in_the_server_s_words(launch, visit):
    live = launch()
    page = visit(live.url, expected=("400",))
    page.fill("#play-prompt", "x" * 5000)
    page.click("#play-send")
    page.locator("#play-output .trouble", has_text="at most 4095 fit").wait_for()
