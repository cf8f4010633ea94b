"""The report of `/lint` in words, for `gateway lint` and among what `gateway inventory` has against the gateway."""

from collections.abc import Iterator
from typing import Any

WORDS = {
    "json_whitespace": "white space within JSON",
    "json_empty_keys": "keys that are empty in every object of a list",
    "repeated_lines": "long lines that stand there already",
    "changing_prefix": "a time or an id in the system message, and all behind it there",
}


def fault_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields each fault of one model's prompts with what it costs, the dearest first."""
    for kind, fault in sorted(found["faults"].items(), key=lambda item: -item[1]["tokens"]):
        cost = "" if fault["prefill_ms"] is None else f", {fault['prefill_ms']:.1f} ms to prefill"
        yield f"{WORDS.get(kind, kind)}: {fault['requests']} requests, about {fault['tokens']} tokens{cost}"


def lint_notes(told: dict[str, Any]) -> tuple[str, ...]:
    """Returns what all models' prompts carry for nothing, a line each."""
    looked_at = {model: found["requests"] for model, found in told["models"].items()}
    return tuple(
        f"prompts of {model} ({looked_at[model]} looked at): {line}"
        for model, found in told["models"].items()
        for line in fault_lines(found)
    )
