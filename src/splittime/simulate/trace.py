"""What a ledger says of the requests that came: when, how long, with what in common. Made anew from closed accounts.

A ledger keeps no texts and no tokens. It keeps hashes of a prompt's beginnings (`ledger.prompt_parts`) and how much of
it was found in the prefix cache. From these come stand-ins: tokens that are equal where the beginnings are. Where a
prompt found more in the cache than it shares with another prompt, it begins with the tokens of the latest request that
shares the most with it, output included (a conversation's next turn).

Times are those of the recorded run. Until it reached the engine a request took what it took then; from there on the
simulation says.
"""

import math
from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.drive.messages import Abort, Release, Submit
from splittime.ledger.account import PREFILL, WITHOUT_TOKENS, ClosedAccount, Mark
from splittime.ledger.prompt_parts import PREFIX_TOKENS, prefix_list
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.costed import mixed_tokens, output_token
from splittime.simulate.drafts import RequestDrafts, drafts_of
from splittime.simulate.recorded import require_sound_accounts

END_TOKEN = 2**30  # no other token is so large
MAX_REMEMBERED = 4_096  # requests whose tokens a later one may begin with
SERVER_STAGES = (Stage.RECEIVE, Stage.TOKENIZE_QUEUE, Stage.TOKENIZE, Stage.ADMIT, Stage.HANDOFF)


class Follows(NamedTuple):
    """What a request waits for before it comes. request_id: it comes `think_ns` after this one has ended; None: when a
    worker of a closed loop has nothing else to do. until_ns: it does not come from then on."""

    request_id: str | None
    think_ns: int = 0
    until_ns: int | None = None


class TracedRequest(NamedTuple):
    """A request that reached the engine at `received_ns`, and what its account said in the end.

    marks: of the server, before that; the first is its arrival. stops_after: so many tokens, after which the server
    ended it (a stop string). leaves_ns: when its client went away. None: it ended otherwise. answer: the first tokens
    that it samples, as far as anything is known of them. follows: what it waits for; its instants are then those of
    the earliest time at which it may come. drafts: what was guessed of its answer, if anything was. grammar_ns: from
    `received_ns` on it was held so long for its grammar.
    """

    request: Request
    account: ClosedAccount
    marks: tuple[Mark, ...]
    received_ns: int
    stops_after: int | None = None
    leaves_ns: int | None = None
    answer: tuple[int, ...] = ()
    follows: Follows | None = None
    drafts: RequestDrafts | None = None
    grammar_ns: int = 0

    @property
    def arrived_ns(self) -> int:
        return self.marks[0].begin_ns

    def submissions(self) -> list[tuple[int, Submit | Release | Abort]]:
        """Returns how it comes to the engine, and when: held, if its grammar was still to be compiled."""
        if not self.grammar_ns:
            return [(self.received_ns, Submit(self.request))]
        name, released_ns = self.request.request_id, self.received_ns + self.grammar_ns
        could_not_be = self.account.error is not None and not self.account.token_steps
        then = Abort(name) if could_not_be else Release(name)
        return [(self.received_ns, Submit(self.request, Cause.GRAMMAR)), (released_ns, then)]

    @property
    def admitted_ns(self) -> int:
        """When the server asked whether there was room for it."""
        return next((mark.begin_ns for mark in self.marks if mark.stage is Stage.ADMIT), self.marks[0].begin_ns)

    def moved(self, delta_ns: int) -> "TracedRequest":
        """Returns it as if it had come so much later."""
        deadline_ns = None if self.request.deadline_ns is None else self.request.deadline_ns + delta_ns
        instants = {"submitted_ns": self.request.submitted_ns + delta_ns, "deadline_ns": deadline_ns}
        return self._replace(
            request=msgspec.structs.replace(self.request, **instants),
            marks=tuple(Mark(each.stage, each.cause, each.begin_ns + delta_ns) for each in self.marks),
            received_ns=self.received_ns + delta_ns,
            leaves_ns=None if self.leaves_ns is None else self.leaves_ns + delta_ns,
        )


def traced_requests(accounts: Iterable[ClosedAccount], max_model_len: int) -> list[TracedRequest]:
    """Returns the requests that reached the engine, in the order in which they did. One that was ended by its client,
    its deadline or an error may have as many tokens as it had asked for. Raises ConfigError for one that cannot have
    been, as one that is longer than the server's context: its ledger is damaged."""
    accounts = list(accounts)
    require_sound_accounts(accounts)
    reached = [(received_ns, account) for account in accounts if (received_ns := _received_ns(account)) is not None]
    reached.sort(key=lambda each: (each[0], len(each[1].request_id), each[1].request_id))  # `asked-9`, then `asked-10`
    for _, account in reached:
        if account.prompt_tokens + account.output_tokens > max_model_len:
            words = f"request {account.request_id} has {account.prompt_tokens} + {account.output_tokens} tokens"
            words += f" where the server takes at most {max_model_len}: the ledger is damaged"
            raise ConfigError(words, param="ledger", limit=max_model_len)
    stand_ins = StandIns(account for _, account in reached)
    return [
        _traced(account, received_ns, *stand_ins.tokens_of(account), max_model_len) for received_ns, account in reached
    ]


def with_drafts(requests: Sequence[TracedRequest], steps: Iterable[StepRecord]) -> list[TracedRequest]:
    """Returns the requests with the drafts that these steps told of them."""
    found = drafts_of([traced.account for traced in requests], steps)
    return [traced._replace(drafts=drafts) for traced, drafts in zip(requests, found, strict=True)]


def ended_by_token(traced: TracedRequest, count: int) -> TracedRequest:
    """Returns the request as one that a token ends, the last of so many: nobody knows of it beforehand. An engine that
    plans ahead computes a row behind it, and one that verifies drafts has some behind it."""
    request, own = traced.request, output_token(traced.request.request_id)
    answer = traced.answer[: count - 1]
    answer += (own,) * (count - 1 - len(answer)) + (END_TOKEN,)
    max_tokens = traced.account.max_tokens or None
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens, stop_token_ids=(END_TOKEN,))
    return traced._replace(request=msgspec.structs.replace(request, sampling=sampling), answer=answer)


def unforeseen(traced: TracedRequest) -> TracedRequest:
    """Returns the request as an engine knows it that plans ahead or verifies drafts: an end by a token it does not
    foresee."""
    is_embedding, reason = bool(traced.request.sampling.pooling), traced.account.finish_reason
    if traced.stops_after is None and reason == FinishReason.STOP and not is_embedding:
        return ended_by_token(traced, max(1, traced.account.output_tokens))
    return traced


def refused_requests(accounts: Iterable[ClosedAccount], served: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Returns the requests that the server refused for want of room or time. Nobody knows how long they were: each is
    as long as the next that was served (or the last), and shares its prompt with nobody."""
    received_ns = [traced.received_ns for traced in served]
    refused = (account for account in accounts if account.is_turned_away)
    return [_as_long_as(served[min(bisect(received_ns, a.start_ns), len(served) - 1)], a) for a in refused if served]


def _as_long_as(like: TracedRequest, account: ClosedAccount) -> TracedRequest:
    marks = _server_marks(account)
    num_tokens, own = len(like.request.prompt_token_ids), crc32(account.request_id.encode()) + 1
    received_ns = marks[-1].begin_ns + like.received_ns - like.admitted_ns
    request = msgspec.structs.replace(
        like.request,
        request_id=account.request_id,
        prompt_token_ids=tuple(mixed_tokens(own, 0, num_tokens)),
        submitted_ns=received_ns,
        deadline_ns=account.deadline_ns,
    )
    return TracedRequest(request, msgspec.structs.replace(account, prompt_tokens=num_tokens), marks, received_ns)


def with_own_ids(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """Returns the requests in the order in which they came, the second of an id under another: a client may use an id
    again once its request has ended, or was refused."""
    seen: Counter[str] = Counter()
    renamed = []
    for traced in sorted(requests, key=lambda each: each.arrived_ns):
        name = traced.request.request_id
        seen[name] += 1
        own = name if seen[name] == 1 else f"{name}#{seen[name]}"
        renamed.append(traced._replace(request=msgspec.structs.replace(traced.request, request_id=own)))
    return renamed


def at_speed(requests: Iterable[TracedRequest], factor: float) -> list[TracedRequest]:
    """Returns the requests as if they had come `factor` times as fast. What each does by itself keeps its pace."""
    requests = list(requests)
    first_ns = min((traced.arrived_ns for traced in requests), default=0)
    return [traced.moved(round((traced.arrived_ns - first_ns) * (1 / factor - 1))) for traced in requests]


def _traced(
    account: ClosedAccount, received_ns: int, prompt: tuple[int, ...], answer: tuple[int, ...], max_model_len: int
) -> TracedRequest:
    stopped = _met_stop_string(account)
    went_away = account.finish_reason == FinishReason.ABORT
    queued = [interval for interval in account.intervals if interval.stage is Stage.QUEUE]  # else its mask was late
    held_until = [interval.end_ns for interval in queued if interval.cause is Cause.GRAMMAR]
    return TracedRequest(
        request=_request(account, prompt, max_model_len),
        account=account,
        marks=_server_marks(account),
        received_ns=received_ns,
        stops_after=account.output_tokens if stopped else None,
        leaves_ns=(account.end_ns if account.cancelled_ns is None else account.cancelled_ns) if went_away else None,
        answer=answer,
        grammar_ns=max(held_until, default=received_ns) - received_ns,
    )


def _received_ns(account: ClosedAccount) -> int | None:
    """When the engine took it; None if it never did."""
    behind = (interval.begin_ns for interval in account.intervals if interval.stage not in SERVER_STAGES)
    reached = not account.is_refused and account.prompt_tokens > 0
    return next(behind, None) if reached else None


def was_taken_in(account: ClosedAccount) -> bool:
    """Returns whether the engine took it in; one that it refused has its answer at once."""
    behind = (interval.stage for interval in account.intervals if interval.stage not in SERVER_STAGES)
    return _received_ns(account) is not None and next(behind) is not Stage.DELIVER


def _computed_ns(account: ClosedAccount) -> float:
    """When its prompt was begun to be computed."""
    begun = (each.begin_ns for each in account.intervals if each.stage is Stage.PREFILL)
    return next(begun, math.inf)


def _request(account: ClosedAccount, prompt: tuple[int, ...], max_model_len: int) -> Request:
    in_engine = account.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not _met_stop_string(account)
    room = max_model_len - len(prompt)
    max_tokens = account.output_tokens if in_engine else min(account.max_tokens or room, room)
    handed_ns = next((each.begin_ns for each in account.intervals if each.stage is Stage.HANDOFF), account.start_ns)
    return Request(
        request_id=account.request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max(1, max_tokens), seed=0, ignore_eos=True, **_computed(account)),
        submitted_ns=handed_ns,
        priority=account.priority,
        deadline_ns=account.deadline_ns,
        cache_salt=account.cache_salt,
        tenant=account.tenant,
        weight=account.weight,
    )


def _computed(account: ClosedAccount) -> dict[str, Any]:
    """Returns what of its prompt is computed, and to what end."""
    if account.endpoint in WITHOUT_TOKENS:
        kind = "mean" if account.computes_prompt else "last"
        return {"pooling": AHEAD if account.endpoint == PREFILL else kind}
    return {"prompt_logprobs": 0 if account.computes_prompt else None}


def _met_stop_string(account: ClosedAccount) -> bool:
    """Whether the server ended it, before the engine said that it had."""
    if account.finish_reason != FinishReason.STOP or account.freed_ns is None:
        return account.finish_reason == FinishReason.STOP
    return next((each.begin_ns for each in account.intervals if each.stage is Stage.DELIVER), 0) < account.freed_ns


def _server_marks(account: ClosedAccount) -> tuple[Mark, ...]:
    """Returns at least one, its arrival."""
    before = takewhile(lambda interval: interval.stage in SERVER_STAGES, account.intervals)
    marks = tuple(Mark(interval.stage, interval.cause, interval.begin_ns) for interval in before)
    return marks or (Mark(Stage.HANDOFF, None, account.start_ns),)


class StandIns:
    """Tokens in the place of prompts. Blocks of `PREFIX_TOKENS` are the same in two prompts where these are, up to the
    end of the block."""

    def __init__(self, accounts: Iterable[ClosedAccount]) -> None:
        self._computed_ns: dict[bytes, float] = {}  # when the first prompt with this beginning was begun
        for account in accounts:
            for mark in prefix_list(account.prefixes + account.answer_prefixes):
                self._computed_ns[mark] = min(self._computed_ns.get(mark, math.inf), _computed_ns(account))
        self._by_beginning: dict[bytes, list[int]] = {}  # the latest request with it: its tokens, output included
        self._recent: deque[tuple[list[bytes], list[int]]] = deque()
        self._unusual: dict[bytes, list[int]] = {}  # blocks that are not what their hash alone says

    def tokens_of(self, account: ClosedAccount) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns `prompt_tokens` tokens, and those of the answer that fill blocks."""
        hashes = prefix_list(account.prefixes + account.answer_prefixes)
        count = account.prompt_tokens
        tokens = [token for mark in hashes for token in self._block(mark)]
        own = crc32(account.request_id.encode()) + 1
        tokens += mixed_tokens(own, len(tokens), count) if len(tokens) < count else []
        if account.cached_tokens and not self._is_explained(account, hashes):
            self._continue(tokens, self._nearest(hashes)[: account.cached_tokens], hashes)
        num_unknown = count + account.output_tokens - len(tokens)
        self._remember(hashes, tokens + [output_token(account.request_id)] * num_unknown)
        return tuple(tokens[:count]), tuple(tokens[count:])

    def _is_explained(self, account: ClosedAccount, hashes: list[bytes]) -> bool:
        """Whether a prompt that was computed before begins with what this one found in the cache."""
        last = -(-account.cached_tokens // PREFIX_TOKENS)
        return last <= len(hashes) and self._computed_ns[hashes[last - 1]] < _computed_ns(account)

    def _block(self, mark: bytes) -> list[int]:
        seed = int.from_bytes(mark, "big")
        return self._unusual.get(mark) or mixed_tokens(seed, 0, PREFIX_TOKENS)

    def _continue(self, tokens: list[int], beginning: list[int], hashes: list[bytes]) -> None:
        """Gives a prompt, which found more in the cache than any prompt explains, the beginning of another request."""
        first = num_equal(tokens, beginning) // PREFIX_TOKENS
        tokens[: len(beginning)] = beginning
        for index, mark in enumerate(hashes[first : -(-len(beginning) // PREFIX_TOKENS)], first):
            self._unusual[mark] = tokens[index * PREFIX_TOKENS : (index + 1) * PREFIX_TOKENS]

    def _nearest(self, hashes: list[bytes]) -> list[int]:
        """Returns the tokens of the latest request that shares the longest beginning."""
        shared = (self._by_beginning.get(mark) for mark in (*reversed(hashes), b""))
        return next((tokens for tokens in shared if tokens is not None), [])

    def _remember(self, hashes: list[bytes], tokens: list[int]) -> None:
        for mark in (b"", *hashes):
            self._by_beginning[mark] = tokens
        self._recent.append((hashes, tokens))
        if len(self._recent) > MAX_REMEMBERED:
            old_hashes, old_tokens = self._recent.popleft()
            for mark in old_hashes:
                if self._by_beginning.get(mark) is old_tokens:
                    del self._by_beginning[mark]


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many first tokens are the same."""
    pairs = zip(tokens, others, strict=False)
    return next((index for index, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(others)))
