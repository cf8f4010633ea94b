"""What a gateway's account says beside its stages: each attempt at an upstream, why it was chosen, and what it told.

An upstream that keeps accounts of its own (a splittime server) returns its request's stages. They are kept here as they
came, counted from the upstream's own beginning: no instant of its clock is compared with one of the gateway's. What is
compared are lengths: `upstream` lasts as long as the upstream's account, and what the gateway's clock saw beyond that
is `network` (ADR 23).
"""

import msgspec

from splittime.ledger.stages import Cause, Stage

CANCELLED = "cancelled"  # the end of an attempt whose client left
UNSURE, LOGPROBS_REFUSED = "unsure", "logprobs_refused"  # a small model seemed unsure, or would not say: asked anew
TIED_LOST = "tied_lost"  # another had a byte first; in ledgers of before decision 32
NO_FAILURE = frozenset({"", CANCELLED, TIED_LOST, UNSURE, LOGPROBS_REFUSED})  # `error` of attempts that did not fail
UNSURE_KEPT = "unsure_kept"  # it seemed unsure, and its answer was given all the same
HIT, CAPPED, NO_AFFINITY = "hit", "capped", "none"  # results of prefix affinity


class NestedStage(msgspec.Struct, frozen=True, gc=False):
    """One stage of an upstream's account, in ns from that account's own beginning."""

    stage: Stage
    cause: Cause | None
    begin_ns: int
    end_ns: int


class DifficultyDecision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Which of two models a request was given to first. choice: `small`; `large` too, in ledgers of before decision 32,
    where its text decided."""

    choice: str


class FirstTokens(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a gateway read of the first tokens of a small model's answer, before the client had any of it.

    verdict: `sure`; `unsure`, and the large model was asked; `unsure_kept`, and it was not; `no_logprobs`,
    `logprobs_refused`, `too_long`, `echo` or `several_answers`: nothing could be said. num_tokens, mean_logprob: of
    those that were looked at. below: the mean below which it is unsure. held_ns: how long the answer was held back,
    from its first piece on. why: of one that was kept, `share` (as many as may had been asked anew), `deadline` (no
    time was left) or `no_place` (at the large one); else "".
    """

    verdict: str
    num_tokens: int = 0
    mean_logprob: float | None = None
    below: float
    held_ns: int = 0
    why: str = ""


class RouteDecision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the rules of a gateway's config said of a request, and what they looked at; with the account's tenant and
    endpoint that is all of it, so that the decision can be made again under another config.

    policy: the beginning of the SHA-256 of the config. rule: the rule's name; empty if none matched.
    asked_model, model: as the client named it, and as it was passed on. upstreams: whom the rule named; () for all.
    prompt_tokens: as the gateway estimated them. headers: of those that some rule of that config asks for, the ones
    that were there, at most 65 characters of each.
    difficulty: who was asked first, where the name was that of a `[[difficulty]]`; None before that, as of an
    answer from the cache.
    """

    policy: str
    rule: str = ""
    asked_model: str
    model: str
    upstreams: tuple[str, ...] = ()
    prompt_tokens: int
    headers: tuple[tuple[str, str], ...] = ()
    difficulty: DifficultyDecision | None = None


class Considered(msgspec.Struct, frozen=True, gc=False):
    """An upstream that was looked at for a request, with what the gateway had given it at that moment.

    tokens: of its requests in flight, prompt and most output, as the gateway estimates them.
    rtt_ns, wait_ns: the round trip to it, and the wait for a first byte there, as estimated; None where nobody knew, or
    where upstreams have no regions.
    """

    upstream: str
    requests: int
    tokens: int
    rtt_ns: int | None = None
    wait_ns: int | None = None


class AffinityDecision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Whether an upstream was chosen for what it had served of the prompt, and what that went by.

    result: `hit`; `capped`, where load decided since who served it had too much to do; `none`, where nobody had.
    why: of a capped one `over_cap` or `no_room`; of none `unseen`, `shared` (it is everybody's beginning), `short` or
    `unread`.
    upstream: who had served most of it, of a hit within the cap; "" for none. matched_bytes: of the prompt's beginning;
    shared_bytes: of these, what most conversations share. tokens: that it had in flight; cap_tokens: the most that it
    might have.
    """

    result: str
    why: str = ""
    upstream: str = ""
    matched_bytes: int = 0
    shared_bytes: int = 0
    tokens: int = 0
    cap_tokens: int = 0


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One attempt to have a request answered by an upstream; times in ns of the gateway's monotonic clock.

    request_id: by which the upstream knows it.
    considered: among whom it was chosen; the first is the one that got it.
    status: of its answer; None if there was none. first_byte_ns: when the first byte of the answer's body was read,
    behind the comments of a stream.
    error: why it failed, as a code; empty if it did not.
    num_events: of a stream, events passed on. This is no number of tokens.
    knows_tokens: the answer told its tokens; else those of the account are 0 because nobody said.
    nested: the upstream's own stages; () if it keeps none. nested_fault: why they could not be nested.
    resumed_by: how it goes on with the stream of the attempt before it, `token_ids` or `text`; "" if it does not.
    resumed_after: after how many tokens (by `text`: pieces) of it.
    first_tokens: of a small model, where a `[[difficulty]]` has `escalate`. lost_tokens: of one that is `unsure`, the
    prompt's as estimated: with the time from its begin to its end, what it cost its upstream at most.
    affinity: by what prefix affinity chose; None where there is none.
    """

    upstream: str
    request_id: str
    considered: tuple[Considered, ...]
    begin_ns: int
    end_ns: int
    status: int | None = None
    first_byte_ns: int | None = None
    error: str = ""
    num_events: int = 0
    knows_tokens: bool = False
    nested: tuple[NestedStage, ...] = ()
    nested_fault: str = ""
    resumed_by: str = ""
    resumed_after: int = 0
    lost_tokens: int = 0
    first_tokens: FirstTokens | None = None
    affinity: AffinityDecision | None = None
