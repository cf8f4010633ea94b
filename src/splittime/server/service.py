"""What the routes share: the engine's client, the tokenizer, the ledger, and who is being served right now."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import msgspec
import orjson

from splittime import __version__
from splittime.api.choice import Choice
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.core.clock import SystemClock
from splittime.core.engine_stats import EngineStats
from splittime.core.errors import Conflict, ErrorInfo, Refused
from splittime.core.forked import ForkLimits
from splittime.core.sleep import AWAKE, WAY_OUT, Part
from splittime.drive.client import EngineClient
from splittime.drive.host_time import GcPauses, freeze_heap, machine_time
from splittime.ledger.account import ClosedAccount
from splittime.ledger.derive import send_lag_ns
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.facts import Process, ServerFacts, start_book
from splittime.ledger.store import ANSWER_PREFIXES, Ledger
from splittime.scheduler.admission import Admission, QueueLimits
from splittime.server.books import OpenBook
from splittime.server.config import ServerConfig
from splittime.server.endpoints import ENDPOINTS
from splittime.server.group import Group
from splittime.server.prefilled import Prefilled
from splittime.server.response_store import ResponseStore
from splittime.server.simulation import Simulation
from splittime.simulate.wait import Begun, WaitModel
from splittime.text.answer_marks import answer_marks
from splittime.text.process import Encode, InlineTokenizing, TextWork
from splittime.text.tokenizer import Tokenizer
from splittime.text.workers import TextWorkers
from splittime.web.http import Headers
from splittime.web.quota import Quota
from splittime.web.reading import LoopTurn
from splittime.web.tenants import ANYBODY, ApiKeys, Tenant

log = logging.getLogger("splittime.server")

READING_THREADS = 2
DRAIN_POLL_S = 0.02
ENGINE_ANSWER_S = 1.0  # for the engine to end what it was told to abort; it may hang
CUT_S = 1.0  # for those that did not read them to be gone
LAST_WORDS_S = 5.0  # for streams to take their error event, after the grace time
ENDPOINT_OF = {each.prefix: name for name, each in ENDPOINTS.items()}


class Service:
    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        ledger: Ledger,
        config: ServerConfig,
        model: ModelInfo | None,
        started_ns: int | None = None,
    ) -> None:
        """model: None until the engine has said what it serves (`settle`). started_ns: when the process began."""
        config.validate()
        self.client, self.tokenizer, self.ledger, self.config = client, tokenizer, ledger, config
        self.model = model
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
        self.exporter.tell_step_errors(lambda: self.waits.cost.errors)
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
        self.model = model
        freeze_heap()
        self.gc_pauses = GcPauses(SystemClock())
        self._ready_ns = time.monotonic_ns()
        self._start = start_book(self.started_ns, self._ready_ns, start)

    def takes_inline(self, work: TextWork) -> bool:
        """Returns whether this text is worked on here and now."""
        return isinstance(work, Encode) and self.tokenizer.is_quick and self.inline.takes(work.size)

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
        expected = self.admission.expected_wait()
        errors = self.waits.cost.errors
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
        model = self.model
        return {
            "version": __version__,
            "model": model.name if model is not None else None,
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
        """Tell the exporter what no choice's own account knows of the prompt that it answers, of which each has `n`
        answers. One that no step computed is left out, and one that is embedded."""
        for begin in range(0, len(choices), n):
            answers = choices[begin : begin + n]
            if any(choice.has_started and not choice.request.sampling.pooling for choice in answers):
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
        log.warning("shutting down: %d requests open", self.num_open)
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
