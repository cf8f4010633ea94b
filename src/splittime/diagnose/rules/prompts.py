"""What prompts waste, and callers who do not wait for their answers.

A request is asked again if its caller left before any of its answer was written (who had read some of it did not like
it), and one with the same prompt came from the same key after that. A prompt of fewer than `PREFIX_TOKENS` tokens has
no hash, so what is said is a lower bound.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from splittime.core.request import FinishReason
from splittime.diagnose.attribution import Computed
from splittime.diagnose.attribution import in_stages as time_in
from splittime.diagnose.books import Books, once
from splittime.diagnose.finding import NO_CURE_KNOWN, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.known_prompts import (
    DEFAULT_BLOCK,
    Missed,
    all_missed,
    computed_until,
    first_part_tokens,
    token_ns,
)
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_LOSERS,
    Share,
    is_whole,
    median,
    ms,
    num_requests,
    of_requests,
    served,
    setting,
    stated,
    worst,
)
from splittime.diagnose.words import RESTART, WORDS
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage

LATE_NS = 500_000_000  # a busy server notices that somebody has left so much later, when the next has come already
SOON_NS = 60_000_000_000  # who asks the same a minute later is not known to be asking again
CROWDED = (
    *("overload", "slot_bound", "kv_bound", "token_budget_bound", "head_of_line", "prefill_interference"),
    NO_CURE_KNOWN,
)
AFTER_STEPS = 2  # an abort is heard between steps: what runs then, and one that is planned ahead, may still give tokens


@rule("accounts", root_of=(*CROWDED, "burst", "deadlines_missed", "computed_for_nobody"))
def asked_again(books: Books) -> Answer:
    """Callers give their requests up before the end and ask the same again, so that it is computed several times."""
    accounts = served(books.accounts)
    tries = _tries(accounts)
    again = {account.group_id for line in tries for account in line[:-1]}
    given_up = [account for account in accounts if account.group_id in again]
    share = stated({a.request_id: float(a.end_ns - a.start_ns) for a in given_up}, accounts)
    if not share.is_worth_it or len(again) < MIN_LOSERS:
        return share.unsure()
    patience_ns = median(a.end_ns - a.start_ns for a in given_up) or 0.0
    whole = [account.end_ns - account.start_ns for account in accounts if is_whole(account)]
    needed_ns = derive.percentile(whole, 90) or 0.0
    needs = f"{needed_ns / 1e9:.2g} s (p90 of {len(whole)} that came to their end)"
    if needed_ns <= patience_ns:
        needs = "at least that; nobody was let finish" + " who needed longer" * bool(whole)
    left = num_requests(a for a in accounts if _was_left(a))
    return Finding(
        claim=f"{left} of {num_requests(accounts)} requests were given up by their callers, and {len(again)} of "
        f"them asked again, the same prompt up to {max(map(len, tries))} times: {share.value:.0%} of all requests' "
        "time was spent for nobody.",
        evidence=(
            Fact("given up after, median", ms(patience_ns), "ms"),
            Fact("whole requests, p90", ms(needed_ns) if whole else "none came to its end", "ms" if whole else ""),
            Fact("different prompts that were asked again", len(tries)),
            Fact("tokens computed for nobody", _computed_tokens(books, given_up), "tokens"),
        ),
        request_ids=tuple(account.request_id for account in max(tries, key=len)[:5]),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="prompts with equal hashes and lengths, of one key, each after the one before had been left",
        cure=Cure(
            sentence=f"Have callers wait longer than {ms(patience_ns) / 1000:.2g} s: whole requests take {needs}. Have "
            "them ask again once at most, after a pause that doubles and is drawn, and tell the server how long they "
            "wait (X-Request-Deadline-Ms): it refuses at once what cannot be in time."
        ),
        cost="A caller whose request is truly lost learns of it later.",
        counter_check="With longer time-outs and the same load the number of requests does not fall.",
        regime="callers with a time-out near to what a request takes; each try makes the others slower",
    )


def _was_left(account: ClosedAccount) -> bool:
    has_read = bool(account.token_written_ns)
    return account.cancelled_ns is not None and account.finish_reason == FinishReason.ABORT and not has_read


def _tries(accounts: Sequence[ClosedAccount]) -> list[list[ClosedAccount]]:
    """Returns the first choices of the same request in order, all but the last left by their caller, of each that was
    asked more than once. accounts: by start."""
    lines: dict[tuple[object, ...], list[list[ClosedAccount]]] = defaultdict(list)
    for account in sorted({a.group_id: a for a in reversed(accounts)}.values(), key=lambda a: a.start_ns):
        if not account.prefixes:
            continue
        key = (account.tenant, account.model, account.prompt_tokens, account.prefixes, account.prompt_parts)
        for line in lines[key]:
            left_ns = line[-1].cancelled_ns
            if left_ns is not None and _was_left(line[-1]) and -LATE_NS <= account.start_ns - left_ns < SOON_NS:
                line.append(account)
                break
        else:
            lines[key].append([account])
    return [line for found in lines.values() for line in found if len(line) > 1]


def _computed_tokens(books: Books, accounts: Sequence[ClosedAccount]) -> int:
    return sum(computed_until(books)[a.request_id] - a.cached_tokens + a.output_tokens for a in accounts)


@rule("accounts", root_of=CROWDED)
def computed_for_nobody(books: Books) -> Answer:
    """Requests are computed on after their callers have gone."""
    accounts = served(books.accounts)
    late = {a.request_id: ns for a in accounts if (ns := _after_leaving_ns(a)) > 0}
    share = stated(late, accounts)
    if not share.is_worth_it or len(late) < MIN_LOSERS:
        return share.unsure()
    after = [account for account in accounts if account.request_id in late]
    tokens = [_tokens_after(account) for account in after]
    return Finding(
        claim=f"{num_requests(after)} of {num_requests(accounts)} requests were computed on after their callers had "
        f"gone, up to {max(tokens)} tokens of one: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("from going away to the blocks being free, median", ms(median(late.values()) or 0), "ms"),
            Fact("tokens made for nobody", sum(tokens), "tokens"),
            Fact("of these requests came to their own end", sum(map(is_whole, after)), "requests"),
        ),
        request_ids=worst(late),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="when the server noticed that the caller was gone, and when the engine let the request go",
        cure=Cure(
            sentence="The engine did not hear that they were given up: read the server's log of these moments, and "
            "restart it. Until that is found, give requests a deadline (X-Request-Deadline-Ms), which the engine "
            "itself keeps, and bound their answers (max_tokens)."
        ),
        cost="None: nobody reads these answers.",
        counter_check="With the same callers leaving, cancel-to-freed (p99 in /metrics) is no longer than two steps.",
        regime="callers who leave before the end",
    )


def _after_leaving_ns(account: ClosedAccount) -> float:
    left_ns = account.cancelled_ns
    if left_ns is None:
        return 0.0
    known = zip(account.token_steps, account.token_ready_ns, strict=False)
    if len({step for step, ready_ns in known if ready_ns > left_ns}) <= AFTER_STEPS:
        return 0.0
    end_ns = account.end_ns if account.freed_ns is None else min(account.freed_ns, account.end_ns)
    return float(max(0, end_ns - left_ns))


def _tokens_after(account: ClosedAccount) -> int:
    left_ns = account.cancelled_ns
    return 0 if left_ns is None else sum(ready_ns > left_ns for ready_ns in account.token_ready_ns)


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
    return time_in(books, Computed.OTHERS_PROMPTS, [stage for stage in Stage if stage not in own])


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
_KEEP = "Keep prefixes longer: a larger KV cache ({}), the same cache_salt for who may share, and, with several "
_KEEP += "servers, requests of one prefix to one of them."
_KEEP_PREFIXES = Cure(
    sentence=_KEEP.format("--kv-cache-memory-bytes; on a card also host memory, --kv-offload-memory-bytes"),
    elsewhere={
        "vllm": OtherCure(
            sentence=_KEEP.format(f"{WORDS['vllm'].memory}; on a card also host memory, --kv-offloading-size"),
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
    share.require()
    hit = sum(account.cached_tokens for account in accounts)
    is_off = setting(books, "enable_prefix_caching") is False
    is_coarse = sum(miss.in_blocks for miss in missed) < tokens / 2
    if is_coarse and (hit > tokens or setting(books, "num_state_slots")):  # the rest of a block, or what no block mends
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
    share.require()
    at_token = int(median(miss.at_token for miss in missed) or 0)
    until = int(median(first_part_tokens(miss) for miss in missed) or 0)
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
    share.require()
    at_token = int(median(miss.at_token for miss in missed) or 0)
    each, lacks = (int(median(of) or 0) for of in zip(*((miss.tokens, miss.dropped) for miss in missed), strict=True))
    thoughts = sum(account.reasoning_tokens for account in accounts)
    are_thoughts = 2 * thoughts >= sum(miss.dropped for miss in missed)  # or it is something else
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


@rule("accounts", "parts", root_of=CROWDED, explains=(Computed.OTHERS_PROMPTS,))
def repeated_part(books: Books) -> Answer:
    """One prompt holds the same long part more than once."""
    accounts = [account for account in served(books.accounts) if account.prompt_parts]
    twice = {account.request_id: _tokens_again(account, computed_until(books)) for account in accounts}
    wasted_ns = {a.request_id: twice[a.request_id] * token_ns(books, a) for a in accounts if twice[a.request_id]}
    lost_ns, share = _sums(books, twice, wasted_ns)
    share.require()
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
