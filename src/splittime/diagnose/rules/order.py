"""In which order the waiting go: a batch that nobody joins, and a policy that lets some wait for ever."""

from collections.abc import Sequence

from splittime.diagnose.attribution import attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    Share,
    counted,
    median,
    ms,
    num_requests,
    of_requests,
    served,
    setting,
    worst,
)
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

FCFS = "fcfs"
STARVED_TIMES = 4.0  # overtaken for so many times the usual time to a first token
STARVED_NS = 1_000_000_000  # and long enough that a person notices
MIN_STARVED, STARVED_SHARE = 5, 0.02  # requests
LEAST_BOUND_MS = 100


@rule("accounts", "facts", root_of=("overload", "slot_bound", "head_of_line", "starvation"), explains=(Cause.POLICY,))
def static_batching(books: Books) -> Answer:
    """Requests wait until a whole batch has ended, though there would be room beside those that still run."""
    if setting(books, "batching") != "static":
        return None
    accounts = served(books.accounts)
    lost = attribution(books).of(Cause.POLICY)
    share = of_requests(lost, accounts).require()
    rows = [len(step.rows) for step in books.steps if step.rows]
    return Finding(
        claim=f"{num_requests(accounts, lost)} requests waited for a whole batch to end, {share.value:.0%} of all "
        "requests' time: static batching lets nobody join one that runs.",
        evidence=(
            Fact("waiting for the batch to end", ms(sum(lost.values())), "ms over all requests"),
            Fact("batching", "static"),
            Fact("rows in a step, mean and most", f"{sum(rows) / max(1, len(rows)):.1f} and {max(rows, default=0)}"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the setting, and the cause that the scheduler stated for each wait",
        cure=Cure(sentence="Admit at every step.", flags=("--batching", "continuous")),
        cost="None known: a step's rows come and go.",
        counter_check="With continuous batching and the same load TTFT p50 stays.",
        regime="answers of mixed lengths, or arrivals while a batch runs",
    )


@rule(
    "accounts",
    "facts",
    root_of=("head_of_line", "token_budget_bound", "deadlines_missed"),  # who stands back waits for what others take
    explains=(Cause.POLICY,),
)
def starvation(books: Books) -> Answer:
    """A policy lets some requests wait for very long, since others that came later always go first."""
    policy = setting(books, "policy")
    if policy in (None, FCFS) or setting(books, "batching") == "static":
        return None
    accounts = served(books.accounts)
    overtaken = overtaken_ns(accounts)
    usual_ns = median(_queued_to_first_ns(a) for a in accounts if a.request_id not in overtaken) or 0.0
    bar_ns = max(STARVED_NS, STARVED_TIMES * usual_ns)
    starved = {request_id: ns for request_id, ns in overtaken.items() if ns >= bar_ns}
    share = of_requests(starved, accounts, STARVED_SHARE)
    if len(starved) < max(MIN_STARVED, STARVED_SHARE * len(accounts)):
        return None
    if not share.is_worth_it:  # the few are the point of it, however little of all time they are
        share = counted(share.value, len(starved), STARVED_SHARE)
    return _starvation(books, str(policy), accounts, starved, usual_ns, share)


def _starvation(
    books: Books,
    policy: str,
    accounts: Sequence[ClosedAccount],
    starved: dict[str, float],
    usual_ns: float,
    share: Share,
) -> Finding:
    now_ms = float(setting(books, "starvation_bound_ms") or 0.0)
    bound_ms = max(LEAST_BOUND_MS, round(STARVED_TIMES * usual_ns / 1e6, -2))
    flags = ("--starvation-bound-ms", f"{bound_ms:.0f}") if not now_ms or bound_ms < now_ms else ("--policy", FCFS)
    longest = max(starved.values())
    return Finding(
        claim=f"Under the policy {policy} {num_requests(accounts, starved)} of {num_requests(accounts)} requests stood "
        f"back for others that came later, the longest for {longest / 1e9:.1f} s, where those who were not overtaken "
        f"have their first token after {ms(usual_ns):.0f} ms.",
        evidence=(
            Fact("overtaken for long", num_requests(accounts, starved), "requests"),
            Fact("the longest, from the first that overtook it", ms(longest), "ms"),
            Fact("median prompt of these", median(_prompts(accounts, starved)) or 0, "tokens"),
            *((Fact("starvation_bound_ms", now_ms),) if now_ms else ()),
        ),
        request_ids=worst(starved),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="the order in which requests came and in which their prompts were begun",
        cure=Cure(
            sentence="Let nobody stand back for so long: a shorter starvation bound, after which a request goes first."
            if flags[0] != "--policy"
            else "Let them go in the order in which they came.",
            flags=flags,
            elsewhere={"vllm": _IN_ORDER_BY_VLLM, "sglang": "--schedule-policy fcfs"},
        ),
        cost="Those whom the policy prefers wait a little longer.",
        counter_check="With the change and the same load TTFT p99 stays.",
        regime="loads near to what the server can serve; with no queue nobody is overtaken",
    )


_IN_ORDER_BY_VLLM = OtherCure(
    sentence="Let them go in the order in which they came, or send what must not wait for ever with a lower `priority` "
    "(vLLM's lowest goes first, and nobody's rises while it waits).",
    flags=("--scheduling-policy", FCFS),
)


def overtaken_ns(accounts: Sequence[ClosedAccount]) -> dict[str, float]:
    """By request: how long it still waited after the first one that had come later was begun."""
    begun = [(begin_ns, _queued_ns(a), a) for a in accounts if (begin_ns := _begun_ns(a)) is not None]
    begun.sort(key=lambda entry: entry[:2])
    found: dict[str, float] = {}
    latest_ns = min((begin_ns for begin_ns, _, _ in begun), default=0)
    latest: list[tuple[int, int]] = []  # (came, begun) of those begun so far whose coming was the latest until then
    for begin_ns, came_ns, account in begun:
        overtaken_at = next((at_ns for later_ns, at_ns in latest if later_ns > came_ns), None)
        if overtaken_at is not None and begin_ns > overtaken_at:
            found[account.request_id] = float(begin_ns - max(overtaken_at, came_ns))
        if came_ns > latest_ns:
            latest_ns = came_ns
            latest.append((came_ns, begin_ns))
    return found


def _queued_ns(account: ClosedAccount) -> int:
    return next((i.begin_ns for i in account.intervals if i.stage is Stage.QUEUE), account.start_ns)


def _begun_ns(account: ClosedAccount) -> int | None:
    return next((i.begin_ns for i in account.intervals if i.stage in (Stage.PREFILL, Stage.DECODE)), None)


def _queued_to_first_ns(account: ClosedAccount) -> float:
    return float((account.token_ready_ns[0] if account.token_ready_ns else account.end_ns) - account.start_ns)


def _prompts(accounts: Sequence[ClosedAccount], wanted: dict[str, float]) -> list[int]:
    return [account.prompt_tokens for account in accounts if account.request_id in wanted]
