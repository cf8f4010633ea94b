"""`gateway rehearse`: another config replayed over a ledger, from a shell and on made-up accounts."""

import json
import tomllib

import msgspec
import pytest

import forked
from splittime.gateway.config_file import config_of
from splittime.gateway.routing.policy import RoutePolicy
from splittime.gateway.routing.rehearse import features_of, rehearse
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.attempts import Attempt, RouteDecision
from splittime.ledger.stages import Stage

from .conftest import gateway_of, upstream
from .test_routing import BASE, rule

S = 10**9
ASKED = Attempt(upstream="a", request_id="x", considered=(), begin_ns=0, end_ns=0)


def tenant(name: str, **limits) -> str:
    told = {"name": name, "operator": name == "ops", "sha256": ("1" if name == "ops" else "2") * 64, **limits}
    return "[[tenant]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


def config(text: str):
    return config_of(tomllib.loads(text))


def account(number: int, begin_s: float, end_s: float, policy: str = "", tokens: int = 0, **more) -> ClosedAccount:
    begin_ns, end_ns = int(begin_s * S), int(end_s * S)
    routing = RouteDecision(policy=policy, asked_model="big", model="big", prompt_tokens=100)
    told = {"model": "big", "endpoint": "chat", "tenant": "", "finish_reason": "stop", "routing": routing, **more}
    return ClosedAccount(
        request_id=f"r{number}",
        group_id=f"g{number}",
        started_at_unix_ns=begin_ns,
        start_ns=begin_ns,
        end_ns=end_ns,
        intervals=(StageInterval(Stage.RECEIVE, None, begin_ns, end_ns),),
        output_tokens=tokens,
        **{"attempts": (ASKED,), **told},
    )


def test_a_config_beside_itself_differs_in_nothing_and_makes_its_decisions_again():
    old = config(BASE)
    accounts = [account(number, number, number + 1, RoutePolicy(old).version) for number in range(5)]
    found = rehearse(accounts, old, old)
    assert (found.requests, found.reproduced, found.strange, found.differences) == (5, 5, 0, ())
    forged = msgspec.structs.replace(accounts[0].routing, model="small")
    found = rehearse([msgspec.structs.replace(accounts[0], routing=forged)], old, old)
    assert (found.reproduced, found.strange) == (0, 1)


def test_a_new_rule_moves_what_it_matches():
    accounts = [account(number, number, number + 1) for number in range(5)]
    new = config(BASE + rule("r", max_prompt_tokens=100, model="small", upstreams=["b"]))
    (moved,) = rehearse(accounts, config(BASE), new).differences
    assert (moved.old, moved.new, moved.requests, moved.examples) == ("big", "small at b", 5, ("r0", "r1", "r2"))
    gone = config(upstream("b", "http://127.0.0.1:2", "small"))
    (refused,) = rehearse(accounts, config(BASE), gone).differences
    assert (refused.new, refused.requests) == ("refused: model_not_found", 5)


@pytest.mark.parametrize(
    ("limits", "reason", "refused"),
    [
        ({"max_open_requests": 2}, "max_open_requests", ["r2"]),  # r0 has left when r3 comes
        ({"requests_per_minute": 3}, "requests_per_minute", ["r3"]),
        ({"tokens_per_minute": 60}, "tokens_per_minute", ["r3"]),  # r0 used 100
        ({"max_open_requests": 3}, "", []),
    ],
)
def test_limits_are_replayed_in_the_ledgers_time(limits, reason, refused):
    spans = ((0.0, 2.5, 100), (1.0, 9.0, 0), (2.0, 9.0, 0), (2.5, 3.0, 0))
    accounts = [account(n, *span[:2], tokens=span[2], tenant="t") for n, span in enumerate(spans)]
    old, new = config(BASE + tenant("ops") + tenant("t")), config(BASE + tenant("ops") + tenant("t", **limits))
    differences = rehearse(reversed(accounts), old, new).differences
    assert [one.new for one in differences] == [f"refused: {reason}"] * bool(refused)
    assert [name for one in differences for name in one.examples] == refused


def test_what_no_upstream_answered_is_not_charged():
    """A hit of the cache tells the tokens of the answer that was kept."""
    accounts = [account(n, n, n + 0.5, tokens=100, tenant="t", attempts=() if n else (ASKED,)) for n in range(4)]
    limited = config(BASE + tenant("ops") + tenant("t", tokens_per_minute=150))
    assert rehearse(accounts, limited, limited).new == {"big": 4}
    charged = [msgspec.structs.replace(one, attempts=(ASKED,)) for one in accounts]
    assert rehearse(charged, limited, limited).new == {"big": 2, "refused: tokens_per_minute": 2}


def test_budgets_are_replayed_by_the_ledgers_dates():
    day_s = 86_400.0
    begins_s = (0.0, 10.0, 20.0, day_s - 1, day_s + 2, day_s + 20, 32 * day_s)
    accounts = [account(n, begin_s, begin_s + 2, tokens=100, tenant="t") for n, begin_s in enumerate(begins_s)]
    old = config(BASE + tenant("ops") + tenant("t"))
    for limits, refused in (({"tokens_per_day": 200}, ["r2", "r3"]), ({"tokens_per_month": 300}, ["r3", "r4", "r5"])):
        new = config('budget_file = "not-made.sqlite"\n' + BASE + tenant("ops") + tenant("t", **limits))
        (found,) = rehearse(accounts, old, new).differences
        assert (found.new, list(found.examples)) == (f"refused: {next(iter(limits))}", refused)


def test_what_the_ledger_cannot_tell_is_said():
    headless = account(0, 0, 1, routing=None, tenant="gone")
    new = config(BASE + tenant("ops") + rule("r", headers={"x-class": "*"}, model="small"))
    found = rehearse([headless, account(1, 1, 2, tenant="ops")], config(BASE + tenant("ops")), new)
    assert (found.not_read, found.unknown_headers) == (1, ("x-class",))
    assert found.new == {"refused: no such tenant": 1, "big": 1}
    with pytest.raises(ValueError, match="no decision"):
        features_of(headless)


def test_from_a_shell_over_what_a_gateway_wrote(hostile, tmp_path):
    text = 'ledger_file = "gateway.sqlite"\n' + upstream("one", hostile.url("fine"), "m", "n")
    with gateway_of(tmp_path, text) as gateway:
        for number in range(3):
            assert gateway.ask("m" if number else "n")[0] == 200
    (tmp_path / "new.toml").write_text("port = 0\n" + text + rule("r", models=["m"], model="n"))
    command = ["gateway", "rehearse", "new.toml", "--config", "gateway.toml", "--ledger", "gateway.sqlite"]
    done = forked.run([*command, "--json"], tmp_path, check=True)
    told = json.loads(done.stdout)
    assert (told["requests"], told["reproduced"], told["strange"]) == (3, 3, 0)
    assert [(one["old"], one["new"], one["requests"]) for one in told["differences"]] == [("m", "n", 2)]
    done = forked.run(command, tmp_path, check=True)
    assert "3 requests, 1 of them treated alike" in done.stderr
    assert "for example" in done.stdout
