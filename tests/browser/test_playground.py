"""The playground: an answer that streams, its account beside it, and what goes wrong on the way."""

import json
import shlex

from server.conftest import say
from splittime.core.facts import Pooling

EVIL = "<img src=x onerror=document.title='owned'>"


def test_streams_and_shows_the_account_beside_it(launch, visit):
    live = launch(say("hello from the engine"), step_s=0.1)
    page = visit(live.url)
    page.click("#play-send")
    page.locator("#play-output .told", has_text="hel").wait_for()
    assert page.locator("#play-stop").is_enabled()
    page.locator("#play-account .waterfall").wait_for()
    assert page.locator("#play-output .told").inner_text() == "hello from the engine"
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


def test_it_chats_with_what_was_said_before_and_an_answer_that_is_html_stays_text(launch, visit):
    live = launch(say(EVIL))
    page = visit(live.url)
    page.get_by_role("link", name="Playground").click()
    prompts = []
    for asked in ("It's blue?", "And red?"):
        page.fill("#play-prompt", asked)
        prompts.append(page.locator("#curl").inner_text())
        page.press("#play-prompt", "Enter")
        page.locator("#play-new:enabled").wait_for()
    page.locator("#play-account .waterfall").wait_for()
    assert page.locator("#play-output p").all_inner_texts() == ["It's blue?", EVIL, "And red?", EVIL]
    words = [shlex.split(prompt.replace("\\\n", "")) for prompt in prompts]
    assert words[0][:2] == ["curl", f"{live.url}/v1/chat/completions"]
    roles = [[one["role"] for one in json.loads(said[-1])["messages"]] for said in words]
    assert roles == [["user"], ["user", "assistant", "user"]]
    page.click("#play-new")
    assert page.locator("#play-output .told").count() == 0
    assert page.locator("img[src=x]").count() == 0
    assert "owned" not in page.title()


def test_a_refusal_is_shown_in_the_server_s_words(launch, visit):
    live = launch()
    page = visit(live.url, expected=("400",))
    page.fill("#play-prompt", "x" * 5000)
    page.click("#play-send")
    page.locator("#play-output .trouble", has_text="at most").wait_for()
    assert page.locator("#play-prompt").input_value() == "x" * 5000, "to be mended and sent again"


def test_the_packaged_model_is_asked_for_code_and_one_that_embeds_for_nothing(launch, visit):
    page = visit(launch(model={"names": ("splittime-code",)}).url)
    page.locator("#curl", has_text="/v1/completions").wait_for()
    assert page.locator("#play-prompt").input_value().startswith("def ")
    page = visit(launch(model={"pooling": Pooling(is_all=True)}).url)
    page.locator("#playground").wait_for(state="hidden")
