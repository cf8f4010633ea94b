"""splittime: an LLM inference server that accounts for every nanosecond of every request.

    from splittime import LLM, SamplingParams

    for output in LLM().generate(["def read_json(path):"], SamplingParams(max_tokens=40)):
        print(output.text, output.account.intervals)

The names are loaded when first used, so that `import splittime` is fast and imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splittime.core.sampling import SamplingParams
    from splittime.llm import LLM, Output
    from splittime.wire.tracing import trace

__all__ = ["LLM", "Output", "SamplingParams", "trace"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "splittime.llm",
    "Output": "splittime.llm",
    "SamplingParams": "splittime.core.sampling",
    "trace": "splittime.wire.tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splittime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
