"""The evidence of an incident: books, state and metrics of one server, shareable, within a span of time.

from_server(get, get_text, base, wanted)     what a running server or gateway tells
from_ledger(path, wanted)                    a ledger file, also after a crash

What a server does not tell is a note in the evidence, and no error: in an incident half of it may be gone.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError, SplittimeError
from splittime.diagnose.books import Books, another_server, make_books
from splittime.diagnose.incident.shareable import LEFT_OUT, Shareable, SharedNames, label
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import PREFIX_BYTES
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import open_readonly

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


Get = Callable[[str], Any]
GetText = Callable[[str], str]

MAX_ACCOUNTS, MAX_STEPS = 10_000, 100_000
LIVE_ACCOUNTS, LIVE_STEPS = 4_000, 10_000  # what a server has in memory, and the most that it answers at once
MAX_BLOCK_HASHES = 1_000_000  # beginnings of prompts, the latest requests' first
SAME_BOOT_NS = 3_600 * 10**9  # by which the wall clock may have been set since the host started


class Wanted(NamedTuple):
    """Which requests: those under way between two instants of the wall clock, in Unix seconds; at most so many, the
    latest."""

    since_s: float = -math.inf
    until_s: float = math.inf
    max_accounts: int = MAX_ACCOUNTS

    def has(self, account: ClosedAccount) -> bool:
        begin_ns = account.started_at_unix_ns
        end_ns = begin_ns + account.end_ns - account.start_ns
        return begin_ns <= self.until_s * 1e9 and end_ns >= self.since_s * 1e9


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one server, shareable. kind: server, gateway or ledger. stats: its page of figures, if any.
    are_steps_cut: there were more steps in the time than these. notes: what could not be had."""

    kind: str
    books: Books
    stats: Any = None
    metrics: str = ""
    are_steps_cut: bool = False
    notes: tuple[str, ...] = ()


def from_server(get: Get, get_text: GetText, base: str, wanted: Wanted) -> Evidence:
    """get, get_text: return the decoded answer, or the text, of a URL. Raises `EngineError` where nobody answers, and
    `ConfigError` for a refused key or no splittime server."""
    listed = get(f"{base}/ledger/requests?limit={min(wanted.max_accounts, LIVE_ACCOUNTS)}")
    notes: list[str] = []
    facts_json = _answered("/ledger/facts", get, base, notes)
    steps_json = _answered(f"/ledger/steps?limit={LIVE_STEPS}", get, base, notes)
    try:
        facts = None if facts_json is None else msgspec.convert(facts_json, ServerFacts)
        accounts = [account_from_json(entry) for entry in listed["accounts"]]
        steps = [] if steps_json is None else msgspec.convert(steps_json["steps"], list[StepRecord])
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        message = "the server's ledger cannot be read"
        raise ConfigError(message, param="url", hint=another_server(base)) from error
    shareable = Shareable(facts)
    stats, metrics = _answered("/stats", get, base, notes), _answered("/metrics", get_text, base, notes)
    checks = [_checked(path, get, base) for path in ("/health", "/ready")]
    is_gateway = facts is not None and facts.process("gateway") is not None
    return _evidence(
        "gateway" if is_gateway else "server",
        (facts, accounts, steps),
        wanted,
        shareable,
        stats={"checks": dict(checks), "stats": shareable.state(stats)},
        metrics=shareable_metrics(metrics or "", shareable),
        notes=tuple(notes),
    )


def from_ledger(path: Path, wanted: Wanted) -> Evidence:
    """Raises `NotFound` or `ConfigError` for what is no ledger file."""
    file = open_readonly(path)
    try:
        facts = file.facts()
        read = file.accounts(limit=10 * wanted.max_accounts)
        given = [account for account in read if wanted.has(account)]
        accounts = given[-wanted.max_accounts :]
        begin_ns = min((account.start_ns for account in accounts), default=0)
        end_ns = max((account.end_ns for account in accounts), default=0)
        steps = file.steps_between(begin_ns, end_ns)
    finally:
        file.close()
    is_all = len(read) < 10 * wanted.max_accounts
    notes = () if is_all else (f"requests before the latest {len(read)} were not read",)
    return _evidence("ledger", (facts, given, steps), wanted, Shareable(facts), notes=notes)


Records = tuple[ServerFacts | None, Sequence[ClosedAccount], Sequence[StepRecord]]


def _evidence(kind: str, records: Records, wanted: Wanted, shareable: Shareable, **more: Any) -> Evidence:
    facts, given, steps = records
    accounts = _of_one_boot([account for account in given if wanted.has(account)])[-wanted.max_accounts :]
    notes = more.pop("notes", ())
    if len(accounts) < len(given):
        notes = (
            *notes,
            f"{len(given) - len(accounts)} requests are of another time, another start of the host, or over the limit",
        )
    begin_ns = min((account.start_ns for account in accounts), default=0)
    end_ns = max((account.end_ns for account in accounts), default=0)
    during = [step for step in steps if step.end_ns > begin_ns and step.begin_ns < end_ns]
    kept = during[-MAX_STEPS:]
    is_cut = len(kept) < len(during) or bool(kept and len(steps) >= LIVE_STEPS and kind != "ledger")
    books = make_books(
        shareable.facts(facts), _shareable(accounts, shareable), [shareable.step(step) for step in kept], kind
    )
    return Evidence(kind=kind, books=books, are_steps_cut=is_cut, notes=notes, **more)


def _of_one_boot(accounts: Iterable[ClosedAccount]) -> list[ClosedAccount]:
    """Returns them by their ends, without those from before the host was started anew: its clock began again then."""
    found = sorted(accounts, key=lambda account: account.started_at_unix_ns + account.end_ns - account.start_ns)
    offsets_ns = [account.started_at_unix_ns - account.start_ns for account in found]
    return [
        account
        for account, offset_ns in zip(found, offsets_ns, strict=True)
        if abs(offset_ns - offsets_ns[-1]) <= SAME_BOOT_NS
    ]


def _shareable(accounts: Sequence[ClosedAccount], shareable: Shareable) -> list[ClosedAccount]:
    """The latest first, as long as there is room for the hashes of their beginnings."""
    room, made = MAX_BLOCK_HASHES, []
    for account in reversed(accounts):
        room -= (len(account.prefixes) + len(account.answer_prefixes)) // PREFIX_BYTES
        made.append(shareable.account(account, with_prefixes=room >= 0))
    return made[::-1]


def _answered(path: str, get: Callable[[str], Any], base: str, notes: list[str]) -> Any:
    """Returns the answer; None, and a note, where the server does not give it."""
    try:
        return get(f"{base}{path}")
    except SplittimeError as error:
        notes.append(f"{path.partition('?')[0]} was not answered: {error.info.kind}")
        return None


def _checked(path: str, get: Get, base: str) -> tuple[str, bool]:
    try:
        get(f"{base}{path}")
    except SplittimeError:
        return path[1:], False
    return path[1:], True
