"""One run, one set of figures: the table, the JSON and the page print the same ones, and the counts add up."""

import html
import io
import re

import client_runs as runs
import msgspec
from hypothesis import Phase as Looking
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from splittime.bench.book.records import Ending, Phase
from splittime.bench.book.requests import is_good
from splittime.bench.book.slo import parse_slo
from splittime.bench.report import as_json
from splittime.bench.report.html import render_html
from splittime.bench.report.table import ROWS, STATISTICS, ms, percent, render
from splittime.present.tables import COLUMNS

SLO = parse_slo("ttft=1s,e2e=2s,goodput=95%")
AS_FOUND = (Looking.explicit, Looking.generate)  # a run of many requests is slow to make smaller
many_outcomes = st.lists(runs.outcomes(), min_size=1, max_size=25, unique_by=lambda one: one.index)


def table_of(run) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=COLUMNS, color_system=None).print(render(run))
    return out.getvalue().splitlines()


def words_of(page: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", page)).split())


@settings(max_examples=30, phases=AS_FOUND)
@given(many_outcomes)
def test_counts_add_up_and_goodput_is_over_what_was_intended(outcomes):
    run = runs.run(outcomes, slo=SLO)
    found = msgspec.json.decode(msgspec.json.encode(as_json(run)))["summaries"][0]
    measured = [one for one in outcomes if one.phase is Phase.MEASURED]
    cancelled = sum(one.ending is Ending.CANCELLED for one in measured)
    complete = sum(one.ending is Ending.COMPLETE for one in measured)
    assert sum(found["endings"].values()) == found["intended"] == len(measured)
    assert found["counted"] == len(measured) - cancelled == complete + found["errors"]
    if found["counted"]:
        good = found["goodput"]
        assert good["intended"] == found["counted"]
        limits = {name: limit for name, limit in SLO.items() if name in ("ttft", "e2e")}
        assert good["good"] == sum(is_good(one, limits) for one in measured if one.ending is not Ending.CANCELLED)
        assert good["share"]["value"] == good["good"] / good["intended"]
        assert found["error_rate"] == found["errors"] / found["counted"]


@settings(max_examples=15, phases=AS_FOUND)
@given(many_outcomes)
def test_table_json_and_page_print_the_same_figures(outcomes):
    run = runs.run(outcomes, slo=SLO)
    lines, page = table_of(run), words_of(render_html(run))
    found = msgspec.json.decode(msgspec.json.encode(as_json(run)))["summaries"][0]
    said = " ".join(" ".join(lines).split())
    assert f"{found['intended']:,} intended" in said
    if found["goodput"]:
        assert f"({found['goodput']['good']:,} of {found['goodput']['intended']:,} intended)" in said
    if found["errors"]:
        assert f"{percent(found['error_rate'])} errors" in said
    for name, title in ROWS:
        figure = found["figures"].get(name)
        if figure is None or (name == "token_gap" and figure == found["figures"].get("chunk_gap")):
            continue
        line = next(line for line in lines if line.startswith(f"{title} "))
        values = [figure["mean"], *(figure["percentiles"][one] for one in STATISTICS)]
        printed = [ms(one["value"]) for one in values] + [ms(figure["max"])]
        assert line.removeprefix(title).split() == printed
        assert all(text in page for text in printed), name
