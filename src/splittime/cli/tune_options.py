"""The flags of `splittime tune` that are its own, and which of them exclude each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from splittime.cli.options import JsonFlag, ModelArgument
from splittime.core.errors import ConfigError
from splittime.core.whole_file import check_writable


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    model: ModelArgument = None
    slo: Annotated[str, typer.Option("--slo", metavar="TERMS", help="To be kept: ttft_p99=500ms,itl_p99=50ms.")]
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Tune this running server's live knobs instead.")
    ] = None
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm", metavar="'serve MODEL ...'", help="Tune vLLM's flags: servers of this command, with books."
        ),
    ] = None
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="Load of this ledger's busiest half minute, instead of --rate."),
    ] = None
    compare_profiles: Annotated[
        bool, typer.Option("--compare-profiles", help="Measure the three profiles on this load, and change nothing.")
    ] = False
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="latency|throughput|balanced",
            help="What to begin with (not with --url), and what to seek.",
        ),
    ] = None
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            metavar="N",
            min=0.1,
            help="Time for simulations and runs. A run or a quality gate that has begun is completed.",
        ),
    ] = 20.0
    notebook: Annotated[
        Path | None,
        typer.Option("--notebook", metavar="FILE", help="Keep each trial here; a trial that is in it is not repeated."),
    ] = None
    knob: Annotated[
        list[str] | None, typer.Option("--knob", metavar="NAME", help="Turn only this one. May be given again.")
    ] = None
    keep_numbers: Annotated[
        bool, typer.Option("--keep-numbers", help="Try nothing that changes what the model answers.")
    ] = False
    apply: Annotated[bool, typer.Option("--apply", help="Leave the settings found on the server of --url.")] = False
    write_config: Annotated[
        Path | None, typer.Option("--write-config", metavar="FILE", help="Write the settings found as a settings file.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="SPLITTIME_API_KEY", help="Key of the server of --url."),
    ] = None
    json: JsonFlag = False


def check(given: TuneOptions, load: Mapping[str, Any]) -> None:
    """Raises ConfigError for flags that exclude each other, before anything is started."""
    _check_load(given, load)
    if given.apply and given.url is None:
        hint = "--write-config FILE keeps them for the next start."
        raise ConfigError("--apply needs the --url of a running server", param="apply", hint=hint)
    named = {"model": given.model, "url": given.url, "vllm": given.vllm}
    if sum(value is not None for value in named.values()) > 1:
        told = " and ".join(name for name, value in named.items() if value is not None)
        raise ConfigError(f"{told} at once", param="url", hint="Give one of MODEL, --url and --vllm.")
    if given.vllm is not None and (given.write_config is not None or given.compare_profiles or given.profile):
        words = "profiles and settings files are of `splittime serve`; vLLM has flags"
        raise ConfigError(words, param="vllm", value=given.vllm, hint="Leave the one or the other out.")
    _check_heeded(given)
    if given.write_config is not None:
        check_writable(given.write_config, "write_config")


def _check_load(given: TuneOptions, load: Mapping[str, Any]) -> None:
    if given.ledger is not None and load:
        name = next(iter(load))
        hint = "Leave one of them out."
        raise ConfigError("a ledger is a load already", param=name, value=load[name], hint=hint)
    words = "tune needs a load whose requests do not wait for answers (an open loop)"
    hint = "Give --rate, --trace with its own times, or --ledger."
    if "concurrency" in load:
        number = load["concurrency"]
        words = f"{words}, and --concurrency {number} has them wait"
        raise ConfigError(words, param="concurrency", value=number, hint=f"Leave --concurrency out. {hint}")
    if given.ledger is None and "rate" not in load and "trace" not in load:
        raise ConfigError(words, param="rate", hint=hint)


def _check_heeded(given: TuneOptions) -> None:
    """Raises ConfigError for a flag that would do nothing beside another one."""
    from splittime.tune.knobs import changes_numbers

    hint = "Leave one of them out."
    for name in ("profile", "knob", "keep_numbers", "write_config", "apply") if given.compare_profiles else ():
        if value := getattr(given, name):
            flag = name.replace("_", "-")
            words = f"--{flag} with --compare-profiles, which measures all profiles and changes nothing"
            raise ConfigError(words, param=name, value=str(value), hint=hint)
    for name in given.knob or ():
        if given.keep_numbers and changes_numbers({name: None}):
            words = f"--keep-numbers with --knob {name}, which changes what the model answers"
            raise ConfigError(words, param="knob", value=name, hint=hint)
