"""A config is taken whole or refused with the key, the value, the limit and a way out."""

import tomllib

import pytest

from splittime.core.errors import ConfigError
from splittime.gateway.config_file import NOT_BUILT, REMOVED, config_of, read_config, secrets_of

UPSTREAM = '[[upstream]]\nname = "a"\nurl = "http://127.0.0.1:8000/v1"\nmodels = ["m"]\n'
TENANT = '[[tenant]]\nname = "ops"\noperator = true\nkey_env = "OPS"\n'


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(tomllib.loads(text))
    return caught.value


def test_the_least_is_taken():
    config = config_of(tomllib.loads(UPSTREAM))
    assert (config.host, config.port, config.upstream[0].kind) == ("127.0.0.1", 8100, "openai")
    assert secrets_of(config, {}) == ({}, (), None, {})


@pytest.mark.parametrize(
    ("text", "param", "value", "limit"),
    [
        (UPSTREAM + "max_in_flight = -1\n", "upstream[0].max_in_flight", -1, [0, 65536]),
        (UPSTREAM + 'kind = "vllm"\n', "upstream[0].kind", None, None),
        ("port = 70000\n" + UPSTREAM, "port", 70000, [0, 65535]),
        ("shared_port = 0\n" + UPSTREAM, "shared_port", 0, [1, 65535]),
        ("shared_port = 8100\n" + UPSTREAM, "shared_port", 8100, None),
        (UPSTREAM + "[queue]\nmax_wait_s = 0\n", "queue.max_wait_s", 0, [0.001, 86400]),
        (UPSTREAM + "[retries]\nratio = 1.5\n", "retries.ratio", 1.5, [0, 1]),
        (UPSTREAM + "[breaker]\nfailures = 0\n", "breaker.failures", 0, [1, None]),
        (UPSTREAM + TENANT + "weight = 0\n", "tenant[0].weight", 0, [0.001, 1e6]),
        (UPSTREAM.replace("http:", "ftp:"), "upstream[0].url", "ftp://127.0.0.1:8000/v1", None),
        (UPSTREAM.replace('["m"]', "[]"), "upstream[0].models", None, None),
        (UPSTREAM + UPSTREAM, "upstream[1].name", "a", None),
        ('host = "0.0.0.0"\n' + UPSTREAM, "host", "0.0.0.0", None),
        (UPSTREAM + TENANT.replace("true", "false"), "tenant", None, None),
        (UPSTREAM + '[[cache_route]]\nmodel = "n"\n', "cache_route[0].model", "n", None),
        (UPSTREAM + '[[cache_route]]\nmodel = "m"\n' * 2, "cache_route[1].model", "m", None),
        (UPSTREAM + '[[cache_route]]\nmodel = "m"\nthreshold = 0.5\n', "cache_route[0].threshold", 0.5, [0.9, 1]),
        (UPSTREAM + "[cache]\nmax_bytes = 0\n", "cache.max_bytes", 0, [1, None]),
        (UPSTREAM + '[cache]\nfile = "f"\nvalkey = "redis://h"\n', "cache.file", "f", None),
        (UPSTREAM + '[embedder]\nurl = "ftp://h"\nmodel = "e"\n', "embedder.url", "ftp://h", None),
        ("", "upstream", None, None),
        (UPSTREAM + "[affinity]\nload_cap = 0.5\n", "affinity.load_cap", 0.5, [1, 100]),
        (UPSTREAM + "[affinity]\nmax_blocks = 1\n", "affinity.max_blocks", 1, [4096, 2**22]),
        ('ssl_keyfile = "k.pem"\n' + UPSTREAM, "ssl_keyfile", "k.pem", None),
    ],
)
def test_what_is_wrong_is_named(text, param, value, limit):
    error = refused(text)
    assert (error.info.param, error.info.value, error.info.limit) == (param, value, limit)
    assert error.info.hint
    assert param in error.info.message


def test_an_unknown_key_is_refused_with_the_nearest():
    error = refused(UPSTREAM + "max_inflight = 3\n")
    assert error.info.message == "upstream[0].max_inflight: no such key"
    assert error.info.hint == "did you mean max_in_flight?"
    assert refused("prot = 1\n" + UPSTREAM).info.hint == "did you mean port?"
    assert refused(UPSTREAM + "[queue]\nmax_request = 1\n").info.hint == "did you mean max_requests?"
    assert refused(UPSTREAM + 'kind = "vllm"\n').info.hint.startswith("one of openai, splittime. openai: ")
    assert refused("[[upstream]]\nname = 3\n").info.hint == "Its name in accounts and metrics."


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_what_is_not_built_is_refused_by_name(name):
    for text in (f"{name} = true\n" + UPSTREAM, UPSTREAM + f"{name} = true\n", UPSTREAM + f"[{name}]\non = true\n"):
        error = refused(text)
        assert error.info.code == "not_built"
        assert name in error.info.message
        assert NOT_BUILT[name] in error.info.hint


GRADED = UPSTREAM + '[[difficulty]]\nmodel = "auto"\nsmall = "m"\nlarge = "n"\n'


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (UPSTREAM + "[tied]\nafter_s = 0.5\n", "tied"),
        ('limits_valkey = "redis://h"\n' + UPSTREAM, "limits_valkey"),
        (GRADED + 'labels = "l.jsonl"\n', "difficulty[0].labels"),
        (GRADED + "neighbours = 4\n", "difficulty[0].neighbours"),
    ],
)
def test_a_key_that_was_removed_is_refused_with_the_way_out(text, param):
    error = refused(text)
    assert (error.info.code, error.info.param, error.info.message) == ("removed", param, f"{param} was removed")
    assert error.info.hint == f"take it out: {REMOVED[param.replace('[0]', '')]}"


def test_nothing_that_is_built_is_called_not_built():
    from splittime.gateway import config

    kinds = (config.GatewayConfig, config.UpstreamConfig, config.TenantConfig, config.QueueConfig)
    kinds += (config.RetryConfig, config.BreakerConfig, config.CacheConfig, config.CacheRoute, config.EmbedderConfig)
    kinds += (config.DegradationConfig, config.AffinityConfig)
    assert not set(NOT_BUILT) & {name for kind in kinds for name in kind.__struct_fields__}


@pytest.mark.parametrize("url", ["http://user:pass@host", "http://host?key=1", "http://host#x", "http://ho st"])
def test_a_url_has_an_address_alone(url):
    error = refused(UPSTREAM.replace("http://127.0.0.1:8000/v1", url))
    assert error.info.param == "upstream[0].url"
    assert "pass" not in error.info.message  # it may be a secret


def test_keys_come_from_the_environment_or_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("of-a\n")
    config = config_of(tomllib.loads(UPSTREAM + f'key_file = "{file}"\n' + TENANT))
    secrets = secrets_of(config, {"OPS": "of-ops"})
    assert secrets.upstream_keys == {"a": "of-a"}
    ((_, tenant),) = secrets.holders
    assert (tenant.name, tenant.is_operator) == ("ops", True)


@pytest.mark.parametrize(
    ("more", "environment", "param"),
    [
        (TENANT, {}, "tenant[0].key_env"),
        (TENANT, {"OPS": "two words"}, None),
        (TENANT + 'sha256 = "00"\n', {"OPS": "x"}, "tenant[0].key_env"),
        (TENANT.replace('key_env = "OPS"', 'sha256 = "00"'), {}, "tenant[0].sha256"),
        (TENANT.replace('key_env = "OPS"', 'key_file = "nowhere"'), {}, "tenant[0].key_file"),
        (TENANT.replace('key_env = "OPS"', ""), {}, "tenant[0].key_env"),
        ('key_env = "A"\nkey_file = "b"\n', {"A": "x"}, "upstream[0].key_env"),
    ],
)
def test_a_key_that_is_not_there_is_said(more, environment, param):
    config = config_of(tomllib.loads(UPSTREAM + more))
    with pytest.raises(ConfigError) as caught:
        secrets_of(config, environment)
    assert param is None or caught.value.info.param == param
    assert "two words" not in str(caught.value)


def test_an_empty_key_is_nobodys():
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    config = config_of(tomllib.loads(UPSTREAM + TENANT.replace('key_env = "OPS"', f'sha256 = "{empty}"')))
    with pytest.raises(ConfigError, match="empty key"):
        secrets_of(config, {})


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "gateway.toml").write_text("port = \n")
    for path in (tmp_path / "gateway.toml", tmp_path / "other.toml"):
        with pytest.raises(ConfigError, match="cannot read"):
            read_config(path)
