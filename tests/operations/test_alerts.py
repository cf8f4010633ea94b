"""The alert rules: each names what is exported, has an owner and a runbook, and fires on its own series alone."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from deploy.alerts import PAGE, TICKET
from deploy.generate import ALERTS, FOLDER, GROUPS, outdated
from deploy.slo_alerts import FIRST_TOKEN_S, recordings
from splittime.cli.main import app
from splittime.gateway.config import TenantConfig
from splittime.ledger.export.metrics import EDGES_NS

from .promql import OF_PROMETHEUS, TARGET_LABELS, exported, labels_of, named

ROOT = Path(__file__).parents[2]
PROMETHEUS = FOLDER / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks"
KEPT = {rule.name: TARGET_LABELS for rule in recordings()}
RULES = [*((alert.name, alert.expr) for alert in ALERTS), *((rule.name, rule.expr) for rule in recordings())]


def known_labels(name):
    return OF_PROMETHEUS.get(name) or KEPT.get(name) or labels_of(name)


@pytest.mark.parametrize(("name", "expr"), RULES, ids=[name for name, _ in RULES])
def test_a_rule_names_what_is_exported(name, expr):
    asked = named(expr)
    assert asked.metrics
    known = [known_labels(metric) for metric in asked.metrics]
    assert asked.labels <= set().union(*known)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_its_test_is_of_series_that_can_be(alert):
    for series in (*alert.fires, *alert.silent):
        asked = named(series)
        (metric,) = asked.metrics
        assert asked.labels == known_labels(metric), series


def test_the_names_are_told_apart():
    assert named('a:b_c{x=~"1|2"} > 0.5 and sum by (y, le) (rate(d_total[5m])) or e * 3') == (
        {"a:b_c", "d_total", "e"},
        {"x", "y", "le"},
        {("x", "1"), ("x", "2")},
    )
    assert exported("splittime_e2e_seconds") is None
    assert exported("splittime_e2e_seconds_bucket") is not None
    assert exported("splittime_steps_total_count") is None
    assert exported("splittime_nothing") is None


def test_values_of_labels_are_values_that_the_source_writes():
    source = "".join(path.read_text() for path in (ROOT / "src" / "splittime").rglob("*.py"))
    written = set(re.findall(r'"([a-z_]+)"', source))
    found = {(label, value) for _, expr in RULES for label, value in named(expr).values}
    assert {pair for pair in found if pair[0] not in ("job", "le") and pair[1] not in written} == set()


def test_the_first_tokens_bound_is_an_edge_of_the_histograms():
    edge_ns = round(FIRST_TOKEN_S * 1e9)
    assert edge_ns in EDGES_NS
    assert all(value == str(edge_ns / 1e9) for _, expr in RULES for label, value in named(expr).values if label == "le")


def test_a_key_over_a_limit_of_its_own_is_no_failure():
    limits = {name for name in TenantConfig.__struct_fields__ if name.startswith("max_") or "_per_" in name}
    failed = [rule.expr for rule in recordings() if "failed" in rule.name]
    left_out = [re.search(r'refusals_total\{reason!~"(.*?)"\}', expr) for expr in failed]
    assert [set(found[1].split("|")) for found in left_out] == [limits] * len(failed)
    assert len(failed) == 2 * 5
    assert not any(re.fullmatch(left_out[0][1], reason) for reason in ("draining", "queued_requests", "upstream_401"))


def test_each_alert_has_a_name_of_its_own_an_owner_a_severity_and_a_runbook():
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert alert.owner
        assert alert.severity in (PAGE, TICKET)
        assert alert.summary.endswith(".")
        assert alert.name in (RUNBOOKS / f"{alert.runbook}.md").read_text(), f"{alert.runbook}.md names {alert.name}"


def test_each_runbook_is_some_alerts_and_names_a_command():
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md") if path.stem != "index"}
    assert set(pages) == {alert.runbook for alert in ALERTS}
    assert [name for name, text in pages.items() if not re.search(r"^splittime \w+|^curl ", text, re.MULTILINE)] == []


def test_the_files_are_what_the_code_makes(tmp_path):
    assert outdated() == [], "run: python -m deploy.generate"
    assert "prometheus/slo.rules.yml" in outdated(tmp_path)


def test_the_configs_name_the_jobs_and_files_that_there_are():
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["rule_files"] == [f"{group}.rules.yml" for group in GROUPS]
    jobs = {value for _, expr in RULES for label, value in named(expr).values if label == "job"}
    assert jobs <= {one["job_name"] for one in config["scrape_configs"]}
    routes = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["route"]["routes"]
    assert [route["matchers"] for route in routes] == [[f'severity="{PAGE}"']]


def run(tool, *words):
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here: Debian has it in prometheus and prometheus-alertmanager")
    done = subprocess.run([tool, *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("group", [*filter("slo".__ne__, GROUPS), pytest.param("slo", marks=pytest.mark.sweep)])
def test_each_alert_fires_and_is_silent(group):
    run("promtool", "test", "rules", f"{group}.test.yml")


def test_prometheus_and_its_alertmanager_take_the_configs():
    run("promtool", "check", "rules", *(f"{group}.rules.yml" for group in GROUPS))
    run("amtool", "check-config", "alertmanager.yml")


def test_the_commands_of_the_guide_pass():
    """As they stand there, but for the rules' tests, each of which has a test of its own."""
    guide = (FOLDER.parent / "docs" / "guides" / "operate.md").read_text()
    (block,) = re.findall(r"```sh\n(promtool .*?)```", guide, re.DOTALL)
    commands = [line.replace("deploy/prometheus/", "").split() for line in block.splitlines()]
    assert {words[0] for words in commands} == {"promtool", "amtool"}
    for words in commands:
        assert (PROMETHEUS / words[-1]).is_file()
        if words[:2] != ["promtool", "test"]:
            run(*words)


def test_commands_of_the_runbooks_are_commands():
    root = typer.main.get_command(app)
    for path in RUNBOOKS.glob("*.md"):
        for line in re.findall(r"^splittime .*", path.read_text(), re.MULTILINE):
            command, words = root, shlex.split(line)[1:]
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
            assert command is not root, line
            assert {word for word in words if word.startswith("--")} <= known, line


def test_findings_and_codes_of_the_runbooks_exist():
    source = "".join(path.read_text() for path in (ROOT / "src" / "splittime").rglob("*.py"))
    for path in RUNBOOKS.glob("*.md"):
        for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", path.read_text()):
            assert name in source, f"{path.name}: {name}"
