"""Every setting, once: key in splittime.toml, `--flag`, `SPLITTIME_` variable, type, default, range, help.

Flags, the settings file, `config show`, `LLM(...)` and `docs/reference/settings.md` are all made from `SETTINGS`.
`parts` names the components' configs that the value goes to; a test holds their defaults to be the ones written here.
None as a default means that the machine or the model decides; what it decided is printed at start.
"""

from typing import Any, Literal, NamedTuple

Kind = Literal["text", "texts", "whole", "number", "switch", "bytes"]

ENV_PREFIX = "SPLITTIME_"


class Setting(NamedTuple):
    name: str
    kind: Kind
    default: Any
    help: str
    parts: tuple[str, ...]
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """As it would be written in the settings file; empty if the machine or the model decides."""
        if self.default is None:
            return ""
        if self.kind == "switch":
            return str(self.default).lower()
        if self.kind == "texts":
            return " ".join(self.default)
        return f"{self.default:g}" if self.kind == "number" else str(self.default)

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


_DTYPES = ("auto", "float32", "bfloat16")
_POLICIES = ("fcfs", "priority", "shortest_prefill", "deadline")
_BOTH = ("runner", "scheduler")

SETTINGS = (
    Setting("model", "text", None, "Folder or Hugging Face id; without it, the model in the package.", ()),
    Setting(
        "dtype",
        "text",
        "auto",
        "Weights that are not quantised; of other than native kernels activations too.",
        ("runner",),
        choices=_DTYPES,
    ),
    Setting(
        "activation_dtype",
        "text",
        "auto",
        "Activations in products. auto, native kernels: float32 by float weights, int8 by integers, on any processor; "
        "others: as dtype. bfloat16 (native, bfloat16 weights) rounds them: faster with AVX512-BF16.",
        ("runner",),
        choices=_DTYPES,
    ),
    Setting(
        "quantization",
        "text",
        None,
        "Round linear weights while loading: int8, int4 (groups of 64, the head int8), w8a8 (int8, and activations), "
        "fp8 (a card; and activations); default: not.",
        ("runner",),
        choices=("int8", "int4", "w8a8", "fp8"),
    ),
    Setting(
        "kv_cache_dtype",
        "text",
        "auto",
        "KV cache; auto is as dtype; fp8 needs a card.",
        ("runner",),
        choices=(*_DTYPES, "int8", "fp8"),
    ),
    Setting(
        "max_model_len", "whole", None, "Longest prompt plus output, in tokens; default: the model's.", ("runner",), 1
    ),
    Setting(
        "kv_cache_memory_bytes",
        "bytes",
        None,
        "KV cache, as 512MiB or 4GiB; default: for max_num_seqs contexts, on a card what is free.",
        ("runner",),
        1,
    ),
    Setting(
        "kv_offload_memory_bytes",
        "bytes",
        0,
        "On a card: host memory for copies of blocks that the KV cache has no room for, as 16GiB; 0: none.",
        ("runner",),
        0,
    ),
    Setting("block_size", "whole", 16, "Tokens in a block of KV cache.", _BOTH, 1, 1024),
    Setting(
        "num_threads",
        "whole",
        None,
        "CPU threads; default: one a core. Small models: native kernels measure it at start (up to 256 MiB of "
        "weights), the others take one (up to 128 MiB).",
        ("runner",),
        1,
        1024,
    ),
    Setting(
        "remeasure",
        "switch",
        False,
        "Measure threads and prompt tokens a step again, rather than take what an earlier start has remembered.",
        ("runner",),
    ),
    Setting(
        "kernels",
        "text",
        "auto",
        "auto is triton with a card, else native, or torch (slower) without its library; reference is slow.",
        ("runner",),
        choices=("auto", "native", "torch", "reference", "triton"),
    ),
    Setting(
        "packed_cache",
        "text",
        "auto",
        "Folder that keeps quantised weights, or off; auto: splittime/packed in your cache folder. Delete to clear.",
        ("runner",),
    ),
    Setting(
        "load_format",
        "text",
        "auto",
        "auto tells safetensors and gguf apart by the path; dummy makes random weights, to measure speed by.",
        ("runner",),
        choices=("auto", "safetensors", "gguf", "dummy"),
    ),
    Setting(
        "generation_config",
        "text",
        "auto",
        "What applies of generation_config.json: auto all of it, where a request says nothing; vllm its ends of "
        "sequence, not its sampling; none nothing.",
        ("runner",),
        choices=("auto", "vllm", "none"),
    ),
    Setting(
        "gpu_memory_utilization",
        "number",
        0.9,
        "Share of a card's memory for weights, steps and KV cache together.",
        ("runner",),
        0.01,
        1.0,
    ),
    Setting(
        "enforce_eager",
        "switch",
        False,
        "On a card, capture no CUDA graphs: kernels are launched one by one.",
        ("runner",),
    ),
    Setting(
        "async_scheduling",
        "switch",
        False,
        "Plan the next step while one runs; a new request may wait for one step more.",
        ("runner",),
    ),
    Setting(
        "tensor_parallel_size",
        "whole",
        1,
        "Processes that share the model, each with its part of every layer; they divide num_threads.",
        ("runner",),
        1,
        64,
    ),
    Setting(
        "collective_timeout_s",
        "number",
        30.0,
        "Seconds that such a process may keep the others waiting before all are ended and started anew.",
        ("runner",),
        0.001,
    ),
    Setting("max_num_seqs", "whole", 64, "Requests that run at once.", _BOTH, 1, 65536),
    Setting("max_num_batched_tokens", "whole", 512, "Tokens that one step may compute, over all rows.", _BOTH, 1),
    Setting(
        "max_prefill_tokens",
        "whole",
        None,
        "Prompt tokens of these; default: what a step computes in 0.25 s, measured once, at least 16. "
        "Not heeded without chunked prefill.",
        ("scheduler",),
        1,
    ),
    Setting("policy", "text", "fcfs", "Who goes first.", ("scheduler",), choices=_POLICIES),
    Setting(
        "batching",
        "text",
        "continuous",
        "continuous admits at every step; static fills a batch and runs it to its end.",
        ("scheduler",),
        choices=("continuous", "static"),
    ),
    Setting(
        "starvation_bound_ms",
        "number",
        10_000.0,
        "A request that has waited longer goes first under every policy.",
        ("scheduler",),
        0,
    ),
    Setting("enable_prefix_caching", "switch", True, "Reuse the KV cache of equal prefixes.", ("scheduler",)),
    Setting("enable_chunked_prefill", "switch", True, "Cut long prompts to fit the token budget.", ("scheduler",)),
    Setting("host", "text", "127.0.0.1", "Address to bind; any but loopback needs api_key.", ("server",)),
    Setting("port", "whole", 8000, "TCP port; 0 lets the system choose.", ("server",), 0, 65535),
    Setting(
        "api_key",
        "texts",
        (),
        "Asked for as `Authorization: Bearer KEY`. The first is the operator's, each other one a tenant's.",
        ("server",),
        is_secret=True,
    ),
    Setting("api_keys_file", "text", None, "TOML file of keys with names, limits and salts.", ("server",)),
    Setting("metrics_api_key", "text", None, "A key for /metrics alone.", ("server",), is_secret=True),
    Setting("root_path", "text", "", "What a proxy has before these paths, as /llm.", ("server",)),
    Setting("ssl_certfile", "text", None, "PEM file of a certificate, to serve HTTPS.", ("server",)),
    Setting("ssl_keyfile", "text", None, "PEM file of its key; default: in ssl_certfile.", ("server",)),
    Setting(
        "allowed_hosts",
        "texts",
        (),
        "Names by which requests may call the server (Host header), beside those it listens on: api.example, "
        "*.example, or * for any. Default: none on loopback, any on other addresses (which ask for a key).",
        ("server",),
    ),
    Setting(
        "cors_origins",
        "texts",
        (),
        "Pages of these origins may use the API from a browser: https://app.example, or * for all.",
        ("server",),
    ),
    Setting(
        "served_model_name",
        "texts",
        (),
        "Names in the API: answers carry the first, requests may use any. Default: the model's own.",
        ("server",),
    ),
    Setting("strict", "switch", False, "Refuse request fields that have no effect, and clamp nothing.", ("server",)),
    Setting("chat_template", "text", None, "File with a Jinja chat template, in place of the model's.", ("server",)),
    Setting(
        "tokenize_cpu_s",
        "number",
        10.0,
        "Processor time that the texts of one request may take to render and tokenise (400).",
        ("server",),
        0.001,
    ),
    Setting("tokenize_memory_bytes", "bytes", 2**30, "And memory.", ("server",), 2**20),
    Setting("max_body_bytes", "bytes", 4 * 2**20, "A longer request body is refused (413).", ("server",), 1),
    Setting("max_queued_requests", "whole", 256, "Requests that may wait; one more is refused (429).", ("server",), 1),
    Setting("max_queued_prompt_tokens", "whole", 262_144, "Prompt tokens that may wait; more is 429.", ("server",), 1),
    Setting("max_n", "whole", 16, "Largest n.", ("server",), 1, 128),
    Setting(
        "slow_reader_buffer_bytes", "bytes", 256 * 1024, "Unread output at which a client is dropped.", ("server",), 1
    ),
    Setting(
        "slow_reader_s", "number", 20.0, "Seconds without progress at which a client is dropped.", ("server",), 0.001
    ),
    Setting("body_timeout_s", "number", 60.0, "Seconds for a client to send its body (408).", ("server",), 0.001),
    Setting("grace_s", "number", 30.0, "Seconds that open requests get after SIGTERM.", ("server",), 0),
    Setting("ledger_file", "text", None, "SQLite file for all accounts and steps; default: memory only.", ("ledger",)),
    Setting("max_file_accounts", "whole", 100_000, "Accounts kept in the ledger file.", ("ledger",), 1),
    Setting("max_file_steps", "whole", 1_000_000, "Steps kept in the ledger file.", ("ledger",), 1),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
ENGINE_PARTS = ("runner", "scheduler")
