"""Which requests may go on at another upstream when their stream breaks off, and what that one is asked.

    token_ids   between splittime servers: the prompt is the first one's token ids with those of the answer so far. The
                first says them in its chunks (`return_token_ids`), for a chat too, so that the second needs no template
                and no tokenizer to stand where the first stood.
    text        between other servers, of a completion whose prompt is a text: the prompt is that text and the answer
                so far. Its tokens may be cut differently there: it goes on well, and is not promised to be the same.

What would not be the same is not continued: penalties that count an answer's tokens, a seed (draws go by their place in
the answer), logprobs, several answers, stop strings between splittime servers (a half of one may be held back). Only
fields that are known to mean the same at the other upstream are passed on; a request with any other is not continued.

One request's part of it: what each of its attempts is asked, and whether there may be another after a break.

A `StreamStory` is what a stream has told its client so far; a `Splicer` lets another upstream's chunks go on with it.
Each chunk of a stream that may be continued is read. Its client sees it as the upstream wrote it, without the token ids
that only the gateway asked for. Chunks of the second upstream get the first one's id, model and form (a chat's, if it
was one), the first of them says `resumed`, and `usage` counts the answer as one.

By text an answer's tokens are those that the upstream tells in each chunk, which it is asked for (`usage_asked`). Where
it tells none they are estimated: a chunk is a token, unless it has several words.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from splittime.core.errors import RequestError
from splittime.gateway.answer_events import AnswerEditor
from splittime.gateway.config import UpstreamConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, CHAT, COMPLETIONS, WITH_CHOICES, ForwardedRequest
from splittime.gateway.upstreams import Router, Upstream
from splittime.ledger.attempts import FirstTokens
from splittime.web.reading import BodySender, read_beside
from splittime.wire.sse import EventLines

TOKEN_IDS, TEXT = "token_ids", "text"
KEPT = frozenset(
    ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
) | frozenset(
    ("logit_bias", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "user", "safety_identifier", "metadata")
)
SETTLED = frozenset(("prompt", "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "n"))
OF_THE_TEMPLATE = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort")
)
WITHOUT_EFFECT = {"echo": False, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0, "tools": []}
NO_STOP: tuple[Any, ...] = (None, "", [])
BREAKS = ("upstream_died", "upstream_stalled")
Asked = tuple[ForwardedRequest, AnswerEditor | None]  # of an upstream, and who reads its chunks: None for nobody
MAX_TOKENS = 2**18  # of an answer that is remembered; a longer one is not continued
MAX_CHARS = 2**22
LONG_TOKEN_CHARS = 32  # no token of a text is longer, but for runs of one character
HEAD = ("id", "object", "created", "model", "system_fingerprint")
DONE = b"[DONE]"
Fields = dict[str, Any]

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def body_of(request: ForwardedRequest) -> dict[str, Any]:
    """Returns the body's fields. It is an object, and no name stands in it twice: `forwarded` has seen to it."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, RecursionError) as error:  # of a field that nobody had to read before
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return {name: value for name, value in fields.items() if value is not None}


def way_of(upstream: UpstreamConfig) -> str:
    return TOKEN_IDS if upstream.kind == "splittime" else TEXT


def why_not(path: str, body: dict[str, Any], way: str) -> str:
    """Returns why a stream of this request is not continued if it breaks off; "" if it is."""
    if path not in WITH_CHOICES:
        return "only chats and completions go on elsewhere"
    if way == TEXT and path == CHAT:
        return "only splittime servers tell where in its template a chat stood"
    if way == TEXT and not isinstance(body.get("prompt"), str):
        return "its prompt is not one text"
    if way == TOKEN_IDS and not _is_one(body.get("prompt", "")):
        return "it has several prompts"
    if way == TOKEN_IDS and path == COMPLETIONS and "max_tokens" not in body:
        return "it has no max_tokens, and the server's own is not known"
    if body.get("n", 1) != 1:
        return "it asks for several answers"
    if type(body.get("min_tokens", 0)) is not int:
        return "its min_tokens is no whole number"
    if "seed" in body and body.get("temperature") != 0:
        return "a seed's draws go by their place in the answer"
    for name, value in body.items():
        is_known = name in KEPT or name in SETTLED or name in OF_THE_TEMPLATE
        if is_known or (name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]):
            continue
        if name == "stop" and (way == TEXT or value in NO_STOP):
            continue
        return f"it has {name[:64]!r}, which another upstream cannot be asked to go on with"
    return ""


def _is_one(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(one) is int for one in prompt))


def telling(request: ForwardedRequest, body: dict[str, Any]) -> ForwardedRequest:
    """Returns the request that has its answer's token ids told."""
    encoded = msgspec.json.encode({**body, "return_token_ids": True})
    return msgspec.structs.replace(request, body=encoded)


def continued(
    request: ForwardedRequest, body: dict[str, Any], way: str, prompt: str | list[int], num_tokens: int
) -> ForwardedRequest:
    """Returns what another upstream is asked after so many tokens. prompt: the request's own and the answer so far."""
    fields = {name: value for name, value in body.items() if name in KEPT}
    fields |= {"prompt": prompt, "stream": True, "max_tokens": _left(body, num_tokens)}
    if fields["max_tokens"] is None:
        del fields["max_tokens"]
    if "min_tokens" in body:
        fields["min_tokens"] = max(0, body["min_tokens"] - num_tokens)
    if way == TOKEN_IDS:
        fields["return_token_ids"] = True
    elif body.get("stop") not in NO_STOP:
        fields["stop"] = body["stop"]
    return msgspec.structs.replace(request, path=COMPLETIONS, body=msgspec.json.encode(fields))


def most_tokens(body: dict[str, Any]) -> int | None:
    """Returns the most tokens that the answer may have; None for the rest of the context (-1), or the server's own."""
    told = body.get("max_completion_tokens", body.get("max_tokens"))
    return told if isinstance(told, int) and told >= 0 else None


def _left(body: dict[str, Any], num_tokens: int) -> int | None:
    most = most_tokens(body)
    if most is not None:
        return max(1, most - num_tokens)
    return -1 if "messages" in body or "max_tokens" in body else None


class StreamStory:
    """way: `token_ids` or `text`. shows_ids: the client asked for token ids itself. prompt: None until it is told."""

    def __init__(self, path: str, way: str, prompt: str | None, shows_ids: bool) -> None:
        self.path, self.way, self.shows_ids = path, way, shows_ids
        self.prompt_text = prompt
        self.prompt_ids: list[int] | None = None if way == TOKEN_IDS else []
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._num_chars = 0
        self._before_tokens = self._told_tokens = 0  # of earlier upstreams; of this one, as it told
        self._estimated_tokens = 0  # of its chunks since then
        self.prompt_tokens: int | None = None  # as the first one told them
        self.head: Fields = {}
        self.is_ended = False  # a finish reason was told
        self.is_lost = False  # it cannot be told any more where the stream stands
        self._is_in_content = True  # a chat: what comes next is content, not reasoning

    @property
    def num_tokens(self) -> int:
        """The answer's tokens so far; by `text` as they were told, or as estimated."""
        if self.way == TOKEN_IDS:
            return len(self.token_ids)
        return self._before_tokens + self._told_tokens + self._estimated_tokens

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_known(self) -> bool:
        return bool(self.head) and self.prompt_ids is not None and not self.is_lost and self._is_in_content

    def go_on(self) -> None:
        """What comes now is another upstream's."""
        self._before_tokens, self._told_tokens, self._estimated_tokens = self.num_tokens, 0, 0

    def note(self, chunk: Fields) -> None:
        """A chunk that the client is about to have."""
        self.head = self.head or {name: chunk[name] for name in HEAD if name in chunk}
        for choice in chunk.get("choices") or ():
            self._note_choice(choice)
        self._note_told(chunk.get("usage"), chunk.get("timings"))

    def _note_told(self, usage: object, timings: object) -> None:
        told = usage if isinstance(usage, dict) else {}
        tokens = told.get("completion_tokens")
        if tokens is None and isinstance(timings, dict):  # of llama.cpp
            tokens = timings.get("predicted_n")
        if type(tokens) is int and tokens >= self._told_tokens:
            self._told_tokens, self._estimated_tokens = tokens, 0
        if self.prompt_tokens is None and not self._before_tokens and type(told.get("prompt_tokens")) is int:
            self.prompt_tokens = told["prompt_tokens"]

    def _note_choice(self, choice: Fields) -> None:
        self.is_ended = self.is_ended or choice.get("finish_reason") is not None
        if self.way == TOKEN_IDS:
            self.prompt_ids = self.prompt_ids or choice.get("prompt_token_ids")
            told = choice.get("token_ids") or []
            self.token_ids += told
            if told and self.path == CHAT:  # who goes on writes all as content
                self._is_in_content = "text" in choice or "content" in (choice.get("delta") or {})
            self.is_lost = self.is_lost or (not told and bool(choice.get("text"))) or len(self.token_ids) > MAX_TOKENS
        elif text := choice.get("text"):
            self._texts.append(text)
            self._estimated_tokens += text_tokens(text)
            self._num_chars += len(text)
            self.is_lost = self.is_lost or self._num_chars > MAX_CHARS


def text_tokens(text: str) -> int:
    """Returns about how many tokens a chunk's text has: one, unless it has several words or is too long for one."""
    words = len(text.split())
    if words <= 1 and len(text) <= LONG_TOKEN_CHARS:
        return 1
    return max(words, len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


class StreamRecorder:
    """Reads the chunks of the first upstream; gives what the client is to have, whole events only."""

    def __init__(self, story: StreamStory) -> None:
        self._story, self._lines = story, EventLines()

    @property
    def is_too_long(self) -> bool:
        return self._lines.is_too_long

    def edit(self, piece: bytes) -> bytes:
        """Returns the events that are now whole, as the client is to have them. A chunk that cannot be read is given
        as it is, and its stream is not continued."""
        return b"".join(b"data: %b\n\n" % self._event(data) for data in self._lines.feed(piece))

    def edit_whole(self, body: bytes) -> bytes:
        return body

    def _event(self, data: bytes) -> bytes:
        if data == DONE:
            return data
        try:
            chunk = _decode(data)
            self._story.note(chunk)
            return msgspec.json.encode(self._shown(chunk))
        except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, TypeError):
            self._story.is_lost = True
            return data

    def _shown(self, chunk: Fields) -> Fields:
        if not self._story.shows_ids:
            for choice in chunk.get("choices") or ():
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        return chunk


class Splicer(StreamRecorder):
    """Reads the chunks of another upstream, which goes on after `before` tokens. mark: what the first of them says."""

    def __init__(self, story: StreamStory, mark: Fields) -> None:
        super().__init__(story)
        story.go_on()
        self._before, self._mark = story.num_tokens, mark

    def _shown(self, chunk: Fields) -> Fields:
        for choice in chunk.get("choices") or ():
            choice.pop("prompt_token_ids", None)
            if self._story.path == CHAT:
                choice["delta"] = {"content": choice.pop("text", "")}
        if chunk.get("usage"):
            chunk["usage"] = self._whole_usage(chunk["usage"])
        if chunk.get("error") is None:
            chunk |= self._story.head
        if self._mark:
            chunk["resumed"], self._mark = self._mark, {}
        return super()._shown(chunk)

    def _whole_usage(self, usage: Fields) -> Fields:
        """The first upstream's prompt, and the answer of both."""
        told, before = usage.get("prompt_tokens", 0), self._before
        prompt = told - before if told >= before else told  # else it was not counted as this one counts
        if self._story.way == TEXT and self._story.prompt_tokens is not None:
            prompt = self._story.prompt_tokens
        output = usage.get("completion_tokens", 0) + before
        usage |= {"prompt_tokens": prompt, "completion_tokens": output}
        if "total_tokens" in usage:
            usage["total_tokens"] = prompt + output
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
        return usage


def mark_of(story: StreamStory, upstream: str) -> Fields:
    """Returns what the first chunk of another upstream says: who goes on, by what, and after how many tokens."""
    return {"upstream": upstream, "by": story.way, "after_tokens": story.num_tokens}


def prompt_of(story: StreamStory) -> str | list[int]:
    """Returns the prompt from which another upstream goes on."""
    if story.way == TEXT:
        return f"{story.prompt_text or ''}{story.text}"
    return [*(story.prompt_ids or ()), *story.token_ids]


class Resumption:
    """request: of the client. reason: why a stream that broke off is not continued."""

    def __init__(self, request: ForwardedRequest) -> None:
        self._request = request
        self._body: dict[str, Any] = {}
        self.story: StreamStory | None = None
        self.reason = ""
        self.is_continuing = False  # the client has a beginning, and the next attempt goes on with it

    async def asked(self, upstream: Upstream, sender: BodySender) -> Asked:
        """As `attempt`, beside the loop where the body is long. Raises `Refused` where too many of those wait."""
        if not self.reads_body(upstream):
            return self.attempt(upstream)
        return await read_beside(sender, len(self._request.body), self.attempt, upstream)

    def reads_body(self, upstream: Upstream) -> bool:
        """Returns whether `attempt` reads or writes the request's body, which may be long."""
        return self.is_continuing or (upstream.config.resume and self._request.is_stream)

    def attempt(self, upstream: Upstream) -> Asked:
        """Returns what this upstream is asked. In whatever thread."""
        story, request = self.story, self._request
        if self.is_continuing and story is not None:
            asked = continued(request, self._body, story.way, prompt_of(story), story.num_tokens)
            return asked, Splicer(story, mark_of(story, upstream.name))
        self.story = None
        if not (upstream.config.resume and request.is_stream):
            return request, None
        self._body, way = body_of(request), way_of(upstream.config)
        self.reason = why_not(request.path, self._body, way)
        if self.reason:
            return request, None
        shows_ids = bool(self._body.get("return_token_ids"))
        self.story = StreamStory(request.path, way, self._body.get("prompt") if way == TEXT else None, shows_ids)
        asked = telling(request, self._body) if way == TOKEN_IDS else request
        return asked, StreamRecorder(self.story)

    def may_go_on(self, code: str) -> bool:
        """Returns whether a stream that broke off for this reason may go on elsewhere; `reason` says why not."""
        if self.story is None or code not in BREAKS:
            return False
        self.reason = self._why_not_now(self.story)
        self.is_continuing = not self.reason
        return self.is_continuing

    def _why_not_now(self, story: StreamStory) -> str:
        most = most_tokens(self._body)
        if story.is_ended or (most is not None and story.num_tokens >= most):
            return "all its tokens had been told"
        return "" if story.is_known else "the upstream did not tell where it stood"

    @property
    def counts_each(self) -> bool:
        """Returns whether each chunk is to tell the tokens so far, which nothing else tells."""
        return self.story is not None and self.story.way == TEXT

    @property
    def first_tokens(self) -> FirstTokens | None:
        """Returns what was read of the answer's first tokens where they are looked at (`routing.escalation`)."""
        return None

    # ---- who goes on

    def suits(self, upstream: Upstream) -> bool:
        """Returns whether this upstream can go on with what the first began."""
        return (
            not self.is_continuing
            or self.story is None
            or (upstream.config.resume and way_of(upstream.config) == self.story.way)
        )

    def tried(self, router: Router, tried: Collection[str]) -> list[str]:
        """Returns the upstreams that are not to be asked while another may be."""
        if not self.is_continuing:
            return list(tried)
        unfit = [one.name for one in router.of_model(self._request.pool) if not self.suits(one)]
        return [*dict.fromkeys((*tried, *unfit))]

    @property
    def resumed_by(self) -> str:
        """By what the latest attempt goes on: "" for one that begins."""
        return self.story.way if self.is_continuing and self.story is not None else ""

    @property
    def resumed_after(self) -> int:
        return self.story.num_tokens if self.is_continuing and self.story is not None else 0
