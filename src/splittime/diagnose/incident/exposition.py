"""A server's `/metrics` for a bundle: our metrics and vLLM's, without what their labels say of whom they are about."""

import re

from splittime.diagnose.incident.names import LEFT_OUT, SharedNames, label

PREFIXES = ("splittime_", "vllm:")
SAFE_LABELS = frozenset(
    [
        "action",
        "arm",
        "bound",
        "budget",
        "by",
        "cache_dtype",
        "block_size",
        "cause",
        "choice",
        "enable_prefix_caching",
        "engine",
        "execution",
        "finish_reason",
        "finished_reason",
        "kind",
        "le",
        "max_lora",
        "num_cpu_blocks",
        "num_gpu_blocks",
        "outcome",
        "part",
        "position",
        "prompt_tokens",
        "reason",
        "result",
        "rule",
        "sleep_state",
        "source",
        "stage",
        "state",
        "upstream",
        "verdict",
        "why",
        "whose",
    ]
)
RENAMED_LABELS = frozenset({"tenant", "model_name", "model"})
LEFT_OUT_LABELS = frozenset({"running_lora_adapters", "waiting_lora_adapters"})  # names of adapters
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>[-+.\w]+)")
_LABEL_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')


def shareable_metrics(text: str, shareable: SharedNames) -> str:
    """Returns the lines of metrics that we know, in Prometheus' text form."""
    shown = (_shown(line, shareable) for line in text.splitlines())
    return "".join(f"{line}\n" for line in shown if line is not None)


def _shown(line: str, shareable: SharedNames) -> str | None:
    if line.startswith("#"):
        words = line.split(" ", 3)
        return line if len(words) > 3 and words[1] == "TYPE" and words[2].startswith(PREFIXES) else None
    found = _SAMPLE.fullmatch(line)
    if found is None or not found["name"].startswith(PREFIXES):
        return None
    pairs = [f'{name}="{_value(name, value, shareable)}"' for name, value in _LABEL_PAIR.findall(found["labels"] or "")]
    labels = f"{{{','.join(pairs)}}}" if pairs else ""
    return f"{found['name']}{labels} {found['value']}"


def _value(name: str, value: str, shareable: SharedNames) -> str:
    if name == "tenant":
        return shareable.tenant(value)
    if name in ("model_name", "model"):
        return label(shareable.model(value))
    return value if value == "+Inf" else label(value) if name in SAFE_LABELS else LEFT_OUT
