"""Writes docs/reference/ from the code: settings, stages, errors, fields of the API, metrics, findings, exit codes.
A test holds the pages to be current.

python docs/generate.py            write the pages
python docs/generate.py --check    exit with 1 and their names if any is out of date
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import typer

from splittime.cli.main import app
from splittime.cli.settings_table import SETTINGS, Setting
from splittime.core import errors
from splittime.diagnose import doctor, finding
from splittime.ledger import derive
from splittime.ledger.export.histogram import EDGES_NS
from splittime.ledger.export.metrics import METRICS
from splittime.ledger.export.vllm_names import ALIASES
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING
from splittime.server.config import ServerConfig
from splittime.server.described.openapi import document

FOLDER = Path(__file__).parent / "reference"
BODIES = ("CompletionBody", "ChatBody", "Message", "TextPart", "StreamOptions", "TokenizeBody", "DetokenizeBody")
NOTICE = "<!-- Made by docs/generate.py from the code; change it there. -->\n\n"


def settings_page() -> str:
    rows = [(f"`{s.name}`", f"`{_flag(s)}`", f"`{s.env}`", _default(s), _range(s), s.help) for s in SETTINGS]
    return (
        "# Settings\n\n"
        "Default < `splittime.toml` (in the current folder, or `--config FILE`) < environment < flag. A name that is "
        "not in this table is an error. `splittime config show` prints each value with its origin. `LLM(...)` "
        "takes the engine's settings as arguments.\n\n"
        + _table(("key in the file", "flag", "environment", "default", "range", "meaning"), rows)
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


def fields_page() -> str:
    """Each body's fields with their fate, from the description that `/openapi.json` gives."""
    schemas = document(ServerConfig())["components"]["schemas"]
    parts = []
    for name in BODIES:
        rows = [
            (f"`{field}`", _type_words(of), _fate(of), of.get("description", "").removeprefix("No effect: "))
            for field, of in schemas[name]["properties"].items()
        ]
        parts.append(f"## {name}\n\n" + _table(("field", "type", "fate", "meaning"), rows))
    return (
        "# Fields of the API\n\n"
        "An unknown field is refused by name. *no effect*: taken, since ordinary clients send it and its API promises "
        "nothing that could be missed; `--strict` refuses it. *refused*: only the value without effect is taken. "
        "A server describes itself, with its model's limits, at `/docs` and `/openapi.json`.\n\n" + "\n".join(parts)
    )


def _fate(schema: dict[str, Any]) -> str:
    if schema.get("x-effect") == "none":
        return "no effect"
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
    rows.append((f"`{errors.EngineError.__name__}`", "500", "`engine_error`", "`engine_error`"))
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
    rows = [
        (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels) or "-", m.help)
        for m in (*METRICS, *(alias.spec for alias in ALIASES))
    ]
    return (
        "# Metrics\n\nAt `/metrics`, in Prometheus' text form.\n\n"
        + _table(("name", "kind", "labels", "meaning"), rows)
        + f"\nEdges of every histogram of times, in seconds: {edges}. Histograms of tokens have 1, 2 and 5 times the "
        "powers of ten, up to the model's context; those that count something else have vLLM's edges.\n\n"
        + f"Values of the label `prompt_tokens`: {buckets}.\n"
    )


def findings_page() -> str:
    needed = {
        "accounts": "accounts",
        "steps": "steps",
        "run": "a run of `splittime bench`",
        "told": "a run, or a look at a live server, of another kind",
        "facts": "the server's facts",
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
    return (
        "# Findings\n\n"
        "What `splittime doctor` can name. Each finding comes with its evidence, the share of the requests' time it "
        "explains, a prescription, its cost, and what would refute it. A rule whose needs are not met says so.\n\n"
        f"It abstains below {doctor.MIN_REQUESTS} requests or {doctor.MIN_STEPS} steps, and where more than "
        f"{doctor.MAX_RESIDUAL:.0%} of the requests' time is in neither book.\n\n"
        "The order: illnesses before limits (`weight_bandwidth_bound`, `kv_bandwidth_bound`, `compute_bound`: what a "
        "healthy server is bound by); the larger share of time first; but a root before its symptoms.\n\n"
        + _table(("finding", "meaning", "needs", "is the root of"), rows)
    )


def exit_codes_page() -> str:
    """From what each command's `--help` says."""
    pages = [f"## `{name}`\n\n" + _table(("code", "meaning"), codes) for name, codes in command_codes()]
    return (
        "# Exit codes\n\nWhat a script can rely on, as each command's `--help` says it. Data goes to standard output, "
        "talk and errors to standard error.\n\n" + "\n".join(pages)
    )


def command_codes() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Each command with its codes and their meanings."""
    for name, command in _commands("splittime", typer.main.get_command(app)):
        _, _, told = (command.epilog or "").partition("Exit codes:")
        codes = re.findall(r"(\d+) +(.*?)(?:,\s+(?=\d)|\.?\s*(?:\n|$))", told.strip())
        yield name, [(f"`{code}`", meaning) for code, meaning in codes]


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    parts = getattr(command, "commands", None)  # of a group
    for part in (parts or {}).values():
        yield from _commands(f"{name} {part.name}", part)
    if parts is None:
        yield name, command


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "stages.md": stages_page,
    "errors.md": errors_page,
    "fields.md": fields_page,
    "metrics.md": metrics_page,
    "findings.md": findings_page,
    "exit_codes.md": exit_codes_page,
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


def _flag(setting: Setting) -> str:
    return setting.flag if setting.parts else "MODEL"


def _default(setting: Setting) -> str:
    return f"`{setting.shown_default}`" if setting.shown_default else "-"


def _range(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.minimum is None:
        return {"switch": "`true`, `false`"}.get(setting.kind, "-")
    return f"{setting.minimum} to {setting.maximum}" if setting.maximum is not None else f"at least {setting.minimum}"


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
