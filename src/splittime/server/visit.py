"""One HTTP request for generations, from its first byte to its last: the order in which things happen, and the account.

    receive -> admit -> (tokenize_queue ->) tokenize -> handoff -> (the engine) -> deliver

What a request's head decides is refused before its body is read, and a text that can never fit is refused before it is
tokenised (`prompt_text`; `tokens` does the tokenising). Whatever happens, the request ends in one closed account for
each choice, or in one for the whole request if it never got that far, and its id is free once the engine has let go.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from splittime.core.errors import EngineError, ErrorInfo, SplittimeError
from splittime.core.request import FinishReason, Request
from splittime.engine.choice import Choice, Echo
from splittime.engine.output import OutputText, make_detokenizer
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.prompt_parts import PromptParts, prompt_parts
from splittime.ledger.stages import Stage
from splittime.server import http
from splittime.server.admission import Place, Refused
from splittime.server.config import ModelInfo
from splittime.server.decode import decode_body
from splittime.server.generation import Generation
from splittime.server.output_budget import clamp_notices, output_budget
from splittime.server.params import Ask, Prompt, ask_chat, ask_completion
from splittime.server.prompt_text import PromptText
from splittime.server.quota import Quota
from splittime.server.schema import ChatBody, CompletionBody
from splittime.server.service import Service
from splittime.server.strict import refuse_without_effect
from splittime.server.tenants import tenant_of
from splittime.server.tokens import Tokens, too_late

now_ns = time.monotonic_ns


def do_nothing() -> None:
    """Nobody has to be told."""


class Visit:
    """receive: a caller that only asks whether there is room (`knock`) may leave it out."""

    def __init__(
        self, service: Service, endpoint: str, scope: http.Scope, receive: http.Receive = http.receive_nothing
    ) -> None:
        self.service, self.endpoint, self.scope, self.receive = service, endpoint, scope, receive
        self.start_ns: int = scope.get(http.START_NS) or now_ns()
        self.unseen_ns: int = scope.get(http.UNSEEN_NS, 0)
        self.tenant = tenant_of(scope)
        self.started_at_unix_ns = time.time_ns() - (now_ns() - self.start_ns)
        self.has_body = False  # the whole body has been read
        self.is_gone = False
        self.request_id = ""
        self.generation: Generation | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._account = Account("", self.start_ns, Stage.RECEIVE)
        self._tokens = Tokens(service, self._account)
        self._place: Place | None = None
        self._is_reserved = False
        self._quota: Quota | None = None  # that of its tenant, once it has let the request in
        self._prompt_parts: list[PromptParts] = []  # of each prompt
        self.on_gone: Callable[[], None] = do_nothing  # the writer of a stream puts its own function here
        self.notices: list[str] = []  # what the client is told beside its answer

    @property
    def group_id(self) -> str:
        """The id in the response."""
        return f"{'chatcmpl' if self.endpoint == 'chat' else 'cmpl'}-{self.request_id}"

    @property
    def full_id(self) -> str:
        return self.service.full_id(self.request_id, self.tenant)

    # ---- in

    def knock(self) -> None:
        """Raises what the client must be told if its head alone decides that there is no room now. Takes nothing."""
        self.request_id = http.new_request_id()  # until it is known to have a good one of its own
        given = http.request_id(self.scope)
        self.service.check_free(given, self.tenant)
        self.request_id = given
        self._read_head()

    async def come_in(self) -> tuple[Ask, Generation]:
        """Everything up to the hand-off. Raises what the client must be told, or `Disconnected`."""
        self.request_id = http.new_request_id()
        self.request_id = http.request_id(self.scope)
        await self._reserve()  # before anything can be refused: an account goes by no other request's id
        model, deadline_ns = self._read_head()
        self._quota = self.service.quota(self.tenant)
        self._quota.enter(now_ns())
        admission = self.service.admission
        config = self.service.config
        body = await http.read_body_in_time(self.scope, self.receive, config.max_body_bytes, config.body_timeout_s)
        self.has_body = True
        ask = self._understand(body, model)
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._account.enter(Stage.ADMIT, now_ns())
        prompt = PromptText(ask, model, self.service.tokenizer)
        prompt.require_possible()
        tokens = prompt.estimate_tokens(admission) * ask.n
        self._place = admission.enter(now_ns(), count=ask.num_choices, tokens=tokens, deadline_ns=deadline_ns)
        prompts = await self._tokens.of(prompt, deadline_ns)
        self._prompt_parts = [prompt_parts(ids) for ids in prompts]
        self._account.enter(Stage.ADMIT, now_ns())
        if self.is_gone:
            raise http.Disconnected
        lengths = [len(ids) for ids in prompts for _ in range(ask.n)]
        if prompt.is_long:
            self._place.require_room(sum(lengths))
        self._place.correct(lengths)
        self._check_in_time(deadline_ns)
        self.generation = self._hand_off(ask, prompts, model, deadline_ns, self._place)
        return ask, self.generation

    def _understand(self, body: bytes, model: ModelInfo) -> Ask:
        config = self.service.config
        given: ChatBody | CompletionBody
        given = decode_body(body, ChatBody) if self.endpoint == "chat" else decode_body(body, CompletionBody)
        if config.strict:
            refuse_without_effect(given)
        timing = http.flag(self.scope, "X-Include-Timing")
        if isinstance(given, ChatBody):
            return ask_chat(given, model, config, timing)
        return ask_completion(given, model, config, timing)

    def _read_head(self) -> tuple[ModelInfo, int | None]:
        """The model, and the request's deadline; refused if there is no room, or none for its tenant."""
        deadline_ns = http.deadline_ns(self.scope, self.start_ns)
        model = self.service.require_serving()
        admission = self.service.admission
        try:
            self.service.quota(self.tenant).check(now_ns())
        except Refused as refused:
            raise admission.refuse(refused) from None
        admission.check(now_ns(), tokens=1, deadline_ns=deadline_ns)
        return model, deadline_ns

    async def _reserve(self) -> None:
        try:
            await self.service.reserve(self.request_id, self.tenant)
        except SplittimeError:
            self.request_id = http.new_request_id()
            raise
        self._is_reserved = True

    def _check_in_time(self, deadline_ns: int | None) -> None:
        if deadline_ns is not None and now_ns() >= deadline_ns:
            raise too_late()

    # ---- to the engine

    def _hand_off(
        self, ask: Ask, prompts: Sequence[tuple[int, ...]], model: ModelInfo, deadline_ns: int | None, place: Place
    ) -> Generation:
        budgets = [output_budget(ids, ask, model, is_strict=self.service.config.strict) for ids in prompts]
        self.notices = clamp_notices(ask, budgets, model)
        sources = ask.prompts or (prompts[0],)
        plans = [(p, s) for p in range(len(prompts)) for s in range(ask.n)]
        choices = []
        for index, (p, sample) in enumerate(plans):
            name = self.request_id if len(plans) == 1 else f"{self.request_id}-{index}"
            request = Request(
                request_id=self.service.full_id(name, self.tenant),
                prompt_token_ids=prompts[p],
                sampling=ask.sampling_of(sample, budgets[p]),
                eos_token_ids=model.eos_token_ids,
                submitted_ns=now_ns(),
                priority=ask.priority,
                deadline_ns=deadline_ns,
                cache_salt=self.tenant.cache_salt(ask.cache_salt),
            )
            choices.append(self._choice(index, request, ask, sources[p], self._prompt_parts[p]))
        generation = Generation(self.group_id, self.service.client, choices, place)
        generation.start()
        self._use_tokens(len(prompts[p]) for p, _ in plans)
        self.service.generations[self.full_id] = generation
        return generation

    def _use_tokens(self, counts: Iterable[int]) -> None:
        if self._quota is not None:
            self._quota.use_tokens(sum(counts), now_ns())

    def _choice(self, index: int, request: Request, ask: Ask, source: Prompt, parts: PromptParts) -> Choice:
        account = Account(request.request_id, self.start_ns, Stage.RECEIVE)
        account.extend(self._account.marks[1:])
        account.enter(Stage.HANDOFF, request.submitted_ns)
        tokenizer, sampling = self.service.tokenizer, request.sampling
        text = OutputText(tokenizer, request.prompt_token_ids, stop=sampling.stop, min_tokens=sampling.min_tokens)
        echo = self._echo(request.prompt_token_ids, source, ask) if ask.echo else None
        return Choice(index, request, account, text, echo, ask.echo_only, parts)

    def _echo(self, prompt_ids: Sequence[int], source: Prompt, ask: Ask) -> Echo:
        """The prompt as it was given, and where each of its tokens begins."""
        tokenizer = self.service.tokenizer
        text = source if isinstance(source, str) else tokenizer.decode(prompt_ids)
        if ask.sampling.prompt_logprobs is None:
            return Echo(text)
        detokenizer, offsets, length = make_detokenizer(tokenizer), [], 0
        for token_id in prompt_ids:
            offsets.append(min(length, len(text)))
            length += len(detokenizer.push(token_id))
        return Echo(text, offsets)

    # ---- while it is served

    async def _watch(self) -> None:
        """Notice the client's going away, whatever the request is doing."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._tokens.drop()
        if self.generation is not None:
            self.generation.cancel()
            self.on_gone()

    # ---- out

    def close_choice(self, choice: Choice, at_ns: int) -> None:
        """Close a choice's account, once."""
        if not choice.is_closed:
            model, unix_ns = self._model_name(), self.started_at_unix_ns
            about = (self.group_id, model, self.endpoint, unix_ns, self.unseen_ns, self.tenant.name)
            self.service.file_account(choice.close(at_ns, *about))

    def close_refused(self, finish_reason: str, error: ErrorInfo | None) -> None:
        """Close the account of a request that never reached the engine."""
        at_ns = now_ns()
        self._account.close(at_ns)
        self.service.file_account(
            ClosedAccount(
                request_id=self.full_id,
                group_id=self.group_id,
                model=self._model_name(),
                endpoint=self.endpoint,
                started_at_unix_ns=self.started_at_unix_ns,
                start_ns=self.start_ns,
                end_ns=at_ns,
                intervals=tuple(self._account.intervals()),
                finish_reason=finish_reason,
                error=error,
                cancelled_ns=at_ns if finish_reason == FinishReason.ABORT else None,
                unseen_ns=self.unseen_ns,
                tenant=self.tenant.name,
            )
        )

    def begin_refusal(self) -> None:
        self._account.enter(Stage.DELIVER, now_ns())

    def _model_name(self) -> str:
        model = self.service.model
        return model.name if model is not None else ""

    def leave(self) -> None:
        """Give back what the visit holds: its queue places, its id (when the engine has let go), its watcher."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # a task that holds its visit: without this, both would wait for the collector
        if self._quota is not None:
            self._use_tokens(len(choice.token_ids) for choice in (self.generation.choices if self.generation else ()))
            self._quota.leave()
        self._tokens.drop()
        if self.generation is not None:
            self.generation.when_released(partial(self.service.release, self.full_id))
            return
        if self._account.end_ns is None:  # something unforeseen was raised; the edge has answered 500
            self.close_refused(FinishReason.ERROR, EngineError("the server failed").info)
        if self._place is not None:
            self._place.give_up()
        if self._is_reserved:
            self.service.release(self.full_id)
