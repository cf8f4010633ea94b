"""`splittime config show`: every setting, its value, and where the value came from."""

import orjson
from rich.console import Console
from rich.table import Table

from splittime.assemble.settings import Settings
from splittime.cli.options import EXIT_CODES, JsonFlag, ModelArgument, with_settings, write_data
from splittime.cli.panels import add, group

app = group("The settings and where they come from.")

_EXAMPLES = f"""\b
Examples:
  splittime config show
  SPLITTIME_PORT=9000 splittime config show --policy deadline --json

{EXIT_CODES}"""


@with_settings("runner", "scheduler", "server", "ledger")
def show(settings: Settings, model: ModelArgument = None, json: JsonFlag = False) -> None:
    """Print each setting with its origin: default, file and line, environment variable, or flag."""
    if json:
        write_data(orjson.dumps({"settings": settings.shown()}, option=orjson.OPT_INDENT_2))
        return
    table = Table("setting", "value", "origin", box=None, pad_edge=False)
    for entry in settings.shown():
        style = "dim" if entry["origin"] == "default" else "bold"
        table.add_row(entry["name"], _plain(entry["value"]), entry["origin"], style=style)
    Console(highlight=False).print(table)


add(app, show, _EXAMPLES, "Print each setting, its value and its origin.")


def _plain(value: object) -> str:
    if value in (None, ()):
        return "-"
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
