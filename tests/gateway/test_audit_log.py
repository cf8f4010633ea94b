"""The audit log: whole lines, drops that are counted and told, and no secrets."""

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest

from patience import until
from splittime.core.errors import ConfigError
from splittime.gateway.audit import AuditLog, AuditRecord
from splittime.gateway.config import AuditConfig

from .conftest import gateway_of, upstream
from .test_limits import bearer
from .test_versions import KEYS, TENANTS, admin

AT = datetime(2026, 11, 27, tzinfo=UTC)


LINE = b'{"at":"2026-11-27T00:00:00Z","kind":"x"}\n'


def opened(path, **more) -> AuditLog:
    return AuditLog(AuditConfig(file=str(path), **more))


def kinds(path):
    return [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]


def dropped(path) -> int:
    return sum(json.loads(line).get("dropped", 0) for line in path.read_bytes().splitlines())


def test_it_goes_on_where_it_ended_and_cuts_a_line_that_was_not_finished(tmp_path):
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        log = opened(path)
        log.note("x", {})
        log.close()
    path.write_bytes(path.read_bytes() + b'{"at":"20')
    log = opened(path)
    log.close()
    assert kinds(path) == ["x", "x", "torn"]
    assert log.stats() == {"file": str(path), "lines": 1, "dropped": 0}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [b"{", b'{"at":', LINE[:-1], b'{"at":"' + b"x" * 100_000])
@pytest.mark.parametrize("count", [0, 2])
def test_a_torn_tail_is_cut_and_told_and_nothing_else_is(torn, count, tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(LINE * count + torn)
    log = opened(path)
    log.note("x", {})
    log.close()
    assert path.read_bytes().startswith(LINE * count)
    told = [json.loads(line) for line in path.read_bytes().splitlines()[count:]]
    assert [(one["kind"], one.get("bytes")) for one in told] == [("torn", len(torn)), ("x", None)]
    opened(path).close()
    assert len(kinds(path)) == count + 2  # nothing was torn


def test_a_file_with_a_chain_of_hashes_is_gone_on_with(tmp_path):
    """As they were written before decision 32."""
    path, chained = (
        tmp_path / "audit.jsonl",
        b'{"n":1,"prev":"00","at":"2026-11-27T00:00:00Z","kind":"request","hash":"ab"}\n',
    )
    path.write_bytes(chained)
    log = opened(path)
    log.note("x", {})
    log.close()
    assert path.read_bytes().startswith(chained)
    assert kinds(path) == ["request", "x"]


def test_a_file_that_is_no_log_or_is_written_by_another_is_left_as_it_is(tmp_path):
    path = tmp_path / "other"
    for text in (b"hello\n", b"hello", b"\x00" * 9, b'{"a": 1}', b'{"a": 1}\n', b"[1]\n"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="cannot go on"):
            opened(path)
        assert path.read_bytes() == text
    first = opened(tmp_path / "audit.jsonl")
    with pytest.raises(ConfigError, match="cannot go on"):
        opened(tmp_path / "audit.jsonl")
    first.close()


def test_what_the_queue_does_not_hold_is_dropped_counted_and_told(tmp_path):
    path, is_writing, may_go_on = tmp_path / "audit.jsonl", threading.Event(), threading.Event()
    log = opened(path, max_queue=2)

    def held():
        is_writing.set()
        may_go_on.wait(10)
        return {}

    log.put(AuditRecord(AT, "held", held))
    assert is_writing.wait(10)
    for _ in range(5):
        log.note("x", {})
    assert log.num_dropped == 3
    may_go_on.set()
    log.close()
    assert kinds(path) == ["held", "dropped", "x", "x"]
    assert (dropped(path), log.num_lines) == (3, 4)


def test_a_full_disk_drops_counts_and_tells_when_there_is_room_again(tmp_path):
    """In a process of its own, which may write no more than so many bytes to a file."""
    done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["40", "0", "3"], done.stderr
    assert kinds(tmp_path / "audit.jsonl") == ["first", "dropped", "last"]
    assert dropped(tmp_path / "audit.jsonl") == 40


FULL = """
import resource, time
from splittime.gateway.audit import AuditLog
from splittime.gateway.config import AuditConfig
log = AuditLog(AuditConfig(file="audit.jsonl"))
log.note("first", {})
while log.num_lines < 1: time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
for _ in range(40): log.note("lost", {"text": "x" * 300})
while log.num_dropped < 40: time.sleep(0.01)
lost = log.num_lines - 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.note("last", {})
log.close()
print(log.num_dropped, lost, log.num_lines)
"""


def text_of(hostile, **more) -> str:
    audit = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
    one = upstream("one", hostile.url("fine"), "m", key_env="UP_KEY")
    return one + TENANTS + '[audit]\nfile = "audit.jsonl"\n' + audit


def ask(gateway, key: str, **body):
    messages = [{"role": "user", "content": "the-prompt"}]
    return gateway.ask("m", {**bearer(key), "x-request-id": f"r-{key}", "x-secret": "told-nobody"}, messages=messages)[
        0
    ]


def test_who_asked_for_what_is_in_the_file_and_no_prompt_and_no_key(hostile, tmp_path):
    keys = {**KEYS, "UP_KEY": "of-upstream"}
    with gateway_of(tmp_path, text_of(hostile), **keys) as gateway:
        assert ask(gateway, "of-a") == 200
        assert admin(gateway, toml="port = 0\n" + text_of(hostile) + "[queue]\nmax_requests = 9\n")[0] == 200
        assert ask(gateway, "of-b") == 200
        gateway.account("r-of-b", "of-ops")
        assert metric_of(gateway, "splittime_gateway_audit_drops_total") == 0
        until(lambda: kinds(tmp_path / "audit.jsonl").count("request") == 2)  # written behind the answers
        gateway.kill()
    with gateway_of(tmp_path, text_of(hostile), **keys) as gateway:
        assert ask(gateway, "of-c") == 200
    data = (tmp_path / "audit.jsonl").read_text()
    told = [json.loads(line) for line in data.splitlines()]
    requests = {one["tenant"]: one for one in told if one["kind"] == "request"}
    assert {name: one["config"][:2] for name, one in requests.items()} == {"a": "1:", "b": "2:", "c": "1:"}
    assert (requests["a"]["upstreams"], requests["a"]["finish_reason"]) == (["one"], "stop")
    changes = [(one["what"], one["by"]) for one in told if one["kind"] == "config"]
    assert changes == [("started", ""), ("applied", "ops"), ("started", "")]
    assert not [word for word in ("the-prompt", "told-nobody", "of-upstream", *KEYS.values()) if f'"{word}' in data]
    assert "the-prompt" not in data
    assert "told-nobody" not in data


def metric_of(gateway, name: str) -> float:
    from urllib.request import Request, urlopen

    asked = Request(gateway.url + "/metrics", headers=bearer("of-ops"))
    with urlopen(asked, timeout=10) as answer:
        text = answer.read().decode()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


def test_prompts_are_kept_where_the_config_says_so(hostile, tmp_path):
    with gateway_of(tmp_path, text_of(hostile, prompts=True), **KEYS, UP_KEY="of-upstream") as gateway:
        assert ask(gateway, "of-a") == 200
    data = (tmp_path / "audit.jsonl").read_text()
    (body,) = [told["body"] for told in map(json.loads, data.splitlines()) if told["kind"] == "request"]
    assert json.loads(body)["messages"][0]["content"] == "the-prompt"
    assert "told-nobody" not in data


def test_no_name_that_a_client_writes_makes_a_line_too_long_to_go_on_from(hostile, tmp_path):
    """Four bytes of a body are twelve of a line: 4 MB of them were a line that the next start refused."""
    text = text_of(hostile).replace("port = 0\n", "")
    with gateway_of(tmp_path, text, **KEYS, UP_KEY="of-upstream") as gateway:
        raw = json.dumps({"model": "\U0001f600" * 100_000, "prompt": "a"}, ensure_ascii=False).encode()
        assert gateway.ask("", bearer("of-a"), path="/v1/completions", raw=raw)[0] == 404
    told = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [len(one["model"]) for one in told if one["kind"] == "request"] == [256]
