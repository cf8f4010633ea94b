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

from itertools import takewhile
from typing import NamedTuple

import msgspec

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
    the tokens, those that blocks of the server's size can hold. earlier: the id of a request that had them."""

    account: ClosedAccount
    tokens: int
    at_token: int
    saved_ns: float
    dropped: int = 0
    in_blocks: int = 0
    earlier: str = ""


class AllMissed(NamedTuple):
    """begun: what a cache of any size and with small blocks would have given. varied, dropped: what it would have given
    with the varying part at the end, and with the history as it was."""

    begun: list[Missed]
    varied: list[Missed]
    dropped: list[Missed]


class _Known:
    """Prompts so far, as a tree of parts with the instant from which each prefix could be reused and whose it was, and
    the latest prompt that holds each part."""

    def __init__(self) -> None:
        self.ready: dict[tuple[int, ...] | bytes, tuple[int, str]] = {}
        self.latest: dict[int, tuple[int, ClosedAccount]] = {}
        self.seen: dict[int, int] = {}

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

    def dropped_tokens(self, account: ClosedAccount, place: int) -> tuple[int, str]:
        """Returns how many more tokens than this prompt the latest one with its next known part has before that, and
        whose it is; 0 where that prompt has not its first `place` parts, or, without any, not its first tokens."""
        parts = account.prompt_parts
        start, (then, before) = next((n, self.latest[mark]) for mark, n, _ in parts[place:] if mark in self.latest)
        is_alike = before.prompt_parts[:place] == parts[:place]
        is_alike = is_alike and before.prefixes[:PREFIX_BYTES] == account.prefixes[:PREFIX_BYTES]
        return is_alike * (then - start), before.request_id

    def add(self, account: ClosedAccount, ready_ns: int, computed: int) -> None:
        path: tuple[int, ...] = ()
        ready = ready_ns, account.request_id
        for mark, start, _ in takewhile(lambda part: part[1] + part[2] <= computed, account.prompt_parts):
            path = (hash((path, mark)),)
            self.ready[path] = min(ready, self.ready.get(path, ready))
            self.latest[mark] = start, account
            self.seen[mark] = min(ready_ns, self.seen.get(mark, ready_ns))
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
    """Returns what a prefix cache could have given, by what keeps it from that."""
    known, found = _Known(), AllMissed([], [], [])
    block_size = setting(books, "block_size") or DEFAULT_BLOCK
    accounts = [account for account in served(books.accounts) if account.prompt_parts or account.prefixes]
    computed = [(begin_ns, a) for a in accounts if (begin_ns := _prefill_begin_ns(a)) is not None]
    for begin_ns, account in sorted(computed, key=lambda entry: entry[0]):
        place, of_parts = known.prefix_parts(account, begin_ns)
        first, rest = account.prompt_parts[:place], account.prompt_parts[place:]
        in_parts = sum(num_tokens for _, _, num_tokens in first)
        at_token, earlier = max((in_parts, of_parts), known.prefix_tokens(account, begin_ns))
        until, each_ns = computed_until(books)[account.request_id], token_ns(books, account)
        prefix = min(at_token, account.prompt_tokens - 1, until)
        had, smallest = account.cached_tokens, min(block_size, DEFAULT_BLOCK)
        lost, in_blocks = (max(0, prefix // size * size - had) for size in (smallest, block_size))
        found.begun.append(Missed(account, lost, had, lost * each_ns, 0, in_blocks, earlier))
        again = sum(n for mark, at, n in rest if at + n <= until and known.seen.get(mark, begin_ns) < begin_ns)
        dropped, before = known.dropped_tokens(account, place) if again else (0, "")
        found.varied.append(Missed(account, again, at_token, again * each_ns, dropped, earlier=before))
        known.add(account, account.token_ready_ns[0] if account.token_ready_ns else account.end_ns, until)
    return _apart(AllMissed(*([miss for miss in missed if miss.tokens] for missed in found)))


def _apart(found: AllMissed) -> AllMissed:
    """Returns the same with those apart that lack something, where that is the rule."""
    lacks = [miss for miss in found.varied if miss.dropped >= DROPPED_TOKENS]
    has_more = [miss for miss in found.varied if miss.dropped <= -DROPPED_TOKENS]
    if len(lacks) < MOST * len(found.varied) or len(has_more) > FEW * len(lacks):
        return found
    return found._replace(dropped=lacks, varied=[miss for miss in found.varied if miss.dropped < DROPPED_TOKENS])


class ComputedAgain(msgspec.Struct, frozen=True):
    """Prompt tokens that a request computed though `earlier` had them, what that took, and why.

    why: `cache_off`; `within_a_block`: only whole blocks are found again; `not_kept`: the cache had given them up;
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
    missed, found = all_missed(books), []
    is_off = setting(books, "enable_prefix_caching") is False
    all_of_it = ((kind, miss) for kind in missed for miss in kind if miss.account.request_id == account.request_id)
    for kind, miss in all_of_it:
        until, lacks = miss.at_token + miss.tokens, 0
        why = "cache_off" if is_off else "within_a_block" if miss.in_blocks < miss.tokens / 2 else "not_kept"
        if kind is not missed.begun:
            until, lacks = miss.at_token + first_part_tokens(miss), max(0, miss.dropped)
            why = "lacks" if lacks >= DROPPED_TOKENS else "differs"
        found.append(ComputedAgain(miss.earlier, miss.tokens, round(miss.saved_ns), why, miss.at_token, until, lacks))
    return found


def first_part_tokens(miss: Missed) -> int:
    """Returns the length of the part in which the difference lies: how exactly its place is known."""
    return next((n for _, start, n in miss.account.prompt_parts if start + n > miss.at_token), 0)
