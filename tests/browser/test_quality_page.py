"""The page of `splittime quality` in headless Chromium, from disk and offline: it reads in both lights, on any screen,
its plots' labels can be told apart, and nothing that came with a model or a text runs. Its console must stay empty."""

from dataclasses import replace

import pytest
from tables import Bytes, Table, drawn_texts, random_logits, silent

from splittime.lab.quality.margins import Margins
from splittime.lab.quality.questions import ChoiceQuestion
from splittime.lab.quality.report import render_html
from splittime.lab.quality.run import Gate, Tasks

from .test_page import WORST_CONTRAST

LOGITS = random_logits()
EVIL = "</script><img src=x onerror=document.title='owned'>"
CHOICES = [ChoiceQuestion(f"What is {n}?", ("one", "two", "three", "four"), n % 4) for n in range(12)]
UNREADABLE = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const labels = [...plot.querySelectorAll(".x, .y")].map((one) => [one.textContent, one.getBoundingClientRect()]);
  const outside = labels.filter(([, box]) => box.left < 0 || box.right > innerWidth || !box.width);
  const covered = labels.filter(([, one], place) => labels.slice(0, place).some(([, other]) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1
    && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 1));
  return [...outside, ...covered].map(([words]) => words);
})"""
"""Labels of axes that lie beyond the screen or on each other."""


def report(noise: float, name: str = "candidate"):
    """With everything that a page can have: texts at two lengths, decoded tokens, questions, a needle."""
    texts = drawn_texts(LOGITS, 24, 330)
    documents = [replace(texts[0], name=name), *texts[1:]]
    tasks = Tasks(documents, (64, 0), 4000, choices={f"{name}.csv": CHOICES}, with_needle=True)
    candidate = Table(LOGITS + random_logits(9, noise), name=name)
    return Gate(Table(LOGITS, name="base"), candidate, Bytes(), Margins(), silent).run(tasks)


@pytest.fixture(scope="module")
def failed():
    return render_html(report(1.0))


@pytest.fixture
def show(visit, tmp_path):
    def open_page(html, **options):
        (tmp_path / "quality.html").write_text(html)
        return visit((tmp_path / "quality.html").as_uri(), offline=True, **options)

    return open_page


@pytest.mark.parametrize(("noise", "verdict"), [(0.0, "INCONCLUSIVE"), (1.0, "FAIL")])
def test_the_verdict_comes_first(show, noise, verdict):
    page = show(render_html(report(noise)))
    assert page.title().startswith(verdict)
    assert verdict in page.locator("body").inner_text()[:200]


def test_nothing_of_a_model_or_a_text_runs(show):
    page = show(render_html(report(1.0, name=EVIL)))
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 0
    assert EVIL in page.locator("body").inner_text()
    assert "owned" not in page.title().replace(EVIL, "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_lights(show, failed, scheme):
    assert show(failed, color_scheme=scheme).evaluate(WORST_CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_moves_sideways_and_labels_can_be_read(show, failed, width):
    page = show(failed, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot .x span").count() >= 16
    assert page.evaluate(UNREADABLE) == []
