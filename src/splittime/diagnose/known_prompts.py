"""What prompts held that had been computed before, and why no prefix cache gave it.

What of prompts was known when they were computed is read from `ClosedAccount.prompt_parts`, which cut a prompt where
its own content says so: a part that two prompts share has the same hash in both, wherever it stands; and from
`prefixes`, hashes of its beginnings. Only whole parts and whole beginnings count, and of a prompt that was given up
what had been computed: what is said to be shared is a lower bound. What a token would have saved is the time that its
own request took for each token of prompt that it computed.

A prompt that goes on like an earlier one behind their first difference lacks what stood there before, or has something
else instead: by how many tokens each of the two has until the first part of both. What varies is longer as often as
shorter than before; a history that loses something is shorter each time.
"""

import math
from collections import defaultdict
from itertools import takewhile
from typing import NamedTuple

import msgspec

from splittime.core.step import CHECKPOINT_TOKENS
from splittime.diagnose.books import Books, once
from splittime.diagnose.rules.evidence import in_stages, is_whole, served, setting, time_ns
from splittime.ledger.account import ClosedAccount
from splittime.ledger.prompt_parts import PREFIX_BYTES, PREFIX_TOKENS, prefix_list
from splittime.ledger.stages import Stage

DEFAULT_BLOCK = 16
DROPPED_TOKENS = 24  # fewer are a sentence, which varies
MOST, FEW = 0.5, 0.25  # of those that go on like an earlier one lack something, and as many of them have more instead


class Missed(msgspec.Struct, frozen=True):
    """Tokens that a request computed though they were known, the token before which that begins, and the time. dropped:
    how many more tokens stood there in an earlier prompt that goes on as this one does; below 0: fewer. in_blocks: of
    the tokens, those that whole blocks of the server can hold, or that lie before its checkpoints of states. earlier:
    the id of a request that had them."""

    account: ClosedAccount
    tokens: int
    at_token: int
    saved_ns: float
    dropped: int = 0
    in_blocks: int = 0
    earlier: str = ""


class AllMissed(NamedTuple):
    """begun: what a cache of any size and with small blocks would have given. varied, dropped: what it would have given
    with the varying part at the end, and with the history as it was. apart: what one without `cache_salt` would."""

    begun: list[Missed]
    varied: list[Missed]
    dropped: list[Missed]
    apart: list[Missed]


class _Known:
    """Prompts so far, as a tree of parts with the instant from which each prefix could be reused and whose it was, and
    the latest prompt that holds each part, and from when."""

    def __init__(self) -> None:
        self.ready: dict[tuple[int, ...] | bytes, tuple[int, str]] = {}
        self.latest: dict[int, tuple[int, ClosedAccount, int]] = {}
        self.seen: dict[int, tuple[int, str]] = {}

    def prefix_parts(self, account: ClosedAccount, at_ns: int) -> tuple[int, str]:
        """Returns how many of its first parts an earlier request had computed by then, and which."""
        path: tuple[int, ...] = ()
        earlier = ""
        for place, (mark, _, _) in enumerate(account.prompt_parts):
            path = (hash((path, mark)),)
            ready_ns, whose = self.ready.get(path, (at_ns, ""))
            if ready_ns >= at_ns:
                return place, earlier
            earlier = whose
        return len(account.prompt_parts), earlier

    def prefix_tokens(self, account: ClosedAccount, at_ns: int) -> tuple[int, str]:
        """Returns how many of its first tokens an earlier request had computed by then, in steps of 16, and which."""
        all_ready = (self.ready.get(mark, (at_ns, "")) for mark in prefix_list(account.prefixes))
        known = list(takewhile(lambda ready: ready[0] < at_ns, all_ready))
        return PREFIX_TOKENS * len(known), known[-1][1] if known else ""

    def dropped_tokens(self, account: ClosedAccount, place: int, at_ns: int) -> tuple[int, str]:
        """Returns how many more tokens than this prompt the latest one with its next known part has before that, and
        who had that part by then; 0 where that prompt has not its first `place` parts, or, without any, its tokens."""
        parts = account.prompt_parts
        mark, start = next((mark, start) for mark, start, _ in parts[place:] if mark in self.latest)
        then, before, ready_ns = self.latest[mark]
        is_alike = before.prompt_parts[:place] == parts[:place]
        is_alike = is_alike and before.prefixes[:PREFIX_BYTES] == account.prefixes[:PREFIX_BYTES]
        return is_alike * (then - start), before.request_id if ready_ns < at_ns else self.seen[mark][1]

    def add(self, account: ClosedAccount, ready_ns: int, computed: int) -> None:
        path: tuple[int, ...] = ()
        ready = ready_ns, account.request_id
        for mark, start, _ in takewhile(lambda part: part[1] + part[2] <= computed, account.prompt_parts):
            path = (hash((path, mark)),)
            self.ready[path] = min(ready, self.ready.get(path, ready))
            self.latest[mark] = start, account, ready_ns
            self.seen[mark] = min(ready, self.seen.get(mark, ready))
        for beginning in prefix_list(account.prefixes)[: computed // PREFIX_TOKENS]:
            self.ready.setdefault(beginning, ready)


def _prefill_begin_ns(account: ClosedAccount) -> int | None:
    return next((i.begin_ns for i in account.intervals if i.stage is Stage.PREFILL), None)


@once
def computed_until(books: Books) -> dict[str, int]:
    """Returns, by request id, how many first tokens of its prompt are known. One that was given up before its first
    token has those that it found in the cache, and those that its rows reached."""
    done = {a.request_id for a in books.accounts if is_whole(a) or a.token_ready_ns}
    known = {a.request_id: a.prompt_tokens if a.request_id in done else a.cached_tokens for a in books.accounts}
    for name, start, num_tokens in (row for step in books.steps for row in step.rows):
        if name in known and name not in done:
            known[name] = max(known[name], start + num_tokens)
    return known


def token_ns(books: Books, account: ClosedAccount) -> float:
    """What each computed token of its prompt took this request."""
    computed = max(1, computed_until(books)[account.request_id] - account.cached_tokens)
    return time_ns(account, in_stages(Stage.PREFILL, Stage.PREFILL_STALL)) / computed


@once
def all_missed(books: Books) -> AllMissed:
    """Returns what a prefix cache could have given, by what keeps it from that. A prompt that was computed since its
    request asked for that (`computes_prompt`) missed nothing."""
    known: dict[tuple[str, str | None], _Known] = defaultdict(_Known)  # by model and salt, and by model alone
    found = AllMissed([], [], [], [])
    accounts = [account for account in served(books.accounts) if account.prompt_parts or account.prefixes]
    computed = [(begin_ns, a) for a in accounts if (begin_ns := _prefill_begin_ns(a)) is not None]
    for begin_ns, account in sorted(computed, key=lambda entry: entry[0]):
        own, anybodys = known[account.model, account.cache_salt], known[account.model, None]
        if not account.computes_prompt:
            found.begun.append(begun := _begun(books, own, account, begin_ns))
            found.varied.append(_varied(books, own, account, begin_ns))
            found.apart.append(_begun(books, anybodys, account, begin_ns, begun.tokens))
        ready_ns = account.token_ready_ns[0] if account.token_ready_ns else account.end_ns
        for each in (own, anybodys):
            each.add(account, ready_ns, computed_until(books)[account.request_id])
    return _with_dropped(AllMissed(*([miss for miss in missed if miss.tokens] for missed in found)))


def _begun(books: Books, known: _Known, account: ClosedAccount, begin_ns: int, less: int = 0) -> Missed:
    """Returns what of the prompt's beginning was known and computed again. less: so many tokens count elsewhere."""
    block_size = setting(books, "block_size") or DEFAULT_BLOCK
    found_again = math.lcm(block_size, CHECKPOINT_TOKENS) if setting(books, "num_state_slots") else block_size
    _, at_token, earlier = _known_beginning(known, account, begin_ns)
    prefix = min(at_token, account.prompt_tokens - 1, computed_until(books)[account.request_id])
    had, smallest = account.cached_tokens, min(block_size, DEFAULT_BLOCK)
    lost, in_blocks = (max(0, prefix // size * size - had) for size in (smallest, found_again))
    lost -= less
    return Missed(account, lost, had, lost * token_ns(books, account), 0, in_blocks, earlier)


def _varied(books: Books, known: _Known, account: ClosedAccount, begin_ns: int) -> Missed:
    """Returns what was known behind the first difference."""
    place, at_token, _ = _known_beginning(known, account, begin_ns)
    until, soon = computed_until(books)[account.request_id], (begin_ns, "")
    rest = account.prompt_parts[place:]
    again = sum(n for mark, at, n in rest if at + n <= until and known.seen.get(mark, soon)[0] < begin_ns)
    dropped, earlier = known.dropped_tokens(account, place, begin_ns) if again else (0, "")
    return Missed(account, again, at_token, again * token_ns(books, account), dropped, earlier=earlier)


def _known_beginning(known: _Known, account: ClosedAccount, at_ns: int) -> tuple[int, int, str]:
    """Returns how many first parts and first tokens were known by then, and who had the tokens."""
    place, whose = known.prefix_parts(account, at_ns)
    in_parts = sum(num_tokens for _, _, num_tokens in account.prompt_parts[:place])
    return place, *max((in_parts, whose), known.prefix_tokens(account, at_ns))


def _with_dropped(found: AllMissed) -> AllMissed:
    """Returns the same with those apart that lack something, where that is the rule."""
    lacks = [miss for miss in found.varied if miss.dropped >= DROPPED_TOKENS]
    has_more = [miss for miss in found.varied if miss.dropped <= -DROPPED_TOKENS]
    if len(lacks) < MOST * len(found.varied) or len(has_more) > FEW * len(lacks):
        return found
    return found._replace(dropped=lacks, varied=[miss for miss in found.varied if miss.dropped < DROPPED_TOKENS])


class ComputedAgain(msgspec.Struct, frozen=True):
    """Prompt tokens that a request computed though `earlier` had them, what that took, and why.

    why: `cache_off`; `within_a_block`: only whole blocks are found again; `between_checkpoints`: the model's layers
    keep states, from which prompts go on only where there is a copy; `not_kept`: the cache had given them up;
    `not_given`: the server's settings are not known here; `salted_apart`: they were under another `cache_salt`;
    `differs`: they stand behind a first difference, which lies within tokens from_token to until_token; `lacks`: so
    too, and `lacks` tokens that `earlier` had there are gone."""

    earlier: str
    tokens: int
    took_ns: int
    why: str
    from_token: int
    until_token: int
    lacks: int = 0


def computed_again(account: ClosedAccount, books: Books) -> list[ComputedAgain]:
    """Returns what of this prompt was known and computed all the same. books: with this account and those before."""
    missed, found, who = all_missed(books), [], (account.request_id, account.start_ns)
    for kind, miss in ((one, miss) for one in missed for miss in one):
        if (miss.account.request_id, miss.account.start_ns) != who:
            continue
        until, lacks, why = miss.at_token + miss.tokens, 0, "salted_apart"
        if kind is missed.begun:
            why = _why_not_given(miss, books)
        elif kind is not missed.apart:
            until, lacks = miss.at_token + first_part_tokens(miss), max(0, miss.dropped)
            why = "lacks" if lacks >= DROPPED_TOKENS else "differs"
        found.append(ComputedAgain(miss.earlier, miss.tokens, round(miss.saved_ns), why, miss.at_token, until, lacks))
    return found


def _why_not_given(miss: Missed, books: Books) -> str:
    if books.facts is None:
        return "not_given"
    if setting(books, "enable_prefix_caching") is False:
        return "cache_off"
    if miss.in_blocks >= miss.tokens / 2:
        return "not_kept"
    return "between_checkpoints" if setting(books, "num_state_slots") else "within_a_block"


def first_part_tokens(miss: Missed) -> int:
    """Returns how far the part reaches in which the difference lies: how exactly its place is known."""
    ends = (start + num_tokens for _, start, num_tokens in miss.account.prompt_parts)
    return next((end - miss.at_token for end in ends if end > miss.at_token), 0)
