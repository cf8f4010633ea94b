"""Settings: one table, three sources over the defaults, each value with its origin, mistakes named where they are."""

from pathlib import Path

import pytest

from splittime.assemble import settings
from splittime.assemble.settings import worker_settings
from splittime.cli.serve import check_adapters, model_names
from splittime.core.errors import ConfigError
from splittime.core.settings import settings_of
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig
from splittime.server.config import ServerConfig


def test_file_under_environment_under_flag(tmp_path):
    file = tmp_path / "splittime.toml"
    file.write_text('# mine\nport = 1111\npolicy = "deadline"\nmax-num-seqs = 8\n')
    found = settings.load({"port": 3333}, environ={"SPLITTIME_PORT": "2222", "SPLITTIME_POLICY": "priority"})
    assert found.values["port"] == (3333, "flag --port")
    assert found.values["policy"] == ("priority", "env SPLITTIME_POLICY")
    assert found.values["max_num_seqs"] == (8, "splittime.toml:4")
    assert found.values["host"] == ("127.0.0.1", "default")


def test_switches_by_every_way():
    assert settings.load({"enable_prefix_caching": False}, environ={}).values["enable_prefix_caching"] == (
        False,
        "flag --no-enable-prefix-caching",
    )
    for word, value in (("off", False), ("TRUE", True), ("0", False)):
        assert settings.load({}, environ={"SPLITTIME_ENABLE_CHUNKED_PREFILL": word})["enable_chunked_prefill"] is value


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SPLITTIME_PRT": "1"}, ["unknown setting 'prt'", "env SPLITTIME_PRT", "did you mean 'port'"]),
        ({"SPLITTIME_PORT": "80000"}, ["port = 80000", "0 to 65535", "env SPLITTIME_PORT"]),
        ({"SPLITTIME_PORT": "tcp://10.0.0.1:80"}, ["is not a whole number"]),
        ({"SPLITTIME_POLICY": "lifo"}, ["none of fcfs, priority"]),
        ({"SPLITTIME_ENABLE_PREFIX_CACHING": "maybe"}, ["is not true or false"]),
        ({"SPLITTIME_KV_CACHE_MEMORY_BYTES": "4 parsecs"}, ["is not a size"]),
        ({"SPLITTIME_STARVATION_BOUND_MS": "nan"}, ["must be at least 0"]),
    ],
)
def test_mistakes_are_named(environ, words):
    with pytest.raises(ConfigError) as caught:
        settings.load({}, environ=environ)
    told = f"{caught.value} {caught.value.info.hint}"
    assert all(word in told for word in words), told


def test_mistakes_in_the_file_say_the_line(tmp_path):
    file = tmp_path / "other.toml"
    file.write_text("port = 8000\nmax_num_sqs = 3\n")
    with pytest.raises(ConfigError, match=r"other\.toml:2") as caught:
        settings.load({}, config=file, environ={})
    assert caught.value.info.hint == "did you mean 'max_num_seqs'?"
    file.write_text("port = ")
    with pytest.raises(ConfigError, match="cannot read settings"):
        settings.load({}, config=file, environ={})
    with pytest.raises(ConfigError, match="cannot read settings"):
        settings.load({}, config=tmp_path / "missing.toml", environ={})


def test_kubernetes_service_links_are_not_settings():
    settings.load({}, environ={"SPLITTIME_SERVICE_HOST": "10.0.0.1", "SPLITTIME_PORT_8000_TCP_ADDR": "10.0.0.1"})


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("512MiB", 2**29), ("4g", 2**32), ("1.5 GiB", 3 * 2**29), ("2MB", 2 * 10**6)]
)
def test_sizes(text, size):
    assert settings.parse_bytes(text) == size


def test_secrets_are_masked_in_values_and_errors():
    found = settings.load({"api_key": ["hunter2"]}, environ={})
    assert found["api_key"] == ("hunter2",)
    assert "hunter2" not in str(found.shown())


def test_each_part_is_made_from_the_defaults(tmp_path):
    found = settings.load({}, environ={})
    assert ServerConfig(**found.part("server")) == ServerConfig()
    assert SchedulerConfig(**found.part("scheduler")) == SchedulerConfig()
    assert RunnerConfig(model_path="x", **found.part("runner")) == RunnerConfig(model_path="x")


@pytest.mark.parametrize("part", settings.PARTS.values(), ids=settings.PARTS)
def test_parts_agree_on_what_they_share_and_every_default_may_be_had(part):
    for setting in settings_of(part):
        assert setting == settings.BY_NAME[setting.name]
        assert setting.fault(setting.default) is None


@pytest.mark.parametrize(("name", "kind", "choices"), [
    ("quantization", "text", ("int8", "int4", "w8a8", "fp8")), ("policy", "text", settings.BY_NAME["policy"].choices),
    ("num_threads", "whole", ()), ("kv_cache_memory_bytes", "bytes", ()), ("api_key", "texts", ()),
    ("ledger_file", "text", ()), ("grace_s", "number", ()), ("strict", "switch", ()),
])  # fmt: skip
def test_kind_and_choices_follow_from_the_type(name, kind, choices):
    assert (settings.BY_NAME[name].kind, settings.BY_NAME[name].choices) == (kind, choices)


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 0), ("policy", "lifo"), ("starvation_bound_ms", -1.0)])
def test_a_part_refuses_what_its_declaration_excludes(name, value):
    with pytest.raises(ConfigError, match=name) as refused:
        SchedulerConfig(**{name: value}).validate()
    assert refused.value.info.limit == settings.BY_NAME[name].limit


def test_what_the_scheduler_would_refuse_is_refused_before_any_process(tmp_path):
    found = settings.load({"max_num_seqs": 600}, environ={})
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        worker_settings(found, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "kv_cache_memory_bytes = 1.5",
        "kv_cache_memory_bytes = [1]",
        f'kv_cache_memory_bytes = "{"9" * 400}"',
        "starvation_bound_ms = 1" + "0" * 400,
        "grace_s = inf",
    ],
)
def test_values_that_no_type_can_hold_are_mistakes_too(tmp_path, line):
    file = tmp_path / "odd.toml"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"odd\.toml:1"):
        settings.load({}, config=file, environ={})


@pytest.mark.parametrize(("name", "value"), [("served_model_name", ["caf\udcff"]), ("model", "models/caf\udcff")])
def test_bytes_that_are_not_utf_8_are_refused_before_an_answer_has_to_hold_them(name, value):
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        settings.load({name: value}, environ={})
    assert str(caught.value.info.value).isascii()
    assert caught.value.info.param == name


def test_a_model_in_a_folder_whose_name_is_not_utf_8_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"caf\\udcff is not in UTF-8"):
        worker_settings(settings.load({}, environ={}), tmp_path / "caf\udcff")


@pytest.mark.parametrize("name", ["port", "ledger_file"])
def test_what_the_engine_does_not_honour_is_no_argument_of_it(name):
    with pytest.raises(ConfigError, match=f"{name} is no setting of the engine"):
        settings.from_arguments({name: "1"})


def test_lists_of_texts_by_every_way(tmp_path):
    file = tmp_path / "splittime.toml"
    file.write_text('served_model_name = ["a", "b"]\ncors_origins = "https://one"\n')
    found = settings.load({"served_model_name": []}, environ={"SPLITTIME_ALLOWED_HOSTS": "x.example  *.y"})
    assert found.values["served_model_name"] == (("a", "b"), "splittime.toml:1")
    assert found["cors_origins"] == ("https://one",)
    assert found["allowed_hosts"] == ("x.example", "*.y")
    assert settings.load({"cors_origins": ["https://a", "https://b"]}, environ={})["cors_origins"] == (
        "https://a",
        "https://b",
    )
    for wrong in ("served_model_name = 3", "served_model_name = [3]", "served_model_name = [[]]"):
        file.write_text(wrong + "\n")
        with pytest.raises(ConfigError, match="is not a list of texts"):
            settings.load({}, environ={})


def test_adapters_are_the_servers() -> None:
    with pytest.raises(ConfigError, match="loads no adapters"):
        settings.from_arguments({"enable_lora": True})
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        check_adapters(settings.load({"lora_modules": ["a=b"]}, environ={}))
    with pytest.raises(ConfigError, match="is no folder"):
        check_adapters(settings.load({"enable_lora": True, "lora_root": "/nowhere/at/all"}, environ={}))


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_an_adapter_is_not_called_as_the_model_is(names: list[str]) -> None:
    loaded, folder = settings.load({"model": "org/a"}, environ={}), Path("/nowhere")
    config = ServerConfig(lora_modules=("b=/x", "org/a=/y"), served_model_name=tuple(names))
    with pytest.raises(ConfigError, match="is what the model is called") as caught:
        model_names(loaded, config, folder)
    assert caught.value.info.value == ("b" if names else "org/a")
    assert model_names(loaded, ServerConfig(lora_modules=("c=/x",)), folder) == ("org/a",)
