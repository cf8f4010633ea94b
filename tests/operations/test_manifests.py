"""The manifests: what they name is there, and a server that ends has the time that its drain takes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from deploy.generate import ALERTS, FOLDER
from splittime.cli.main import app
from splittime.drive.head_start import TERMINATED
from splittime.gateway.app import PATHS as GATEWAY_PATHS
from splittime.gateway.config_file import read_config, secrets_of
from splittime.gateway.service import CUT_S as GATEWAY_CUT_S
from splittime.gateway.service import LAST_WORDS_S as GATEWAY_LAST_WORDS_S
from splittime.server.app import PATHS
from splittime.server.config import ServerConfig
from splittime.server.service import CUT_S, ENGINE_ANSWER_S, LAST_WORDS_S
from splittime.web.connection import LEAVE_S
from splittime.web.serving import SHUTDOWN_S

from .promql import labels_of, named

AT_GATES = "splittime-gateway"
AFTER_GRACE_S = ENGINE_ANSWER_S + LAST_WORDS_S + CUT_S + SHUTDOWN_S
KUBERNETES, SYSTEMD, COMPOSE = FOLDER / "kubernetes", FOLDER / "systemd", FOLDER / "compose"
SETTINGS_OF_ENVIRONMENT = {f"SPLITTIME_{name.upper()}" for name in ServerConfig.__struct_fields__}
BUILT = ("base", "keda", "gateway", "monitors")


def loaded(path):
    return yaml.safe_load(path.read_text())


def deployment(name="base"):
    return loaded(KUBERNETES / name / "deployment.yaml")["spec"]


def server(name="base"):
    (container,) = deployment(name)["template"]["spec"]["containers"]
    return container


def require_flags(words):
    """Each word that begins a flag is one of the command's."""
    command = typer.main.get_command(app).commands[words[0]]
    known = {flag for option in command.params for flag in option.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def grace_s(words):
    return float(re.search(r"--grace-s[= ](\d+)", " ".join(words))[1])


def test_a_pod_that_ends_has_the_time_that_its_drain_takes():
    pause_s = float(server()["lifecycle"]["preStop"]["exec"]["command"][1])
    spec = deployment()["template"]["spec"]
    assert pause_s > 0
    assert spec["terminationGracePeriodSeconds"] >= pause_s + grace_s(server()["args"]) + AFTER_GRACE_S


def test_a_gateways_pod_fits_the_servers_and_its_config():
    """Its keys are in its environment, its upstream is the servers' Service, and it has the time for its drain."""
    config, spec = read_config(KUBERNETES / "gateway" / "gateway.toml"), deployment("gateway")["template"]["spec"]
    service, _ = built("base")["Service", "splittime"], require_flags(server("gateway")["args"])
    assert [one.url for one in config.upstream] == [f"http://{service['metadata']['name']}:{port_of(service)}"]
    assert server("gateway")["ports"] == [{"name": "http", "containerPort": config.port}]
    assert loaded(KUBERNETES / "gateway" / "service.yaml")["spec"]["ports"][0]["port"] == config.port
    secrets_of(config, {one["name"]: f"key-of-{one['name'].lower()}" for one in server("gateway")["env"]})
    pause_s = float(server("gateway")["lifecycle"]["preStop"]["exec"]["command"][1])
    after_s = config.grace_s + GATEWAY_LAST_WORDS_S + GATEWAY_CUT_S + SHUTDOWN_S
    assert spec["terminationGracePeriodSeconds"] >= pause_s + after_s
    mounts = {mount["name"]: mount["mountPath"] for mount in server("gateway")["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert f"--config={mounts['config']}/gateway.toml" in server("gateway")["args"]
    assert config.ledger_file.startswith(mounts["ledger"])


def port_of(service) -> int:
    return service["spec"]["ports"][0]["port"]


def test_who_scrapes_the_pods_finds_them_under_the_jobs_that_are_asked_for():
    """By the operator's monitors and by Prometheus' own config: each job is the name of pods, and has the key."""
    names = {name: built(folder)["Deployment", name] for folder, name in (("base", "splittime"), ("gateway", AT_GATES))}
    monitors = [manifest for (kind, _), manifest in built("monitors").items() if kind == "PodMonitor"]
    scraped = loaded(FOLDER / "prometheus" / "kubernetes.yml")["scrape_configs"]
    assert {one["metadata"]["name"] for one in monitors} == {one["job_name"] for one in scraped} == set(names)
    for name, made in names.items():
        labels = made["spec"]["template"]["metadata"]["labels"]
        (container,) = made["spec"]["template"]["spec"]["containers"]
        (monitor,) = [one["spec"] for one in monitors if one["metadata"]["name"] == name]
        assert labels[monitor["jobLabel"]] == name
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert endpoint["port"] in [port["name"] for port in container["ports"]]
        secret = {"name": endpoint["authorization"]["credentials"]["name"], "key": "metrics-key"}
        given = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
        assert given["SPLITTIME_METRICS_API_KEY"] == secret == endpoint["authorization"]["credentials"]
        (job,) = [one for one in scraped if one["job_name"] == name]
        kept = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
        assert [rule["regex"] for rule in kept] == [f"{labels['app.kubernetes.io/name']};{endpoint['port']}"]
        assert job["authorization"]["credentials_file"].endswith("/metrics-key")
    triggers = loaded(KUBERNETES / "keda" / "scaled-object.yaml")["spec"]["triggers"]
    exprs = [*(trigger["metadata"]["query"] for trigger in triggers), *(alert.expr for alert in ALERTS)]
    jobs = {value for expr in exprs for label, value in named(expr).values if label == "job"}
    assert jobs == set(names)


def test_the_guide_says_how_long_an_end_takes():
    guide = (FOLDER.parent / "docs" / "guides" / "operate.md").read_text()
    assert guide.count(f"{AFTER_GRACE_S:g} seconds") == 2
    assert f"{AFTER_GRACE_S:g} seconds, or {AFTER_GRACE_S + LEAVE_S:g} for a gateway with a shared port" in guide
    assert f"`--grace-s` ({ServerConfig().grace_s:g})" in guide


def test_probes_ask_for_what_they_mean():
    paths = {name: server()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert {("GET", path) for path in paths.values()} <= {route[:2] for route in PATHS}
    paths = {name: server("gateway")[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness")}
    assert paths == {"readiness": "/ready", "liveness": "/health"}
    assert {("GET", path) for path in paths.values()} <= {route[:2] for route in GATEWAY_PATHS}


def test_the_pods_command_is_one():
    require_flags(server()["args"])
    assert {variable["name"] for variable in server()["env"]} <= SETTINGS_OF_ENVIRONMENT
    mounted = {mount["name"] for mount in server()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in deployment()["template"]["spec"]["volumes"]}
    assert any(mount["mountPath"] in " ".join(server()["args"]) for mount in server()["volumeMounts"])


def test_the_image_has_the_user_that_the_pod_runs_as():
    uid = deployment()["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--uid {uid} splittime" in (FOLDER.parent / "Dockerfile").read_text()


def test_scaling_asks_for_what_runs_and_what_waits():
    triggers = loaded(KUBERNETES / "keda" / "scaled-object.yaml")["spec"]["triggers"]
    asked = [named(trigger["metadata"]["query"]) for trigger in triggers]
    for each in asked:
        assert each.labels <= set().union(*map(labels_of, each.metrics))
    assert asked[0].metrics >= {"splittime_blocks_used", "splittime_waiting_prompt_tokens"}
    assert asked[1].metrics == {"splittime_requests_running", "splittime_requests_waiting"}


def test_each_file_of_a_kustomization_is_there_and_used():
    for name in BUILT:
        folder = KUBERNETES / name
        listed = set(loaded(folder / "kustomization.yaml")["resources"])
        generated = loaded(folder / "kustomization.yaml").get("configMapGenerator", [])
        assert all((folder / file).is_file() for one in generated for file in one["files"])
        assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} == {
            resource for resource in listed if not resource.startswith("..")
        }
        assert all((folder / resource).exists() for resource in listed)


def built(name):
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize(("folder", "name"), [("base", "splittime"), ("gateway", AT_GATES)])
def test_kustomize_builds_what_selects_its_pods(folder, name):
    made = built(folder)
    pods = made["Deployment", name]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    for selector in (
        pods["spec"]["selector"]["matchLabels"],
        made["Service", name]["spec"]["selector"],
        made["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector


def test_what_is_scaled_has_no_number_of_its_own():
    base, scaled = built("base"), built("keda")
    assert set(scaled) == {*base, ("ScaledObject", "splittime")}
    assert "replicas" not in scaled["Deployment", "splittime"]["spec"]  # the autoscaler's
    assert ("Deployment", scaled["ScaledObject", "splittime"]["spec"]["scaleTargetRef"]["name"]) in base


@pytest.mark.parametrize("folder", ["base", "gateway"])
def test_the_schemas_of_kubernetes_take_the_manifests(folder):
    validate = pytest.importorskip("kubernetes_validate", reason="not installed: pip install kubernetes-validate")
    for kind, manifest in built(folder).items():
        validate.validate(manifest, "1.32", strict=True), kind


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("*.service")), ids=lambda path: path.name)
def test_a_unit_starts_a_command_and_waits_for_its_drain(unit, tmp_path):
    text = unit.read_text()
    words = re.search(r"^ExecStart=/opt/splittime/bin/splittime (.*)", text, re.MULTILINE)[1].split()
    require_flags(words)
    stop_s = float(re.search(r"^TimeoutStopSec=(\d+)", text, re.MULTILINE)[1])
    if words[0] == "serve":
        assert stop_s >= grace_s(words) + AFTER_GRACE_S
        assert grace_s(words) > 0
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    for name in (path.name for path in SYSTEMD.glob("*.service")):
        command = (SYSTEMD / name).read_text().replace("/opt/splittime/bin/splittime", shutil.which("true"))
        (tmp_path / name).write_text(command)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60
    )
    mine = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, mine) == (0, [])


def test_a_server_that_is_stopped_while_it_starts_has_not_failed():
    assert f"\nSuccessExitStatus={TERMINATED}\n" in (SYSTEMD / "splittime.service").read_text()


def test_the_services_of_the_compose_file_fit_together():
    services = loaded(COMPOSE / "compose.yaml")["services"]
    config = read_config(COMPOSE / "gateway.toml")
    hosts = {upstream.url.removeprefix("http://").partition(":")[0] for upstream in config.upstream}
    assert hosts | {"gateway"} == set(services)
    for service in services.values():
        assert service["restart"] == "unless-stopped"  # also after a reboot, and one that ended well
        require_flags(service["command"])
        assert (COMPOSE / service.get("build", {"context": "."})["context"]).is_dir()
    for host in hosts:
        words = services[host]["command"]
        assert f"http://{host}:{words[words.index('--port') + 1]}" in {upstream.url for upstream in config.upstream}
        assert float(services[host]["stop_grace_period"].rstrip("s")) >= grace_s(words) + AFTER_GRACE_S
    gateway = services["gateway"]
    assert gateway["ports"] == [f"127.0.0.1:8100:{config.port}"]
    assert set(gateway["depends_on"]) == hosts
    after_s = config.grace_s + GATEWAY_LAST_WORDS_S + GATEWAY_CUT_S + SHUTDOWN_S
    assert float(gateway["stop_grace_period"].rstrip("s")) >= after_s
    keys = dict.fromkeys(gateway["environment"], "")
    secrets_of(config, {name: f"key-of-{name.lower()}" for name in keys})  # raises for a key that nobody gives


def test_it_is_said_what_was_not_run():
    text = " ".join((FOLDER / "README.md").read_text().split())
    assert "were not run" in text
    for folder in (path.name for path in Path(FOLDER).iterdir() if path.is_dir() and not path.name.startswith("_")):
        assert f"{folder}/" in text, f"deploy/README.md says nothing of {folder}/"


def test_dashboards_are_json_as_grafana_reads_it():
    for path in (FOLDER / "grafana").glob("*.json"):
        assert json.loads(path.read_text())["panels"]
