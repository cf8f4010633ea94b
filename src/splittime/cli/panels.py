"""The headings under which `-h` lists the settings: what a user wants first, and what is asked for most comes first.

Typer's own headings are drawn as tables, which cut long flags short; `GroupedCommand` writes them as plain text.
"""

import re
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from splittime.core.settings import Setting

if TYPE_CHECKING:  # older versions of typer take these from click
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter

OTHER, RARELY, ALL = "Other settings", "Rarely needed", "--help-all"
COMMON = {
    *("max_model_len", "served_model_name", "enable_lora", "lora_modules", "chat_template", "tool_call_parser"),
    *("reasoning_parser", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    *("max_num_seqs", "max_num_batched_tokens", "policy", "enable_prefix_caching", "speculative_config"),
    *("num_threads", "tensor_parallel_size", "port", "host", "api_key", "api_keys_file", "ssl_certfile"),
    *("ssl_keyfile", "max_queued_requests", "grace_s", "ledger_file"),
}
"""Settings that `--help` lists; `--help-all` lists the others too."""
PANELS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("max_model_len", "served_model_name", "enable_lora", "lora_modules", "lora_root", "max_loras"),
        *("max_lora_rank", "chat_template", "tool_call_parser", "reasoning_parser", "generation_config"),
        *("load_format", "max_n", "strict"),
    ),
    "Quantisation and types": ("quantization", "kv_cache_dtype", "dtype", "activation_dtype", "packed_cache"),
    "Memory": ("kv_cache_memory_bytes", "gpu_memory_utilization", "kv_offload_memory_bytes", "block_size"),
    "Blocks of other servers": ("kv_peers", "kv_peer_key", "kv_export"),
    "Scheduling": (
        *("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "policy", "enable_prefix_caching"),
        *("enable_chunked_prefill", "async_scheduling", "speculative_config", "starvation_bound_ms", "batching"),
    ),
    "Processor and cards": (
        "num_threads",
        "kernels",
        "remeasure",
        "tensor_parallel_size",
        "enforce_eager",
        "collective_timeout_s",
    ),
    "Network and keys": (
        *("port", "host", "api_key", "api_keys_file", "metrics_api_key", "cors_origins", "allowed_hosts"),
        *("ssl_certfile", "ssl_keyfile", "root_path"),
    ),
    "Limits": (
        *("max_queued_requests", "max_queued_prompt_tokens", "max_body_bytes", "grace_s", "body_timeout_s"),
        *("slow_reader_s", "slow_reader_buffer_bytes", "tokenize_cpu_s", "tokenize_memory_bytes"),
        *("max_stored_responses", "max_stored_response_bytes", "stored_response_s", "prefill_ahead_s"),
    ),
    "The ledger": ("ledger_file", "max_file_accounts", "max_file_steps", "max_file_bytes", "max_memory_bytes"),
}
ADDRESS, MODEL = ("--url", "--host", "--port", "--base-url"), ("--model", "--models")
ELSEWHERE = (  # a command's name, a flag or an argument of it; the flags that it has not; where it is told the same
    ("gateway", ("--host", "--port"), "a key of the file of --config"),
    ("gateway", ("--url", "--upstream", *MODEL), "a key of an [[upstream]] in the file of --config"),
    ("up", ("--host", "--port"), "a key of [gateway] in the file of --config"),
    ("up", MODEL, "a key of [serve] in the file of --config"),
    ("--url", ADDRESS, "a server is named by --url http://HOST:PORT"),
    ("URL", ADDRESS, "a server is named without a flag, as http://HOST:PORT"),
    ("LEDGER", (*ADDRESS, "--ledger"), "a ledger is named without a flag, as FILE.sqlite"),
    ("MODEL", MODEL, "a model is named without a flag"),
)
_UsageError: Any = typer.BadParameter.__base__
_PLACES = {name: (panel, place) for panel, names in PANELS.items() for place, name in enumerate(names)}
_ORDER = [*PANELS, OTHER]


def panel_of(setting: Setting) -> str:
    return _PLACES[setting.name][0] if setting.name in _PLACES else OTHER


def place_of(setting: Setting) -> tuple[int, int]:
    """Returns what settings are sorted by: their panel, then their place in it."""
    panel, place = _PLACES.get(setting.name, (OTHER, 0))
    return _ORDER.index(panel), place


def _is_rare(param: Any) -> bool:
    is_uncommon = param.name in _PLACES and param.name not in COMMON
    return is_uncommon or getattr(param, "rich_help_panel", None) == RARELY


def write_text(formatter: "HelpFormatter", text: str) -> None:
    """Writes a part of a help that is none of flags."""
    if text:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text.strip("\n"))


def _place_of(command: Any, option: str) -> str | None:
    """Returns where a command is told what a flag would say that it has not; None for a flag that nobody expects."""
    arguments = " ".join(str(param.metavar) for param in command.params if param.param_type_name == "argument")
    marks = {command.name, *re.split(r"\W+", arguments), *(name for param in command.params for name in param.opts)}
    behind = "flags stand behind the name of one of its commands" if command.no_args_is_help else None
    return next((said for mark, flags, said in ELSEWHERE if mark in marks and option in flags), behind)


class ExamplesFirst:
    """A help whose examples, the first part of its epilog, stand before its flags; `--help-all` shows the rare ones."""

    epilog: str | None

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ends = {"--", *getattr(self, "commands", ())}
        own = [*takewhile(lambda word: word not in ends, args)]
        if ALL in own:
            ctx.meta[ALL] = True
            args = ["--help"]
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except _UsageError as error:
            if hasattr(error, "possibilities"):
                place = _place_of(self, error.option_name)
                error.message += f": {place}" if place else ""
                error.possibilities = error.possibilities[:1] if place is None else []  # the nearest is the first
            raise

    def format_help(self: Any, ctx: "Context", formatter: "HelpFormatter") -> None:
        examples, _, rest = (self.epilog or "").partition("\n\n")
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_text(formatter, examples)
        self.format_options(ctx, formatter)
        write_text(formatter, rest)


class CommandGroup(ExamplesFirst, TyperGroup):
    """A command with commands of its own."""


class GroupedCommand(ExamplesFirst, TyperCommand):
    """A command whose help has a heading for each `rich_help_panel`, after the flags that have none."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        num_rare = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if _is_rare(param) and ALL not in ctx.meta:
                num_rare += 1
                continue
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            groups.setdefault(heading, []).append(record)
        if num_rare:
            groups["Options"].append((ALL, f"Show {num_rare} flags more, which are rarely needed."))
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == RARELY):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def group(words: str, epilog: str | None = None) -> typer.Typer:
    """Returns a command that has commands of its own, and does nothing else. words: its help."""
    more = {"no_args_is_help": True, "add_completion": False, "rich_markup_mode": None}
    made = typer.Typer(cls=CommandGroup, help=words, epilog=epilog, **more)  # type: ignore[arg-type]
    made.callback()(lambda: None)
    return made


def add(app: typer.Typer, command: Callable[..., Any], examples: str, summary: str, name: str | None = None) -> None:
    """Adds a command to a group. summary: fits into a line of 80 columns, or is cut there."""
    app.command(name=name or command.__name__, cls=GroupedCommand, epilog=examples, short_help=summary)(command)
