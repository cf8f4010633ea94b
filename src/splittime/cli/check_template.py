"""`splittime check-template MODEL|FILE`: does each turn's prompt begin with the one before, or is it computed again?"""

import signal
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import typer
from rich.table import Table

from splittime.assemble import model_source
from splittime.cli import options
from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from splittime.simulate.cost import CostModel
    from splittime.text.template_check import TurnCheck

CONTEXTS = (8_192, 32_768, 131_072)
NO_MODEL = {"bos_token": "<s>", "eos_token": "</s>"}  # what a template is told that comes without a model
MARKS = {"holds": "=", "answer": "a", "refused": "x", "history": "H"}
MOST_S = 30  # of processor time; the slowest of 70 known templates takes 1
LEGEND = "= begins with the prompt before, a the last answer is computed again, H the history is, x refused"

EXAMPLES = """\b
Examples:
  splittime check-template ./models/qwen3          its own template
  splittime check-template chat_template.jinja     a file, no model needed

Exit codes: 0 each history comes back, 1 one is computed again,
2 a usage error, or a template that does not parse or end,
3 cannot tell: each conversation is refused.
"""


@options.fails_clearly
def check_template(
    source: str | None = options.argument("MODEL|FILE.jinja", "Whose chat template. Default: the model of serve."),
    costs: str | None = options.flag("FILE", "A ledger or a calibration: what its server takes for the tokens."),
    json: options.JsonFlag = False,
) -> None:
    """Prove for grown conversations whether each prompt begins with the one before."""
    from splittime.plan.sources import replica_in
    from splittime.text.template_check import CHARS, check_template

    name, text, special, encode = _template_of(source)
    cost = None if costs is None else replica_in(costs, {}).costs
    signal.signal(signal.SIGPROF, signal.default_int_handler)  # an exception would be taken for the template's refusal
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        found = check_template(text, special, encode)
    except KeyboardInterrupt:
        if signal.getitimer(signal.ITIMER_PROF)[0]:
            raise
        raise ConfigError(f"the chat template does not end within {MOST_S} s", param="source") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    fails = dict.fromkeys(one.case for one in found if one.breaks)
    code = 1 if fails else 3 if all(one.verdict == "refused" for one in found) else 0
    if json:
        turns = [msgspec.to_builtins(one) | _again(one, cost) for one in found]
        options.write_data(orjson.dumps({"template": name, "turns": turns, "exit_code": code}))
        raise typer.Exit(code)
    console = options.wide()
    how = "its own tokens" if encode else f"a token counted as {CHARS} characters, since there is no model"
    console.print(
        f"{name}, {how}. Of each turn from the second on: {LEGEND}; and the tokens of the worst turn.\n", markup=False
    )
    console.print(_table(found, cost))
    worst = sorted(_worst(found).values(), key=lambda one: one.breaks)  # what fails is shown, of those alike
    for one in {(one.verdict, one.cause): one for one in worst}.values():
        console.print(_difference(one), markup=False)
    ends = {0: "fails nothing", 1: f"fails: {'; '.join(fails)}", 3: "cannot tell: each conversation is refused"}
    console.print(f"\n{ends[code]}", markup=False)
    raise typer.Exit(code)


def _template_of(source: str | None) -> tuple[str, str, dict[str, str], Any]:
    """Returns a name, the template, the special tokens, and what makes tokens of a text, where there is a model."""
    from splittime.text.tokenizer import read_template

    if source is not None and Path(source).is_file() and Path(source).suffix != model_source.GGUF_SUFFIX:
        return Path(source).name, read_template(source), NO_MODEL, None
    tokenizer = model_source.load_tokenizer(model_source.locate(source, "dummy"))
    if not tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template", param="source", hint="Name a file: FILE.jinja.")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return source or model_source.default(), tokenizer.chat_templates["default"], tokenizer.special_tokens, encode


def _again(one: "TurnCheck", cost: "CostModel | None") -> dict[str, Any]:
    """Returns by length of the history the tokens that a turn computes again, and what they take."""
    tokens = {str(context): one.tokens_again(context) for context in CONTEXTS}
    ms = {context: prompt_ns(cost, again, int(context)) / 1e6 for context, again in tokens.items()} if cost else {}
    return {"tokens_again": tokens} | ({"ms_again": ms} if ms else {})


def prompt_ns(cost: "CostModel", tokens: int, context: int) -> float:
    """Returns what the last so many tokens of a prompt of this length take, whatever the steps that compute them."""
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2
    return max(line[3] * tokens + line[5] * pairs for line in (cost.device, cost.compute) if line)


def _worst(found: "Sequence[TurnCheck]") -> "dict[str, TurnCheck]":
    """Returns by case the turn that costs most; none of a case whose turns all hold."""
    ranked = sorted(found, key=lambda one: (list(MARKS).index(one.verdict), one.tokens_again(CONTEXTS[0])))
    return {one.case: one for one in ranked if one.verdict != "holds"}


def _table(found: "Sequence[TurnCheck]", cost: "CostModel | None") -> Table:
    table = Table("conversation", "turns", box=None, pad_edge=False)
    for context in CONTEXTS:
        table.add_column(f"at {context // 1024}k", justify="right")
    worst = _worst(found)
    for case in dict.fromkeys(one.case for one in found):
        marks = " ".join(MARKS[one.verdict] for one in found if one.case == case)
        table.add_row(case, marks, *(_cells(worst[case], cost) if case in worst else ()))
    return table


def _cells(one: "TurnCheck", cost: "CostModel | None") -> Iterator[str]:
    again = _again(one, cost)
    for context, tokens in again["tokens_again"].items():
        ms = f"\n{again['ms_again'][context]:,.0f} ms" if cost is not None else ""
        yield f"{tokens:,}{ms}" if tokens else ""


def _difference(one: "TurnCheck") -> str:
    from splittime.text.template_check import CAUSES

    head = f"\n{one.case}, turn {one.turn}"
    if one.verdict == "refused":
        return f"{head}: refused: {one.now}"
    told = f"{head}: token {one.at} of {one.tokens} is another\n  before {one.before!r}\n  now    {one.now!r}\n"
    return told + textwrap.fill(f"  cause  {CAUSES[one.cause]}", 80, subsequent_indent=" " * 9)
