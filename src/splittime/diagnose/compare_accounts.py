"""Two sets of a gateway's accounts, compared as two runs of `bench compare` are.

The instants are the gateway's: a request is intended and sent when its account begins, its first chunk is the first
byte of the answer that was given. What its client broke off is not counted; whatever else ended with an error, a
refusal included, is a failure. The two have not asked the same, so they are never paired.
"""

from collections.abc import Sequence

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.core.request import FinishReason
from splittime.diagnose.compare import compare
from splittime.diagnose.comparison import Comparison, Terms
from splittime.ledger.account import ClosedAccount

METRICS = ("e2e_mean", "ttft_p50", "error_rate")


def compare_accounts(
    a: Sequence[ClosedAccount], b: Sequence[ClosedAccount], margin: float, confidence: float
) -> Comparison:
    """Returns B against A. confidence: of all metrics together."""
    terms = Terms(metrics=METRICS, margin=margin, confidence=confidence)
    return compare(_run(a, "A"), _run(b, "B"), terms)


def _run(accounts: Sequence[ClosedAccount], label: str) -> Run:
    ordered = sorted(accounts, key=lambda account: account.start_ns)
    begin_ns = ordered[0].start_ns if ordered else 0
    until_ns = max((account.end_ns for account in ordered), default=begin_ns) - begin_ns
    return Run(
        label=label,
        begin_ns=begin_ns,
        begin_unix_ns=ordered[0].started_at_unix_ns if ordered else 0,
        measured_from_ns=0,
        measured_until_ns=until_ns,
        arms=(Arm(url=label, kind="splittime"),),
        outcomes=tuple(_outcome(number, account, begin_ns) for number, account in enumerate(ordered)),
    )


def _outcome(number: int, account: ClosedAccount, begin_ns: int) -> Outcome:
    first_ns = account.attempts[-1].first_byte_ns if account.attempts else None
    start_ns = account.start_ns - begin_ns
    return Outcome(
        index=number,
        request_id=account.request_id,
        phase=Phase.MEASURED,
        ending=_ending(account),
        intended_ns=start_ns,
        picked_up_ns=start_ns,
        connect_ns=0,
        sent_ns=start_ns,
        chunk_ns=() if first_ns is None else (first_ns - begin_ns,),
        end_ns=account.end_ns - begin_ns,
    )


def _ending(account: ClosedAccount) -> Ending:
    if account.finish_reason == FinishReason.ABORT:
        return Ending.CANCELLED
    return Ending.COMPLETE if account.error is None else Ending.FAILED
