"""`splittime doctor`: what holds requests back, from a running server, a ledger file, a run of a bench, or an incident.

`--self` looks at the installation instead (`assemble.installation`), and needs no server.

A running vLLM, SGLang, TGI or llama.cpp keeps no ledger: `bench.observation` watches its metrics, and sends
an idle one a small load.
"""

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import typer
from rich.text import Text

from splittime import __version__
from splittime.attach.settings import KNOBS, setting_of
from splittime.cli import options
from splittime.cli.explain import DEFAULT_URL
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError, EngineError, NotFound
from splittime.core.files import SQLITE, begins_with
from splittime.diagnose.bill import between_keys
from splittime.diagnose.books import Books, another_server, books_from_file, books_from_server, books_of_observed
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.diagnose.explain import many
from splittime.diagnose.finding import CANNOT_TELL, FOUND, NOTHING_FOUND, Finding
from splittime.diagnose.incident.bundle import books_in, is_incident
from splittime.diagnose.words import ATTACHED
from splittime.ledger.stages import Cause
from splittime.wire.target import Target, base_of, get_json, is_url

if TYPE_CHECKING:
    from splittime.diagnose.sized import Replays

MAX_LIMIT = 10_000
LATEST = 1000  # what the server's page reads too (`diagnose.books.LIVE_ACCOUNTS`)
NOBODY = (
    "Is `splittime serve` running there? Name another: `splittime doctor http://host:port`; "
    "or a file: `splittime doctor FILE`, a ledger, a bench's run or an incident."
)
_LINE = 80
WHOLE_FROM = 1e5  # figures are told without a fraction
MOST_NAMES = 6  # of rules that could not tell for one reason; --json has all
MIN_TOLD = 0.05  # of the requests' time, in the summary of where it went
FULL = {Cause.BATCH_SLOTS, Cause.KV_BLOCKS, Cause.TOKEN_BUDGET}  # more of it came than there is

EXAMPLES = """\b
Examples:
  splittime doctor                           the server on port 8000
  splittime doctor http://host:9000          vLLM, SGLang, TGI, llama.cpp too
  splittime doctor http://host:9000 --no-probe   the same, watched only
  splittime doctor runs/today.sqlite         a ledger file, also after a crash
  splittime doctor run.json --json           a bench run, of any server
  splittime doctor incident.zip              what `splittime incident` wrote
  splittime doctor --no-sizes                at once, without each gain
  splittime doctor --self                    is this installation sound?

Exit codes: 0 nothing found, 1 something found, 2 usage, 3 cannot tell,
4 nobody answers.
"""


@options.fails_clearly
def doctor(
    source: str | None = options.argument(
        "URL|LEDGER.sqlite|RUN.json|INCIDENT.zip", f"What to look at. Default: {DEFAULT_URL}"
    ),
    url: str | None = options.flag("URL", "The server to ask, as explain has it."),
    limit: int = options.flag("N", "The latest so many requests.", LATEST, min=1, max=MAX_LIMIT),
    api_key: str | None = options.flag("KEY", "The server's.", envvar="SPLITTIME_API_KEY"),
    probe: bool = options.flag(None, "Send a small load to another kind of server if it is idle.", True),
    sizes: bool = options.flag(None, "Replay the latest requests with each cure: what would it gain?", True),
    part: str | None = options.flag("NAME", "Of an incident with several: which, as server-1.", None, "--source"),
    is_self: bool = options.switch("--self", "Check this installation: kernels, libraries, memory, extras."),
    json: options.JsonFlag = False,
) -> None:
    """Name what holds the requests back, with evidence, a prescription, and what would refute it."""
    if is_self:
        raise typer.Exit(_check_installation(json))
    if source is not None and url is not None:
        raise ConfigError("give a source or --url, one of them", param="url", value=url)
    try:
        books = _read(source or base_of(url or DEFAULT_URL), limit, api_key, probe, part)
    except EngineError as error:  # no finding
        options.say_error(error)
        raise typer.Exit(options.code_of(error, CANNOT_TELL)) from None
    diagnosis = msgspec.structs.replace(diagnose(books), waits=between_keys(books))
    if sizes:
        diagnosis = _with_sizes(books, diagnosis)
    if json:
        options.write_data(orjson.dumps(diagnosis.as_json()))
    else:
        asked = _asked(source or base_of(url or DEFAULT_URL), books)
        options.CleanConsole(highlight=False, soft_wrap=True).print(diagnosis_text(diagnosis, asked))
    raise typer.Exit(diagnosis.exit_code)


def _with_sizes(books: Books, diagnosis: Diagnosis) -> Diagnosis:
    if not any(finding.cure.flags for finding in diagnosis.findings):
        return diagnosis
    from splittime.diagnose.sized import sized

    with loading("replaying the latest requests") as say:
        return sized(books, diagnosis, say, _replays_of(books))


def _replays_of(books: Books) -> "Replays":
    """Returns how these books are replayed; those of a vLLM by its own scheduler, where it is in this environment."""
    from splittime.attach.simulators import simulator_of
    from splittime.diagnose.sized import OUR_REPLAYS, Replays

    if books.facts is None or not books.facts.engine:
        return OUR_REPLAYS
    try:
        to_replica = simulator_of(books.facts).to_replica
    except ConfigError:  # no such vLLM here: the finding says that nothing was replayed
        return OUR_REPLAYS
    return Replays(ATTACHED["vllm"], KNOBS, setting_of, to_replica)


def _check_installation(as_json: bool) -> int:
    """Shows the checks; `FOUND` if one of them is bad, and not for a note."""
    from splittime.assemble.installation import examine

    checks = examine()
    code = FOUND if any(check.verdict == "bad" for check in checks) else NOTHING_FOUND
    if as_json:
        told = {"version": __version__, "exit_code": code, "checks": msgspec.to_builtins(checks)}
        options.write_data(orjson.dumps(told))
        return code
    console = options.CleanConsole(highlight=False, soft_wrap=True)
    console.print(f"splittime {__version__}")
    for check in checks:
        console.print(_wrapped(f"{check.verdict:<5}{check.name:<11} {check.found}", "", " " * 17), end="", markup=False)
        if check.remedy is not None:
            console.print(_wrapped(f"try: {check.remedy}", " " * 17, " " * 17), end="", markup=False)
    return code


def _read(source: str, limit: int, api_key: str | None, is_probing: bool, part: str | None) -> Books:
    """A URL is asked; a file says by its content what it is."""
    if is_url(source):
        base = base_of(source)
        try:
            return books_from_server(lambda url: get_json(url, api_key, NOBODY), base, limit)
        except NotFound as error:
            return _look(base, api_key, is_probing, error)
    path = Path(source)
    if not path.exists():
        hint = (
            "Give a URL (http://...), a ledger file (splittime serve --ledger-file) or a run (splittime bench --out)."
        )
        raise NotFound(f"{source!r} is neither a URL nor a file", param="source", value=source, hint=hint)
    if is_incident(path):
        return books_in(path, part, limit)
    if part is not None:
        raise ConfigError(f"{path} is no incident, and has no sources", param="source", value=part)
    return books_from_file(path, limit=limit)


def _look(base: str, api_key: str | None, is_probing: bool, no_ledger: NotFound) -> Books:
    """A server without a ledger. Raises `NotFound`, with what was asked for, where its kind is not known either."""
    from splittime.bench.event_loop import run_loop
    from splittime.bench.observation import ServerKind, observe, what_is_sent

    options.talk().print(f"{base} keeps no ledger; its metrics are watched, and {what_is_sent()}", markup=False)
    try:
        found = run_loop(observe(Target(url=base, api_key=api_key), is_probing))
        return books_of_observed(found.run, is_watched=found.kind == ServerKind.WATCHED)
    except NotFound:
        raise NotFound(no_ledger.info.message, hint=another_server(base)) from None


def _asked(source: str, books: Books) -> str | None:
    """Returns the flag by which `explain` reads the same books; None where it cannot."""
    if is_url(source):
        base = base_of(source)
        return None if books.run is not None else "" if base == DEFAULT_URL else f" --url {shlex.quote(base)}"
    return f" --ledger {shlex.quote(source)}" if begins_with(Path(source), SQLITE) else None


def diagnosis_text(diagnosis: Diagnosis, asked: str | None) -> Text:
    """Returns what people read, in 80 columns: the findings first, then the limits, then what could not be told.
    asked: as `_asked` gives it."""
    refused = f" and {many(diagnosis.num_refused, 'refused one')}" if diagnosis.num_refused else ""
    seen = f"{many(diagnosis.num_requests, 'request')}{refused}, {many(diagnosis.num_steps, 'step')}"
    text = Text(_wrapped(f"{seen}: {diagnosis.source}", "", "  "), style="dim")
    text.append(_still_open(diagnosis), style="bold yellow not dim")
    if not diagnosis.illnesses:
        text.append_text(_nothing(diagnosis))
    text.append_text(_spent(diagnosis))
    number = 0
    for finding in diagnosis.findings:
        number += not finding.is_limit
        text.append_text(_finding(finding, "- " if finding.is_limit else f"{number}. ", asked))
    return text.append_text(_untold(diagnosis))


def _still_open(diagnosis: Diagnosis) -> str:
    """Returns what there is to say of requests that have not ended, which no rule reads, and what to do."""
    told = diagnosis.still_open
    if told is None or not told.open_requests:
        return ""
    causes = ", ".join(f"{n:,} {cause}" for cause, n in sorted(told.waiting_for.items(), key=lambda each: -each[1]))
    says = [f"Still open: {told.open_requests:,}. Running: {told.num_running:,}."]
    if causes:
        says.append(f"Waiting for: {causes}.")
        if told.predicted_wait_ms is not None:
            says.append(f"One more would wait about {told.predicted_wait_ms / 1e3:,.1f} s.")
    if FULL & told.waiting_for.keys():
        says.append("More came than is computed at once. If this grows, send fewer a second or add a server.")
    is_paused = Cause.PAUSED in told.waiting_for
    says.append("The engine is paused." if is_paused else "Ask again when they have ended.")
    return "\n" + _wrapped(" ".join(says), "", "")


def _spent(diagnosis: Diagnosis) -> Text:
    """Where the requests' time went, whether it is an illness or not."""
    told = [entry for entry in diagnosis.spent if entry.share >= MIN_TOLD]
    text = Text("\nWhere the requests' time went\n" if told else "", style="bold not dim")
    for entry in told:
        by = f" [{entry.explained_by}]" if entry.explained_by is not None else ""
        line = f"{entry.share:5.0%} {entry.owner}: {entry.meaning.rstrip('.')}{by}"
        text.append(_wrapped(line, "  ", " " * 10), style="not bold default")
    between = [wait for wait in diagnosis.waits if wait.share >= MIN_TOLD]
    text.append("\nWhich key waited for which\n" if between else "", style="bold not dim")
    for wait in between:
        line = f"{wait.share:5.0%} requests of {wait.waited or 'no key'} waited for those of {wait.had_it or 'no key'}"
        text.append(_wrapped(line, "  ", " " * 10), style="not bold default")
    return text


def _nothing(diagnosis: Diagnosis) -> Text:
    if diagnosis.void:
        return Text("\nCannot tell: the client was at fault (a VOID run).\n", style="bold yellow not dim")
    if diagnosis.is_unexplained:
        return Text("\nCannot tell what would cure it: see no_cure_known.\n", style="bold yellow not dim")
    if diagnosis.exit_code == CANNOT_TELL:
        return Text("\nCannot tell: there is too little to go by.\n", style="bold yellow not dim")
    return Text("\nNothing found that a setting would cure.\n", style="bold green not dim")


def _finding(finding: Finding, mark: str, asked: str | None) -> Text:
    style = "bold not dim" if finding.is_limit else "bold red not dim"
    text = Text(f"\n{mark}{finding.name}", style=style)
    kind = "" if not finding.is_limit else "; a limit"
    text.append(f"  {_share(finding)} of {finding.share_of}{kind}\n", style="not bold")
    text.append(_wrapped(finding.claim, "  ", "  "), style="not bold default")
    evidence = "".join(_wrapped(f"- {_fact(fact)}", "  ", "    ") for fact in finding.evidence)
    text.append(evidence, style="not bold dim")
    text.append(_entry("try", finding.cure.sentence), style="not bold default")
    if finding.cure.command is not None:
        text.append(f"{'':10}{finding.cure.command}\n", style="bold default")
    text.append(_size(finding), style="not bold default")
    rest = (("costs", finding.cost), ("unless", finding.counter_check), ("holds", finding.regime))
    sure = f"{finding.confidence:.2f}: {finding.confidence_from}"
    entries = "".join(_entry(name, sentence) for name, sentence in (*rest, ("sure", sure)))
    return text.append(entries + _where(finding, asked), style="not bold default")


def _size(finding: Finding) -> str:
    if finding.predicted is not None:
        return _entry("gains", finding.predicted.sentence)
    return _entry("gains", f"not known: {finding.not_predicted}.") if finding.not_predicted else ""


def _share(finding: Finding) -> str:
    if finding.share_interval is None or finding.share_interval[0] == finding.share_interval[1]:
        return f"{finding.share_of_time:.0%}"
    low, high = finding.share_interval
    return f"{finding.share_of_time:.0%} ({low:.0%} to {high:.0%})"


def _entry(name: str, sentence: str) -> str:
    return _wrapped(f"{name:<7} {sentence}", "  ", " " * 10)


def _fact(fact: Any) -> str:
    value = str(fact.value)
    if isinstance(fact.value, float):
        value = f"{fact.value:,.0f}" if abs(fact.value) >= WHOLE_FROM else f"{fact.value:,g}"
    return f"{fact.what}: {value} {fact.unit}".rstrip()


def _where(finding: Finding, asked: str | None) -> str:
    """Returns the ids, on lines of their own: they are to be copied."""
    shown = ""
    if finding.request_ids:
        first = shlex.quote(finding.request_ids[0])
        named = f"{asked} -- {first}" if finding.request_ids[0].startswith("-") else f" {first}{asked}"
        shown += f"  see     {first if asked is None else f'splittime explain{named}'}\n"
        rest = finding.request_ids[1:]
        shown += _entry("", f"also {', '.join(rest)}") if rest else ""
    if finding.step_ids:
        shown += _entry("", f"steps {', '.join(map(str, finding.step_ids))}")
    return shown


def _untold(diagnosis: Diagnosis) -> Text:
    """What could not be told, the rules of one reason together: a few of many are named."""
    by_reason: dict[str, list[str]] = {}
    for abstention in diagnosis.abstentions:
        by_reason.setdefault(abstention.why, []).append(abstention.name)
    text = Text("\nCould not be told, or would not help\n" if by_reason else "", style="bold not dim")
    for why, names in by_reason.items():
        few = names if len(names) <= MOST_NAMES else [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} more"]
        text.append(_wrapped(f"- {', '.join(few)}: {why}", "  ", "    "), style="dim not bold")
    return text


def _wrapped(sentence: str, indent: str, hang: str) -> str:
    return textwrap.fill(sentence, _LINE, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False) + "\n"
