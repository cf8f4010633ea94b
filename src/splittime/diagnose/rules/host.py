"""The machine around the model: a host that keeps the device waiting, pauses, slow tokenising, a cold start."""

from collections.abc import Sequence

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    in_stages,
    median,
    ms,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    times_ns,
    total_ns,
    union,
    worst,
)
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import Process
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

HOST_SHARE = 0.5  # of busy time: the device waits longer than it works; a small model (4 M parameters) is at a quarter
PAUSE_SHARE = 0.02  # pauses hit everybody at once and at the worst moment: less of them is felt
LONG_PAUSE_NS = 100_000_000  # as long as a whole answer of a fast server's first token
COLD_TIMES = 3.0  # the first requests take so many times what the later ones take
COLD_REQUESTS = 3  # at least so many of them, or it was one odd request
COLD_SHARE = 0.5  # of the first steps are slow: a single slow one is no start
COLD_WINDOW_NS = 5_000_000_000  # what comes later than this after readiness is not of the start

_COMPUTING = in_stages(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Stage.PREFILL_STALL, Stage.DECODE_STALL)


@rule("accounts", "steps", root_of=("overload", "slot_bound"))
def host_bound(books: Books) -> Answer:
    """The device waits for Python: planning, launching and committing take a large part of the steps' time."""
    book = derive.device_book(books.steps)
    busy_ns = max(1, book.wall_ns - book.idle_ns)
    host_share = book.host_gap_ns / busy_ns
    accounts = served(books.accounts)
    share = host_share * sum(times_ns(accounts, _COMPUTING).values()) / total_ns(accounts)
    if host_share < HOST_SHARE or share < MIN_SHARE:
        return None
    parts = {name: sum(getattr(step, name) for step in books.steps) for name in _HOST_PARTS}
    largest = max(parts, key=lambda name: parts[name])
    rows = sum(len(step.rows) for step in books.steps) / len(books.steps)
    kernels = str(setting(books, "kernels") or "")
    is_native = kernels in ("", "native", "auto")
    return Finding(
        name="host_bound",
        claim=f"Of {book.wall_ns / 1e9 - book.idle_ns / 1e9:.1f} s of work the device waited {host_share:.0%} for the "
        f"host, most of it in {_HOST_PARTS[largest]}.",
        evidence=(
            *(Fact(meaning, f"{parts[name] / busy_ns:.1%}", "of busy time") for name, meaning in _HOST_PARTS.items()),
            Fact("rows in a step, mean", round(rows, 1)),
            Fact("kernels", kernels or "not told"),
        ),
        request_ids=worst(times_ns(accounts, _COMPUTING)),
        step_ids=slowest_steps(step for step in books.steps if step.host_gap_ns + step.launch_ns > step.device_ns),
        share_of_time=share,
        confidence=CERTAIN if largest != "host_gap_ns" else LIKELY,
        confidence_from="each step's own split, which sums to its length",
        cure=Cure(
            sentence="Give the engine process a core of its own: nothing else busy on this machine, one thread fewer."
            if is_native
            else "Use the native kernels: one call a layer instead of one an operation.",
            flags=("--num-threads", "1") if is_native else ("--kernels", "native"),
            elsewhere={"vllm": "--async-scheduling, no --enforce-eager", "sglang": "no --disable-cuda-graph"},
        ),
        cost="Fewer threads compute large prompts more slowly." if is_native else "None known.",
        counter_check="With the change the host's share of busy time stays.",
        regime=f"steps of about {rows:.0f} rows; the host's part shrinks as batches and models grow",
    )


_HOST_PARTS = {
    "host_gap_ns": "between steps",
    "plan_ns": "planning",
    "launch_ns": "launching",
    "commit_ns": "committing",
}


@rule("accounts", "steps", "facts", root_of=("host_bound",))
def gc_pauses(books: Books) -> Answer:
    """Collections of garbage hold up the requests that were in flight."""
    assert books.facts is not None
    accounts = served(books.accounts)
    pauses = [(process.name, b, b + ns) for process in books.facts.processes for b, ns in process.pauses]
    spans = union((begin_ns, end_ns) for _, begin_ns, end_ns in pauses)
    held = {a.request_id: float(overlap_ns(a.start_ns, a.end_ns, spans)) for a in accounts}
    held = {request_id: ns for request_id, ns in held.items() if ns > 0}
    share = sum(held.values()) / total_ns(accounts)
    felt = [(name, end_ns - begin_ns) for name, begin_ns, end_ns in pauses if _meets(begin_ns, end_ns, accounts)]
    longest_ns = max((ns for _, ns in felt), default=0)
    if share < PAUSE_SHARE and longest_ns < LONG_PAUSE_NS:
        return None
    where = " and ".join(sorted({name for name, _ in felt}))
    return Finding(
        name="gc_pauses",
        claim=f"{len(felt)} collections of garbage in the {where} process, up to {ms(longest_ns):.0f} ms, held up "
        f"{len(held)} requests: {share:.1%} of all requests' time.",
        evidence=(
            Fact("collections of a millisecond or more", len(felt)),
            Fact("the longest", ms(longest_ns), "ms"),
            Fact("requests' time in them", ms(sum(held.values())), "ms over all requests"),
        ),
        request_ids=worst(held),
        step_ids=slowest_steps(s for s in books.steps if overlap_ns(s.begin_ns - s.host_gap_ns, s.end_ns, spans)),
        share_of_time=share,
        confidence=CERTAIN,
        confidence_from="the collector's own callbacks, on the same clock as the accounts",
        cure=Cure(
            sentence="Find what keeps so many objects alive (a large ledger in memory, huge bodies): the server "
            "freezes what start-up made, so long pauses come from what was made since. Restart to confirm."
        ),
        cost="A restart drops the prefix cache.",
        counter_check="After a restart, at the same load, the pauses are as long at once.",
        regime="any load; the pauses grow with the number of live objects, not with the batch",
    )


def _meets(begin_ns: int, end_ns: int, accounts: Sequence[ClosedAccount]) -> bool:
    return any(account.start_ns < end_ns and account.end_ns > begin_ns for account in accounts)


@rule("accounts")
def slow_tokenizing(books: Books) -> Answer:
    """Turning texts into tokens takes a large part of the requests' time."""
    accounts = served(books.accounts)
    taken = times_ns(accounts, in_stages(Stage.TOKENIZE))
    share = sum(taken.values()) / total_ns(accounts)
    if share < MIN_SHARE:
        return None
    tokens = sum(account.prompt_tokens for account in accounts)
    rate = tokens / max(1e-9, sum(taken.values()) / 1e9)
    return Finding(
        name="slow_tokenizing",
        claim=f"Tokenising took {share:.0%} of all requests' time: {rate:.0f} prompt tokens/s.",
        evidence=(
            Fact("tokenising", ms(sum(taken.values())), "ms over all requests"),
            Fact("median of a request", ms(median(taken.values()) or 0), "ms"),
            Fact("prompt tokens", tokens, "tokens"),
            Fact("of them from the prefix cache", sum(account.cached_tokens for account in accounts), "tokens"),
        ),
        request_ids=worst(taken),
        share_of_time=share,
        confidence=CERTAIN,
        confidence_from="a stage of the accounts",
        cure=Cure(
            sentence="Send token ids instead of text (`prompt: [1, 2, ...]`), or shorter texts; for chats keep the "
            "history short.",
            elsewhere={"vllm": "--api-server-count", "sglang": "--tokenizer-worker-num", "any": "send token ids"},
        ),
        cost="The client must have the model's tokenizer.",
        counter_check="With ids sent instead of text TTFT does not fall by about the tokenising time.",
        regime="long texts with little to compute: short answers, prompts that the prefix cache holds",
    )


@rule("accounts", "facts")
def cold_start(books: Books) -> Answer:
    """Requests met a server that was not yet ready, or that computed its first steps slowly."""
    assert books.facts is not None
    engine = books.facts.process("engine") or books.facts.process("llm")
    turned_away = [a for a in books.accounts if a.error is not None and a.error.code == "not_ready"]
    if len(turned_away) >= max(COLD_REQUESTS, MIN_SHARE * len(books.accounts)):
        return _not_ready(books, turned_away, engine)
    if engine is None or engine.ready_ns is None:
        return Abstention("cold_start", "the server does not say when it was ready")
    slow = _slow_first_steps(books.steps, engine.ready_ns + COLD_WINDOW_NS)
    lost_ns = sum(over_ns for _, over_ns in slow)
    spans = union((step.begin_ns, step.end_ns) for step, _ in slow)
    held = {a.request_id: float(overlap_ns(a.start_ns, a.end_ns, spans)) for a in served(books.accounts)}
    held = {request_id: ns for request_id, ns in held.items() if ns > 0}
    share = sum(held.values()) / total_ns(served(books.accounts))
    if share < MIN_SHARE or len(held) < COLD_REQUESTS:
        return None
    claim = f"The first {len(slow)} steps after the start took {ms(lost_ns):.0f} ms longer than the same work later."
    return _cold(claim, tuple(worst(held)), share, LIKELY, [Fact("above the later steps", ms(lost_ns), "ms")])


def _not_ready(books: Books, turned_away: Sequence[ClosedAccount], engine: Process | None) -> Finding:
    took_ns = engine.ready_ns - engine.started_ns if engine is not None and engine.ready_ns is not None else 0
    share = len(turned_away) / len(books.accounts)
    claim = f"{len(turned_away)} of {len(books.accounts)} requests came before the engine was ready and got 503"
    claim += f"; it took {took_ns / 1e9:.1f} s to start." if took_ns else "."
    restarts = engine.restarts if engine is not None else 0
    facts = [Fact("turned away with 503", len(turned_away), "requests"), Fact("start-up", round(took_ns / 1e9, 2), "s")]
    ids = tuple(account.request_id for account in turned_away[:5])
    return _cold(claim, ids, share, CERTAIN, [*facts, Fact("restarts of the engine", restarts)])


def _slow_first_steps(steps: Sequence[StepRecord], until_ns: int) -> list[tuple[StepRecord, float]]:
    """The first steps, as far as most took several times what the cost of the later ones says, and by how much."""
    later = [step for step in steps if step.begin_ns > until_ns]
    cost = step_cost.fit(later)
    if cost is None:
        return []
    expected = [(s, cost.step_ns(s.decode_tokens, s.prefill_tokens, s.kv_tokens_read)) for s in steps]
    early = [(s, step_cost.length_ns(s) - ns, ns) for s, ns in expected if s.begin_ns <= until_ns]
    is_slow = [over_ns > (COLD_TIMES - 1) * ns for _, over_ns, ns in early]
    cold = max((n for n in range(len(early) + 1) if sum(is_slow[:n]) >= COLD_SHARE * n), default=0)
    return [(step, over_ns) for step, over_ns, _ in early[:cold]]


def _cold(claim: str, ids: tuple[str, ...], share: float, confidence: float, facts: list[Fact]) -> Finding:
    return Finding(
        name="cold_start",
        claim=claim,
        evidence=tuple(facts),
        request_ids=ids,
        share_of_time=share,
        confidence=confidence,
        confidence_from="the time of readiness and the accounts are on one clock",
        cure=Cure(
            sentence="Send no traffic before GET /ready answers 200 (a readiness probe); leave the first seconds out "
            "of a measurement; keep a packed_cache folder for quantised weights, so that the next start is quick.",
            elsewhere={"vllm": "GET /health", "sglang": "GET /health_generate", "tgi": "GET /health"},
        ),
        cost="The server takes part in the load some seconds later.",
        counter_check="With the probe, the same requests some seconds later are as slow.",
        regime="the first seconds of a process",
    )
