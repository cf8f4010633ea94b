"""What the prompts themselves waste: prefixes that could have come from the cache, and parts sent again and again.

Read from `ClosedAccount.prompt_parts`, which cut a prompt where its own content says so: a part that two prompts share
has the same hash in both, wherever it stands. Only parts count, so what is said to be shared is a lower bound. What a
token would have saved is the time that its own request took for each token of prompt that it computed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import LIKELY, in_stages, median, ms, served, setting, time_ns, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.words import RESTART, WORDS
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage

DEFAULT_BLOCK = 16
ROOT_OF = ("overload", "head_of_line", "token_budget_bound", "prefill_interference", "slot_bound", "kv_bound")


class Missed(msgspec.Struct, frozen=True):
    """Tokens that a request computed though they were known, the token before which that begins, and the time."""

    account: ClosedAccount
    tokens: int
    at_token: int
    saved_ns: float


class _Known:
    """Prompts so far, as a tree of parts with the instant from which each prefix could be reused."""

    def __init__(self) -> None:
        self.ready_ns: dict[tuple[int, ...], int] = {}
        self.seen: dict[int, int] = {}

    def prefix_parts(self, account: ClosedAccount, at_ns: int) -> int:
        """How many of its first parts an earlier request had computed by then."""
        path: tuple[int, ...] = ()
        for place, (mark, _, _) in enumerate(account.prompt_parts):
            path = (hash((path, mark)),)
            if self.ready_ns.get(path, at_ns) >= at_ns:
                return place
        return len(account.prompt_parts)

    def add(self, account: ClosedAccount, ready_ns: int) -> None:
        path: tuple[int, ...] = ()
        for mark, _, _ in account.prompt_parts:
            path = (hash((path, mark)),)
            self.ready_ns[path] = min(ready_ns, self.ready_ns.get(path, ready_ns))
            self.seen[mark] = min(ready_ns, self.seen.get(mark, ready_ns))


def _prefill_begin_ns(account: ClosedAccount) -> int | None:
    return next((i.begin_ns for i in account.intervals if i.stage is Stage.PREFILL), None)


def _token_ns(account: ClosedAccount) -> float:
    """What each computed token of its prompt took this request."""
    computed = max(1, account.prompt_tokens - account.cached_tokens)
    return time_ns(account, in_stages(Stage.PREFILL, Stage.PREFILL_STALL)) / computed


def _missed(accounts: Sequence[ClosedAccount], block_size: int) -> tuple[list[Missed], list[Missed]]:
    """What a cache of any size would have given, and what it would have given with the varying part at the end."""
    known, from_start, behind = _Known(), [], []
    computed = [(begin_ns, a) for a in accounts if (begin_ns := _prefill_begin_ns(a)) is not None and a.prompt_parts]
    for begin_ns, account in sorted(computed, key=lambda entry: entry[0]):
        place = known.prefix_parts(account, begin_ns)
        first, rest = account.prompt_parts[:place], account.prompt_parts[place:]
        prefix = sum(num_tokens for _, _, num_tokens in first)
        possible = min(prefix, account.prompt_tokens - 1) // block_size * block_size
        lost = max(0, possible - account.cached_tokens)
        from_start.append(Missed(account, lost, account.cached_tokens, lost * _token_ns(account)))
        again = sum(n for mark, _, n in rest if known.seen.get(mark, begin_ns) < begin_ns)
        behind.append(Missed(account, again, prefix, again * _token_ns(account)))
        known.add(account, account.token_ready_ns[0] if account.token_ready_ns else account.end_ns)
    return [m for m in from_start if m.tokens], [m for m in behind if m.tokens]


def _sums(books: Books, tokens: Mapping[str, int], own_ns: Mapping[str, float]) -> tuple[float, Share]:
    """ns, and the share of all requests' time, that computing these tokens took: the time of the requests whose they
    are, and of those that decoded meanwhile, their share in what all prompts held them up."""
    accounts = served(books.accounts)
    computed = sum(account.prompt_tokens - account.cached_tokens for account in accounts)
    of_prompts = min(1.0, sum(tokens.values()) / max(1, computed))
    behind_ns = attribution(books).of(Computed.OTHERS_PROMPTS) if tokens else {}
    lost_ns = {request_id: of_prompts * ns for request_id, ns in behind_ns.items()}
    for request_id, ns in own_ns.items():
        lost_ns[request_id] = lost_ns.get(request_id, 0.0) + ns
    return sum(lost_ns.values()), of_requests(lost_ns, accounts)


def _sums_of(books: Books, missed: Sequence[Missed]) -> tuple[int, float, Share]:
    tokens = {miss.account.request_id: miss.tokens for miss in missed}
    return sum(tokens.values()), *_sums(books, tokens, {miss.account.request_id: miss.saved_ns for miss in missed})


_TURN_CACHE_ON = Cure(
    sentence="Turn the prefix cache on.",
    flags=("--enable-prefix-caching",),
    elsewhere={"vllm": "--enable-prefix-caching", "sglang": "leave out --disable-radix-cache"},
)
_KEEP_PREFIXES = Cure(
    sentence="Keep prefixes longer: a larger KV cache (--kv-cache-memory-bytes; on a card also host memory, "
    "--kv-offload-memory-bytes), the same cache_salt for who may share, and, with several servers, requests of one "
    "prefix to one of them.",
    elsewhere={
        "vllm": OtherCure(
            sentence=f"Keep prefixes longer: a larger KV cache ({WORDS['vllm'].memory}; on a card also host memory, "
            "--kv-offloading-size), the same cache_salt for who may share, and, with several servers, requests of one "
            "prefix to one of them.",
            cost=f"Memory. {RESTART}",
        ),
        "sglang": "--mem-fraction-static",
    },
)


@rule("accounts", "parts", root_of=ROOT_OF, explains=(Computed.OTHERS_PROMPTS,))
def uncached_reuse(books: Books) -> Answer:
    """Prompts begin like earlier ones, and that beginning was computed again."""
    accounts = served(books.accounts)
    missed, _ = _missed(accounts, setting(books, "block_size") or DEFAULT_BLOCK)
    tokens, saved_ns, share = _sums_of(books, missed)
    if not share.is_worth_it:
        return share.unsure()
    hit = sum(account.cached_tokens for account in accounts)
    is_off = setting(books, "enable_prefix_caching") is False
    return Finding(
        claim=f"{len(missed)} of {len(accounts)} prompts began like earlier ones, and {tokens} such tokens were "
        f"computed again: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("prompt tokens", sum(account.prompt_tokens for account in accounts), "tokens"),
            Fact("came from the cache", hit, "tokens"),
            Fact("could have, at least", hit + tokens, "tokens"),
            Fact("time for them", ms(saved_ns), "ms over all requests"),
            Fact("prefix caching", "off" if is_off else "on, but they were no longer there"),
        ),
        request_ids=worst({miss.account.request_id: miss.saved_ns for miss in missed}),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="parts with equal hashes from the start on, computed before this request's prompt was",
        cure=_TURN_CACHE_ON if is_off else _KEEP_PREFIXES,
        cost="Under 1 % of throughput where nothing is shared; cached blocks are given up when room is needed.",
        counter_check=f"With the change and the same load the cached tokens do not reach about {hit + tokens}.",
        regime="prompts that share their beginning and come while it is still kept",
    )


@rule("accounts", "parts", root_of=ROOT_OF, explains=(Computed.OTHERS_PROMPTS,))
def prefix_broken(books: Books) -> Answer:
    """A part that earlier prompts had too stands behind one that varies, so no prefix cache can give it."""
    accounts = served(books.accounts)
    _, missed = _missed(accounts, setting(books, "block_size") or DEFAULT_BLOCK)
    tokens, saved_ns, share = _sums_of(books, missed)
    if not share.is_worth_it:
        return share.unsure()
    at_token = int(median(miss.at_token for miss in missed) or 0)
    until = int(median(_first_part_tokens(miss) for miss in missed) or 0)
    each = int(median(miss.tokens for miss in missed) or 0)
    return Finding(
        claim=f"{len(missed)} of {len(accounts)} prompts differ from earlier ones within tokens {at_token} to "
        f"{at_token + until} and repeat {each} of their tokens behind that: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("first difference, median", f"{at_token} to {at_token + until}", "token"),
            Fact("repeated behind it, median", each, "tokens of a prompt"),
            Fact("computed again in all", tokens, "tokens"),
            Fact("time for them", ms(saved_ns), "ms over all requests"),
        ),
        request_ids=worst({miss.account.request_id: miss.saved_ns for miss in missed}),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="parts with equal hashes at other places, or behind a part with another hash",
        cure=Cure(
            sentence=f"Put what varies (a date, a user's name, an id) behind what does not: about {each} tokens of "
            "each prompt would come from the prefix cache."
            + (" And turn that on." if setting(books, "enable_prefix_caching") is False else ""),
            flags=("--enable-prefix-caching",) if setting(books, "enable_prefix_caching") is False else (),
            elsewhere={"any": "the same: every prefix cache ends at the first token that differs"},
        ),
        cost="A change of the prompt's order, which can change answers: compare a sample of them.",
        counter_check=f"With the varying part at the end the cached tokens do not rise by about {each} a request.",
        regime="prompts made from a template",
    )


def _first_part_tokens(miss: Missed) -> int:
    """The length of the part in which the difference lies: how exactly its place is known."""
    return next((n for _, start, n in miss.account.prompt_parts if start >= miss.at_token), 0)


@rule("accounts", "parts", root_of=ROOT_OF, explains=(Computed.OTHERS_PROMPTS,))
def repeated_part(books: Books) -> Answer:
    """One prompt holds the same long part more than once."""
    accounts = [account for account in served(books.accounts) if account.prompt_parts]
    twice = {account.request_id: _tokens_again(account) for account in accounts}
    wasted_ns = {a.request_id: twice[a.request_id] * _token_ns(a) for a in accounts if twice[a.request_id]}
    lost_ns, share = _sums(books, twice, wasted_ns)
    if not share.is_worth_it:
        return share.unsure()
    each = int(median(twice[request_id] for request_id in wasted_ns) or 0)
    return Finding(
        claim=f"{len(wasted_ns)} of {len(accounts)} prompts hold the same part more than once, {each} tokens of each "
        f"(median) a second time: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("repeated within a prompt, median", each, "tokens"),
            Fact("prompt, median", int(median(a.prompt_tokens for a in accounts) or 0), "tokens"),
            Fact("time for the repetitions", ms(lost_ns), "ms over all requests"),
        ),
        request_ids=worst(wasted_ns),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="parts with equal hashes within one prompt",
        cure=Cure(sentence="Send the part once and refer to it; compact what is data (JSON without its spaces)."),
        cost="A change of the prompt, which can change answers: compare a sample of them.",
        counter_check="With the part sent once, prompt tokens fall and the prefill time of these requests does not.",
        regime="prompts put together from messages or documents",
    )


def _tokens_again(account: ClosedAccount) -> int:
    """Computed tokens of parts that the same prompt had before."""
    seen: set[int] = set()
    again = 0
    for mark, start, num_tokens in account.prompt_parts:
        if mark in seen and start >= account.cached_tokens:
            again += num_tokens
        seen.add(mark)
    return again
