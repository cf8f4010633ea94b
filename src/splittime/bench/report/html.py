"""A run as one HTML page: everything in it, nothing fetched. It opens from disk, on paper and in a mail ten years on.

`write_html` is the door. The order is that of a reader's questions: may I believe it, how fast was it, when and how
was it slow, for whom, why, what does the server say, how was it measured. Plots are drawn by `present.plot` as SVG,
with no charting library: plotly alone is 4.8 MB, in a report that is 0.3 MB with all its requests, and would have to
run before anything is seen. The page's own script (`assets/report.js`) only adds zoom and read-out.

Colours of stages are the dashboard's own file, read as it is: one stage has one colour everywhere. All that comes from
a run goes through the template's escaping, and a content policy lets no other script run and nothing be loaded.
`tests/bench/test_html_report.py` and `tests/browser/test_report.py` check it.
"""

import base64
import hashlib
import string
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import orjson
from markupsafe import Markup

from splittime.bench.book import requests as one
from splittime.bench.book.definitions import DEFINITIONS
from splittime.bench.book.figures import prompt_tokens, summary
from splittime.bench.book.records import Outcome, Run
from splittime.bench.book.slo import judge
from splittime.bench.join import join
from splittime.bench.report import html_words as words
from splittime.bench.report.html_books import largest_part, left_out, part_lines, slowest, time_went
from splittime.bench.report.html_spread import histograms, ttft_by_prompt
from splittime.bench.report.html_time import TimePlots
from splittime.bench.server_view import server_view
from splittime.core.whole_file import write_whole
from splittime.present.plot import plot_styles
from splittime.wire.dialects import DIALECTS

MOST_NAMED = 20_000  # requests whose dots say who they are; beyond, that alone would be megabytes


def write_html(run: Run, path: Path) -> None:
    """Write whole or not at all. Raises `ConfigError` where it cannot be written."""
    write_whole(path, render_html(run).encode("utf-8", "replace"), param="html")


def render_html(run: Run) -> str:
    """The page. The same run gives the same bytes."""
    package = files("splittime")
    assets = {name: package.joinpath("bench/report/assets", name).read_text("utf-8") for name in _ASSETS}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    script = assets["report.js"]
    return environment.from_string(assets["report.html"]).render(
        run=run,
        words=words,
        arms=[_arm(run, arm) for arm in range(len(run.arms))],
        failed_checks=[check for check in run.checks if check.voids and not check.ok],
        definitions=DEFINITIONS,
        styles=Markup(plot_styles() + assets["report.css"]),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


_ASSETS = ("report.html", "report.css", "report.js")


def _arm(run: Run, arm: int) -> dict[str, Any]:
    """All that the page says of one server."""
    found, joined = summary(run, arm), join(run, arm)
    server = run.arms[arm]
    view = server_view(run, arm)
    outcomes = [outcome for outcome in run.outcomes if outcome.arm == arm]
    return {
        "key": string.ascii_uppercase[arm],
        "found": found,
        "server": server,
        "slo": judge(found, run.slo) if run.slo else [],
        "time": TimePlots(run, arm),
        "histograms": histograms(run, found),
        "ttft_by_prompt": ttft_by_prompt(run, arm),
        "time_went": time_went(joined),
        "parts": part_lines(joined),
        "largest_part": largest_part(joined),
        "left_out": left_out(joined),
        "slowest": slowest(run, arm, joined),
        "has_accounts": bool(joined.books),
        "view": view if server.kind in DIALECTS and server.metrics_after else None,
        "notes": view.notes,
        "data": _embedded(outcomes),
    }


def _embedded(outcomes: Sequence[Outcome]) -> Markup:
    """What the read-out of a dot says, by columns. `<` is written so that no text can end the script element."""
    named = outcomes if len(outcomes) <= MOST_NAMED else []
    columns = {
        "index": [o.index for o in named],
        "id": [o.request_id for o in named],
        "t": [round(o.intended_ns / 1e9, 4) for o in named],
        "prompt": [prompt_tokens(o) for o in named],
        "output": [one.output_tokens(o) for o in named],
        "ttft": [one.response_ttft_ns(o) for o in named],
        "sttft": [one.service_ttft_ns(o) for o in named],
        "e2e": [one.response_ns(o) for o in named],
        "se2e": [one.service_ns(o) for o in named],
        "ending": [o.ending.value for o in named],
        "phase": [o.phase.value for o in named],
    }
    text = orjson.dumps(columns).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(text)
