"""The dashboards: a panel for each metric, and no query that names another."""

import json
import shutil
import subprocess

import pytest

from deploy.dashboards import OTHER, dashboards
from splittime.gateway.metrics import GATEWAY_METRICS
from splittime.ledger.export.metrics import METRICS

from .promql import exported, labels_of, named

BOARDS = dashboards()
SHOWN = {"server.json": METRICS, "gateway.json": GATEWAY_METRICS}


def queries(board):
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("name", SHOWN)
def test_each_metric_has_one_panel(name):
    panels = [panel for panel in BOARDS[name]["panels"] if panel["type"] != "row"]
    shown = [
        {exported(metric).name for t in panel["targets"] for metric in named(t["expr"]).metrics} for panel in panels
    ]
    assert all(len(metrics) == 1 for metrics in shown)
    assert sorted(metric for metrics in shown for metric in metrics) == sorted(spec.name for spec in SHOWN[name])


@pytest.mark.parametrize("name", SHOWN)
def test_each_query_names_what_is_exported(name):
    for expr in queries(BOARDS[name]):
        asked = named(expr)
        (metric,) = asked.metrics
        assert asked.labels <= labels_of(metric), expr
    for variable in BOARDS[name]["templating"]["list"][1:]:
        asked = variable["query"].removeprefix("label_values(").partition(",")[0]
        assert all(exported(metric) for metric in named(asked).metrics)


@pytest.mark.parametrize("name", SHOWN)
def test_panels_do_not_lie_on_each_other(name):
    taken, panels = set(), BOARDS[name]["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert taken.isdisjoint(cells)
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"][-1] == OTHER


def test_promtool_reads_each_query(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: Debian has it in prometheus")
    asked = [expr for board in BOARDS.values() for expr in queries(board)]
    rules = [
        {"record": f"q{number}", "expr": expr.replace("$__rate_interval", "5m")} for number, expr in enumerate(asked)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(asked)} rules found" in done.stdout
