"""What the books state and no finding explains: told as it is, "stated, no cure known", rather than given the nearest
familiar name.

Of each owner of the requests' time (`diagnose.attribution`) that is a wait, the finding that explains it is known from
the rules (`Rule.explains`). What is left over and worth telling is one more finding, `no_cure_known`, with what the
rules that might have explained it said instead.
"""

from collections.abc import Collection, Sequence

import msgspec

from splittime.diagnose.attribution import Computed, Owner, attribution, meaning, waits
from splittime.diagnose.books import Books
from splittime.diagnose.finding import NO_CURE_KNOWN, RULES, Abstention, Cure, Fact, Finding
from splittime.diagnose.rules.evidence import CERTAIN, MIN_SHARE, of_requests, served, worst

MAX_UNEXPLAINED = 0.3  # of the requests' time: beyond, "nothing found" would be an all-clear that nobody can give
MIN_TOLD = 0.01  # of the requests' time, in the summary of where it went


class Spent(msgspec.Struct, frozen=True):
    """An owner's share of the requests' time, and the finding that explains it, if one does."""

    owner: Owner
    share: float
    meaning: str
    explained_by: str | None = None


def spent(books: Books, findings: Sequence[Finding]) -> tuple[Spent, ...]:
    """Where the requests' time went, the largest share first."""
    by_owner = _explained(findings)
    found = attribution(books).largest() if served(books.accounts) else []
    told = [(owner, share) for owner, share in found if share >= MIN_TOLD]
    return tuple(Spent(str(owner), share, meaning(owner), by_owner.get(owner)) for owner, share in told)


def _explained(findings: Sequence[Finding]) -> dict[Owner, str]:
    """The first finding that explains an owner."""
    found: dict[Owner, str] = {}
    for finding in findings:
        known = RULES.get(finding.name)
        for owner in known.explains if known is not None else ():
            found.setdefault(owner, finding.name)
    return found


def unexplained(books: Books, findings: Sequence[Finding], abstentions: Sequence[Abstention]) -> Finding | None:
    """The waits that are worth telling and that no finding explains, as one finding."""
    explained = _explained(findings)
    found = attribution(books)
    left = [(str(owner), share) for owner, share in waits(found) if owner not in explained and share >= _least(owner)]
    lost = found.of(*(owner for owner, _ in left))
    share = of_requests(lost, served(books.accounts))
    if not left or not (share.is_worth_it or share.value >= MAX_UNEXPLAINED):
        return None  # so much of it is told, be it of this run alone
    first = left[0][0]
    about = _about({owner for owner, _ in left}, abstentions)
    reasons = {abstention.name: abstention.why for abstention in about}
    asked = {abstention.name for abstention in about if abstention.was_asked}
    return Finding(
        name=NO_CURE_KNOWN,
        claim=f"{share.value:.0%} of all requests' time is {'mostly ' * (len(left) > 1)}{first}: "
        f"{meaning(first).rstrip('.')}. It is stated in the books, and no rule here has a cure to offer for it.",
        evidence=(
            *(Fact(f"{owner} ({meaning(owner).rstrip('.')})", f"{part:.0%}", "of the time") for owner, part in left),
            *(Fact(name, why) for name, why in reasons.items()),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="stages and causes of the accounts, and the steps' own split",
        cure=Cure(sentence=_what_remains(asked, reasons)),
        cost="Not known.",
        counter_check="At half the rate the same share of the time goes there: then it is no matter of load.",
        regime="this load at these settings",
        is_limit=True,
    )


def _least(owner: Owner) -> float:
    """Returns the share from which it is told. A server's own processes and a client beside it make an engine wait for
    a processor, on two cores for a fifth of the time and more, and nothing is wrong with that."""
    return MAX_UNEXPLAINED if owner in (Computed.CPU_WAIT, Computed.STOPPED) else MIN_SHARE


def _about(owners: set[Owner], abstentions: Sequence[Abstention]) -> list[Abstention]:
    """What the rules that might have explained these said instead."""
    able = {name for name, rule in RULES.items() if owners & set(rule.explains)}
    return [abstention for abstention in abstentions if abstention.name in able]


def _what_remains(asked: Collection[str], reasons: Collection[str]) -> str:
    """asked: those of the rules in reasons that looked."""
    refuted = f"What usually helps would not here: {', '.join(sorted(asked))}. " if asked else ""
    others = ", ".join(name for name in reasons if name not in asked)
    unknown = f"What might help could not be asked: {others}. " if others else ""
    look = "Look at the requests named here (`splittime explain`); a lower rate or a second server always helps."
    return refuted + unknown + look
