"""What a config that comes over HTTP may point at, files that are none, and a key for metrics alone."""

import os
import tomllib
import urllib.error
import urllib.request

import pytest

from splittime.core.errors import ConfigError
from splittime.core.files import read_small
from splittime.gateway.config_file import check_reach, config_of, config_unread, read_config, secrets_of
from splittime.web.ports import check_certificate
from splittime.web.tenants import ApiKeys

from .conftest import gateway_of, upstream
from .test_limits import bearer
from .test_versions import KEYS, TENANTS, admin

GRADED = '[[difficulty]]\nmodel = "auto"\nsmall = "m"\nlarge = "m2"\n[difficulty.escalate]\nlabels = "own.jsonl"\n'
OWN = (
    '[metrics]\nkey_file = "metrics.key"\n'
    + upstream("one", "http://127.0.0.1:8001", "m", key_env="ONE")
    + upstream("two", "https://models.example/v1", "m2", key_file="two.key")
    + '[[tenant]]\nname = "ops"\nkey_env = "OPS"\noperator = true\n[[tenant]]\nname = "app"\nkey_file = "app.key"\n'
    + GRADED
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('models = ["m"]', 'models = ["m", "m3"]\nmax_in_flight = 3'),
        ('name = "one"', 'name = "another"'),
        ('https://models.example/v1"', 'https://models.example"'),  # one base URL, written in two ways
        ('key_env = "ONE"\n', ""),
        ('key_file = "app.key"', f'sha256 = "{"a" * 64}"'),
        ('[metrics]\nkey_file = "metrics.key"\n', ""),
        (GRADED, ""),
        ('labels = "own.jsonl"', "below = -1.0"),
        (OWN, OWN + upstream("third", "http://127.0.0.1:8003", "m3")),
    ],
)
def test_a_config_from_elsewhere_may_use_what_the_own_one_uses(old, new):
    check_reach(config_of(tomllib.loads(OWN)), config_of(tomllib.loads(OWN.replace(old, new, 1))))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('key_env = "ONE"', 'key_env = "HOME"', "upstream[0]"),
        ('key_env = "ONE"', 'key_file = "/etc/passwd"', "upstream[0]"),
        ('key_env = "ONE"', 'key_env = "OPS"', "upstream[0]"),  # a tenant's key is for no upstream
        ('key_env = "ONE"', 'key_file = "two.key"', "upstream[0]"),  # nor another upstream's
        ("http://127.0.0.1:8001", "http://127.0.0.1:8002", "upstream[0]"),
        ("http://127.0.0.1:8001", "http://evil.example:8001", "upstream[0]"),
        ("https://models.example", "http://models.example:443", "upstream[1]"),  # in the clear
        ('key_file = "two.key"', 'key_file = "./two.key"', "upstream[1]"),
        ('key_env = "OPS"', 'key_env = "HOME"', "tenant[0]"),
        ('key_file = "app.key"', 'key_env = "OPS"', "tenant[1]"),
        ('key_file = "app.key"', 'key_file = "/etc/passwd"', "tenant[1]"),
        ('"own.jsonl"', '"/etc/passwd"', "difficulty[0]"),
        ("own.jsonl", "/dev/zero", "difficulty[0]"),
        ("metrics.key", "/etc/passwd", "metrics"),
        ('key_file = "metrics.key"', 'key_env = "ONE"', "metrics"),
        (OWN, OWN + upstream("third", "http://127.0.0.1:8003", "m3", key_env="ONE"), "upstream[2]"),
    ],
)
def test_it_may_point_at_nothing_else_of_the_host(old, new, named):
    with pytest.raises(ConfigError) as error:
        check_reach(config_of(tomllib.loads(OWN)), config_of(tomllib.loads(OWN.replace(old, new, 1))))
    assert error.value.info.code == "needs_own_file"
    assert error.value.info.message.startswith(named)


def test_an_operators_key_has_no_file_of_the_host_sent_anywhere(hostile, tmp_path):
    """Nor is it told whether there is such a file; a pipe is not opened. The file of the host may name all of them."""
    (tmp_path / "secret").write_text("of-the-host\n")
    os.mkfifo(tmp_path / "pipe")
    before = upstream("one", hostile.url("fine"), "m") + TENANTS
    with gateway_of(tmp_path, before, **KEYS, HOSTS="a-variable") as gateway:
        good = "port = 0\n" + before
        codes = set()
        for number, more in enumerate(
            (
                {"key_file": str(tmp_path / "secret")},
                {"key_file": str(tmp_path / "gone")},
                {"key_file": str(tmp_path / "pipe")},
                {"key_env": "HOSTS"},
                {"key_env": "NONE"},
            )
        ):
            status, error = admin(gateway, toml=good + upstream(f"u{number}", hostile.url("stolen"), "x", **more))
            assert status == 400
            codes.add((error["code"], error["message"]))
        ((code, message),) = codes
        assert code == "needs_own_file"
        assert message.startswith("upstream[1].key_env or key_file points at something of this host")
        pipe = tmp_path / "pipe"
        assert admin(gateway, toml=f'ssl_certfile = "{pipe}"\n' + good)[1]["code"] == "needs_restart"
        assert admin(gateway, toml=good + f'[metrics]\nkey_file = "{pipe}"\n')[1]["code"] == "needs_own_file"
        assert hostile.asked["stolen"] == []
        # What an operator leaves out for a while stays the host's to use: its own config says so.
        assert admin(gateway, toml=good.partition('[[tenant]]\nname = "c"')[0])[0] == 200
        assert admin(gateway, toml=good)[0] == 200
        assert gateway.ask("m", bearer("of-a"))[0] == 200


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_at_once(make, tmp_path):
    path = str(tmp_path / "odd")
    make(path)
    with pytest.raises(OSError, match="it is no regular file"):
        read_small(path)
    config = config_unread(tomllib.loads(OWN.replace('key_env = "ONE"', f'key_file = "{path}"')))
    readers = (
        lambda: secrets_of(config, {}),
        lambda: read_config(tmp_path / "odd"),
        lambda: check_certificate(path, None),
        lambda: ApiKeys(api_keys_file=path),
    )
    for reader in readers:
        with pytest.raises(ConfigError):
            reader()


def test_a_small_file_has_a_bound(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 10)
    assert read_small(tmp_path / "small", 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_small(tmp_path / "small", 9)


def test_metrics_have_a_key_of_their_own(hostile, tmp_path):
    """It opens nothing else; operators' keys open nothing less, and tenants' nothing more."""
    text = upstream("one", hostile.url("fine"), "m") + TENANTS + '[metrics]\nkey_env = "M"\n'
    with gateway_of(tmp_path, text, **KEYS, M="scraper") as gateway:

        def status(path: str, key: str) -> int:
            asked = urllib.request.Request(gateway.url + path, headers=bearer(key))
            try:
                return urllib.request.urlopen(asked, timeout=10).status
            except urllib.error.HTTPError as error:
                return error.code

        assert [status("/metrics", key) for key in ("scraper", "of-ops", "of-a", "wrong")] == [200, 200, 403, 401]
        assert [status(path, "scraper") for path in ("/stats", "/v1/models", "/ledger/facts")] == [401] * 3
        assert gateway.ask("m", bearer("scraper"))[0] == 401


def test_a_metrics_key_is_asked_for_where_no_other_is():
    text = upstream("one", "http://127.0.0.1:9", "m") + '[metrics]\nkey_env = "M"\n'
    config = config_of(tomllib.loads(text))
    keys = ApiKeys(metrics_digest=secrets_of(config, {"M": "scraper"}).metrics_key)
    assert keys.holder({"path": "/metrics"}, b"") is None
    assert keys.holder({"path": "/metrics"}, b"scraper") is not None
    assert keys.holder({"path": "/stats"}, b"") is not None
    with pytest.raises(ConfigError, match="needs one key"):
        secrets_of(config_of(tomllib.loads(text.replace('key_env = "M"', ""))), {})
