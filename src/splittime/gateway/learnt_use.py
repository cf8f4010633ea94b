"""What requests have used of late, by tenant and model: from it those that come are estimated, and answers that nobody
read to their end.

`max_tokens` is a bound and no forecast: who writes 500,000 there uses 200. So the order of the queue and the choice of
an upstream go by what such requests used (`expected_tokens`), never more than the bound. Limits are safe the other way
round: all that a request may use is reserved (`reserved_tokens`), and what upstreams wrote beyond that of late. Until
a tenant has one answer of a model its bound is not believed below what an answer is assumed to have.

An answer whose client left told no usage. Its tokens are those of its events, by how many one had of late
(speculation and `stream_interval` have several in one), or by its text; of an answer that is no stream, by the time
that it ran, at the best pace at which one of its tenant's was written of late. It is charged no more than it may use,
as far as that is known. What one tenant's requests used says nothing of another's.
"""

from collections import OrderedDict
from math import ceil, inf

from splittime.gateway.forwarded import BYTES_PER_TOKEN, MOST_TOKENS, ForwardedRequest

MAX_KEPT = 4096  # pairs of a tenant and a model; who was seen longest ago goes
WEIGHT = 1 / 8  # of the latest answer in a mean; the first ones count alike
SLOWER = 1.1  # a best pace is forgotten by so much with each answer
KEPT_BEYOND = 0.75  # of what was written beyond a bound, with each answer that keeps to its own


class UsedOfLate:
    """The use of a tenant and model. answer_tokens: of one answer. beyond_tokens: by whether a bound was said.
    s_per_token: at the best pace of one answer."""

    __slots__ = ("answer_tokens", "beyond_tokens", "num_seen", "s_per_token", "tokens_per_piece")

    def __init__(self) -> None:
        self.num_seen = 0
        self.answer_tokens = 0.0
        self.beyond_tokens = {True: 0.0, False: 0.0}
        self.tokens_per_piece, self.s_per_token = 1.0, inf

    def note(self, request: ForwardedRequest, output_tokens: int, num_pieces: int, lasted_s: float) -> None:
        self.num_seen += 1
        weight = max(WEIGHT, 1 / self.num_seen)
        self.answer_tokens += weight * (output_tokens / request.answers - self.answer_tokens)
        kept = KEPT_BEYOND * self.beyond_tokens[request.is_bounded]
        self.beyond_tokens[request.is_bounded] = max(kept, output_tokens - request.output_tokens)
        if output_tokens and num_pieces:
            self.tokens_per_piece += weight * (max(1.0, output_tokens / num_pieces) - self.tokens_per_piece)
        if output_tokens and not request.is_stream:  # several answers are written at once
            now_s = max(lasted_s, 1e-6) * request.answers / output_tokens
            self.s_per_token = min(now_s, self.s_per_token * SLOWER)


NOTHING = UsedOfLate()


class LearntUse:
    """assumed_tokens: of an answer of which nothing is known, as the config says now."""

    def __init__(self) -> None:
        self._used: OrderedDict[tuple[str, str], UsedOfLate] = OrderedDict()

    def note(
        self, tenant: str, request: ForwardedRequest, output_tokens: int, num_pieces: int, lasted_s: float
    ) -> None:
        """An answer told its tokens. num_pieces: events that had some, 0 for no stream. lasted_s: until its first byte,
        since its request was sent."""
        used = self._used.setdefault((tenant, request.model), UsedOfLate())
        self._used.move_to_end((tenant, request.model))
        used.note(request, output_tokens, num_pieces, lasted_s)
        if len(self._used) > MAX_KEPT:
            self._used.popitem(last=False)

    def expected_tokens(self, tenant: str, request: ForwardedRequest, assumed_tokens: int) -> int:
        """Returns the tokens that its answers are expected to have."""
        used = self._of(tenant, request)
        one = used.answer_tokens if used.num_seen else assumed_tokens
        return min(request.output_tokens, ceil(one * request.answers))

    def reserved_tokens(self, tenant: str, request: ForwardedRequest, assumed_tokens: int) -> int:
        """Returns the tokens that its prompt and its answers may come to."""
        if not request.is_written:
            return request.prompt_tokens
        used = self._of(tenant, request)
        most = request.output_tokens + ceil(used.beyond_tokens[request.is_bounded])
        if not used.num_seen:
            most = max(most, assumed_tokens * request.answers)
        return request.prompt_tokens + min(MOST_TOKENS, most)

    def written_tokens(self, tenant: str, request: ForwardedRequest, num_pieces: int, text_bytes: int) -> int:
        """Returns the tokens of a stream that told so many events with so much text."""
        used = self._of(tenant, request)
        tokens = max(ceil(num_pieces * used.tokens_per_piece), text_bytes // BYTES_PER_TOKEN)
        return min(tokens, request.output_tokens) if request.is_bounded else tokens

    def unseen_tokens(self, tenant: str, request: ForwardedRequest, lasted_s: float) -> int:
        """Returns the tokens that were written for so long of an answer that comes as a whole."""
        if not request.is_written:
            return 0
        used = self._of(tenant, request)
        if used.s_per_token == inf:
            return request.expected_tokens
        most = request.output_tokens + (0 if request.is_bounded else ceil(used.beyond_tokens[False]))
        return min(most, ceil(min(MOST_TOKENS, lasted_s / used.s_per_token * request.answers)))

    def _of(self, tenant: str, request: ForwardedRequest) -> UsedOfLate:
        return self._used.get((tenant, request.model), NOTHING)
