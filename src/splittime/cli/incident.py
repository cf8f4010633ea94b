"""`splittime incident`: what is known of an incident in one file, without prompts and secrets, to be given to others.

Sources are servers and gateways (URLs), ledger files, and folders of ledger files. One that cannot be asked is said and
left out, as long as another can: in an incident half of it may be gone.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splittime import __version__
from splittime.cli.explain import DEFAULT_URL
from splittime.cli.options import ASKING_CODES, JsonFlag, argument, fails_clearly, flag, say_error, talk, write_data
from splittime.core.errors import ConfigError, EngineError, NotFound
from splittime.core.settings import parse_bytes

if TYPE_CHECKING:
    from splittime.diagnose.incident.bundle import Manifest
    from splittime.diagnose.incident.gather import Evidence, Wanted

NOBODY = "Is it running there? Its ledger file tells of it too: splittime incident FILE."
EXAMPLES = f"""\b
Examples:
  splittime incident                               the server on port 8000
  splittime incident http://gw:9000 http://a:8000  a gateway and a server
  splittime incident ledgers/ --out slow.zip       a folder of ledger files
  splittime incident run.sqlite --since 2026-11-27T09:00 --until 2026-11-27T09:30
  splittime doctor slow.zip                        what was it?

{ASKING_CODES}"""


@fails_clearly
def incident(
    sources: list[str] | None = argument("URL|LEDGER.sqlite|FOLDER", "What to ask and to read."),
    out: Path | None = flag("FILE", "The file. Default: incident-TIME.zip, here."),
    since: str | None = flag("TIME", "Requests from then on, as 2026-11-27T09:00 (UTC)."),
    until: str | None = flag("TIME", "Requests until then."),
    limit: int = flag("N", "The latest so many requests of a source.", 10_000, min=1, max=100_000),
    max_bytes: str = flag("SIZE", "The file's bound; the oldest requests go.", "20MiB"),
    api_key: str | None = flag("KEY", "The servers'.", envvar="SPLITTIME_API_KEY"),
    json: JsonFlag = False,
) -> None:
    """Put what is known of an incident into one file: no prompt, no answer, no key is in it."""
    from splittime.core.files import check_writable, write_whole
    from splittime.diagnose.incident.bundle import pack

    now_s = int(time.time())
    path = out or Path(datetime.fromtimestamp(now_s, UTC).strftime("incident-%Y%m%d-%H%M%S.zip"))
    check_writable(path)
    wanted, bound = _wanted(since, until, limit), _bound(max_bytes)
    found = _gathered(sources or [DEFAULT_URL], wanted, api_key)
    packed = pack(found, now_s, _versions(), bound)
    write_whole(path, packed.data, keeps=True)
    if json:
        write_data(msgspec.json.encode({"file": str(path), "manifest": packed.manifest}))
        return
    _say(path, len(packed.data), packed.manifest)


def _wanted(since: str | None, until: str | None, limit: int) -> "Wanted":
    from splittime.diagnose.incident.gather import Wanted

    wanted = Wanted(max_accounts=limit)
    if since is not None:
        wanted = wanted._replace(since_s=_unix_s(since, "since"))
    if until is not None:
        wanted = wanted._replace(until_s=_unix_s(until, "until"))
    if wanted.since_s > wanted.until_s:
        raise ConfigError("--since is later than --until", param="since", value=since, limit=until)
    return wanted


def _unix_s(text: str, param: str) -> float:
    """Returns the instant; one without a zone is in UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        hint = "Write it as 2026-11-27T09:00 (UTC), or with a zone, as 2026-11-27T10:00+01:00."
        raise ConfigError(f"{text!r} is no time", param=param, value=text, hint=hint) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _bound(text: str) -> int:
    from splittime.diagnose.incident.bundle import LEAST_BYTES

    try:
        num_bytes = parse_bytes(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no size", param="max_bytes", value=text, hint="As 20MiB.") from None
    if num_bytes < LEAST_BYTES:
        raise ConfigError("the file's bound is too small", param="max_bytes", value=text, limit=LEAST_BYTES)
    return num_bytes


def _gathered(sources: list[str], wanted: "Wanted", api_key: str | None) -> "list[Evidence]":
    """Raises the first source's error where none can be had."""
    found, errors = [], []
    for source in _named(sources):
        try:
            found.append(_evidence(source, wanted, api_key))
        except (ConfigError, EngineError, NotFound) as error:
            errors.append(error)
    for one in errors[0 if found else 1 :]:
        say_error(one)
    if not found:
        raise errors[0]
    return found


def _named(sources: list[str]) -> list[str]:
    """Returns the sources with the ledger files of each folder in its place. Raises `NotFound` for an empty one."""
    from splittime.core.files import SQLITE, begins_with

    named: list[str] = []
    for source in sources:
        if not Path(source).is_dir():
            named.append(source)
            continue
        ledgers = [str(file) for file in sorted(Path(source).iterdir()) if file.is_file() and begins_with(file, SQLITE)]
        if not ledgers:
            hint = "A ledger file is what `splittime serve --ledger-file FILE` writes."
            raise NotFound(f"no ledger file in {source}", param="source", value=source, hint=hint)
        named += ledgers
    return named


def _evidence(source: str, wanted: "Wanted", api_key: str | None) -> "Evidence":
    from splittime.diagnose.incident.gather import from_ledger, from_server
    from splittime.wire.target import base_of, get_json, get_text, is_url

    if not is_url(source):
        return from_ledger(Path(source), wanted)
    return from_server(
        lambda url: get_json(url, api_key, NOBODY), lambda url: get_text(url, api_key, NOBODY), base_of(source), wanted
    )


def _versions() -> dict[str, str]:
    """Returns the versions on this machine, which need not be the server's: its own is in its facts."""
    import platform
    from importlib import metadata

    found = {"splittime": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in ("torch", "msgspec", "orjson", "uvicorn", "starlette", "aiohttp", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _say(path: Path, num_bytes: int, manifest: "Manifest") -> None:
    console = talk()
    for source in manifest.sources:
        findings = ", ".join(source.findings) or "no finding"
        left_out = f", {source.left_out} older ones left out" if source.left_out else ""
        console.print(f"{source.name}: {source.accounts} requests{left_out}, {source.steps} steps; {findings}")
        for note in source.notes:
            console.print(f"  {note}", style="dim", markup=False)
    console.print(f"{path}: {num_bytes:,} bytes. Read it with: splittime doctor {path}", markup=False)
