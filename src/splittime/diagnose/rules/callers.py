"""Callers who do not wait for their answers: they ask the same again, or their answers are computed for nobody.

A request is asked again if its caller left before any of its answer was written (who had read some of it did not like
it), and one with the same prompt came from the same key after that. A prompt of fewer than `PREFIX_TOKENS` tokens has
no hash, so what is said is a lower bound.
"""

from collections import defaultdict
from collections.abc import Sequence

from splittime.core.request import FinishReason
from splittime.diagnose.books import Books
from splittime.diagnose.finding import NO_CURE_KNOWN, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import CERTAIN, LIKELY, is_whole, median, ms, num_requests, served, worst
from splittime.diagnose.rules.known_prompts import computed_until
from splittime.diagnose.rules.share import MIN_LOSERS, stated
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount

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
