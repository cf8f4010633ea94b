"""The page on a server whose books are given: what it shows, by which keys, in which light; what it never runs."""

import re
import time

import msgspec
import pytest

from patience import until
from splittime.core.facts import Pooling
from splittime.ledger.facts import Process, ServerFacts
from splittime.server import routes_dashboard

from . import books

EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


@pytest.fixture
def live(launch):
    return launch()


def fill(live, accounts, steps=()) -> None:
    live.call(lambda: [*map(live.ledger.add_account, accounts), *map(live.ledger.add_step, steps)])


def lines(page):
    return page.locator("#grid-lines .line:visible")


def test_shows_what_is_in_the_books(live, visit):
    fill(live, books.accounts(40, seconds=50), books.steps(200, ("r37", "r38", "r39")))
    page = visit(live.url)
    lines(page).first.wait_for()
    assert page.locator("#state-word").inner_text() == "live"
    assert page.locator("#total").inner_text() == "40 kept"
    assert page.locator("#grid").get_attribute("aria-rowcount") == "41"
    ends = lines(page).first.locator(".when").inner_text()
    assert len(ends) == 8, ends
    assert "40 in 60 s" in page.locator("#tiles").inner_text()
    legend = page.locator("#charts figure").first.inner_text()
    assert "batch slots" in legend
    assert "decode" in legend
    assert page.locator("#charts figure").nth(3).locator("path.area").count() == 2


def test_what_is_not_kept_is_veiled_and_no_zero(live, visit, monkeypatch):
    monkeypatch.setattr(routes_dashboard, "MAX_STEPS", 50)
    monkeypatch.setattr(routes_dashboard, "MAX_ROWS", 20)
    fill(live, books.accounts(40, seconds=50), books.steps(200, ("r37", "r38", "r39")))
    page = visit(live.url)
    lines(page).first.wait_for()
    charts = page.locator("#charts figure")
    told = [charts.nth(i).locator("text", has_text="not kept").count() for i in range(6)]
    assert (told, charts.locator("rect.veil").count()) == ([1] * 6, 6)
    seconds = int(page.locator("#tiles .writes .note").last.inner_text().split()[-2])
    assert 10 < seconds < 50, "a percentile is of those that are kept"


def test_an_empty_chart_has_no_axis_of_zeros(live, visit):
    page = visit(live.url)
    page.locator("#charts text", has_text="nothing in this time").nth(3).wait_for()
    assert page.locator("#charts figure").nth(1).locator("text.tick.end").all_text_contents() == ["0", "now"]


def test_a_sliver_of_a_bar_has_its_colour_and_its_place(live, visit):
    fill(live, books.accounts(4, seconds=10))
    page = visit(live.url)
    bar = lines(page).first.locator(".bar")
    bar.locator("i").first.wait_for()
    slivers = bar.locator("i.thin")
    assert slivers.count() >= 2, "before the engine, and deliver"
    for sliver in slivers.all():
        assert sliver.evaluate("element => getComputedStyle(element).boxShadow") == "none"
        assert sliver.bounding_box()["width"] >= 2
    end = bar.bounding_box()["x"] + bar.bounding_box()["width"]
    last = bar.locator("i").last.bounding_box()
    assert last["x"] + last["width"] <= end + 0.5
    short, before = (f"getComputedStyle(document.body).getPropertyValue('--{name}')" for name in ("short", "before"))
    assert page.evaluate(f"{short} !== {before}"), "short stages have a colour of their own"


def test_what_those_in_the_queue_wait_for_now(live, visit):
    causes: dict[str, int] = {}
    idle = live.engine.stats()
    live.engine.stats = lambda: msgspec.structs.replace(
        idle, num_waiting=sum(causes.values()), waiting_for=dict(causes)
    )
    page = visit(live.url)
    tile = page.locator("#tiles .tile").nth(1)
    tile.locator(".note", has_text="nobody").wait_for()
    assert tile.locator(".bar i").count() == 0
    causes |= {"kv_blocks": 1, "policy": 9}
    tile.locator(".note", has_text="9 policy, 1 kv blocks").wait_for()
    assert tile.locator(".value").inner_text() == "10"
    widths = [piece.bounding_box()["width"] for piece in tile.locator(".bar i").all()]
    assert widths[1] / widths[0] == pytest.approx(9, rel=0.15)
    del causes["policy"]
    tile.locator(".note", has_text="kv blocks").and_(tile.locator(".note:not(:has-text('policy'))")).wait_for()
    assert tile.locator(".bar i").count() == 1


def test_new_requests_appear_while_it_is_open(live, visit):
    page = visit(live.url)
    page.locator("#grid-empty").wait_for()
    fill(live, [books.account("late", time.monotonic_ns())])
    lines(page).filter(has_text="late").wait_for()
    assert page.locator("#grid-empty").is_hidden()


def test_a_waterfall_by_keyboard_and_back(live, visit):
    fill(live, books.accounts(12, seconds=5), books.steps(300, ("r10", "r11")))
    page = visit(live.url)
    lines(page).first.wait_for()
    page.focus("#grid")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    active = page.locator("#grid").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active} .id").inner_text() == "r11"
    page.keyboard.press("Enter")
    page.locator("#detail .waterfall").wait_for()
    words = page.locator("#detail").inner_text()
    assert "queue · batch slots" in words
    assert "decode stall · token budget" in words
    assert "Shared its steps with" in words
    page.locator("#detail .neighbours:not(.waits) button").first.click()
    page.locator("#detail-title", has_text="r10").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    assert page.evaluate("document.activeElement.id") == "grid"


def test_lanes_lie_where_their_stages_were(live, visit):
    fill(live, [books.account("one", time.monotonic_ns())])
    page = visit(live.url)
    lines(page).first.click()
    lane = page.locator("#detail .lane", has_text="queue · kv blocks")
    whole = sum(ms for _, _, ms in books.PLAN)
    before = sum(ms for _, _, ms in books.PLAN[:4])
    track, piece = lane.locator(".track").bounding_box(), lane.locator("i").bounding_box()
    assert (piece["x"] - track["x"]) / track["width"] == pytest.approx(before / whole, abs=0.01)
    assert piece["width"] / track["width"] == pytest.approx(30 / whole, abs=0.01)


def test_holds_still_while_it_is_read(live, visit):
    fill(live, books.accounts(30, seconds=5))
    page = visit(live.url)
    lines(page).first.hover()
    before = lines(page).first.locator(".id").inner_text()
    fill(live, [books.account("newer", time.monotonic_ns())])
    page.locator("#held", has_text="1 new request").wait_for()
    assert lines(page).first.locator(".id").inner_text() == before
    page.locator("#held").press("Enter")  # the pointer stays: when it leaves the table, that alone shows what is new
    assert lines(page).first.locator(".id").inner_text() == "newer"


def test_time_that_stands_still_is_hatched(live, visit):
    """Of two stages in one colour the hatched one is the stall."""
    page = visit(live.url)
    drawn = """kind => { const i = document.createElement("i"); i.className = "ink " + kind;
        document.body.append(i); return getComputedStyle(i).backgroundImage; }"""
    for kind in ("stage-prefill_stall", "stage-decode_stall", "stage-recompute", "cause-not_told"):
        assert "gradient" in page.evaluate(drawn, kind), kind
    for kind in ("stage-decode", "cause-upstream_slots"):
        assert page.evaluate(drawn, kind) == "none", kind


def test_two_thousand_requests_are_a_handful_of_elements(live, visit):
    fill(live, books.accounts(1000))
    page = visit(live.url)
    lines(page).first.wait_for()
    assert page.locator("#grid").get_attribute("aria-rowcount") == "1001"
    assert page.locator("#grid-lines .line").count() < 60
    page.focus("#grid")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    assert lines(page).last.locator(".id").inner_text() == "r0"
    fill(live, books.accounts(1000, seconds=1, seed=2))
    page.locator("#held", has_text="1,000 new requests").wait_for()
    assert page.locator("#grid-lines .line").count() < 60


def test_sorting_and_filters(live, visit):
    fill(live, [*books.accounts(20), books.account("bad", time.monotonic_ns(), error="no such thing")])
    page = visit(live.url)
    page.get_by_role("button", name="Total").click()
    totals = page.locator("#grid-lines .line:visible .total").all_inner_texts()
    assert totals == sorted(totals, key=lambda text: -float(text.split()[0]) * {"ms": 1, "s": 1000}[text.split()[1]])
    page.select_option("#filter", "failed")
    assert [line.locator(".id").inner_text() for line in lines(page).all()] == ["bad"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_lights(live, visit, scheme):
    fill(live, books.accounts(5))
    page = visit(live.url, color_scheme=scheme)
    lines(page).first.wait_for()
    assert page.evaluate(WORST_CONTRAST) >= 4.5
    page.select_option("#theme", "dark" if scheme == "light" else "light")
    assert page.evaluate(WORST_CONTRAST) >= 4.5


WORST_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (channels) => channels.slice(0, 3)
    .map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let worst = 21;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.matches(":disabled")) continue;
    const style = getComputedStyle(element);
    const front = rgb(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(front), luminance(behind(element))].sort((x, y) => y - x);
    worst = Math.min(worst, (a + 0.05) / (b + 0.05));
  }
  return worst;
}"""


def test_texts_of_requests_stay_texts(live, visit):
    now_ns = time.monotonic_ns()
    fill(live, [books.account(EVIL, now_ns), books.account("refused", now_ns, error=f"no model {EVIL!r}")])
    page = visit(live.url)
    lines(page).nth(1).wait_for()
    assert EVIL in [line.locator(".id").inner_text() for line in lines(page).all()]
    lines(page).filter(has_text="refused").first.click()
    page.locator("#detail .trouble", has_text="bad").wait_for()  # the code: books keep no word of a request
    page.keyboard.press("Escape")
    lines(page).filter(has_text="<img").click()
    page.locator("#detail-title", has_text=EVIL).wait_for()
    page.locator("#detail .waterfall").wait_for()
    assert page.locator("img[src=x]").count() == 0
    assert "owned" not in page.title()


INSERT_SCRIPT = """() => {
  const script = document.createElement("script");
  script.textContent = "document.title = 'owned'";
  document.body.append(script);
}"""


def test_what_is_written_into_it_as_html_cannot_run(live, visit):
    """The policy is a second wall: even a page that inserted HTML would not run its scripts."""
    page = visit(live.url, expected=("Content Security Policy", "img", "404"))
    page.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", EVIL)
    page.evaluate(INSERT_SCRIPT)
    page.wait_for_timeout(200)
    assert "owned" not in page.title()


def test_asks_for_a_key_and_keeps_it_for_the_tab(launch, visit):
    live = launch(config={"api_key": ("secret",)})
    fill(live, books.accounts(3))
    page = visit(live.url, expected=("401",))
    page.locator("#key-dialog").wait_for()
    page.fill("#key-input", "wrong")
    with page.expect_response(lambda response: response.status == 401):
        page.keyboard.press("Enter")
    page.locator("#key-dialog").wait_for()
    page.fill("#key-input", "secret")
    page.keyboard.press("Enter")
    lines(page).first.wait_for()
    page.reload()
    lines(page).first.wait_for()
    assert page.evaluate("Object.values(localStorage).join()").find("secret") == -1


def test_nothing_moves_sideways_on_a_narrow_screen(live, visit):
    fill(live, books.accounts(20, seconds=20), books.steps(100, ("r18", "r19")))
    page = visit(live.url, viewport={"width": 360, "height": 740})
    lines(page).first.click()
    page.locator("#detail .waterfall").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.getElementById('detail').scrollWidth") <= 360


WATCH_SHIFTS = """() => {
  window.shift = 0;
  const watch = (list) => list.getEntries().forEach((entry) => (window.shift += entry.value));
  new PerformanceObserver(watch).observe({type: "layout-shift"});
}"""


def test_layout_stays_where_it_is_while_news_come(live, visit):
    page = visit(live.url)
    page.locator("#state-word", has_text="live").wait_for()
    page.locator("#findings-note", has_text="from the latest").wait_for()
    page.wait_for_timeout(300)
    page.evaluate(WATCH_SHIFTS)
    fill(live, books.accounts(60, seconds=50), books.steps(500, ("r58", "r59")))
    for i in range(2):
        fill(live, books.accounts(20, seconds=2, seed=10 + i))
        page.wait_for_timeout(1100)
    assert page.evaluate("window.shift") < 0.01


def test_every_control_is_reached_by_tab(live, visit):
    fill(live, books.accounts(5))
    page = visit(live.url)
    lines(page).first.wait_for()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "(() => { const a = document.activeElement; return [a.id || a.name || a.className || a.tagName,"
            " getComputedStyle(a).outlineStyle]; })()"
        )
        reached.add(focused[0])
        assert focused[0] == "BODY" or focused[1] != "none", focused
    assert {"theme", "span", "filter", "by-time", "grid", "chart", "play-prompt", "max_tokens", "play-send"} <= reached


def test_findings_name_the_illness_and_lead_to_its_requests(live, visit):
    fill(live, books.accounts(60, seconds=60), books.steps(400, tuple(f"r{i}" for i in range(50, 60))))
    page = visit(live.url)
    told = page.evaluate("fetch('dashboard/findings').then((answer) => answer.json())")["spent"]
    largest = f"{round(told[0]['share'] * 100)} % {told[0]['owner']}"
    page.locator("#time-went", has_text=f"Where the requests' time went: {largest}").wait_for()
    finding = page.locator("#findings details:has(.claim):has(button)").first
    finding.locator("summary").click()
    assert "Refuted by" in finding.inner_text()
    request = finding.locator("button").first
    name = request.inner_text()
    request.click()
    page.locator("#detail-title", has_text=name).wait_for()
    page.locator("#detail .more code", has_text=f"splittime explain {name} --url {live.url}").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == name


# ---- when the server is not well


def test_says_that_the_engine_is_not_ready_and_recovers(live, visit):
    page = visit(live.url)
    live.call(live.engine.die)
    page.locator("#banner", has_text="not ready").wait_for()
    live.engine.is_ready = True
    page.locator("#banner").wait_for(state="hidden")
    assert page.locator("#state-word").inner_text() == "live"


def test_says_that_the_server_is_gone(live, visit):
    fill(live, books.accounts(4))
    page = visit(live.url, expected=("ERR_CONNECTION",))
    lines(page).first.wait_for()
    live.stop()
    page.locator("#banner", has_text="does not answer").wait_for()
    assert lines(page).count() == 4


def legend(page, chart: int) -> list[str]:
    return page.locator("#charts figure").nth(chart).locator(".legend li").all_inner_texts()


def test_figures_of_steps_are_of_the_latest_second_of_which_all_is_known(live, visit):
    """A step that runs has told nothing yet: of its seconds nothing is known, which is not zero."""
    shift_ns = 3 * 10**9
    ended = [
        msgspec.structs.replace(step, begin_ns=step.begin_ns - shift_ns, end_ns=step.end_ns - shift_ns)
        for step in books.steps(400, ("r1", "r2"))
    ]
    fill(live, [], ended)
    idle = live.engine.stats()
    live.engine.stats = lambda: msgspec.structs.replace(idle, num_running=2)
    page = visit(live.url)
    when = page.locator("#charts figure").nth(4).locator(".when", has_text="s ago")
    when.wait_for()
    assert int(when.inner_text().split()[0]) >= 4
    shares = [int(words.split()[-2]) for words in legend(page, 4)]
    assert sum(shares) == pytest.approx(100, abs=3)
    assert all(int(words.split()[-1].replace(",", "")) > 0 for words in legend(page, 3))
    assert [page.locator("#charts figure").nth(i).locator("rect.veil").count() for i in range(6)] == [0, 0, 0, 1, 1, 1]
    live.engine.stats = lambda: idle
    page.locator("#charts figure").nth(4).locator(".when").wait_for(state="hidden")
    assert page.locator("#charts rect.veil").count() == 0


@pytest.fixture
def overloaded(live):
    live.engine.paused = True
    threads = [live.events_later("/v1/completions", {"prompt": "x", "max_tokens": 2}) for _ in range(3)]
    until(lambda: len(live.engine.waiting) == 3)
    yield live
    live.engine.paused = False
    for thread in threads:
        thread.join()


def test_those_who_wait_are_drawn_by_what_they_wait_for(overloaded, visit):
    page = visit(overloaded.url)
    page.locator("#charts figure").first.locator(".legend li", has_text=re.compile("batch slots *3")).wait_for()
    told = legend(page, 0)
    assert not any("waiting" in words for words in told), told


def test_who_is_open_is_told_where_nobody_has_ended(overloaded, visit):
    page = visit(overloaded.url)
    page.locator("#tiles .tile", has_text="First token").locator(
        ".note", has_text=re.compile(r"^none ended in 60 s · 3 still without, for up to \d")
    ).wait_for()
    page.locator("#charts text", has_text="none ended in this time, 3 open").first.wait_for()
    page.locator("#findings").scroll_into_view_if_needed()
    page.locator("#findings .empty", has_text="3 requests are open, of which 3 wait: 3 for batch slots").wait_for()


def test_an_empty_page_has_no_large_empty_boxes_and_nothing_changes_its_place(live, visit):
    page = visit(live.url)
    page.locator("#findings .empty", has_text="Nobody has asked yet").wait_for()
    assert page.locator("#findings .abstained").count() == 0
    assert page.locator("#grid").bounding_box()["height"] < 100
    assert page.locator("#play-account").is_hidden()
    sections = "[...document.querySelectorAll('main > section')].map((s) => s.id || s.querySelector('h2').id)"
    before = page.evaluate(sections)
    fill(live, books.accounts(2, seconds=2))
    lines(page).first.wait_for()
    assert page.locator("#grid").bounding_box()["height"] > 400
    page.reload()
    lines(page).first.wait_for()
    assert page.evaluate(sections) == before


def test_of_few_requests_the_longest_is_told_and_of_many_a_percentile(live, visit):
    fill(live, books.accounts(99, seconds=50))
    page = visit(live.url)
    notes = page.locator("#tiles .tile", has_text="Per token").locator(".note")
    page.locator("#tiles .note", has_text=re.compile(r"^longest .* · 99 in 60 s$")).first.wait_for()
    fill(live, [books.account("hundredth", time.monotonic_ns())])
    page.locator("#tiles .note", has_text=re.compile(r"^p99 .* · 100 in 60 s$")).first.wait_for()
    assert notes.inner_text().startswith("p99")


def test_the_page_of_a_model_that_encodes_shows_nothing_that_it_has_not(launch, visit):
    live = launch(model={"pooling": Pooling(is_all=True)})
    fill(live, books.accounts(5, seconds=5))
    page = visit(live.url)
    lines(page).first.wait_for()
    seen = page.locator("#tiles h3, #charts h3, #grid-head .cell").filter(visible=True).all_inner_texts()
    assert seen == [
        *("Running", "Waiting", "Prompt tokens/s", "Answer p50"),
        *("Requests by stage or cause of waiting", "Tokens computed per second", "The engine's time", "Time to answer"),
        *("Ended", "Request", "End", "Prompt", "Total", "Time by stage"),
    ]
    assert "5 in 60 s" in page.locator("#tiles .tile", has_text="Answer p50").inner_text()
    assert "decode" not in page.locator("#colours").inner_text()
    assert [words.split()[0] for words in legend(page, 3)] == ["prefill"]
    widths = page.locator("#grid-head .cell:visible").evaluate_all("cells => cells.map((cell) => cell.offsetWidth)")
    assert min(widths) > 40
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_time_without_a_processor_has_its_piece_and_its_colour(live, visit):
    steps = [msgspec.structs.replace(s, cpu_wait_ns=7 * s.length_ns // 10) for s in books.steps(100, ("one",))]
    fill(live, [books.account("one", steps[-1].end_ns)], steps)
    page = visit(live.url)
    bar = lines(page).first.locator(".bar")
    piece = bar.locator(".stage-cpu_wait")
    piece.wait_for()
    assert piece.bounding_box()["width"] / bar.bounding_box()["width"] == pytest.approx(0.7, abs=0.02)
    ink = "element => getComputedStyle(element).backgroundColor"
    swatch = page.locator("#colours li", has_text="cpu wait").locator("i")
    assert piece.evaluate(ink) == swatch.evaluate(ink) != bar.locator(".cause-batch_slots").evaluate(ink)
    assert "cpu wait" in bar.get_attribute("title")


def test_ticks_of_an_axis_are_told_apart(live, visit):
    page = visit(live.url)
    told = "import('/dashboard/static/format.js').then((m) => [0, 0.05, 0.5, 1, 1.5, 2, 50, 1500].map(m.tickNumber))"
    assert page.evaluate(told) == ["0", "0.05", "0.5", "1", "1.5", "2", "50", "1,500"]


def test_an_axis_of_few_requests_names_halves(live, visit):
    """Two requests at once: its ticks are 0, 1 and 2 or halves of these, and none is there twice."""
    fill(live, books.accounts(2, seconds=5))
    page = visit(live.url)
    lines(page).first.wait_for()
    axis = page.locator("#charts figure").first.locator("text.tick.end").all_text_contents()[:-1]
    assert (axis[0], float(axis[-1]) >= 1, len(axis) > 2) == ("0", True, True)
    assert len(set(axis)) == len(axis)


def test_how_it_started_on_one_axis(live, visit):
    server = Process(
        name="server", started_ns=0, ready_ns=4 * 10**9, start=(("import", 0, 10**9), ("wait", 10**9, 4 * 10**9))
    )
    engine = Process(name="engine", started_ns=10**9, ready_ns=3 * 10**9, start=((EVIL, 10**9, 3 * 10**9),))
    live.engine.facts = lambda: ServerFacts(version="1", model="m", max_model_len=9, processes=(engine,))
    live.service._start, live.service.started_ns, live.service._ready_ns = server.start, 0, server.ready_ns
    page = visit(live.url)
    page.click("#start summary")
    page.locator("#start .bar").nth(1).wait_for()
    assert "import 1.00 s, wait 3.00 s" in page.locator("#start-parts").inner_text()
    whole, part = (
        page.locator("#start .bar").nth(1).bounding_box(),
        page.locator("#start .bar").nth(1).locator("i").bounding_box(),
    )
    assert abs((part["x"] - whole["x"]) / whole["width"] - 0.25) < 0.01
    assert abs(part["width"] / whole["width"] - 0.5) < 0.01
    assert page.title() != "owned"
