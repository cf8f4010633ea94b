"""Lint: what is found in a prompt, what is not, what of it is kept, and what a running gateway tells."""

import json
import time

import pytest
from typer.testing import CliRunner

from patience import until
from splittime.cli.main import app
from splittime.gateway import lint as lint_module
from splittime.gateway.config import LintConfig
from splittime.gateway.forwarded import forwarded
from splittime.gateway.lint import PromptLint, PromptText, changing_prefix, faults_of, texts_of
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import Attempt, NestedStage
from splittime.ledger.stages import Stage

from .conftest import gateway_of, upstream

ROWS = [{"id": number, "name": "somebody", "note": None, "tags": []} for number in range(8)]


def chat(*messages: tuple[str, str]) -> bytes:
    told = [{"role": role, "content": text} for role, text in messages]
    return json.dumps({"model": "fine", "messages": told}).encode()


def found(text: str) -> dict[str, int]:
    return dict(faults_of([PromptText("user", text)]))


def test_white_space_is_what_compact_json_would_save():
    rows = [{"id": number, "name": "somebody"} for number in range(8)]
    indented, compact = json.dumps(rows, indent=2), json.dumps(rows, separators=(",", ":"))
    assert found(f"Here: {indented} and so on") == {"json_whitespace": len(indented) - len(compact)}
    assert found(f"Here: {compact} and so on") == {}


def test_keys_that_are_empty_everywhere_cost_what_they_take():
    compact = json.dumps(ROWS, separators=(",", ":"))
    assert found(compact) == {"json_empty_keys": len(ROWS) * len(',"note":null,"tags":[]')}
    used = [*ROWS[:-1], {**ROWS[-1], "note": "seen", "tags": [1]}]
    assert found(json.dumps(used, separators=(",", ":"))) == {}


def test_long_lines_count_from_the_second_on():
    line = "All answers are to be given in plain words, and none is longer than needed."
    assert found(f"{line}\nshort\nshort\n{line}\n{line}") == {"repeated_lines": 2 * (len(line) + 1)}


@pytest.mark.parametrize("value", ["2026-11-27T07:00", "1764200000", "123e4567-e89b-12d3-a456-426614174000"])
def test_a_time_or_an_id_in_the_system_message_is_seen(value):
    prefix = changing_prefix(texts_of(chat(("system", f"Now: {value}. Be kind."), ("user", "x"))))
    assert prefix == ("Now: ", f"{value}. Be kind.")
    assert (
        changing_prefix(
            texts_of(
                chat(
                    ("user", f"Now: {value}"),
                )
            )
        )
        is None
    )


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages": 3}', b'{"messages": [3, {"content": [{"text": 5}]}]}'])
def test_what_is_no_prompt_has_no_texts(body):
    assert texts_of(body) == []


def test_hostile_brackets_end():
    begin_s = time.process_time()
    assert found("[" * 200_000) == {}
    assert found('{"a":' * 40_000) == {}
    assert time.process_time() - begin_s < 20


def looked_at(lint: PromptLint, *bodies: bytes) -> dict:
    for body in bodies:
        lint.note(forwarded("/v1/chat/completions", body, 16))
    lint._thread.shutdown(wait=True)
    return lint.report([])


def test_a_prefix_is_a_fault_where_it_changes_alone():
    same, other = (chat(("system", f"Now: 2026-11-27 0{hour}:00. {'x' * 35}")) for hour in (7, 8))
    faults = looked_at(PromptLint(LintConfig(share=1.0)), same, same)["models"]["fine"]["faults"]
    assert faults == {}
    faults = looked_at(PromptLint(LintConfig(share=1.0)), same, other, other)["models"]["fine"]["faults"]
    assert faults == {"changing_prefix": {"requests": 1, "tokens": (16 + 2 + 35) // 4, "prefill_ms": None}}


def test_a_token_costs_what_upstreams_told_of_those_they_computed():
    assert lint_module.prefill_ns_per_token([]) is None
    told = account(nested=(NestedStage(Stage.QUEUE, None, 0, 900), NestedStage(Stage.PREFILL, None, 900, 4900)))
    assert lint_module.prefill_ns_per_token([told, account(nested=())]) == 4000 / (50 - 10)


def account(nested: tuple[NestedStage, ...]) -> ClosedAccount:
    attempt = Attempt(upstream="a", request_id="try", considered=(), begin_ns=0, end_ns=5000, nested=nested)
    return ClosedAccount(
        request_id="mine",
        group_id="chatcmpl-try",
        model="m",
        endpoint="chat",
        started_at_unix_ns=0,
        start_ns=0,
        end_ns=5000,
        intervals=(),
        finish_reason="stop",
        prompt_tokens=50,
        cached_tokens=10,
        attempts=(attempt,),
    )


def test_json_behind_a_large_one_is_seen():
    small = json.dumps({"name": "somebody", "address": "somewhere", "number": 1}, indent=8)
    alone = found(small)["json_whitespace"]
    assert found(json.dumps([[]] * 500, separators=(",", ":")) + small) == {"json_whitespace": alone}


def test_no_text_is_kept_and_what_has_no_room_is_skipped(monkeypatch):
    monkeypatch.setattr(lint_module, "MAX_PREFIXES", 2)
    lint = PromptLint(LintConfig(share=1.0))
    lint.note(forwarded("/v1/chat/completions", chat(("user", "x" * lint_module.MAX_BODY_BYTES)), 16))
    bodies = [chat(("system", f"secret {number} 2026-11-27 07:00")) for number in range(5)]
    report = looked_at(lint, *bodies)
    assert (report["skipped"], len(lint._prefixes)) == (1, 2)
    assert "secret" not in str(vars(lint))


def test_a_running_gateway_tells(hostile, tmp_path):
    text = upstream("fine", hostile.url("fine")) + "[lint]\nshare = 1.0\n"
    with gateway_of(tmp_path, text) as gateway:
        indented = json.dumps(ROWS, indent=2)
        gateway.ask("fine", messages=[{"role": "user", "content": indented}])
        until(lambda: gateway.get("/lint")["models"])
        told = CliRunner().invoke(app, ["gateway", "lint", "--url", gateway.url])
        assert told.exit_code == 0, told.output
        assert "white space within JSON: 1 requests" in told.output
        assert "somebody" not in told.output
        flags = ["--config", str(tmp_path / "gateway.toml"), "--url", gateway.url, "--json"]
        listed = CliRunner().invoke(app, ["gateway", "inventory", *flags])
        first, second = json.loads(listed.output)["hops"][0]["notes"]
        assert first.startswith("prompts of fine (1 looked at): white space within JSON: 1 requests, about ")
        assert "keys that are empty" in second


def test_it_is_off_without_a_table(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("fine", hostile.url("fine"))) as gateway:
        told = CliRunner().invoke(app, ["gateway", "lint", "--url", gateway.url])
        assert told.exit_code == 2
        assert "[lint]" in told.output
