"""The headings under which `-h` lists the settings: what a user wants first, and what is asked for most comes first.

Typer's own headings are drawn as tables, which cut long flags short; `GroupedCommand` writes them as plain text.
"""

from typing import TYPE_CHECKING

from typer.core import TyperCommand

from splittime.core.settings import Setting

if TYPE_CHECKING:  # older versions of typer take these from click
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter

OTHER = "Other settings"
PANELS: dict[str, tuple[str, ...]] = {
    "Model": (
        "max_model_len",
        "served_model_name",
        "enable_lora",
        "lora_modules",
        "lora_root",
        "max_loras",
        "max_lora_rank",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "generation_config",
        "load_format",
        "max_n",
        "strict",
    ),
    "Quantisation and types": ("quantization", "kv_cache_dtype", "dtype", "activation_dtype", "packed_cache"),
    "Memory": ("kv_cache_memory_bytes", "gpu_memory_utilization", "kv_offload_memory_bytes", "block_size"),
    "Blocks of other servers": ("kv_peers", "kv_peer_key", "kv_export"),
    "Scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_tokens",
        "policy",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "speculative_config",
        "starvation_bound_ms",
        "batching",
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
        "port",
        "host",
        "api_key",
        "api_keys_file",
        "metrics_api_key",
        "cors_origins",
        "allowed_hosts",
        "ssl_certfile",
        "ssl_keyfile",
        "root_path",
    ),
    "Limits": (
        "max_queued_requests",
        "max_queued_prompt_tokens",
        "max_body_bytes",
        "grace_s",
        "body_timeout_s",
        "slow_reader_s",
        "slow_reader_buffer_bytes",
        "tokenize_cpu_s",
        "tokenize_memory_bytes",
        "max_stored_responses",
        "max_stored_response_bytes",
        "stored_response_s",
        "prefill_ahead_s",
    ),
    "The ledger": ("ledger_file", "max_file_accounts", "max_file_steps", "max_file_bytes", "max_memory_bytes"),
}
_PLACES = {name: (panel, place) for panel, names in PANELS.items() for place, name in enumerate(names)}
_ORDER = [*PANELS, OTHER]


def panel_of(setting: Setting) -> str:
    return _PLACES[setting.name][0] if setting.name in _PLACES else OTHER


def place_of(setting: Setting) -> tuple[int, int]:
    """Returns what settings are sorted by: their panel, then their place in it."""
    panel, place = _PLACES.get(setting.name, (OTHER, 0))
    return _ORDER.index(panel), place


class GroupedCommand(TyperCommand):
    """A command whose help has a heading for each `rich_help_panel`, after the flags that have none."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
