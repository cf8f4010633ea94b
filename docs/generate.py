"""Writes docs/reference/ from the code: commands, settings, models, stages, errors, the API and its fields, metrics,
findings, exit codes, source files. A test holds the pages to be current.

python docs/generate.py            write the pages
python docs/generate.py --check    exit with 1 and their names if any is out of date
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import typer

from splittime.api.lenient import HINTS, UNSUPPORTED, WAYS_OUT
from splittime.api.limits import BodyLimits
from splittime.api.openapi import document
from splittime.assemble.settings import MODEL, SETTINGS
from splittime.cli.main import app
from splittime.cli.panels import ALL
from splittime.cluster.config import ClusterConfig, ReplicaConfig, ScaleSettings, UpstreamTimes
from splittime.core import errors
from splittime.core.settings import Setting, settings_of
from splittime.diagnose import doctor, finding
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import NOT_BUILT, REMOVED, TABLES
from splittime.gateway.metrics import GATEWAY_METRICS
from splittime.lab.quantize.layer_map import KNOWN
from splittime.ledger import derive
from splittime.ledger.export.metrics import EDGES_NS, METRICS, MetricSpec
from splittime.ledger.export.prometheus import ALIASES
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING
from splittime.models.architectures import ARCHITECTURES, WRAPPERS
from splittime.models.gguf.config import FAMILIES

FOLDER = Path(__file__).parent / "reference"
BODIES = (
    *("CompletionBody", "ChatBody", "Message", "TextPart", "StreamOptions"),
    *("ResponsesBody", "ItemMessage", "ItemReasoning", "ItemCall", "ItemCallOutput", "OfferedFunction"),
    *("MessagesBody", "MessagesTool", "OllamaChatBody", "OllamaGenerateBody", "OllamaEmbedBody"),
    *("EmbeddingBody", "RerankBody", "ScoreBody", "TokenizeBody", "DetokenizeBody"),
)
SERVED_BY_SETTINGS = ("splittime serve", "splittime run", "splittime generate", "splittime config show")
NOTICE = "<!-- Made by docs/generate.py from the code; change it there. -->\n\n"


def settings_page() -> str:
    rows = [(f"`{s.name}`", _default(s), _range(s), s.doc.help) for s in SETTINGS]
    return (
        "# Settings\n\n"
        "Each setting has a default. The file `splittime.toml` (in the current folder, or `--config FILE`) overrides "
        "it, the environment overrides the file, and a flag overrides them all. Of `max_num_seqs` the flag is "
        "`--max-num-seqs`, and the variable is `SPLITTIME_MAX_NUM_SEQS`; the others follow the same rule. Only `model` "
        "has no flag: it is the argument `MODEL`.\n\n"
        "`splittime config show` prints each value with its origin. A name that is not in this table is an error. "
        "`LLM(...)` takes the engine's settings as arguments.\n\n"
        + _table(("key", "default", "range", "meaning"), rows)
    )


def stages_page() -> str:
    return (
        "# Stages and causes\n\n"
        "An account is always in exactly one stage; entering a stage closes the last at the same nanosecond, so the "
        "stages of a request sum to its wall time exactly.\n\n"
        + _table(("stage", "meaning"), [(f"`{stage}`", text) for stage, text in STAGE_MEANING.items()])
        + "\nThe scheduler states a cause at the moment it makes a request wait.\n\n"
        + _table(("cause", "why it waits"), [(f"`{cause}`", text) for cause, text in CAUSE_MEANING.items()])
        + "\n## Figures\n\n```\n"
        + _definitions()
        + "\n```\n"
    )


OF_SERVERS = {  # what their APIs add to OpenAI's
    "vLLM": (
        *("best_of", "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "detokenize"),
        *("spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"),
        *("bad_words", "echo", "suffix", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("documents", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "priority", "request_id", "logits_processors"),
        *("return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs"),
        *("include_reasoning", "thinking_token_budget", "prompt_embeds"),
    ),
    "llama.cpp": (
        *("dynatemp_range", "dynatemp_exponent", "top_k", "min_p", "n_predict", "n_indent", "n_keep", "typical_p"),
        *("repeat_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "top_n_sigma"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "grammar", "json_schema", "ignore_eos", "logit_bias"),
        *("n_probs", "min_keep", "t_max_predict_ms", "id_slot", "cache_prompt", "return_tokens", "samplers"),
        *("timings_per_token", "return_progress", "post_sampling_probs", "response_fields", "lora"),
        *("input_prefix", "input_suffix", "input_extra", "image_data", "chat_template_kwargs"),
        *("reasoning_format", "parse_tool_calls"),
    ),
}


def fields_page() -> str:
    """Each body's fields with what the server does with it, from the description that `/openapi.json` gives."""
    schemas = document(BodyLimits())["components"]["schemas"]
    parts = []
    for name in BODIES:
        rows = [
            (f"`{field}`", _type_words(of), _treatment(of), of.get("description", "").removeprefix("No effect: "))
            for field, of in schemas[name]["properties"].items()
        ]
        parts.append(f"## {name}\n\n" + _table(("field", "type", "treatment", "meaning"), rows))
    return (
        "# Fields of the API\n\n"
        "The server takes a body with an unknown field. A notice says that the field has no effect: the header "
        "`x-splittime-notice`, and `notices` in the answer. A field that is null where a value is meant is absent. "
        "`--strict` refuses unknown fields. The column *treatment* says what becomes of a known one:\n\n"
        "* *honoured*: the field does what its meaning says.\n"
        "* *no effect*: the server accepts the field, because ordinary clients send it and nobody misses what it would "
        "do. `--strict` refuses it.\n"
        "* *hint*: the server accepts any value, and a notice says that it has no effect. `--strict` refuses it.\n"
        "* *refused*: the server accepts only the value that changes nothing.\n\n"
        "A running server describes itself, with its model's limits, at `/docs` and `/openapi.json`.\n\n"
        + "\n".join(parts)
    )


def foreign_fields_page() -> str:
    """What becomes of each field that vLLM's and llama.cpp's APIs add to OpenAI's."""
    schemas = document(BodyLimits())["components"]["schemas"]
    known = {**schemas["ChatBody"]["properties"], **schemas["CompletionBody"]["properties"]}
    parts = [
        f"## Of {server}\n\n" + _table(("field", "here", "why, or instead"), [_foreign(n, known.get(n)) for n in names])
        for server, names in OF_SERVERS.items()
    ]
    return (
        "# Fields of other servers\n\nWhat this server does with the fields that vLLM's and llama.cpp's APIs add to "
        "OpenAI's. *Honoured* fields mean what they mean there. A *hint* is taken with a notice. A *refused* one gets "
        "a 400 that names it, unless its value changes nothing.\n\n" + "\n".join(parts)
    )


def _foreign(name: str, schema: dict[str, Any] | None) -> tuple[str, ...]:
    """A row: fields at whose default nothing changes are refused at any other value."""
    if schema is not None and name not in UNSUPPORTED:
        words = schema.get("description", "").removeprefix("No effect: ")
        return f"`{name}`", _treatment(schema), words
    if schema is not None and name in ("echo", "add_special_tokens"):
        return f"`{name}`", "in part", UNSUPPORTED[name]
    if name in HINTS:
        return f"`{name}`", "hint", HINTS[name]
    return f"`{name}`", "refused", UNSUPPORTED.get(name) or WAYS_OUT[name]


def _treatment(schema: dict[str, Any]) -> str:
    if (effect := schema.get("x-effect")) is not None:
        return "no effect" if effect == "none" else str(effect)
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    empty = all(kind.get("maxItems") == 0 or kind.get("enum") in ([""], [False]) for kind in kinds)
    return "refused" if empty else "honoured"


def _type_words(schema: dict[str, Any]) -> str:
    """The type as a reader would write it."""
    if "anyOf" in schema:
        words = [_type_words(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(words)) or "null"
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1])
    if "enum" in schema:
        return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`".lower() for value in schema["enum"])
    if schema.get("type") == "array":
        return "empty list" if schema.get("maxItems") == 0 else f"list of {_type_words(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def errors_page() -> str:
    listed = (errors.RequestError, errors.NotFound, errors.Conflict, errors.DeadlineExceeded, errors.Overloaded)
    rows = [(f"`{cls.__name__}`", str(cls.status), f"`{cls.kind}`", f"`{cls.code}`") for cls in listed]
    rows.insert(2, ("`NotFound`", "404", f"`{errors.NotFound.kind}`", "`model_not_found`: of a server or a gateway"))
    rows.append((f"`{errors.EngineError.__name__}`", "500", "`engine_error`", "`engine_error`"))
    rows.append((f"`{errors.UpstreamError.__name__}`", "502, 504", "`upstream_error`", "`upstream_failed`"))
    tree = errors.__doc__ or ""
    return (
        "# Errors\n\n```\n"
        + tree.strip()
        + "\n```\n\n"
        + _table(("class", "status", "`type`", "`code` (unless a better one is known)"), rows)
    )


def metrics_page() -> str:
    edges = ", ".join(f"{edge_ns / 1e9:g}" for edge_ns in EDGES_NS)
    buckets = ", ".join(derive.prompt_bucket(edge) for edge in (*derive.PROMPT_BUCKET_EDGES, 10**9))
    rows = [_metric(spec) for spec in (*METRICS, *(alias.spec for alias in ALIASES))]
    return (
        "# Metrics\n\nAt `/metrics`, in Prometheus' text form.\n\n"
        + _table(("name", "kind", "labels", "meaning"), rows)
        + "\n## Of a gateway\n\n"
        + _table(("name", "kind", "labels", "meaning"), [_metric(spec) for spec in GATEWAY_METRICS])
        + f"\nEdges of every histogram of times, in seconds: {edges}. Histograms of tokens have 1, 2 and 5 times the "
        "powers of ten, up to the model's context; those that count something else have vLLM's edges.\n\n"
        + f"Values of the label `prompt_tokens`: {buckets}.\n"
    )


def _metric(spec: MetricSpec) -> tuple[str, ...]:
    return f"`{spec.name}`", spec.kind, ", ".join(f"`{label}`" for label in spec.labels) or "-", spec.help


def gateway_page() -> str:
    """Every key of `gateway.toml`, table by table, and what is refused by name."""
    tables = "".join(
        f"\n## {title}\n\n{_first_paragraph(kind)}\n\n"
        + _table(("key", "default", "range", "meaning"), [_key(one) for one in settings_of(kind)])
        for title, kind in (("Of the file itself", GatewayConfig), *((f"`{name}`", kind) for name, kind in TABLES))
    )
    refused = _table(("key", "what there is"), [(f"`{name}`", why) for name, why in NOT_BUILT.items()])
    removed = _table(("key", "what there is"), [(f"`{name}`", why) for name, why in REMOVED.items()])
    return (
        "# The gateway's config\n\n`splittime gateway --config FILE` reads it at the start, and "
        "again when it is told to. A key that is not here "
        f"is an error.\n{tables}\n## What is refused by name\n\nThese are not built.\n\n{refused}"
        f"\nThese were removed ([why](../adr/0032-what-nobody-asked-for-is-left-out.md)).\n\n{removed}"
    )


def cluster_page() -> str:
    """Every key of `cluster.toml`, table by table."""
    kinds = (
        ("Of the file itself", ClusterConfig),
        ("`[replica]`", ReplicaConfig),
        ("`[scale]`", ScaleSettings),
        ("`[times]`", UpstreamTimes),
    )
    tables = "".join(
        f"\n## {title}\n\n{_first_paragraph(kind)}\n\n"
        + _table(("key", "default", "range", "meaning"), [_key(one) for one in settings_of(kind)])
        for title, kind in kinds
    )
    return (
        "# The cluster's config\n\n`splittime up --config FILE` reads it at the start, and again when it is told to. A "
        "key that is not here is an error. `[serve]` has the keys of [the settings](settings.md), `[gateway]` those of "
        "[the gateway's config](gateway.md) but for its upstreams, `[canary]` those of its table of that name.\n"
        + tables
    )


def _first_paragraph(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")


def _key(setting: Setting) -> tuple[str, ...]:
    default = "must be given" if setting.default is msgspec.NODEFAULT else _default(setting)
    return f"`{setting.name}`", default, _range(setting), setting.doc.help


def findings_page() -> str:
    needed = {
        "accounts": "accounts",
        "steps": "steps",
        "run": "a run of `splittime bench`",
        "reported": "a run, or a look at a live server, of another kind",
        "facts": "the server's facts",
        "machine": "the machine's threads and cores",
        "parts": "prompts of 64 tokens or more",
        "floor": "the machine's ceilings",
    }
    rows = [
        (
            f"`{r.name}`",
            r.meaning,
            ", ".join(needed[n] for n in r.needs) or "-",
            ", ".join(f"`{s}`" for s in r.root_of) or "-",
        )
        for r in finding.RULES.values()
    ]
    counted = ", ".join(f"`{r.name}`" for r in finding.RULES.values() if not r.needs)
    return (
        "# Findings\n\n"
        "`splittime doctor` can name these findings. Each comes with its evidence, the share of the requests' time "
        "that it explains, a prescription, its cost, and what would refute it. A rule says so if its needs are not "
        "met.\n\n"
        f"The doctor says nothing below {doctor.MIN_REQUESTS} requests (but for {counted}, which count what ended "
        "badly, and rules that read another server's gauges), or if more than "
        f"{doctor.MAX_RESIDUAL:.0%} of the requests' time is in neither book.\n\n"
        "It prints illnesses before limits. Limits are what binds a healthy server: `weight_bandwidth_bound`, "
        "`kv_bandwidth_bound` and `compute_bound`. `speculation_would_pay` is told with them, since nothing is wrong "
        "with a server that does not guess. Among illnesses, the one with the larger share of time comes first, but a "
        "root always comes before its symptoms.\n\n" + _table(("finding", "meaning", "needs", "is the root of"), rows)
    )


def exit_codes_page() -> str:
    """From what each command's `--help` says."""
    pages = [f"## `{name}`\n\n" + _table(("code", "meaning"), codes) for name, codes in command_codes()]
    return (
        "# Exit codes\n\nScripts can rely on these codes. Each command's `--help` says them too. Commands print data "
        "to standard output, and progress and errors to standard error.\n\n" + "\n".join(pages)
    )


def commands_page() -> str:
    """Returns each command's help, as a terminal of 100 columns shows it."""
    parts = [
        f"## `{name}`\n\n```\n{_help(name, command)}\n```\n"
        for name, command in _commands("splittime", typer.main.get_command(app))
    ]
    return (
        "# Commands\n\nThis is what `--help-all` prints; `--help` leaves out the flags that are rarely needed. The "
        "settings of `serve` and `run` have [a page of their own](settings.md).\n\n" + "\n".join(parts)
    )


def _help(name: str, command: click.Command) -> str:
    """Returns the help without the options that the settings page lists."""
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    context.meta[ALL] = True
    hidden = {setting.flag for setting in SETTINGS if setting is not MODEL} if name in SERVED_BY_SETTINGS else set()
    for option in command.params:
        if hidden.intersection(option.opts):
            option.hidden = True  # type: ignore[attr-defined]
    return command.get_help(context).strip()


def api_page() -> str:
    """Returns a table of the server's paths, from the description that `/openapi.json` gives."""
    paths = document(BodyLimits())["paths"]
    rows = [
        (f"`{method.upper()} {path}`", _sentence(said.get("summary", "")), _sentence(said.get("description", "")))
        for path, methods in paths.items()
        for method, said in methods.items()
    ]
    return (
        "# HTTP API\n\nA server describes itself at `/docs`, and for programs at `/openapi.json`. [Fields of the "
        "API](fields.md) has every field of the bodies, and [Errors](errors.md) the answers that are no success.\n\n"
        + _table(("path", "what it does", "more"), rows)
    )


def _sentence(text: str) -> str:
    return " ".join(text.split())


def command_codes() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Each command with its codes and their meanings."""
    for name, command in _commands("splittime", typer.main.get_command(app)):
        _, _, told = (command.epilog or "").partition("Exit codes:")
        codes = re.findall(r"(\d+) +(.*?)(?:,\s+(?=\d)|\.?\s*(?:\n|$))", told.strip())
        yield name, [(f"`{code}`", meaning) for code, meaning in codes]


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    parts = getattr(command, "commands", None)  # of a group
    if parts is not None and getattr(command, "invoke_without_command", False) and name != "splittime":
        yield name, command
    for part in (parts or {}).values():
        yield from _commands(f"{name} {part.name}", part)
    if parts is None:
        yield name, command


MODELS = {
    "LlamaForCausalLM": ("Llama 2 and 3, SmolLM2, TinyLlama and all that save themselves as one", ""),
    "MistralForCausalLM": ("Mistral 7B, Nemo, Mistral Small", "a window in every layer"),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5, DeepSeek-R1 distilled into them", "biases of queries, keys and values"),
    "MiMoForCausalLM": ("MiMo-7B", "a head that drafts, for speculation"),
    "Qwen3ForCausalLM": ("Qwen3, Qwen3-Embedding", "a norm of each head"),
    "Qwen3_5ForCausalLM": ("Qwen3.5, 3.6 and 3.8 dense", "gated delta nets in three of four layers, gates of heads"),
    "Qwen3_5MoeForCausalLM": ("Qwen3.5-35B-A3B and its like", "the same, and experts, one of them for every token"),
    "Qwen3NextForCausalLM": ("Qwen3-Next-80B-A3B", "gated delta nets; experts, one of them for every token"),
    "MixtralForCausalLM": ("Mixtral", "experts"),
    "Qwen3MoeForCausalLM": ("Qwen3-30B-A3B and its like", "experts, a norm of each head"),
    "Qwen2MoeForCausalLM": ("Qwen1.5-MoE, Qwen2-57B-A14B", "experts, one of them for every token"),
    "GptOssForCausalLM": ("gpt-oss 20B and 120B", "experts in MXFP4, sinks, windows by layer, yarn, clamped SwiGLU"),
    "Ernie4_5_MoeForCausalLM": ("ERNIE 4.5 21B-A3B and 300B-A47B", "experts, shared ones, a corrected router"),
    "Glm4MoeForCausalLM": (
        "GLM-4.5, 4.5-Air and 4.6",
        "the same, by sigmoid and in groups; half of each head is turned",
    ),
    "Dots1ForCausalLM": ("dots.llm1", "the router of GLM-4.5, a norm of each head"),
    "MellumForCausalLM": ("Mellum 2", "as Qwen3 with experts; windows and rotary embeddings by layer"),
    "OlmoeForCausalLM": ("OLMoE 1B-7B", "experts, a norm of all heads together"),
    "GraniteMoeForCausalLM": ("Granite 3 1B-A400M and 3B-A800M, PowerMoE", "experts, Granite's multipliers"),
    "SmolLM3ForCausalLM": ("SmolLM3", "layers without positions"),
    "SeedOssForCausalLM": ("Seed-OSS 36B", "biases"),
    "Ernie4_5ForCausalLM": ("ERNIE 4.5, the dense ones", "rotary pairs as neighbours"),
    "GraniteForCausalLM": ("Granite 3 and 3.3", "multipliers of embeddings, scores, layers and logits"),
    "GraniteMoeHybridForCausalLM": ("Granite 4, those of attention alone", "the same; with or without positions"),
    "Phi3ForCausalLM": ("Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini", "joined projections; longrope, partial"),
    "MinistralForCausalLM": ("Ministral 8B", "windows by layer"),
    "Ministral3ForCausalLM": ("Ministral 3", "yarn; queries that grow with their position"),
    "HunYuanDenseV1ForCausalLM": ("Hunyuan 0.5B to 7B", "a norm of each head behind the position"),
    "HunYuanMoEV1ForCausalLM": ("Hunyuan A13B", "the same; experts, one of them for every token"),
    "Olmo2ForCausalLM": ("OLMo 2", "norms after the parts, a norm of all heads together"),
    "Olmo3ForCausalLM": ("OLMo 3", "the same; windows and rotary embeddings by layer"),
    "Exaone4ForCausalLM": ("EXAONE 4", "norms after the parts; layers without windows know no positions"),
    "GlmForCausalLM": ("GLM-4 9B (2024)", "half of each head is turned, pairs as neighbours"),
    "Glm4ForCausalLM": ("GLM-4 9B and 32B (0414), GLM-Z1", "the same; norms before and after the parts"),
    "GemmaForCausalLM": ("Gemma", "GELU, norms stored less one, a multiplier of embeddings"),
    "Gemma2ForCausalLM": ("Gemma 2", "the same; norms before and after the parts, capped scores and logits"),
    "Gemma3ForCausalLM": ("Gemma 3", "windows and rotary embeddings by layer, a norm of each head"),
    "Gemma4ForCausalLM": (
        "Gemma 4",
        "heads of two widths, values normed, keys as values, experts beside the MLP (26B-A4B), layers with inputs of "
        "their own and with the keys and values of earlier ones (E2B, E4B)",
    ),
    "Gemma3TextModel": ("embedders on Gemma 3", "no head; with `use_bidirectional_attention` an encoder"),
    "CohereForCausalLM": (
        "Command-R, Aya",
        "layer norms, one for attention and MLP side by side; rotary pairs as neighbours",
    ),
    "Cohere2ForCausalLM": (
        "Command R7B, Command A",
        "the same; windows by layer, without which a layer knows no positions",
    ),
    "Starcoder2ForCausalLM": (
        "StarCoder2 3B, 7B and 15B",
        "layer norms and products with biases, an MLP without a gate",
    ),
    "LlamaModel": ("embedders on Llama", "no head"),
    "MistralModel": ("embedders on Mistral", "no head"),
    "Qwen3Model": ("embedders on Qwen3", "no head"),
}
"""By the name in config.json: which models have it, and what is their own beside Llama's layers."""


def models_page() -> str:
    rows = [(f"`{name}`", *MODELS.get(name, ("", ""))) for name in ARCHITECTURES]
    wrapped = [(f"`{outer}`", f"`{kind}`", f"`{name}`") for (outer, kind), name in WRAPPERS.items()]
    return (
        "# Models\n\n"
        "The name is that in a checkpoint's `config.json`. What a model asks for and is not here is refused at the "
        "start, by name. Every line is held to `transformers` on small random models, in texts longer than its windows "
        "and original contexts: logits in float32 are equal to 0.0001. Layers that the native kernels do not have "
        "in one are run part by part; the line `layers` at the start says which, and why.\n\n"
        + _table(("architecture", "models", "beside Llama's layers"), rows)
        + "\nOf multimodal models the text part is served; images are refused.\n\n"
        + _table(("architecture", "type of the text part", "served as"), wrapped)
        + "\n* Rotary embeddings: `default`, `linear`, `llama3`, `yarn`, `longrope` (by the served context, "
        "`--max-model-len`, and not by each text), and `dynamic` with an `alpha`. Kinds of layers may differ.\n"
        "* gpt-oss: MXFP4 is kept as int8 in groups of 32, exactly what the file says, in 8.5 bits a weight where the "
        "file has 4.25. Its sinks, and Gemma 2's capped scores, are in the native, torch and reference kernels, and "
        "not in those for cards: there such models are computed by the processor.\n"
        "* Gated delta nets (Qwen3.5, Qwen3-Next) keep a state of a fixed size for each sequence. The recurrence runs "
        "token by token in float32, in the native, torch and reference kernels. With integer weights the strengths and "
        "decays of tokens stay floats, as in published 8-bit checkpoints. Tensors of heads that draft (`mtp.*`) are "
        "told and not used. Not with such models: LoRA, ranks, drafts, blocks shared among servers.\n"
        "* Experts are not adapted (LoRA), the rest of such models is. `splittime quantize` knows the layers of "
        f"{', '.join(name.removesuffix('ForCausalLM') for name in KNOWN)}.\n"
        "* OLMo 2, 3 and OLMoE are not shared by ranks (`--tensor-parallel-size`): a norm is of all heads together. "
        "Nor is a Command-R with `use_qk_norm`: each head has a scale of its own.\n"
        "* Adapters (LoRA) of joined projections (Phi-3, GLM-4) are refused by their tensors' names.\n"
        f"* As GGUF, by the file's `general.architecture`: {', '.join(f'`{name}`' for name in FAMILIES)}.\n"
        "* Encoders (BERT, RoBERTa, XLM-R, ModernBERT, EmbeddingGemma) embed and rank texts: "
        "[guide](../guides/embeddings.md#encoders).\n"
        "* Not served as text generators: state-space layers, MLA.\n"
    )


def modules_page() -> str:
    """Returns an index of the source files: each with the first sentence of its docstring."""
    source, packages = FOLDER.parents[1] / "src" / "splittime", dict[str, list[tuple[str, str]]]()
    for path in sorted(source.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        name = path.relative_to(source).as_posix()
        if text and path.name != "__init__.py":
            first = re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
            packages.setdefault(name.rpartition("/")[0].partition("/")[0], []).append((f"`{name}`", first.rstrip(".:")))
    tables = [
        f"## {name or 'splittime'}\n\n" + _table(("file", "what it holds"), rows) for name, rows in packages.items()
    ]
    return "# Source files\n\nEach file begins with a design note; this is its first sentence.\n\n" + "\n".join(tables)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "stages.md": stages_page,
    "errors.md": errors_page,
    "fields.md": fields_page,
    "foreign_fields.md": foreign_fields_page,
    "metrics.md": metrics_page,
    "findings.md": findings_page,
    "exit_codes.md": exit_codes_page,
    "commands.md": commands_page,
    "api.md": api_page,
    "gateway.md": gateway_page,
    "cluster.md": cluster_page,
    "models.md": models_page,
    "modules.md": modules_page,
}


def outdated() -> list[str]:
    """The pages that do not say what the code says."""
    return [name for name, page in PAGES.items() if _read(FOLDER / name) != NOTICE + page()]


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(NOTICE + page(), encoding="utf-8")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _default(setting: Setting) -> str:
    return f"`{setting.shown_default}`" if setting.shown_default else "-"


def _range(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    return setting.shown_range or {"switch": "`true`, `false`"}.get(setting.kind, "-")


def _definitions() -> str:
    """The block of definitions in `ledger.derive`'s docstring."""
    lines = (derive.__doc__ or "").splitlines()
    return "\n".join(line.strip() for line in lines if line.startswith("    ") and "sum(shares)" not in line)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> int:
    if "--check" not in sys.argv:
        write()
        return 0
    stale = outdated()
    for name in stale:
        print(f"docs/reference/{name} is out of date: run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
