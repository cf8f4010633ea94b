"""What the prompts themselves waste: prefixes that could have come from the cache, and parts sent again and again.

What was known of them is from `known_prompts`. What a token would have saved is the time that its own request took for
each token of prompt that it computed.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from splittime.diagnose.attribution import Computed, in_stages
from splittime.diagnose.books import Books, once
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.callers import CROWDED
from splittime.diagnose.rules.evidence import LIKELY, median, ms, served, setting, worst
from splittime.diagnose.rules.known_prompts import DEFAULT_BLOCK, Missed, all_missed, computed_until, token_ns
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.words import RESTART, WORDS
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage


def _sums(books: Books, tokens: Mapping[str, int], own_ns: Mapping[str, float]) -> tuple[float, Share]:
    """ns, and the share of all requests' time, that computing these tokens took: the time of the requests whose they
    are, and of those that decoded meanwhile, their share in what all prompts held them up. Of a request's own prefill
    others' prompts are a part already, and nobody loses more than the time that was felt."""
    accounts = served(books.accounts)
    computed = sum(computed_until(books)[account.request_id] - account.cached_tokens for account in accounts)
    of_prompts = min(1.0, sum(tokens.values()) / max(1, computed))
    behind_ns = _held_up(books) if tokens else {}
    lost_ns: dict[str, float] = {}
    for account in accounts:
        name, felt_ns = account.request_id, account.end_ns - account.start_ns
        lost_ns[name] = min(felt_ns, of_prompts * behind_ns.get(name, 0.0) + own_ns.get(name, 0.0))
    return sum(lost_ns.values()), of_requests(lost_ns, accounts)


@once
def _held_up(books: Books) -> dict[str, float]:
    """Returns, by request id, the time that others' prompts have of it outside its own prefill."""
    own = (Stage.PREFILL, Stage.PREFILL_STALL)
    return in_stages(books, Computed.OTHERS_PROMPTS, [stage for stage in Stage if stage not in own])


def _sums_of(books: Books, missed: Sequence[Missed]) -> tuple[int, float, Share]:
    tokens = {miss.account.request_id: miss.tokens for miss in missed}
    return sum(tokens.values()), *_sums(books, tokens, {miss.account.request_id: miss.saved_ns for miss in missed})


_TURN_CACHE_ON = Cure(
    sentence="Turn the prefix cache on.",
    flags=("--enable-prefix-caching",),
    elsewhere={"vllm": "--enable-prefix-caching", "sglang": "leave out --disable-radix-cache"},
)
_USE_SMALL_BLOCKS = Cure(
    sentence=f"Use blocks of {DEFAULT_BLOCK} tokens: what prompts share is shorter than one, or ends within one.",
    flags=("--block-size", f"{DEFAULT_BLOCK}"),
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


@rule("accounts", "parts", root_of=CROWDED, explains=(Computed.OTHERS_PROMPTS,))
def uncached_reuse(books: Books) -> Answer:
    """Prompts begin like earlier ones, and that beginning was computed again."""
    accounts = served(books.accounts)
    missed = all_missed(books).begun
    tokens, saved_ns, share = _sums_of(books, missed)
    if not share.is_worth_it:
        return share.unsure()
    hit = sum(account.cached_tokens for account in accounts)
    is_off = setting(books, "enable_prefix_caching") is False
    is_coarse = sum(miss.in_blocks for miss in missed) < tokens / 2
    if is_coarse and hit > tokens:  # the rest of a block, behind more that was found
        return None
    cure = _USE_SMALL_BLOCKS if is_coarse else _KEEP_PREFIXES
    state = "on, but they were no longer there"
    if is_coarse:
        state = f"on, in blocks of {setting(books, 'block_size')} tokens, and only whole ones are found again"
    return Finding(
        claim=f"{len(missed)} of {len(accounts)} prompts began like earlier ones, and {tokens} such tokens were "
        f"computed again: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("prompt tokens", sum(account.prompt_tokens for account in accounts), "tokens"),
            Fact("came from the cache", hit, "tokens"),
            Fact("could have, at least", hit + tokens, "tokens"),
            Fact("time for them", ms(saved_ns), "ms over all requests"),
            Fact("prefix caching", "off" if is_off else state),
        ),
        request_ids=worst({miss.account.request_id: miss.saved_ns for miss in missed}),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="parts with equal hashes from the start on, computed before this request's prompt was",
        cure=_TURN_CACHE_ON if is_off and not is_coarse else replace(cure, flags=(*_on(is_off), *cure.flags)),
        cost="Under 1 % of throughput where nothing is shared; cached blocks are given up when room is needed.",
        counter_check=f"With the change and the same load the cached tokens do not reach about {hit + tokens}.",
        regime="prompts that share their beginning and come while it is still kept",
    )


@rule("accounts", "parts", root_of=CROWDED, explains=(Computed.OTHERS_PROMPTS,))
def prefix_broken(books: Books) -> Answer:
    """A part that earlier prompts had too stands behind one that varies, so no prefix cache can give it."""
    accounts = served(books.accounts)
    missed = all_missed(books).varied
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
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="parts with equal hashes at other places, or behind a part with another hash",
        cure=Cure(
            sentence=f"Put what varies (a date, a user's name, an id) behind what does not: about {each} tokens of "
            "each prompt would come from the prefix cache."
            + (" And turn that on." if setting(books, "enable_prefix_caching") is False else ""),
            flags=_on(setting(books, "enable_prefix_caching") is False),
            elsewhere={"any": "the same: every prefix cache ends at the first token that differs"},
        ),
        cost="A change of the prompt's order, which can change answers: compare a sample of them.",
        counter_check=f"With the varying part at the end the cached tokens do not rise by about {each} a request.",
        regime="prompts made from a template",
    )


@rule("accounts", "parts", root_of=CROWDED, explains=(Computed.OTHERS_PROMPTS,))
def history_differs(books: Books) -> Answer:
    """A conversation comes back without something that was in it before, and all behind that is computed again."""
    accounts, missed = served(books.accounts), all_missed(books).dropped
    _, saved_ns, share = _sums_of(books, missed)
    if not share.is_worth_it:
        return share.unsure()
    at_token = int(median(miss.at_token for miss in missed) or 0)
    each, lacks = (int(median(of) or 0) for of in zip(*((miss.tokens, miss.dropped) for miss in missed), strict=True))
    thoughts = sum(account.reasoning_tokens for account in accounts)
    are_thoughts = 2 * thoughts >= sum(
        miss.dropped for miss in missed
    )  # each is dropped once: else it is something else
    kept = (
        "Keep thoughts in the history: have the client send them back (reasoning_content, thinking blocks) and the "
        "template write them (chat_template_kwargs, as preserve_thinking or clear_thinking=false, where it has such); "
        "or have both drop them in every turn, not only when a user speaks again."
        if are_thoughts
        else "Send the history as it was sent before: cut old messages off rarely and many at once, and write "
        "thoughts, calls and results the same way in every turn."
    )
    return Finding(
        claim=f"{len(missed)} of {len(accounts)} prompts go on like an earlier one, without {lacks} tokens (median) "
        f"that it had from token {at_token} on, and computed {each} behind these again: {share.value:.0%} of all "
        "requests' time.",
        evidence=(
            Fact("first difference, median", at_token, "token"),
            Fact("there before and not now, median", lacks, "tokens"),
            Fact("repeated behind it, median", each, "tokens of a prompt"),
            Fact("time for them", ms(saved_ns), "ms over all requests"),
            Fact("tokens of reasoning in the answers", thoughts, "tokens"),
        ),
        request_ids=worst({miss.account.request_id: miss.saved_ns for miss in missed}),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="parts with equal hashes behind the first difference, nearer to it than in the earlier prompt",
        cure=Cure(sentence=kept, flags=_on(setting(books, "enable_prefix_caching") is False)),
        cost="Longer prompts, which fill the cache and the context sooner; answers can change: compare a sample.",
        counter_check=f"With the history as it was the cached tokens do not rise by about {each} a request.",
        regime="conversations of several turns",
    )


def _on(is_off: bool) -> tuple[str, ...]:
    """The flag that turns the cache on, where it is off."""
    return _TURN_CACHE_ON.flags if is_off else ()


def _first_part_tokens(miss: Missed) -> int:
    """The length of the part in which the difference lies: how exactly its place is known."""
    return next((n for _, start, n in miss.account.prompt_parts if start + n > miss.at_token), 0)


@rule("accounts", "parts", root_of=CROWDED, explains=(Computed.OTHERS_PROMPTS,))
def repeated_part(books: Books) -> Answer:
    """One prompt holds the same long part more than once."""
    accounts = [account for account in served(books.accounts) if account.prompt_parts]
    twice = {account.request_id: _tokens_again(account, computed_until(books)) for account in accounts}
    wasted_ns = {a.request_id: twice[a.request_id] * token_ns(books, a) for a in accounts if twice[a.request_id]}
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
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="parts with equal hashes within one prompt",
        cure=Cure(sentence="Send the part once and refer to it; compact what is data (JSON without its spaces)."),
        cost="A change of the prompt, which can change answers: compare a sample of them.",
        counter_check="With the part sent once, prompt tokens fall and the prefill time of these requests does not.",
        regime="prompts put together from messages or documents",
    )


def _tokens_again(account: ClosedAccount, computed: Mapping[str, int]) -> int:
    """Computed tokens of parts that the same prompt had before."""
    seen: set[int] = set()
    again = 0
    for mark, start, num_tokens in account.prompt_parts:
        if mark in seen and account.cached_tokens <= start <= computed[account.request_id] - num_tokens:
            again += num_tokens
        seen.add(mark)
    return again
