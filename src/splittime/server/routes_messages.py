"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API: a chat's `Visit` between two translations, of
the body as it is read (`api.messages`) and of the answer as it is sent (`api.message_answers`). What the account says
of a chat, it says of a message."""

from functools import partial

from splittime.api import message_answers, messages
from splittime.api.decode import decode_body
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.api.params import check_model, template_options
from splittime.api.reasoning import can_be_bound
from splittime.api.schema import ChatBody
from splittime.api.tools import as_template_reads, tool_use_of
from splittime.core.errors import RequestError, SplittimeError
from splittime.server.counted import CountedText
from splittime.server.service import Service
from splittime.server.translation import TranslatedAnswer, TranslatedVisit
from splittime.server.visit import GivenBody
from splittime.text.process import Render
from splittime.text.worker import FramedWork, framed
from splittime.web import http
from splittime.web.reading import BodySender


async def create(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a message, whole or streamed."""
    exchange = MessageExchange(service, scope)
    await TranslatedVisit(service, scope, receive, _as_message(send), exchange.chat_of).serve()


async def count_tokens(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with the tokens of the prompt that `create` would make of this body."""
    send = _as_message(send)
    try:
        model = service.require_model()
        _check_version(scope)
        with CountedText(service, scope, receive) as text:
            body = await http.read_body_in_time(
                scope, receive, service.config.max_body_bytes, service.config.body_timeout_s
            )
            ignored = service.config.new_ignored()
            done = await text.done(len(body), _counted_work, body, service, model, ignored)
    except SplittimeError as error:
        await http.respond_error(send, error)
    else:
        counted = {"input_tokens": done.whole_lens[0]}
        await http.respond_json(send, counted, http.notice_headers(service.note_ignored(ignored)))


def _counted_work(body: bytes, service: Service, model: ModelInfo, ignored: Ignored | None) -> FramedWork:
    given = decode_body(body, messages.CountTokensBody, ignored)
    messages.note_tools(given, ignored)
    check_model(given.model, model)
    chat = decode_body(messages.chat_body(given), ChatBody, ignored)
    tool_use = tool_use_of(chat, service.marks)
    options = template_options(chat) | ({} if tool_use is None else {"tools": tool_use.told})
    return framed(Render(as_template_reads(chat, service.marks), options, counts_only=True))


def _check_version(scope: http.Scope) -> None:
    """Clients send one; who sends none is taken to mean it."""
    given = http.header(scope, b"anthropic-version")
    if given is not None and given not in messages.VERSIONS:
        hint = f"send anthropic-version: {' or '.join(messages.VERSIONS)}"
        raise RequestError(
            f"anthropic-version {given[:64]} is not served", param="anthropic-version", value=given[:64], hint=hint
        )


class MessageExchange:
    """One message, from its body to its answer."""

    def __init__(self, service: Service, scope: http.Scope) -> None:
        self._config, self._scope, self._marks = service.config, scope, service.marks

    async def chat_of(self, sender: BodySender, body: bytes) -> GivenBody:
        """Returns what reads a chat's body that asks for this message. Raises what the client must be told."""
        _check_version(self._scope)
        ignored = self._config.new_ignored()
        return GivenBody(len(body), partial(self._chat_of, body, ignored), ignored)

    def _chat_of(self, body: bytes, ignored: Ignored | None) -> ChatBody:
        given = decode_body(body, messages.MessagesBody, ignored)
        messages.note_tools(given, ignored)
        if given.thinking is not None and not can_be_bound(self._marks, has_tools=bool(given.tools)):
            given.thinking.budget_tokens = None  # it says what to aim at, and here nothing can hold to it
        return decode_body(messages.chat_body(given), ChatBody, ignored)


def _as_message(send: http.Send) -> http.Send:
    names = {b"x-request-id": b"request-id"}
    return TranslatedAnswer(send, _translated, lambda: message_answers.MessageEvents().feed, names).send


def _translated(status: int, body: bytes) -> bytes:
    if status != 200:
        return message_answers.error(status, body)
    return message_answers.message(body) if b'"choices":' in body else body
