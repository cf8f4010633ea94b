"""`splittime gateway lint`: what the prompts that pass a running gateway carry for nothing, and what that costs."""

from collections.abc import Iterator
from typing import Any

import orjson
import typer

from splittime.cli.gateway_versions import DEFAULT_URL, NOBODY, Key, Url
from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly
from splittime.wire.get_json import get_json

EXAMPLES = f"""\b
Examples:
  splittime gateway lint                 of a gateway whose config has [lint]
  splittime gateway lint --json

{EXIT_CODES}"""


@fails_clearly
def lint(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Say what the prompts of a running gateway carry for nothing: tokens by estimate, and their time to prefill."""
    told = get_json(f"{url.rstrip('/')}/lint", api_key, NOBODY)
    typer.echo(orjson.dumps(told).decode() if json else "\n".join(_lines(told)))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    from splittime.gateway.lint.words import fault_lines

    yield f"{told['share']:.3g} of the requests were looked at; {told['skipped']} of those were skipped"
    for model, found in told["models"].items():
        yield f"{model}: {found['requests']} requests, about {found['tokens']} tokens"
        yield from (f"  {line}" for line in fault_lines(found))
        if not found["faults"]:
            yield "  nothing found"
