"""Writes what in this folder is made from the code: Prometheus' rules with their tests, and Grafana's dashboards.

python -m deploy.generate            write the files
python -m deploy.generate --check    exit with 1 and their names if any is out of date
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from deploy.alerts import SERVER_ALERTS, Alert
from deploy.dashboards import dashboards
from deploy.gateway_alerts import GATEWAY_ALERTS
from deploy.slo_alerts import SLO_ALERTS, recordings

FOLDER = Path(__file__).parent
NOTICE = "# Made by deploy/generate.py from the alerts in this folder's Python files; change them there.\n"
INTERVAL = "1m"

GROUPS = {"slo": SLO_ALERTS, "server": SERVER_ALERTS, "gateway": GATEWAY_ALERTS}
ALERTS = [alert for alerts in GROUPS.values() for alert in alerts]
TESTED_EVERY = {"slo": "5m"}  # windows of days: each minute of them would take promtool a minute and a half


def rules(group: str) -> dict[str, Any]:
    """Returns a group's alerts; before those of the SLOs the ratios that they watch."""
    alerts = {"name": f"splittime-{group}", "rules": [_rule(alert) for alert in GROUPS[group]]}
    if group != "slo":
        return {"groups": [alerts]}
    kept = [{"record": rule.name, "expr": rule.expr} for rule in recordings()]
    return {"groups": [{"name": "splittime-ratios", "interval": INTERVAL, "rules": kept}, alerts]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.wait,
        "labels": _labels(alert),
        "annotations": _annotations(alert),
    }


def _labels(alert: Alert) -> dict[str, str]:
    return {"severity": alert.severity, "owner": alert.owner}


def _annotations(alert: Alert) -> dict[str, str]:
    return {"summary": alert.summary, "runbook": f"docs/runbooks/{alert.runbook}.md"}


def rule_tests(group: str) -> dict[str, Any]:
    """Returns for promtool, of each alert: that it fires on its series, and that it is silent on the others."""
    tests = [_test(alert, series) for alert in GROUPS[group] for series in (alert.fires, alert.silent)]
    every = TESTED_EVERY.get(group, INTERVAL)
    return {"rule_files": [f"{group}.rules.yml"], "evaluation_interval": every, "tests": tests}


def _test(alert: Alert, series: dict[str, str]) -> dict[str, Any]:
    fired = {"exp_labels": {**_labels(alert), **alert.told}, "exp_annotations": _annotations(alert)}
    is_firing = series is alert.fires
    asked = {"eval_time": alert.at, "alertname": alert.name, "exp_alerts": [fired] if is_firing else []}
    return {
        "name": f"{alert.name} {'fires' if is_firing else 'is silent'}",
        "interval": INTERVAL,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [asked],
    }


def _yaml(content: Any) -> str:
    return NOTICE + yaml.safe_dump(content, sort_keys=False, width=116, allow_unicode=True)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def files() -> dict[str, str]:
    """Returns the text of each file by its path below this folder."""
    made = {f"prometheus/{group}.rules.yml": _yaml(rules(group)) for group in GROUPS}
    made |= {f"prometheus/{group}.test.yml": _yaml(rule_tests(group)) for group in GROUPS}
    return made | {f"grafana/{name}": _json(content) for name, content in dashboards().items()}


def outdated(folder: Path = FOLDER) -> list[str]:
    """Returns the files that are not what the code makes."""
    return [name for name, text in files().items() if _read(folder / name) != text]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def main(arguments: Iterable[str]) -> int:
    if "--check" not in arguments:
        for name, text in files().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return 0
    stale = outdated()
    for name in stale:
        print(f"deploy/{name} is out of date: run python -m deploy.generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
