"""KV memory: requests that wait for blocks, and requests that are thrown out and computed again.

When the first in the queue waits for blocks, those behind it wait for `policy`: nobody overtakes it. Their wait counts
as one for blocks for as long as somebody's wait for blocks runs beside it.
"""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from splittime.diagnose.attribution import Computed
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import evidence as shown
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import of_requests, stated
from splittime.diagnose.words import RESTART
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

MIN_GAIN = 1.1  # as for slots: the batch that fits then must serve a tenth more
THRASH_SHARE = 0.05  # recomputing is pure loss, so half of what other rules ask for is worth telling
SMALL = ("int8", "fp8")  # types of the cache that have no smaller one
MAX_TIMES = 8  # a cache more than eight times as large is another machine, not a setting

_ELSEWHERE: dict[str, str | OtherCure] = {
    "sglang": "--mem-fraction-static, --kv-cache-dtype fp8_e5m2",
    "tgi": "--max-batch-total-tokens",
    "llama.cpp": "--ctx-size, --cache-type-k q8_0",
}


def waits_for_blocks_ns(accounts: Sequence[ClosedAccount]) -> dict[str, int]:
    """By request: its own waits for blocks in the queue, and its waits behind one that waits for blocks."""
    own = shown.waits_for(Cause.KV_BLOCKS, Stage.QUEUE)
    any_wait = shown.waits_for(Cause.KV_BLOCKS)
    spans = shown.union((i.begin_ns, i.end_ns) for a in accounts for i in a.intervals if any_wait(i))
    found: dict[str, int] = {}
    for account in accounts:
        for interval in account.intervals:
            if own(interval):
                waited_ns = interval.duration_ns
            elif interval.stage is Stage.QUEUE and interval.cause is Cause.POLICY:
                waited_ns = shown.overlap_ns(interval.begin_ns, interval.end_ns, spans)
            else:
                continue
            found[account.request_id] = found.get(account.request_id, 0) + waited_ns
    return {request_id: ns for request_id, ns in found.items() if ns > 0}


@rule(
    "accounts",
    "steps",
    root_of=("overload", "head_of_line", "token_budget_bound", "deadlines_missed"),
    explains=(Cause.KV_BLOCKS, Cause.POLICY),
)
def kv_bound(books: Books) -> Answer:
    """Requests wait in the queue for KV cache blocks, and more of them at once would be served faster."""
    accounts = shown.served(books.accounts)
    waits = waits_for_blocks_ns(accounts)
    share = of_requests(waits, accounts).require()
    batch = max(1, max(step.num_running for step in books.steps))
    cost = step_cost.fit(books.steps)
    wanted = sorted(step.num_running + step.num_waiting for step in books.steps)[int(0.95 * (len(books.steps) - 1))]
    times = min(MAX_TIMES, books.most_times, max(2, -(-wanted // batch)))
    gain = step_cost.batch_gain(cost, accounts, batch, times * batch) if cost else None
    if gain is not None and gain < MIN_GAIN:
        why = f"requests wait for blocks, but {times:g} times {batch} at once would serve only {gain - 1:.0%} more"
        return Abstention(why=why)
    return Finding(
        claim=f"{shown.num_requests(accounts, waits)} of {shown.num_requests(accounts)} requests waited for KV "
        f"cache blocks, {share.value:.0%} of all requests' time; {batch} fitted at once.",
        evidence=(
            Fact("waiting for blocks, or behind who does", shown.ms(sum(waits.values())), "ms over all requests"),
            Fact("blocks in use at most", max(step.blocks_used for step in books.steps), _of_blocks(books)),
            Fact("requests running at most", batch),
            Fact("preemptions", sum(a.num_preemptions for a in accounts)),
        ),
        request_ids=shown.worst(waits),
        step_ids=shown.slowest_steps(step for step in books.steps if step.victims),
        **share.as_fields,
        confidence=shown.CERTAIN if gain is not None else shown.LIKELY,
        confidence_from="the scheduler stated the cause of each wait"
        + ("" if gain is not None else "; the steps are too much alike to say what a larger batch costs"),
        cure=_more_memory(books, times),
        cost=_cost_of_memory(books, times),
        counter_check="With the larger cache and the same load the queue's kv_blocks time stays.",
        regime=f"{batch} requests at once; without waits for blocks or preemptions more KV memory changes nothing",
    )


@rule("accounts", "steps", root_of=("overload", "prefill_interference"), explains=(Computed.PREEMPTED, Stage.RECOMPUTE))
def preemption_thrash(books: Books) -> Answer:
    """Running requests are thrown out for want of KV blocks and their tokens computed a second time."""
    accounts = shown.served(books.accounts)
    lost = shown.times_ns(accounts, shown.in_stages(Stage.PREEMPTED, Stage.RECOMPUTE))
    preemptions = sum(account.num_preemptions for account in accounts)
    share = stated(lost, accounts, THRASH_SHARE)  # each is in the records, whether or not another run would have it
    if preemptions == 0 or not share.is_worth_it:
        return None
    again_ns = sum(shown.times_ns(accounts, shown.in_stages(Stage.RECOMPUTE)).values())
    victims = {a.request_id: float(a.num_preemptions) for a in accounts if a.num_preemptions}
    fewer = max(1, int(shown.median(step.num_running for step in books.steps if step.victims) or 1))
    times = min(2, books.most_times)
    memory, theirs = _more_memory(books, times), _memory_of_vllm(books, times)
    or_fewer = f" Or admit fewer at once: --max-num-seqs {fewer}."
    return Finding(
        claim=f"{shown.num_requests(accounts, victims)} requests were preempted {preemptions} times for want of "
        f"KV blocks; waiting to come back and computing again took {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("preemptions", preemptions),
            Fact("out of the batch", shown.ms(sum(lost.values()) - again_ns), "ms over all requests"),
            Fact("computing again", shown.ms(again_ns), "ms over all requests"),
            Fact("blocks in use at most", max(step.blocks_used for step in books.steps), _of_blocks(books)),
        ),
        request_ids=shown.worst(victims),
        step_ids=shown.slowest_steps(step for step in books.steps if step.victims),
        **share.as_fields,
        confidence=shown.CERTAIN,
        confidence_from="each preemption is in the records, with its victim",
        cure=Cure(
            sentence=memory.sentence + or_fewer,
            flags=memory.flags or ("--max-num-seqs", str(fewer)),
            elsewhere=_ELSEWHERE | {"vllm": replace(theirs, sentence=theirs.sentence + or_fewer)},
        ),
        cost=f"{_cost_of_memory(books, times)} With fewer slots the wait moves into the queue, where it throws no work "
        "away.",
        counter_check="With either change and the same load the preemptions stay, or E2E p99 does not fall.",
        regime="answers that outgrow the cache together; with no preemptions there is nothing to cure here",
    )


def _of_blocks(books: Books) -> str:
    num_blocks = shown.setting(books, "num_blocks")
    return f"of {num_blocks}" if num_blocks else ""


def _bytes(books: Books) -> int | None:
    """What the cache takes now, if the server says."""
    num_blocks, block_size = shown.setting(books, "num_blocks"), shown.setting(books, "block_size")
    if not num_blocks or not block_size or books.facts is None or books.facts.cost is None:
        return None
    return int(num_blocks) * int(block_size) * books.facts.cost.kv_bytes_per_token


def _more_memory(books: Books, times: float) -> Cure:
    is_small = shown.setting(books, "kv_cache_dtype") in SMALL
    now_bytes, elsewhere = _bytes(books), _ELSEWHERE | {"vllm": _memory_of_vllm(books, times)}
    if now_bytes is None:
        sentence = (
            f"Give the KV cache {times:g} times the memory (--kv-cache-memory-bytes), or halve what a token takes."
        )
        return Cure(sentence=sentence, flags=() if is_small else ("--kv-cache-dtype", "int8"), elsewhere=elsewhere)
    size = f"{math.ceil(times * now_bytes / 2**20)}MiB"
    other = "" if is_small else ", or --kv-cache-dtype int8 where memory is short"
    return Cure(
        sentence=f"Give the KV cache {times:g} times its {now_bytes / 2**20:.1f} MiB{other}.",
        flags=("--kv-cache-memory-bytes", size),
        elsewhere=elsewhere,
    )


def _memory_of_vllm(books: Books, times: float) -> OtherCure:
    """vLLM's books say how many blocks it has, and not what one takes. A flag for the blocks themselves is told where
    memory is the machine's: a card has given what it has."""
    blocks, size = shown.setting(books, "num_blocks"), shown.setting(books, "block_size")
    now = f" its {blocks * size} tokens ({blocks} blocks of {size})" if blocks and size else " what it has"
    is_on_card = shown.setting(books, "device") != "cpu"
    how = _ON_CARD if is_on_card else _ON_CPU
    flags = () if is_on_card or not blocks else ("--num-gpu-blocks-override", str(int(times * blocks) + NULL_BLOCK))
    cost = "Memory, and a longer TPOT in the larger batch."
    sentence = f"Give the KV cache {times:g} times{now}: {how}."
    return OtherCure(sentence=sentence, flags=flags, cost=cost if flags else f"{cost} {RESTART}")


NULL_BLOCK = 1  # which vLLM's own count of blocks has, and nobody's tokens are in
_ON_CPU = (
    "VLLM_CPU_KVCACHE_SPACE in GiB, which outranks --kv-cache-memory-bytes; --num-gpu-blocks-override outranks both, "
    "on a CPU as well"
)
_ON_CARD = (
    "--gpu-memory-utilization or --kv-cache-memory-bytes, or --kv-cache-dtype fp8 for twice as many tokens; and no "
    "--num-gpu-blocks-override, if there is one"
)


def _cost_of_memory(books: Books, times: float) -> str:
    now_bytes = _bytes(books)
    more = f"{(times - 1) * now_bytes / 2**20:.1f} MiB of memory" if now_bytes else "memory"
    return f"{more}, and a longer TPOT in the larger batch; int8 KV rounds keys and values (see BENCHMARKS.md)."
