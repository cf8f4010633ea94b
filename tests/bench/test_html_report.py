"""The HTML report: it shows what is in the run, runs nothing that is in it, fetches nothing, and stays small."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import books
import msgspec
import numpy as np
import pytest
from client_runs import MS, S, drawn_run, outcome, run
from hypothesis import given
from hypothesis import strategies as st

from splittime.bench.book.records import Arm, Ending, Phase, RunCheck, Sample
from splittime.bench.report.html import bucket_medians, in_flight, render_html, silences, write_html
from splittime.bench.report.html_books import SLOTS, pieces
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.present.plot import HEIGHT, WIDTH, Plot, Scale, duration, fitting

EVIL = "</script></style></title>'\"><img src=x onerror='document.title=1'><script>document.title='owned'</script>"
LATE = RunCheck(name="loop_lag", ok=False, value=30.0, limit=5.0, unit="ms", sentence="the loop was 30 ms late")


KEYS = st.sampled_from([("queue", None), ("prefill", None), ("decode", None)])


class Page(HTMLParser):
    """Elements by name, with their attributes, and the text that is shown."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text, self._inside = "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.text += " "
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        if not self._inside:
            self.text += data

    def named(self, name: str) -> list[dict]:
        return [attributes for tag, attributes in self.elements if tag == name]


def evil_run():
    """A run in which all that is text is an attack."""
    account = books.example("cmpl-r-0-0", num_tokens=3)
    server = Arm(
        url=EVIL,
        kind="splittime",
        model=EVIL,
        version=EVIL,
        accounts=(account,),
        facts=ServerFacts(version=EVIL, model=EVIL, max_model_len=1, settings={EVIL: EVIL}),
        notes=(EVIL,),
    )
    requests = [
        outcome(0, tags={EVIL: EVIL}),
        outcome(1, ending=Ending.REFUSED, status=400, error=EVIL, chunk_ns=(), chunk_tokens=None),
        outcome(2, request_id=EVIL, prompt_tokens=500),
    ]
    checks = (msgspec.structs.replace(LATE, name=EVIL, sentence=EVIL),)
    return run(
        requests, label=EVIL, stopped=EVIL, arms=(server,), checks=checks, settings={EVIL: EVIL}, slo={"ttft": 1.0}
    )


def both_books(count: int = 30):
    """Each request has its account."""
    at_ns = [i * 10 * MS for i in range(count)]
    requests = [outcome(i, intended_ns=ns, picked_up_ns=ns, sent_ns=ns + MS) for i, ns in enumerate(at_ns)]
    whole = [msgspec.structs.replace(o, **_answer(o.sent_ns)) for o in requests]
    accounts = tuple(books.example(f"cmpl-r-{i}-0", start_ns=10**12 + i) for i in range(count))
    server = Arm(url="http://127.0.0.1:8000", kind="splittime", round_trip_ns=(MS,), accounts=accounts)
    return run(whole, arms=(server,))


def _answer(sent_ns: int) -> dict:
    chunks = tuple(sent_ns + ms * MS for ms in (22, 27, 32, 37))
    return {"chunk_ns": chunks, "chunk_tokens": (1,) * 4, "end_ns": sent_ns + 40 * MS}


def test_nothing_in_a_run_becomes_markup():
    page = render_html(evil_run())
    found = Page(page)
    assert found.named("img") == []
    assert len(found.named("script")) == 2  # the requests of the one arm, and the page's own
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert "document.title='owned'</script>" in found.text
    data = page.split('class="requests">')[1].split("</script>")[0]
    assert json.loads(data)["id"][2] == EVIL
    assert "<" not in data


def test_fetches_nothing_and_runs_only_its_own_script():
    page = render_html(both_books())
    found = Page(page)
    assert not [attributes for _, attributes in found.elements if {"src", "href", "srcset"} & set(attributes)]
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    policy = next(meta["content"] for meta in found.named("meta") if "http-equiv" in meta)
    script = page.rsplit("<script>", 1)[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_void_comes_first():
    first = Page(render_html(run([outcome(0)], checks=(LATE,)))).text
    assert "VOID" in first.split("TTFT")[0]
    assert "The loop was 30 ms late. Allowed: 5 ms." in " ".join(first.split())
    assert "The client was at fault" not in Page(render_html(run([outcome(0)]))).text


def test_headings_tables_and_pictures_say_what_they_are():
    found = Page(render_html(both_books()))
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert max(levels) <= 3
    assert levels.count(1) == 1
    tables = len(found.named("table"))
    assert tables == len(found.named("caption"))
    pictures = [svg for svg in found.named("svg") if "aria-hidden" not in svg]
    assert len(pictures) >= 8
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 20 for svg in pictures)


def test_both_books_are_bars_and_their_parts_a_table():
    text = " ".join(Page(render_html(both_books())).text.split())
    assert "queue: kv blocks" in text
    assert "Not enough free KV cache blocks." in text
    assert "The two books differ by" in text
    assert "book is here: this server told no account" not in text
    assert "book is here: this server told no account" in Page(render_html(run([outcome(0)]))).text


def test_a_run_without_a_single_answer_is_a_page_too():
    nothing = {"ending": Ending.FAILED, "chunk_ns": (), "chunk_tokens": None, "end_ns": None}
    failed = [outcome(i, error="no route", **nothing) for i in range(3)]
    assert "no route" in Page(render_html(run(failed))).text
    assert "0 requests intended" in Page(render_html(run([]))).text


def test_two_servers_have_a_part_each():
    arms = (Arm(url="http://a", kind="vllm"), Arm(url="http://b", kind="unknown"))
    found = Page(render_html(run([outcome(0), outcome(1, arm=1)], arms=arms)))
    assert "Server A" in found.text
    assert "Server B" in found.text
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_servers_own_metrics_stand_beside_ours():
    name = "vllm:time_to_first_token_seconds"
    before, after = {f"{name}_sum": 0.0, f"{name}_count": 0.0}, {f"{name}_sum": 0.9, f"{name}_count": 10.0}
    server = Arm(url="http://a", kind="vllm", metrics_before=before, metrics_after=after)
    text = " ".join(Page(render_html(run([outcome(0)], arms=(server,)))).text.split())
    assert f"ttft 90.00 ms 50.00 ms {name}" in text


def test_the_same_run_gives_the_same_page():
    assert render_html(drawn_run(1)) == render_html(drawn_run(1))


def test_ten_thousand_requests_give_a_small_page():
    assert len(render_html(drawn_run(1, size=10_000))) < 3_000_000


def test_what_cannot_be_written_is_said(tmp_path):
    write_html(run([outcome(0)]), tmp_path / "new" / "r.html")
    assert (tmp_path / "new" / "r.html").read_text().startswith("<!doctype html>")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_html(run([outcome(0)]), tmp_path / "file" / "r.html")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new", "r.html"]


@given(st.lists(st.tuples(KEYS, st.integers(0, 10**7)), max_size=80), st.integers(1, 10**9))
def test_pieces_lie_end_to_end_and_lose_nothing(timed, more_ns):
    whole_ns = sum(ns for _, ns in timed)
    drawn = pieces(timed, whole_ns + more_ns)
    for before, after in pairwise(drawn):
        assert after.left >= before.left + before.width - 1e-6
    share = 100 * whole_ns / (whole_ns + more_ns)
    assert sum(piece.width for piece in drawn) <= share + 1e-6
    if len(timed) == 1 and share > 100 / SLOTS:
        assert sum(piece.width for piece in drawn) == pytest.approx(share)


@given(st.floats(1e-3, 1e12), st.floats(1.01, 1e6), st.booleans())
def test_ticks_lie_on_the_scale_and_are_read_apart(low, factor, is_log):
    scale = Scale(low if is_log else 0.0, low * factor, is_log)
    ticks = scale.ticks()
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in ticks)
    assert len(ticks) <= 12
    if not is_log:
        assert len({duration(tick) for tick in ticks}) == len(ticks)
    ends = [scale.x([scale.low, scale.high]).tolist(), scale.y([scale.low, scale.high]).tolist()]
    assert ends == [[0, WIDTH], [HEIGHT, 0]]


def test_wide_spreads_are_logarithmic_and_narrow_ones_from_zero():
    assert fitting([1 * MS, 2 * MS, 900 * MS] * 50).is_log
    narrow = fitting([50 * MS, 60 * MS])
    assert (narrow.low, narrow.is_log) == (0.0, False)


def test_a_freeze_is_a_silence_and_a_pause_of_one_is_not():
    """Two streams with a chunk each 10 ms; both stop for 2 s, later one alone stops as long."""
    frozen = [i * 10 * MS + (2 * S if i >= 50 else 0) for i in range(100)]
    alone = frozen[:80] + [at + 2 * S for at in frozen[80:]]
    streams = [outcome(0, chunk_ns=tuple(frozen)), outcome(1, chunk_ns=tuple(at + 5 * MS for at in alone))]
    others = outcome(2, chunk_ns=tuple(3 * S + i * 10 * MS for i in range(200)))
    assert silences([*streams, others]) == [(495 * MS, 2500 * MS)]
    assert silences([outcome(0, chunk_ns=(1,))]) == []


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=30))
def test_in_flight_is_the_most_at_any_instant_of_a_bin(spans):
    requests = [outcome(i, sent_ns=begin * MS, end_ns=(begin + length) * MS) for i, (begin, length) in enumerate(spans)]
    edges, most = in_flight(requests, 1.3)
    instants = np.arange(0, 1200) * MS
    counts = [sum(begin * MS <= at < (begin + length) * MS for begin, length in spans) for at in instants.tolist()]
    assert most.max() == max(counts)
    for at, count in zip(instants.tolist(), counts, strict=True):
        assert most[min(len(most) - 1, int(np.searchsorted(edges, at / 1e9, "right")) - 1)] >= count


def test_more_dots_than_a_screen_has_are_put_on_a_grid():
    plot = Plot(Scale(0, 1), Scale(0, 1), described="dots")
    values = np.random.default_rng(0).random((2, 60_000)) / 10
    plot.dots(*values, "response")
    plot.dots([0.5, np.nan], [np.nan, 0.5], "response")
    assert 1000 < plot.__html__().count("M") <= 151 * 32


def test_medians_of_buckets():
    lengths, values = np.array([10.0, 12, 16, 17, 200_000]), np.array([1.0, 2, 3, 4, 5])
    assert bucket_medians(lengths, values) == [(1, 16, 2.0), (17, 32, 4.0), (131073, 200_000, 5.0)]


def test_phases_and_samples_are_drawn():
    requests = [outcome(0, phase=Phase.WARM_UP), outcome(1, intended_ns=500 * MS), outcome(2, phase=Phase.COOL_DOWN)]
    samples = tuple(Sample(at_ns=i * MS, in_flight=1, waiting=2.0, running=3.0, kv_usage=0.5) for i in range(4))
    text = Page(render_html(run(requests, samples=samples, measured_from_ns=200 * MS))).text
    for words in ("warm-up", "measured", "waiting, by the server", "running, by the server", "KV cache in use"):
        assert words in text
