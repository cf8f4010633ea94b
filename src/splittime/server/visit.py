"""One HTTP request for generations, from its first byte to its last: the order in which things happen, and the account.

    receive -> admit -> (tokenize_queue ->) tokenize -> handoff -> (the engine) -> deliver

`serve` is the whole of it; `refuse_at_once` answers at its head what has no room. What a request's head decides is
refused before its body is read, and a text that can never fit before it is tokenised (`prompts`). Whatever happens, the
request ends in one closed account for each choice, or in one for the whole request if it never got that far, and its id
is free once the engine has let go.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from splittime.api import lenient
from splittime.api.choice import Choice
from splittime.api.decode import decode_body
from splittime.api.limits import ModelInfo
from splittime.api.params import Ask, check_model
from splittime.api.schema import Strict
from splittime.core.errors import DeadlineExceeded, EngineError, ErrorInfo, Overloaded, Refused, SplittimeError
from splittime.core.request import FinishReason, Request, adapter_name
from splittime.ledger.account import REFUSED, Account, ClosedAccount
from splittime.ledger.derive import server_timing
from splittime.ledger.stages import Stage
from splittime.scheduler.admission import Place
from splittime.server import counted
from splittime.server.endpoints import ENDPOINTS
from splittime.server.group import Group, Writer
from splittime.server.prompts import Prompts, TokenizedPrompt, notices_of, output_budgets, reasoning_begun, too_late
from splittime.server.service import Service
from splittime.server.writers import StreamWriter, WholeWriter
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import QuotaUse, Sharer, notices_of_head, sharer_of, tenant_of

now_ns = time.monotonic_ns


class GivenBody(NamedTuple):
    """A body that is there. num_bytes: what there is to read. read: makes the value of it, in whatever thread. ignored:
    notes then which fields have no effect; None where such are refused. endpoint: whose body it is; "": the visit's."""

    num_bytes: int
    read: Callable[[], Strict]
    ignored: lenient.Ignored | None
    endpoint: str = ""


class Visit:
    """receive, send: a caller that only asks whether there is room (`refuse_at_once`) may leave them out."""

    def __init__(
        self,
        service: Service,
        endpoint: str,
        scope: http.Scope,
        receive: http.Receive = http.receive_nothing,
        send: http.Send = http.send_nothing,
    ) -> None:
        self.service, self.endpoint, self.scope, self._receive, self._send = service, endpoint, scope, receive, send
        self.start_ns: int = scope.get(http.START_NS) or now_ns()
        self.tenant = tenant_of(scope)
        self._sharer = Sharer(self.tenant.name, self.tenant.weight)  # until its head has been read
        self.started_at_unix_ns = time.time_ns() - (now_ns() - self.start_ns)
        self.account = Account("", self.start_ns, Stage.RECEIVE)
        self.request_id = ""
        self.notices: list[str] = []  # what the client reads beside its answer
        self._ignored: lenient.Ignored | None = None
        self._deadline_ns: int | None = None  # once its head has been read
        self._first_token_by_ns: int | None = None
        # what it holds, from when it has it until it leaves
        self._group: Group | None = None
        self._prompts: Prompts | None = None
        self._place: Place | None = None
        self._quota: QuotaUse | None = None  # of that of its tenant, once it has let the request in
        self._watcher: asyncio.Task[None] | None = None
        self._is_reserved = self._is_gone = False
        self.translated: Callable[[bytes], bytes] = bytes  # a whole answer, as another API has it

    @property
    def group_id(self) -> str:
        """The id in the response."""
        return f"{ENDPOINTS[self.endpoint].prefix}-{self.request_id}"

    @property
    def full_id(self) -> str:
        return self.service.full_id(self.request_id, self.tenant)

    async def serve(self) -> None:
        self.service.num_open += 1
        try:
            ask, group, writer = await self._come_in()
        except http.Disconnected:
            self.close_refused(FinishReason.ABORT, None)
        except SplittimeError as error:
            await self._refuse(error)
        else:
            await self._answer(ask, group, writer)
        finally:
            self.service.num_open -= 1
            self._leave()

    # ---- in

    def refuse_at_once(self) -> http.AtOnce | None:
        """The refusal, if the head alone decides that there is no room now; else None, and nothing is taken."""
        self.request_id = http.new_request_id()  # until it is known to have a good one of its own
        try:
            given, self._sharer = http.request_id(self.scope), sharer_of(self.scope, self.tenant)
            self.service.check_free(given, self.tenant)
            self.request_id = given
            self._read_head(self.service.coming)
        except Overloaded as error:
            self.account.enter(Stage.DELIVER, now_ns())
            return http.error_at_once(error, self.headers(), partial(self.close_refused, REFUSED, error.info))
        except SplittimeError:  # a fault of its own, answered when its body has been read
            return None
        return None

    def _read_head(self, before: Mapping[str, int]) -> ModelInfo:
        """Reads the deadlines, and returns the model; refuses if there is no room, or none for that. before: requests
        that will have a place in the queue before this one, by whose they are."""
        deadline_ns = self._deadline_ns = http.deadline_ns(self.scope, self.start_ns)
        by_ns = self._first_token_by_ns = http.first_token_by_ns(self.scope, self.start_ns)
        model = self.service.require_serving()
        try:
            self.service.quota(self.tenant).check(now_ns())
        except Refused as refused:
            raise self.service.admission.refuse(refused) from None
        own = before.get(self._sharer.name, 0)
        by: dict[str, Any] = {"deadline_ns": deadline_ns, "first_token_by_ns": by_ns}
        by |= {"tenant": self._sharer.name, "weight": self._sharer.weight, "others": sum(before.values()) - own}
        self.service.admission.check(now_ns(), count=1 + own, tokens=1 + own, **by)
        return model

    async def _come_in(self) -> tuple[Ask, Group, Writer]:
        """Everything up to the hand-off. Raises what the client must be told, or `Disconnected`."""
        await self._reserve()  # before anything can be refused: an account goes by no other request's id
        self._sharer, coming = sharer_of(self.scope, self.tenant), self.service.coming
        coming[self._sharer.name] += 1
        try:
            await self.service.turn.room()
        finally:
            coming[self._sharer.name] -= 1
            if not coming[self._sharer.name]:  # who asks may name any number
                del coming[self._sharer.name]
        model = self._read_head({})
        self._quota = self.service.quota(self.tenant).enter(now_ns())
        ask, prompts = await self._read_ask(model)
        with counted.refusals_counted(self.service):
            self._quota.count_as(ask.num_choices, now_ns())
        self._prompts = prompts
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self.account.enter(Stage.ADMIT, now_ns())
        place = self._place = prompts.take_place(ask, self._deadline_ns, self._first_token_by_ns)
        tokenized = await prompts.tokenize(self._deadline_ns)
        ask = await prompts.with_words_tokenized(ask, self._deadline_ns)
        ask = reasoning_begun(ask, tokenized[0].token_ids, self.service.tokenizer)
        self.account.enter(Stage.ADMIT, now_ns())
        if self._is_gone:
            raise http.Disconnected
        prompts.correct(place, [len(prompt.token_ids) for prompt in tokenized for _ in range(ask.n)])
        if self._deadline_ns is not None and now_ns() >= self._deadline_ns:
            raise too_late()
        return ask, *(await self._hand_off(ask, tokenized, model, place))

    async def _reserve(self) -> None:
        self.request_id = http.new_request_id()  # until it has a good one of its own, which is nobody else's
        given = http.request_id(self.scope)
        await self.service.reserve(given, self.tenant)
        self.request_id, self._is_reserved = given, True

    async def _read_ask(self, model: ModelInfo) -> tuple[Ask, Prompts]:
        body = await self.service.read_body(self.scope, self._receive)
        sender = BodySender(self._sharer, self._receive)
        with counted.refusals_counted(self.service):
            given = await self._given_by(sender, body)
            self._ignored = given.ignored
            return await read_beside(sender, given.num_bytes, self._asked_by, given.read, model)

    async def _given_by(self, sender: BodySender, body: bytes) -> "GivenBody":
        kind, ignored = ENDPOINTS[self.endpoint].body, self.service.config.new_ignored()
        return GivenBody(len(body), partial(decode_body, body, kind, ignored), ignored)

    def _asked_by(self, read: Callable[[], Strict], model: ModelInfo) -> tuple[Ask, Prompts]:
        """Returns what is asked for. In a thread: it changes nothing of the server."""
        include_timing, ask_of = http.flag(self.scope, "X-Include-Timing"), ENDPOINTS[self.endpoint].ask_of
        ask = ask_of(read(), model, self.service.config, include_timing, self.service.marks)
        return ask, Prompts(ask, model, self.service, self.account, self._sharer)

    # ---- to the engine

    async def _hand_off(
        self, ask: Ask, prompts: Sequence[TokenizedPrompt], model: ModelInfo, place: Place
    ) -> tuple[Group, Writer]:
        budgets = output_budgets(prompts, ask, model, is_strict=self.service.config.strict)
        ignored, changed = self.service.note_ignored(self._ignored), notices_of(ask, prompts, budgets, model)
        self.notices = [*notices_of_head(self.scope, self.tenant), *ignored, *changed]
        choices = await self._choices(ask, prompts, budgets, model)
        if self._quota is not None:
            counted.reserve_tokens(self.service, self._quota, [choice.request for choice in choices])
        renderer = ENDPOINTS[self.endpoint].renderer(ask, self.group_id, self.service.tokenizer)
        writer = (StreamWriter if ask.stream else WholeWriter)(self, renderer, choices, self.service.config, self._send)
        group = Group(self.group_id, self.service.client, choices, place, writer, self.cut)
        await group.start(self._turn)
        self._group = self.service.groups[self.full_id] = group
        return group, writer

    async def _choices(
        self, ask: Ask, prompts: Sequence[TokenizedPrompt], budgets: Sequence[int], model: ModelInfo
    ) -> list[Choice]:
        """Returns all answers to the prompts, with no token yet, each with its request and its account. Of many inputs
        others have their turn between."""
        check_model(ask.model, self.service.require_model())  # an adapter may have gone meanwhile
        adapter, count = self.service.require_model().adapter_of(ask.model), ask.n * len(prompts)
        names = [self.request_id] if count == 1 else [f"{self.request_id}-{index}" for index in range(count)]
        choices, echo = [], None
        for index, name in enumerate(names):
            prompt, sample = divmod(index, ask.n)
            echo = echo if sample else prompts[prompt].echo(ask, self.service.tokenizer)
            request = Request(
                request_id=self.service.full_id(name, self.tenant),
                prompt_token_ids=prompts[prompt].token_ids,
                sampling=ask.sampling_of(sample, budgets[prompt]),
                eos_token_ids=model.eos_token_ids,
                submitted_ns=now_ns(),
                priority=ask.priority,
                deadline_ns=self._deadline_ns,
                cache_salt=self.tenant.cache_salt(ask.cache_salt),
                adapter=adapter,
                tenant=self._sharer.name,
                weight=self._sharer.weight,
            )
            account = Account(request.request_id, self.start_ns, Stage.RECEIVE)
            account.extend(self.account.marks[1:])
            account.enter(Stage.HANDOFF, request.submitted_ns)
            choices.append(prompts[prompt].choice(index, request, account, ask, self.service.tokenizer, echo))
            await self._turn()
        check_model(ask.model, self.service.require_model())  # nor since then
        return choices

    async def _turn(self) -> None:
        """Returns in a turn of the loop that has room left. Raises `Disconnected` once nobody waits."""
        await self.service.turn.room()
        if self._is_gone:
            raise http.Disconnected

    # ---- while it is served

    async def _watch(self) -> None:
        """Notice the client's going away, whatever the request is doing."""
        await http.until_gone(self._receive)
        self._is_gone = True
        if self._prompts is not None:
            self._prompts.drop()
        if self._group is not None:
            self._group.cancel()

    def drop_client(self, limit: str) -> None:
        """A slow reader: end its generations and cut the connection, without waiting for it to read anything."""
        if self._group is not None:
            value, message = getattr(self.service.config, limit), f"the client did not read: {limit} passed"
            self._group.end_early(ErrorInfo("slow_reader", message, "slow_reader", 408, limit=value))
        self.cut()

    def cut(self) -> None:
        """Cut the connection, without waiting for the client to read anything."""
        if (connection := http.connection(self.scope)) is not None:
            connection.abort()

    # ---- out

    def headers(self) -> http.Headers:
        """Returns the headers that every answer has."""
        headers = [(b"x-request-id", self.request_id.encode("latin-1"))]
        headers += http.notice_headers(self.notices)
        wanted = http.header(self.scope, b"endpoint-load-metrics-format")
        return headers if wanted is None else [*headers, *self.service.load_report(wanted)]

    def timed_headers(self, choice: Choice) -> http.Headers:
        timing = server_timing(choice.account.intervals(now_ns()), choice.account.start_ns)
        return [*self.headers(), (b"server-timing", timing.encode("latin-1"))]

    async def _refuse(self, error: SplittimeError) -> None:
        self.account.enter(Stage.DELIVER, now_ns())
        if isinstance(error, Overloaded) and not isinstance(error, Refused):  # the engine client's own refusal
            self.service.exporter.count_refusal(error.info.code)
        await http.respond_error(self._send, error, self.headers())
        self.close_refused(FinishReason.DEADLINE if isinstance(error, DeadlineExceeded) else REFUSED, error.info)

    async def _answer(self, ask: Ask, group: Group, writer: Writer) -> None:
        try:
            await group.all_done.wait()
            await self.service.turn.room()
            await writer.write(group)
        finally:
            if not group.all_done.is_set():  # nobody writes any more: the task was cancelled, or failed
                group.cancel()
                await group.all_done.wait()
            group.is_written = True
            self._settle(group)  # before its books: who has the answer may ask again
            await self._close(group.choices, now_ns())
            self.service.count_prompts(() if ask.sampling.pooling else group.choices, ask.n)

    async def _close(self, choices: Sequence[Choice], at_ns: int) -> None:
        try:
            for choice in choices:
                await self.service.turn.room()
                self.close_choice(choice, at_ns)
        finally:  # cancelled meanwhile
            for choice in choices:
                self.close_choice(choice, at_ns)

    def close_choice(self, choice: Choice, at_ns: int) -> None:
        """Close a choice's account, once."""
        if not choice.is_closed:
            account = choice.close(at_ns, **self._about(adapter_name(choice.request.adapter)))
            self.service.file_account(self.service.prefilled.with_savings(account, choice.request))

    def close_refused(self, finish_reason: str, error: ErrorInfo | None) -> None:
        """Close the account of a request that never reached the engine."""
        at_ns = now_ns()
        self.account.close(at_ns)
        self.service.file_account(
            ClosedAccount(
                request_id=self.full_id,
                start_ns=self.start_ns,
                end_ns=at_ns,
                intervals=tuple(self.account.intervals()),
                finish_reason=finish_reason,
                error=error,
                cancelled_ns=at_ns if finish_reason == FinishReason.ABORT else None,
                deadline_ns=self._deadline_ns,
                **self._about(),
            )
        )

    def _about(self, adapter: str = "") -> dict[str, Any]:
        """Returns what all accounts of this visit say. adapter: the name of that which computed it."""
        model, traced = self.service.model, http.trace_context(self.scope)
        return {
            "group_id": self.group_id,
            "model": adapter or (model.name if model is not None else ""),
            "endpoint": self.endpoint,
            "started_at_unix_ns": self.started_at_unix_ns,
            "unseen_ns": self.scope.get(http.UNSEEN_NS, 0),
            "tenant": self._sharer.name,
            "trace_id": traced.trace_id,
            "parent_id": traced.span_id,
        }

    def _settle(self, group: Group | None) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            counted.settle(quota, group)

    def _leave(self) -> None:
        """Give back what the visit holds: its queue places, its id (when the engine has let go), its watcher. What it
        refers to and what refers to it must not stay a circle: what 4,000 ended requests left for the garbage
        collector kept everybody waiting for half a second when it came."""
        watcher, group, prompts = self._watcher, self._group, self._prompts
        self._watcher = self._group = self._prompts = None
        if watcher is not None:
            watcher.cancel()
        self._settle(group)
        if prompts is not None:
            prompts.drop()
        if group is not None:
            group.when_released(partial(self.service.release, self.full_id))
            return
        if self.account.end_ns is None:  # something unforeseen was raised; the edge has answered 500
            self.close_refused(FinishReason.ERROR, EngineError("the server failed").info)
        if self._place is not None:
            self._place.give_up()
        if self._is_reserved:
            self.service.release(self.full_id)


class PrefillVisit(Visit):
    """A prefill is a visit like others: it counts to its tenant's limits, has an account of its own, and its client
    takes it back by going away. Nobody waits behind it (`scheduler.requests`), so it has no place in the queue once it
    is handed off; that is why a tenant may have few at a time, and why each has a deadline."""

    is_counted = False  # among its tenant's

    def _read_head(self, before: Mapping[str, int]) -> ModelInfo:
        model, asked_ns = super()._read_head(before), self._deadline_ns
        latest_ns = self.start_ns + int(self.service.config.prefill_ahead_s * 1e9)
        self._deadline_ns = latest_ns if asked_ns is None else min(asked_ns, latest_ns)
        return model

    async def _read_ask(self, model: ModelInfo) -> tuple[Ask, Prompts]:
        try:
            self.service.prefilled.enter(self.tenant.name)
        except Refused as refused:
            raise self.service.admission.refuse(refused) from None
        self.is_counted = True
        return await super()._read_ask(model)

    async def _hand_off(
        self, ask: Ask, prompts: Sequence[TokenizedPrompt], model: ModelInfo, place: Place
    ) -> tuple[Group, Writer]:
        handed = await super()._hand_off(ask, prompts, model, place)
        place.give_up()
        return handed

    def _leave(self) -> None:
        if self.is_counted:
            self.service.prefilled.leave(self.tenant.name)
        super()._leave()
