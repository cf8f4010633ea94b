"""The evidence of an incident: books, state and metrics of one server, shareable, within a span of time.

from_server(get, get_text, base, wanted)     what a running server or gateway tells
from_ledger(path, wanted)                    a ledger file, also after a crash

What a server does not tell is a note in the evidence, and no error: in an incident half of it may be gone.

What of a server's records may be given to somebody else: times, lengths, stages, causes and codes.

    kept       numbers, instants, stages and causes; codes of errors; names that the operator gave (upstreams, rules)
    renamed    ids that clients chose, tenants, traces, models that no config names, and each hash of a prompt
    left out   what errors quote, headers, notes, paths, URLs, settings that are texts

Renaming is a hash with a key (BLAKE2b) that is drawn for each bundle and kept nowhere: what was equal stays equal
within the bundle, and nobody can try whether a guessed prompt, id or name gives that hash. A ledger's own hashes of
prompts have no key, so they do not go as they are. Their sums keep their law (`ledger.prompt_parts`): where two
beginnings were equal, and where two blocks were equal, they still are.

A field is in a bundle because this file, or `attempts`, names it. `tests/diagnose/test_incident_shareable.py` holds
that each field of an account is decided on, and that planted texts do not come out.
"""

import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError, ErrorInfo, SplittimeError
from splittime.diagnose.books import Books, another_server, make_books
from splittime.ledger import attempts
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.prompt_parts import HASH_BITS, PREFIX_BYTES, PromptParts, prefix_list
from splittime.ledger.steps import EXECUTIONS, Coming, StepRecord
from splittime.ledger.store import ID_PREFIXES, open_readonly

LEFT_OUT = "(left out)"
_OUR_ID = re.compile(r"[0-9a-f]{24}(?:-\d{1,4})?")
_WORD = re.compile(r"(?=.{1,48}$)(?:[a-z]+(?:_[a-z]+)*|(?:http|upstream)_\d{3})")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,63}")


def word(text: str) -> str:
    """Returns a code as it is, and `other` for what is no code: upstreams write codes too."""
    return text if not text or _WORD.fullmatch(text) else "other"


def label(text: str) -> str:
    """Returns a name that the operator gave."""
    return text if not text or _LABEL.fullmatch(text) else LEFT_OUT


class SharedNames:
    """Renames within one bundle: what was equal stays equal. facts: name the models that are served."""

    def __init__(self, facts: ServerFacts | None) -> None:
        self._key = secrets.token_bytes(32)
        self._models = frozenset(facts.model.split(", ")) if facts is not None else frozenset()
        self._ids: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Returns what tells a text from others, and does not tell it; empty for an empty one."""
        return self.hashed(text.encode("utf-8", "surrogatepass")).hex() if text else ""

    def request_id(self, name: str) -> str:
        """Returns an id that a server made as it is, one that a client chose renamed."""
        if name not in self._ids:
            prefix = next((prefix for prefix in ID_PREFIXES if name.startswith(prefix)), "")
            own, at, tenant = name[len(prefix) :].partition("@")
            shown = own if _OUR_ID.fullmatch(own) or not own else f"id-{self.mark(own)}"
            self._ids[name] = f"{prefix}{shown}{at}{self.tenant(tenant)}"
        return self._ids[name]

    def tenant(self, name: str) -> str:
        return f"tenant-{self.mark(name)}" if name else ""

    def model(self, name: str) -> str:
        """Returns the name of a model that is served, without its folders; a name that a client wrote is renamed."""
        if not name or name in self._models:
            return re.split(r"[/\\]", name)[-1] if name.startswith(("/", ".", "~")) or "\\" in name else name
        return f"model-{self.mark(name)}"

    def hashed(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=PREFIX_BYTES).digest()


def shared_attempt(attempt: attempts.Attempt, names: SharedNames) -> attempts.Attempt:
    return attempts.Attempt(
        upstream=label(attempt.upstream),
        request_id=names.request_id(attempt.request_id),
        considered=tuple(map(_considered, attempt.considered)),
        begin_ns=attempt.begin_ns,
        end_ns=attempt.end_ns,
        status=attempt.status,
        first_byte_ns=attempt.first_byte_ns,
        error=word(attempt.error),
        num_events=attempt.num_events,
        knows_tokens=attempt.knows_tokens,
        nested=attempt.nested,
        nested_fault=LEFT_OUT if attempt.nested_fault else "",
        resumed_by=word(attempt.resumed_by),
        resumed_after=attempt.resumed_after,
        lost_tokens=attempt.lost_tokens,
        first_tokens=_first_tokens(attempt.first_tokens),
        affinity=_affinity(attempt.affinity),
    )


def shared_routing(routing: attempts.RouteDecision | None, names: SharedNames) -> attempts.RouteDecision | None:
    """Returns the decision without the headers that it looked at."""
    if routing is None:
        return None
    return attempts.RouteDecision(
        policy=label(routing.policy),
        rule=label(routing.rule),
        asked_model=names.model(routing.asked_model),
        model=names.model(routing.model),
        upstreams=tuple(map(label, routing.upstreams)),
        prompt_tokens=routing.prompt_tokens,
        difficulty=_difficulty(routing.difficulty),
    )


def _considered(one: attempts.Considered) -> attempts.Considered:
    return attempts.Considered(label(one.upstream), one.requests, one.tokens, one.rtt_ns, one.wait_ns)


def _affinity(decision: attempts.AffinityDecision | None) -> attempts.AffinityDecision | None:
    if decision is None:
        return None
    return attempts.AffinityDecision(
        result=word(decision.result),
        why=word(decision.why),
        upstream=label(decision.upstream),
        matched_bytes=decision.matched_bytes,
        shared_bytes=decision.shared_bytes,
        tokens=decision.tokens,
        cap_tokens=decision.cap_tokens,
    )


def _first_tokens(found: attempts.FirstTokens | None) -> attempts.FirstTokens | None:
    """Returns the verdict without the log-probability: by that, guesses of the prompt could be tried on the model."""
    if found is None:
        return None
    return attempts.FirstTokens(
        verdict=word(found.verdict),
        num_tokens=found.num_tokens,
        below=found.below,
        held_ns=found.held_ns,
        why=word(found.why),
    )


def _difficulty(decision: attempts.DifficultyDecision | None) -> attempts.DifficultyDecision | None:
    return None if decision is None else attempts.DifficultyDecision(choice=word(decision.choice))


HASHES = 1 << 8 * PREFIX_BYTES
AS_THEY_ARE = (
    *("started_at_unix_ns", "start_ns", "end_ns", "intervals", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("num_preemptions", "first_chunk_tokens", "token_steps", "token_ready_ns", "token_written_ns", "cancelled_ns"),
    *("freed_ns", "computes_prompt", "unseen_ns", "host_tokens", "ahead_tokens", "ahead_ns", "reasoning_tokens"),
    *("most_reasoning_tokens", "render_ns", "max_tokens", "priority", "weight", "deadline_ns", "lookup_guesses"),
    "lookup_right",
)
TEXTS_KEPT = frozenset(  # settings and states that are texts and say how a server computes
    [
        *("activation_dtype", "batching", "books_stopped", "device", "dtype", "engine", "execution", "kernels"),
        *("kind", "kv_cache_dtype", "load_format", "method", "mode", "name", "policy", "quantization", "region"),
        *("state", "texts", "wait_estimate"),
    ]
)
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_VERSION = re.compile(r"\d+:[0-9a-f]+")
_PROGRAM = re.compile(r"[A-Za-z][A-Za-z0-9._+ -]{0,63}")


class Shareable(SharedNames):
    """Makes records of one server shareable. facts: as of `SharedNames`."""

    def __init__(self, facts: ServerFacts | None) -> None:
        super().__init__(facts)
        self._blocks: dict[int, int] = {}

    # ---- hashes of prompts

    def parts(self, parts: PromptParts) -> PromptParts:
        def renamed(mark: int) -> int:
            return int.from_bytes(blake2b(b"%d" % mark, key=self._key, digest_size=8).digest()) >> 64 - HASH_BITS

        return tuple((renamed(mark), start, num_tokens) for mark, start, num_tokens in parts)

    def prefixes(self, prefixes: bytes, answer_prefixes: bytes) -> tuple[bytes, bytes]:
        """Returns the sums of the renamed blocks, of the prompt and of its answer."""
        sums = [int.from_bytes(mark) for mark in prefix_list(prefixes + answer_prefixes)]
        total, renamed = 0, bytearray()
        for before, after in pairwise([0, *sums]):
            total = (total + self._block((after - before) % HASHES)) % HASHES
            renamed += total.to_bytes(PREFIX_BYTES)
        return bytes(renamed[: len(prefixes)]), bytes(renamed[len(prefixes) :])

    def _block(self, block: int) -> int:
        """Equal blocks differ by 1 at most (`rules.speculation_off`), and are one here."""
        near = (block, (block + 1) % HASHES, (block - 1) % HASHES)
        known = next((one for one in near if one in self._blocks), None)
        if known is None:
            self._blocks[block] = int.from_bytes(self.hashed(b"%d" % block))
            known = block
        return self._blocks[known]

    # ---- records

    def account(self, account: ClosedAccount, *, with_prefixes: bool = True) -> ClosedAccount:
        """with_prefixes: False leaves the hashes of the prompt's beginnings out."""
        beginnings = (account.prefixes, account.answer_prefixes) if with_prefixes else (b"", b"")
        prefixes, answer_prefixes = self.prefixes(*beginnings)
        return ClosedAccount(
            **{name: getattr(account, name) for name in AS_THEY_ARE},
            request_id=self.request_id(account.request_id),
            group_id=self.request_id(account.group_id),
            model=self.model(account.model),
            endpoint=word(account.endpoint),
            finish_reason=word(account.finish_reason),
            error=self.error(account.error),
            prompt_parts=self.parts(account.prompt_parts),
            prefixes=prefixes,
            answer_prefixes=answer_prefixes,
            cache_salt=self.mark(account.cache_salt),
            tenant=self.tenant(account.tenant),
            trace_id=self.mark(account.trace_id),
            parent_id=self.mark(account.parent_id),
            attempts=tuple(shared_attempt(attempt, self) for attempt in account.attempts),
            degraded=label(account.degraded),
            routing=shared_routing(account.routing, self),
            config_version=account.config_version if _VERSION.fullmatch(account.config_version) else "",
        )

    def error(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Returns the error's code in the place of its words, which quote what was sent."""
        if error is None:
            return None
        limit = error.limit if type(error.limit) in (int, float) else None
        kind, code = word(error.kind), word(error.code)
        return ErrorInfo(kind, code, code, error.status, limit=limit, retry_after_s=error.retry_after_s)

    def step(self, record: StepRecord) -> StepRecord:
        """Returns the step's numbers, and its requests by the names that their accounts have."""
        numbers: dict[str, Any] = {
            name: value
            for name in record.__struct_fields__
            if (value := getattr(record, name)) is None or type(value) is int
        }
        rows = tuple((self.request_id(name), start, count) for name, start, count in record.rows)
        verified = tuple((self.request_id(name), drafts, right) for name, drafts, right in record.verified)
        drafts = tuple((self.request_id(name), told) for name, told in record.told_drafts)
        return StepRecord(
            **numbers,
            rows=rows,
            victims=tuple(map(self.request_id, record.victims)),
            execution=record.execution if record.execution in EXECUTIONS else "host",
            verified=verified,
            drafts=drafts or msgspec.UNSET,
            late=tuple((self.request_id(name), count) for name, count in record.late_rows) or msgspec.UNSET,
            comings=tuple(map(self.coming, record.told_comings)) or msgspec.UNSET,
        )

    def coming(self, coming: Coming) -> Coming:
        if isinstance(coming, int):
            return coming
        name, what = coming
        return self.request_id(name), what if isinstance(what, int) else word(what)

    def facts(self, facts: ServerFacts | None) -> ServerFacts | None:
        if facts is None:
            return None
        return ServerFacts(
            version=label(facts.version),
            model=", ".join(map(self.model, facts.model.split(", "))),
            max_model_len=facts.max_model_len,
            settings=self.state(facts.settings),
            cost=facts.cost,
            machine=facts.machine,
            processes=tuple(map(_process, facts.processes)),
            simulated=LEFT_OUT if facts.simulated else "",
            engine=facts.engine if _PROGRAM.fullmatch(facts.engine) else "",
            knobs_changed_ns=facts.knobs_changed_ns,
            unknown=tuple(map(word, facts.unknown)),
        )

    def state(self, value: Any, name: str = "") -> Any:
        """Returns settings, or a page of figures (`/stats`): numbers and switches; of texts `TEXTS_KEPT`."""
        if isinstance(value, Mapping):
            return {self._name_of(key): self.state(each, key) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.state(each, name) for each in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        is_kept = isinstance(value, str) and name in TEXTS_KEPT and label(value) == value
        return value if is_kept else LEFT_OUT

    def _name_of(self, key: Any) -> str:
        return key if isinstance(key, str) and _KEY.fullmatch(key) else self.mark(str(key))


def _process(process: Process) -> Process:
    """Returns it without the notes of its sleeps."""
    sleeps = tuple(msgspec.structs.replace(sleep, note="") for sleep in process.sleeps)
    return msgspec.structs.replace(process, name=word(process.name), sleeps=sleeps)


PREFIXES = ("splittime_", "vllm:")
SAFE_LABELS = frozenset(
    [
        *("action", "arm", "bound", "budget", "by", "cache_dtype", "block_size", "cause", "choice"),
        *("enable_prefix_caching", "engine", "execution", "finish_reason", "finished_reason", "kind", "le"),
        *("max_lora", "num_cpu_blocks", "num_gpu_blocks", "outcome", "part", "position", "prompt_tokens", "reason"),
        *("result", "rule", "sleep_state", "source", "stage", "state", "upstream", "verdict", "why", "whose"),
    ]
)
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
