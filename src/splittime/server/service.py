"""What the routes share: the engine's client, the tokenizer, the ledger, and who is being served right now.

Responses are kept in memory for `previous_response_id` and `GET /v1/responses/{id}`, bounded in number, bytes and time.
What one key has stored no other key finds. Where there is no room the key that takes most of it loses its oldest
(`core.shares`). A response is charged the whole conversation that led to it, whose texts it shares with others.
"""

import asyncio
import logging
import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import msgspec
import orjson

from splittime import __version__
from splittime.api.choice import Choice
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.api.responses import Conversation
from splittime.core.clock import SystemClock, utc_text
from splittime.core.engine import AWAKE, WAY_OUT, EngineStats, Part
from splittime.core.errors import Conflict, ErrorInfo, NotFound, Refused
from splittime.core.forked import ForkLimits
from splittime.core.request import FinishReason, Request
from splittime.core.shares import KeptByOwner
from splittime.drive.client import EngineClient
from splittime.drive.host_time import GcPauses, freeze_heap, machine_time
from splittime.ledger.account import PREFILL, ClosedAccount
from splittime.ledger.derive import send_lag_ns
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.facts import Process, ServerFacts, start_book
from splittime.ledger.stages import Stage
from splittime.ledger.store import ANSWER_PREFIXES, Ledger
from splittime.scheduler.admission import Admission, QueueLimits
from splittime.server.books import OpenBook
from splittime.server.config import ServerConfig
from splittime.server.endpoints import ENDPOINTS
from splittime.server.group import Group
from splittime.server.simulation import Simulation
from splittime.simulate.wait import Begun, WaitModel
from splittime.text.answer_marks import answer_marks
from splittime.text.process import Encode, InlineTokenizing, TextWork
from splittime.text.tokenizer import Tokenizer
from splittime.text.workers import TextWorkers
from splittime.web.http import Headers, Receive, Scope, read_body_in_time
from splittime.web.reading import LoopTurn
from splittime.web.tenants import ANYBODY, ApiKeys, Quota, Tenant

MOST_OPEN, MOST_KEPT = 8, 16  # of a tenant
CHUNK_TOKENS = 16  # prompts are compared in pieces of so many
ENTRY_BYTES = 512  # for what an entry takes beside its texts
log = logging.getLogger("splittime.server")

READING_THREADS = 2
DRAIN_POLL_S = 0.02
ENGINE_ANSWER_S = 1.0  # for the engine to end what it was told to abort; it may hang
CUT_S = 1.0  # for those that did not read them to be gone
LAST_WORDS_S = 5.0  # for streams to take their error event, after the grace time
ENDPOINT_OF = {each.prefix: name for name, each in ENDPOINTS.items()}


class KeptPrompt(NamedTuple):
    """A prompt of which the tokens from `begin` on were computed ahead, in so many ns; those before were in the cache.
    hashes: see `chunk_hashes`. until_ns: when it is forgotten."""

    salt: str
    hashes: "array[int]"
    begin: int
    num_tokens: int
    took_ns: int
    until_ns: int


class Prefilled:
    """kept_ns: how long a prompt is remembered. Tenants are those of the server's keys."""

    def __init__(self, kept_ns: int) -> None:
        self._kept_ns = kept_ns
        self._open: Counter[str] = Counter()
        self._kept: dict[str, deque[KeptPrompt]] = {}  # only of tenants who have some
        self._until: deque[tuple[int, str]] = deque()  # when a prompt of which tenant is to be forgotten

    def enter(self, tenant: str) -> None:
        """Raises `Refused` if this tenant has as many prefills under way as it may have."""
        if self._open[tenant] >= MOST_OPEN:
            words = f"{MOST_OPEN} prompts of this key are being computed ahead"
            raise Refused(words, reason="open_prefills", queued=self._open[tenant], limit=MOST_OPEN, retry_after_s=1.0)
        self._open[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._open[tenant] -= 1

    def with_savings(self, account: ClosedAccount, request: Request) -> ClosedAccount:
        """Returns the account of a request that has ended, with what a prefill saved it. That of a prefill is
        remembered, until somebody has come with its prompt."""
        self._forget_old(account.end_ns)
        if account.endpoint == PREFILL:
            if account.finish_reason == FinishReason.STOP:
                self._keep(account, request)
            return account
        kept = self._kept.get(account.tenant)
        if not kept or request.adapter or not account.cached_tokens:
            return account
        hashes = chunk_hashes(request.prompt_token_ids[: account.cached_tokens])
        saved, best = max(((_saved(one, hashes, request.cache_salt), one) for one in kept), key=lambda found: found[0])
        if saved <= 0:
            return account
        kept.remove(best)
        saved_ns = best.took_ns * saved // (best.num_tokens - best.begin)
        return msgspec.structs.replace(account, ahead_tokens=saved, ahead_ns=saved_ns)

    def _keep(self, account: ClosedAccount, request: Request) -> None:
        took_ns = sum(each.duration_ns for each in account.intervals if each.stage in (Stage.PREFILL, Stage.RECOMPUTE))
        until_ns, token_ids = account.end_ns + self._kept_ns, request.prompt_token_ids
        sizes = account.cached_tokens, len(token_ids)
        made = KeptPrompt(request.cache_salt, chunk_hashes(token_ids), *sizes, took_ns, until_ns)
        self._kept.setdefault(account.tenant, deque(maxlen=MOST_KEPT)).append(made)
        self._until.append((until_ns, account.tenant))

    def _forget_old(self, now_ns: int) -> None:
        while self._until and self._until[0][0] < now_ns:
            _, tenant = self._until.popleft()
            kept = self._kept.get(tenant, deque())
            while kept and kept[0].until_ns < now_ns:
                kept.popleft()
            if not kept:
                self._kept.pop(tenant, None)


def chunk_hashes(token_ids: tuple[int, ...]) -> "array[int]":
    """Returns for each end of a whole chunk a hash of all tokens before it."""
    hashes, before = array("q"), 0
    for begin in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        before = hash((before, token_ids[begin : begin + CHUNK_TOKENS]))
        hashes.append(before)
    return hashes


def _saved(kept: KeptPrompt, hashes: "array[int]", salt: str) -> int:
    """Returns how many tokens were computed ahead with that prompt, of those that a request found in the cache: whole
    chunks, whose hashes these are."""
    if kept.salt != salt:
        return 0
    most = min(len(kept.hashes), len(hashes))
    num_common = bisect_left(range(most), True, key=lambda place: kept.hashes[place] != hashes[place])
    return num_common * CHUNK_TOKENS - kept.begin


class KeptResponse(NamedTuple):
    """body: the response as it was answered. conversation: with its output. num_input: the items before that."""

    body: bytes
    conversation: Conversation
    num_input: int

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.body) + self.conversation.size


class ResponseStore:
    """most_responses: 0 keeps none. clock: monotonic, in ns."""

    def __init__(
        self, most_responses: int, most_bytes: int, for_s: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._most_responses, self._most_bytes, self._for_s = most_responses, most_bytes, for_s
        self._begun_unix_s = time.time()
        self._kept = KeptByOwner[KeptResponse](most_responses, most_bytes, kept_ns=round(for_s * 1e9), clock=clock)

    @property
    def is_on(self) -> bool:
        return self._most_responses > 0

    @property
    def num_bytes(self) -> int:
        return self._kept.weight

    def put(self, tenant: str, response_id: str, body: bytes, conversation: Conversation, num_input: int = 0) -> bool:
        """Stores a response, in place of one of this id. Returns whether it is kept: one that has no room beside
        what is left of the others is not."""
        entry = KeptResponse(body, conversation, num_input)
        if not self.is_on or entry.size > self._most_bytes:
            return False
        self._kept.put(tenant, response_id, entry, entry.size)
        if self._kept.is_full:
            self._kept.drop(tenant, response_id)
        return self._kept.get(tenant, response_id) is not None

    def get(self, tenant: str, response_id: str, param: str) -> KeptResponse:
        """Returns a response of this key. Raises NotFound, which names `param`, for one that is not there: unknown,
        another key's, dropped or too old, which are all told in the same words."""
        found = self._kept.get(tenant, response_id)
        if found is None:
            raise self._not_found(response_id, param)
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response of this key. Raises NotFound as `get` does."""
        self.get(tenant, response_id, "response_id")
        self._kept.drop(tenant, response_id)

    def _not_found(self, response_id: str, param: str) -> NotFound:
        if self.is_on:
            bounds = f"{self._most_responses} responses and {self._most_bytes} bytes, each for {self._for_s:g} s"
            empty = f"from before {utc_text(self._begun_unix_s)}, when it started with an empty store"
            hint = f"the server keeps {bounds}, and none with store false or {empty}; send the conversation as input"
        else:
            hint = "this server keeps no responses (--max-stored-responses 0); send the conversation as input"
        return NotFound(
            f"no stored response {response_id[:64]!r}",
            code="previous_response_not_found" if param == "previous_response_id" else "not_found",
            param=param,
            value=response_id[:64],
            hint=hint,
        )


class Service:
    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        ledger: Ledger,
        config: ServerConfig,
        model: ModelInfo | None = None,
        started_ns: int | None = None,
    ) -> None:
        """model: None until the engine has said what it serves (`settle`). started_ns: when the process began."""
        config.validate()
        self.client, self.tokenizer, self.ledger, self.config = client, tokenizer, ledger, config
        self.model = model
        self.described: tuple[object, bytes] = None, b""  # in /openapi.json, and for what
        self.keys = ApiKeys(config.api_key, config.api_keys_file, config.metrics_api_key)
        self._quotas = {tenant.name: Quota(tenant) for tenant in (ANYBODY, *self.keys.tenants)}
        self.exporter = PrometheusExporter(ledger, client.stats)
        self.gc_pauses: GcPauses | None = None
        self.started_ns = self._ready_ns = time.monotonic_ns() if started_ns is None else started_ns
        self._start: tuple[Part, ...] = ()
        ledger.describe_by(self.facts, machine_time())
        bounds = QueueLimits(config.max_queued_requests, config.max_queued_prompt_tokens)
        self.groups: dict[str, Group] = {}  # by `full_id`, as what is reserved
        self.waits = WaitModel(self._running, client.stats)
        ledger.subscribe(self.waits.take)
        self.exporter.tell("splittime_step_prediction_error_ratio", lambda: self.waits.cost.errors)
        self.exporter.tell("splittime_kept_bytes", self._kept_bytes)
        self.admission = Admission(bounds, self.exporter.count_refusal, self.waits)
        self.pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="reading")  # of the ledger
        limits = ForkLimits(cpu_s=config.tokenize_cpu_s, memory_bytes=config.tokenize_memory_bytes)
        self.texts = TextWorkers(tokenizer.describe, limits)
        self.marks = answer_marks(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._shortcuts = tokenizer.shortcuts  # looked at now, not while the first request waits
        self.inline = InlineTokenizing(config.inline_tokenize_chars)
        self.is_draining = False
        self.began_draining = asyncio.Event()
        self._reserved: dict[str, asyncio.Event] = {}
        self.simulation = Simulation()
        self.responses = ResponseStore(
            config.max_stored_responses, config.max_stored_response_bytes, config.stored_response_s
        )
        self.prefilled = Prefilled(int(config.prefill_ahead_s * 1e9))
        self.knobs_changed_ns = 0  # when one was last
        self.num_open = 0  # HTTP requests for generations that are being served
        self.turn = LoopTurn()
        self.coming = Counter[str]()  # requests that wait for a turn with room, by whose they are

    # ---- may a request come in

    @property
    def is_serving(self) -> bool:
        is_up = self.client.is_ready and self.client.rest.state == AWAKE
        return is_up and self.model is not None and not self.is_draining

    def require_model(self) -> ModelInfo:
        """The model, or `Refused` with 503 while it is not known."""
        model = self.model
        if model is None:
            raise Refused("the engine is not ready yet", reason="not_ready", status=503)
        return model

    def require_ready(self) -> ModelInfo:
        """The model, or `Refused` with 503 if a request would not be served now."""
        if self.is_draining:
            raise Refused("the server is shutting down", reason="draining", status=503)
        if self.client.rest.state != AWAKE:
            words = self.client.rest.state.replace("_", " ")
            raise Refused(f"the server is {words}", reason="asleep", status=503, hint=WAY_OUT)
        if not self.client.is_ready:
            raise Refused("the engine is not ready yet", reason="not_ready", status=503)
        return self.require_model()

    def require_serving(self) -> ModelInfo:
        """As `require_ready`, and counts a refusal."""
        try:
            return self.require_ready()
        except Refused as refused:
            raise self.admission.refuse(refused) from None

    def note_ignored(self, ignored: Ignored | None) -> list[str]:
        """Count what of a body had no effect, and return its notices. None: a strict server's, which ignores none."""
        if ignored is not None:
            self.exporter.count_ignored(ignored.kinds)
        return [] if ignored is None else ignored.notices()

    def quota(self, tenant: Tenant) -> Quota:
        return self._quotas[tenant.name]

    def settle(self, model: ModelInfo, start: Iterable[Part] = ()) -> None:
        """Start-up is over and this model is served: take what it made out of the garbage collector's sight, and count
        the pauses from here. start: what it was spent on."""
        ends = self.tokenizer.with_own_end(model.eos_token_ids, model.vocab_size)
        self.model = replace(model, eos_token_ids=ends)
        freeze_heap()
        self.gc_pauses = GcPauses(SystemClock())
        self._ready_ns = time.monotonic_ns()
        self._start = start_book(self.started_ns, self._ready_ns, start)

    def takes_inline(self, work: TextWork) -> bool:
        """Returns whether this text is worked on here and now."""
        return isinstance(work, Encode) and self.tokenizer.is_quick and self.inline.takes(work.size)

    async def read_body(self, scope: Scope, receive: Receive, max_bytes: int | None = None) -> bytes:
        """Returns a body within the limits of the server, or of so many bytes."""
        config = self.config
        return await read_body_in_time(scope, receive, max_bytes or config.max_body_bytes, config.body_timeout_s)

    # ---- what it knows of itself

    def facts(self) -> ServerFacts | None:
        """As of now, of this process and of the engine's; None until the model is known."""
        model = self.model
        if model is None:
            return None
        said = self.client.facts() or ServerFacts(version=__version__, model="", max_model_len=0)
        pauses = self.gc_pauses.latest if self.gc_pauses is not None else ()
        begin_ns, ready_ns = self.started_ns, self._ready_ns
        own = Process(name="server", started_ns=begin_ns, ready_ns=ready_ns, pauses=pauses, start=self._start)
        return msgspec.structs.replace(
            said,
            model=model.name,
            max_model_len=model.max_model_len,
            settings=said.settings | asdict(self.admission.bounds) | {"texts": self._shortcuts},
            processes=(own, *said.processes),
            knobs_changed_ns=self.knobs_changed_ns,
        )

    def _kept_bytes(self) -> dict[str, float | None]:
        return {"records": self.ledger.counts().kept_bytes, "responses": self.responses.num_bytes}

    # ---- who is in flight

    def full_id(self, request_id: str, tenant: Tenant) -> str:
        """The id by which the engine and all books know a tenant's request. Where there are several keys, each has ids
        of its own: neither an id of a client nor a tenant's name has an @."""
        return f"{request_id}@{tenant.name}" if len(self.keys.tenants) > 1 else request_id

    def check_free(self, request_id: str, tenant: Tenant) -> None:
        """Raises `Conflict` for an id that is taken now."""
        if self.full_id(request_id, tenant) in self._reserved:
            raise _conflict(request_id)

    async def reserve(self, request_id: str, tenant: Tenant) -> None:
        """Take an id. One whose answer has been given, but which the engine still holds, is free within a step."""
        full_id = self.full_id(request_id, tenant)
        while full_id in self._reserved:
            group = self.groups.get(full_id)
            if group is None or not group.all_done.is_set():
                raise _conflict(request_id)
            await self._reserved[full_id].wait()
        self._reserved[full_id] = asyncio.Event()

    def release(self, full_id: str) -> None:
        self.groups.pop(full_id, None)
        self._reserved.pop(full_id).set()

    def is_open(self, request_id: str, tenant: Tenant) -> bool:
        """Returns whether a request of this id, or of this id in a response, is being served; of another tenant's, only
        an operator is told."""
        whose = self.keys.tenants if tenant.is_operator else ()
        names = {request_id, *map(request_id.removeprefix, ANSWER_PREFIXES)}
        return any(self.full_id(name, each) in self.groups for name in names for each in (tenant, *whose))

    def _running(self) -> Iterator[Begun]:
        for group in self.groups.values():
            for choice in group.choices:
                if choice.has_started and not choice.is_done:
                    request = choice.request
                    most = request.sampling.max_tokens or 1
                    num_prompt, key = len(request.prompt_token_ids), (request.tenant, request.weight)
                    yield Begun(request.request_id, num_prompt, choice.num_output_tokens, most, *key)

    def predicted(self) -> dict[str, Any]:
        """Returns the wait that the server expects of a newcomer (ms), by which estimate, and the error of the model of
        steps."""
        expected, errors = self.admission.expected_wait(), self.waits.cost.errors
        return {
            "predicted_wait_ms": None if expected is None else round(expected.wait_s * 1e3, 3),
            "wait_estimate": None if expected is None else expected.estimate,
            "step_error_ratio": {kind: None if each is None else round(each, 4) for kind, each in errors.items()},
        }

    # ---- what its pages ask

    def stats(self) -> EngineStats:
        return self.client.stats()

    def about(self) -> dict[str, Any]:
        """Returns the server's part of the page's head."""
        model, kind = self.model, "chat" if self.tokenizer.has_chat_template else "completion"
        return {
            "version": __version__,
            "model": model.name if model is not None else None,
            "plays": None if model is None or model.pooling.is_all else kind,  # in the page's playground
            "max_model_len": model.max_model_len if model is not None else None,
            "is_ready": self.is_serving,
            "is_draining": self.is_draining,
            "open_requests": self.num_open,
            **self.predicted(),
            "refusals": dict(self.admission.refusals),
        }

    def open_books(self) -> Iterator[OpenBook]:
        for group in list(self.groups.values()):
            endpoint = ENDPOINT_OF[group.group_id.partition("-")[0]]
            for choice in group.choices:
                if not choice.is_closed:
                    yield OpenBook(
                        choice.request.request_id,
                        group.group_id,
                        endpoint,
                        choice.account.start_ns,
                        tuple(choice.account.marks),
                        len(choice.request.prompt_token_ids),
                        choice.cached_tokens,
                        len(choice.token_ids),
                    )

    # ---- the ledger

    def file_account(self, account: ClosedAccount) -> None:
        """Hand a closed account to the ledger, and its latencies that no stage holds to the exporter."""
        self.ledger.add_account(account)
        self.exporter.observe_send_lags(send_lag_ns(account))
        if account.cancelled_ns is not None and account.freed_ns is not None:
            self.exporter.observe_cancel_to_freed(account.freed_ns - account.cancelled_ns)

    def count_prompts(self, choices: Sequence[Choice], n: int) -> None:
        """Tell the exporter what no choice's own account knows of its prompt, which has `n` answers, once computed."""
        for begin in range(0, len(choices), n):
            answers = choices[begin : begin + n]
            if any(choice.has_started for choice in answers):
                limits = [choice.request.sampling.max_tokens or 0 for choice in answers]
                self.exporter.observe_prompt(limits, max(choice.num_output_tokens for choice in answers))

    def load_report(self, wanted: str) -> Headers:
        """The load report that Envoy and llm-d ask for (ORCA), in the form they ask for."""
        stats = self.client.stats()
        named = {
            "kv_cache_usage_perc": round(stats.kv_cache_usage, 6),
            "num_requests_waiting": stats.num_waiting,
            "num_requests_running": stats.num_running,
        }
        if wanted.upper() == "JSON":
            return [(b"endpoint-load-metrics", b"JSON " + orjson.dumps({"named_metrics": named}))]
        if wanted.upper() == "TEXT":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
            return [(b"endpoint-load-metrics", f"TEXT {text}".encode())]
        return []

    # ---- the end

    async def drain(self, grace_s: float | None = None) -> None:
        """Admit nobody; let what is open finish within the grace time; end the rest with an error."""
        self.is_draining = True
        self.began_draining.set()
        log.info("shutting down: %d requests open", self.num_open)
        await self._until_empty(time.monotonic() + (self.config.grace_s if grace_s is None else grace_s))
        error = ErrorInfo("overloaded_error", "the server is shutting down", "draining", 503, retry_after_s=1.0)
        for group in list(self.groups.values()):
            group.end_early(error)
        await self._until_empty(time.monotonic() + ENGINE_ANSWER_S)
        for group in list(self.groups.values()):
            group.give_up(error)
        await self._until_empty(time.monotonic() + LAST_WORDS_S)
        for group in list(self.groups.values()):
            group.cut()
        await self._until_empty(time.monotonic() + CUT_S)

    async def _until_empty(self, deadline_s: float) -> None:
        while self.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        self.texts.close()
        self.simulation.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.gc_pauses is not None:
            self.gc_pauses.close()


def _conflict(request_id: str) -> Conflict:
    return Conflict(f"request id {request_id!r} is in flight", param="X-Request-Id", value=request_id)
