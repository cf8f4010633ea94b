"""One request's part of it: what each of its attempts is asked, and whether there may be another after a break."""

from collections.abc import Collection
from typing import Any

from splittime.gateway.answer_events import AnswerEditor
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.resume.request import TEXT, TOKEN_IDS, body_of, continued, most_tokens, telling, way_of, why_not
from splittime.gateway.resume.story import Splicer, StreamRecorder, StreamStory, mark_of, prompt_of
from splittime.gateway.upstreams import Router, Upstream
from splittime.ledger.attempts import FirstTokens
from splittime.web.reading import BodySender, read_beside

BREAKS = ("upstream_died", "upstream_stalled")
Asked = tuple[ForwardedRequest, AnswerEditor | None]  # of an upstream, and who reads its chunks: None for nobody


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
