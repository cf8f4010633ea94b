"""A simulated ledger as the client would have seen it, so that an SLO is judged by the same code as a real run's."""

from collections.abc import Iterable, Mapping

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.bench.book.slo import SloResult, check_slo
from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount
from splittime.simulate.run import SimulatedBooks


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
