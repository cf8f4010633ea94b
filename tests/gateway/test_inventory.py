"""`splittime gateway inventory`: what it lists, what it says is not set, and its drawing."""

import json
import subprocess
import tomllib
import xml.etree.ElementTree as ET

import pytest

import forked
from splittime.core.errors import ConfigError
from splittime.core.trace_context import HopKind
from splittime.gateway.config import GatewayConfig, UpstreamConfig
from splittime.gateway.inventory import inventory_of
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.attempts import Attempt
from splittime.ledger.hops import Hop
from splittime.ledger.stages import Stage
from splittime.present.flow import Box, flow_page

from .conftest import upstream

MS = 1_000_000
NEAR = upstream("a", "http://127.0.0.1:8000", "m")


def account(number: int, first_byte_ms: float, name: str = "a", error: str = "") -> ClosedAccount:
    account = Account(f"{number}", 0, Stage.RECEIVE)
    account.close(100 * MS)
    attempt = Attempt(
        upstream=name,
        request_id="x",
        considered=(),
        begin_ns=0,
        end_ns=90 * MS,
        first_byte_ns=None if error else int(first_byte_ms * MS),
        error=error,
    )
    return ClosedAccount(
        request_id=f"{number}",
        group_id="g",
        model="m",
        endpoint="chat",
        started_at_unix_ns=0,
        start_ns=0,
        end_ns=100 * MS,
        intervals=tuple(account.intervals()),
        finish_reason="stop",
        attempts=(attempt,),
    )


def of(text: str, *rest):
    return inventory_of(tomllib.loads(text), *rest)


def test_what_is_not_set_is_named_and_what_is_set_is_not():
    found = of(NEAR)
    (one,) = found.upstreams
    assert one.not_set == ("owner", "connect_s", "first_byte_s", "between_s", "total_s", "max_in_flight")
    assert found.gateway.not_set == ("owner", "tenant", "ledger_file", "queue.max_wait_s")
    defaults = {name: getattr(UpstreamConfig(name="a", url="x", models=()), name) for name in one.not_set[1:]}
    text = 'owner = "x"\nledger_file = "l"\n[queue]\nmax_wait_s = 30\n[[tenant]]\nname = "t"\noperator = true\n'
    text += f'sha256 = "{"ab" * 32}"\n' + upstream("a", "http://127.0.0.1:8000", "m", owner="me", **defaults)
    found = of(text)  # all at their defaults, and chosen
    assert found.gateway.not_set == found.upstreams[0].not_set == ()
    assert (found.gateway.owner, found.upstreams[0].owner) == ("x", "me")
    assert found.upstreams[0].timeouts_s == {name: defaults[name] for name in defaults if name != "max_in_flight"}
    assert (found.upstreams[0].cap, found.upstreams[0].attempts) == (
        64,
        GatewayConfig(upstream=()).retries.max_attempts,
    )


def test_a_shared_port_stands_beside_the_gateways_own():
    gateway = of("port = 9\nshared_port = 8\n" + NEAR).gateway
    assert (gateway.address, gateway.shared_address) == ("127.0.0.1:9", "127.0.0.1:8")
    assert of("port = 9\n" + NEAR).gateway.shared_address == ""


def test_an_upstream_that_is_far_needs_a_key_and_a_lock():
    far = of(upstream("a", "http://10.0.0.7:8000", "m")).upstreams[0]
    assert "key_env" in far.not_set
    assert any("unencrypted" in note for note in far.notes)
    keyed = of(upstream("a", "https://10.0.0.7:8000", "m", key_env="NOWHERE_SET")).upstreams[0]
    assert "key_env" not in keyed.not_set
    assert keyed.notes == ()


@pytest.mark.parametrize(
    ("first_byte_ms", "count", "words"),
    [(50, 100, "1200 times the p99"), (50, 99, None), (40_000, 1, "less than twice"), (20_000, 100, None)],
)
def test_a_time_out_is_held_against_what_was_seen(first_byte_ms, count, words):
    (one,) = of(NEAR, [account(number, first_byte_ms) for number in range(count)]).upstreams
    assert one.seen.count == count
    assert one.seen.first_byte_ms["p99"] == first_byte_ms
    assert (words is None and one.notes == ()) or any(words in note for note in one.notes)


def test_failures_are_counted_and_others_attempts_are_not():
    accounts = [account(1, 50), account(2, 50, error="upstream_died"), account(3, 50, name="b")]
    found = of(NEAR, accounts)
    assert (found.upstreams[0].seen.count, found.upstreams[0].seen.failed) == (2, 1)
    assert found.gateway.seen.count == 3


@pytest.mark.parametrize("ending", ["cancelled", "tied_lost", "unsure", "logprobs_refused"])
def test_an_attempt_that_somebody_ended_has_not_failed(ending):
    (one,) = of(NEAR, [account(1, 50, error=ending)]).upstreams
    assert (one.seen.count, one.seen.failed) == (1, 0)


def test_hops_of_clients_are_listed_by_name_the_frequent_ones_first():
    plain = {"trace_id": "ab" * 16, "clock": "c", "begin_ns": 0}
    hops = [
        Hop(span_id=f"{i}", name=name, kind=HopKind.TOOL, end_ns=end_ms * MS, error=error, **plain)
        for i, (name, end_ms, error) in enumerate((("a", 1, ""), ("b", 2, ""), ("b", 4, "TimeoutError")))
    ]
    client = of(NEAR, (), hops).client
    assert [(one.name, one.kind, one.seen.count, one.seen.failed) for one in client] == [
        ("b", "tool", 2, 1),
        ("a", "tool", 1, 0),
    ]
    assert client[0].seen.lasted_ms == {"p50": 2.0, "p99": 4.0}


def test_a_bad_config_is_refused_as_the_gateway_refuses_it():
    with pytest.raises(ConfigError, match="no such key"):
        of(NEAR + "max_in_flihgt = 3\n")


def test_the_drawing_has_each_box_and_obeys_nobody():
    columns = [[], [Box("gateway", [("</svg><script>", True)])], [Box("a"), Box("b" * 60)]]
    page = flow_page("Hops", columns, 'of "x"')
    assert "<script" not in page
    drawing = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    kinds = [child.tag for child in drawing]
    assert (kinds.count("rect"), kinds.count("path")) == (3, 2)
    heads = ["".join(child.itertext()) for child in drawing if child.get("class") == "head"]
    assert heads[:2] == ["gateway", "a"]
    assert heads[2].endswith("b" * 60)
    _, _, width, height = map(int, drawing.get("viewBox").split())
    for box in (child for child in drawing if child.tag == "rect"):
        assert int(box.get("x")) + int(box.get("width")) <= width
        assert int(box.get("y")) + int(box.get("height")) <= height


def run(folder, *flags: str) -> subprocess.CompletedProcess:
    return forked.run(["gateway", "inventory", "--config", "gateway.toml", *flags], folder)


def test_the_command(tmp_path):
    far = upstream("a", "http://10.0.0.7:8000", "m", key_env="NOWHERE_SET")
    (tmp_path / "gateway.toml").write_text("shared_port = 7999\n" + far)
    done = run(tmp_path, "--json", "--out", "hops.html")
    hops = json.loads(done.stdout)["hops"]
    assert [(hop["name"], hop["kind"]) for hop in hops] == [("gateway", "gateway"), ("a", "upstream")]
    drawn = (tmp_path / "hops.html").read_text()
    assert "not set: owner" in drawn
    assert "shared 127.0.0.1:7999" in drawn
    done = run(tmp_path)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "http://10.0.0.7:8000" in done.stdout
    assert "127.0.0.1:7999" in done.stdout
    assert "NOWHERE_SET" not in done.stdout
    for flags, words in (
        (("--ledger", "none.sqlite"), "no ledger file"),
        (("--out", "no/where.html"), "cannot write"),
    ):
        done = run(tmp_path, *flags)
        assert done.returncode != 0
        assert words in done.stderr
    (tmp_path / "gateway.toml").write_text("[cache]\n")
    assert run(tmp_path).returncode == 2
