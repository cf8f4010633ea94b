"""A run of a load at one rate, simulated: whether it keeps the SLO, and what its requests wait for.

The load is drawn as `bench` would send it and judged as `bench` judges a run, so what is found is what `bench` would
find, and can be checked by it. The first tenth of a trial fills an empty server and does not count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.bench.book.slo import SloResult, check_slo
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.plan.load import MAX_REQUESTS, requests_for
from splittime.simulate.change import Change
from splittime.simulate.replica import AnyReplica
from splittime.simulate.run import SimulatedBooks
from splittime.simulate.shape import shape_of_record

WARM_UP = 0.1
WAITS = (Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)


def judged(books: SimulatedBooks, slo: Mapping[str, float], warm_up_share: float = 0.0) -> list[SloResult]:
    """Returns a result for each term of the SLO, in base units. warm_up_share: of the run's time, whose requests do not
    count."""
    return check_slo(run_of(books, slo, warm_up_share), slo)


def run_of(books: SimulatedBooks, slo: Mapping[str, float] | None = None, warm_up_share: float = 0.0) -> Run:
    """Returns the run of a client without lateness and network of its own."""
    accounts = sorted(books.accounts, key=lambda account: account.start_ns)
    begin_ns, end_ns = accounts[0].start_ns, accounts[-1].start_ns + 1
    from_ns = round((end_ns - begin_ns) * warm_up_share)
    return Run(
        label="simulated",
        begin_ns=begin_ns,
        begin_unix_ns=0,
        measured_from_ns=from_ns,
        measured_until_ns=end_ns - begin_ns,
        slo=dict(slo or {}),
        arms=(Arm(url="simulated", kind="splittime", accounts=tuple(accounts), steps=tuple(books.steps)),),
        outcomes=tuple(_outcomes(accounts, begin_ns, from_ns)),
    )


def _outcomes(accounts: Iterable[ClosedAccount], begin_ns: int, from_ns: int) -> Iterable[Outcome]:
    for index, account in enumerate(accounts):
        at_ns = account.start_ns - begin_ns
        chunks = tuple([written - begin_ns for written in account.token_written_ns])
        yield Outcome(
            index=index,
            request_id=account.request_id,
            phase=Phase.MEASURED if at_ns >= from_ns else Phase.WARM_UP,
            ending=_ending(account),
            intended_ns=at_ns,
            picked_up_ns=at_ns,
            sent_ns=at_ns,
            headers_ns=chunks[0] if chunks else None,
            chunk_ns=chunks,
            chunk_tokens=(1,) * len(chunks),
            end_ns=account.end_ns - begin_ns,
            finish_reason=account.finish_reason,
            prompt_tokens=account.prompt_tokens,
            output_tokens=account.output_tokens,
            cached_tokens=account.cached_tokens,
        )


def _ending(account: ClosedAccount) -> Ending:
    if account.is_refused:
        return Ending.REFUSED
    if account.finish_reason == FinishReason.ABORT:
        return Ending.CANCELLED
    return Ending.FAILED if account.error is not None else Ending.COMPLETE


class RateTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run at one rate. input_tokens, output_tokens: of a request, in the mean. first_waits, later_waits,
    all_waits: the share of the time up to the first token, of the time behind it, and of both together, that the
    requests wait, by cause. prompt_share: the share of the steps' time that prompts need. kv_usage: the most blocks in
    use, as a share of all. running: requests in a step, in the mean."""

    rate: float
    terms: tuple[SloResult, ...]
    num_requests: int
    input_tokens: float
    output_tokens: float
    first_waits: dict[str, float]
    later_waits: dict[str, float]
    all_waits: dict[str, float]
    prompt_share: float
    kv_usage: float
    running: float

    @property
    def num_tokens(self) -> int:
        """How many tokens all prompts and answers have."""
        return round(self.num_requests * (self.input_tokens + self.output_tokens))

    @property
    def keeps(self) -> bool:
        return all(term.ok for term in self.terms)

    def term(self, name: str) -> SloResult:
        return next(term for term in self.terms if term.name == name)


class TooMany(ConfigError):
    """A trial would have more requests than anybody waits for."""


def simulated_trial(
    replica: AnyReplica, load: Mapping[str, Any], slo: Mapping[str, float], rate: float, seed: int
) -> RateTrial:
    """Returns what this load comes to. Raises TooMany, and OutOfRange for steps beyond the model."""
    requests = requests_for(dict(load), replica)
    if len(requests) > MAX_REQUESTS:
        raise TooMany(f"{len(requests):,} requests are too many for a trial", limit=MAX_REQUESTS)
    return _trial_of(replica, replica.run(requests, Change(), seed), slo, rate)


def _trial_of(replica: AnyReplica, books: SimulatedBooks, slo: Mapping[str, float], rate: float) -> RateTrial:
    """Returns the trial whose ledger this is."""
    served = [account for account in books.accounts if not account.is_refused]
    count = max(1, len(served))
    return RateTrial(
        rate=rate,
        terms=tuple(judged(books, slo, WARM_UP)),
        num_requests=len(books.accounts),
        input_tokens=sum(account.prompt_tokens for account in served) / count,
        output_tokens=sum(account.output_tokens for account in served) / count,
        first_waits=_waits(books, is_first=True),
        later_waits=_waits(books, is_first=False),
        all_waits=_waits(books, is_first=None),
        prompt_share=_prompt_share(replica, books),
        kv_usage=max((step.blocks_used for step in books.steps), default=0) / replica.config.num_blocks,
        running=sum(len(step.rows) for step in books.steps) / max(1, len(books.steps)),
    )


def _waits(books: SimulatedBooks, is_first: bool | None) -> dict[str, float]:
    """Returns the shares of the time up to the first token, or behind it, or of both (None), by cause; largest
    first."""
    spent: Counter[str] = Counter()
    total = 0
    for account in books.accounts:
        first_ns = account.token_ready_ns[0] if account.token_ready_ns else account.end_ns
        for each in account.intervals:
            if is_first is None or (each.begin_ns < first_ns) == is_first:
                total += each.end_ns - each.begin_ns
                if each.stage in WAITS:
                    spent[str(each.cause or each.stage)] += each.end_ns - each.begin_ns
    return {name: ns / max(1, total) for name, ns in spent.most_common()}


def _prompt_share(replica: AnyReplica, books: SimulatedBooks) -> float:
    """Returns the share of all steps' time by which steps with prompts take longer than with their decoding rows
    alone."""
    all_ns = prompts_ns = 0
    for step in books.steps:
        shape = shape_of_record(step)
        taken_ns = replica.costs.step_time(shape).step_ns
        all_ns += taken_ns
        prompt_tokens = shape.tokens - shape.decode_rows
        if prompt_tokens:
            alone = shape._replace(rows=shape.decode_rows, tokens=shape.decode_rows, prompt_pairs=0)
            prompts_ns += taken_ns - (replica.costs.step_time(alone).step_ns if shape.decode_rows else 0)
    return max(0.0, min(1.0, prompts_ns / all_ns)) if all_ns else 0.0
