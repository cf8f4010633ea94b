"""The doctor: every rule over closed books, what was found in order, and what could not be told.

It begins with whose the requests' time was (`diagnose.attribution`): each nanosecond has one owner, and rules claim
what is theirs. Illnesses are told before limits, what is largest first; what the books state and no rule explains is
told as `no_cure_known` (`diagnose.unexplained`); and no flag is prescribed in two directions (`diagnose.finding`).

It abstains rather than guesses. A rule runs only when the books hold what it needs, of enough requests
(`MIN_REQUESTS`); what is missing is named. How sure a rule is, is said by its interval over requests, not by how many
steps these took; a fitted cost says itself how many it takes. When more than `MAX_RESIDUAL` of the requests' time is
unattributed, or lies in neither book and no finding about the way between them accounts for it, the rules about the
server are withheld: what they would explain might not be the time that was lost.

    diagnose(books) -> Diagnosis        pure; the same books give the same answer
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from splittime.diagnose import finding as answers
from splittime.diagnose.bill import KeyWait
from splittime.diagnose.books import Books, StillOpen
from splittime.diagnose.finding import one_direction
from splittime.diagnose.reported import MIN_STATES, inside, reported
from splittime.diagnose.rules.client import felt_ns, pairs, sent
from splittime.diagnose.rules.evidence import num_requests, served, times_ns, total_ns
from splittime.diagnose.unexplained import MAX_UNEXPLAINED, Spent, spent, unexplained
from splittime.diagnose.words import ATTACHED, OURS, in_their_words
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage

THEMES = (
    "failures client network loops stated processor order admission burst kv "
    "prefill prompts host start decode speculation "
    "reported_queue reported_prefixes reported_prompts"
)
for _theme in THEMES.split():
    import_module(f"splittime.diagnose.rules.{_theme}")

MIN_REQUESTS = 20  # below, one request is more than a twentieth of what is said
MAX_RESIDUAL = 0.05  # the bound
RESIDUAL_NS = 1_000_000  # of each request: what two clocks and a socket cost, and the goal of the joined books
OUTSIDE_RULES = frozenset(  # read what was seen from outside: what neither book explains does not shake them
    ["client_bound", "client_backlog", "requests_fail", "buffering_proxy", "slow_way", "nagle", "slow_client"]
) | {name for name, rule in answers.RULES.items() if "reported" in rule.needs}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """findings: in the order in which they should be read. residual: the unexplained share of the requests' time.
    spent: where the requests' time went, by the server's books. num_refused: of no rule about the server.
    waits: of one key's requests for another's, where somebody has looked at them (`between_keys`).
    still_open: as in the books; no finding is about these.
    thin: too little was seen for any rule. withheld: the residual is too large for the rules about the server.
    void: the client was at fault, and the server tells nothing of itself, neither in a book nor by its gauges."""

    findings: tuple[answers.Finding, ...]
    abstentions: tuple[answers.Abstention, ...]
    num_requests: int
    num_refused: int = 0
    num_steps: int
    source: str
    residual: float
    thin: bool
    withheld: bool
    void: bool = False
    spent: tuple[Spent, ...] = ()
    waits: tuple[KeyWait, ...] = ()
    still_open: StillOpen | None = None

    @property
    def illnesses(self) -> tuple[answers.Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.is_limit)

    @property
    def limits(self) -> tuple[answers.Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_limit)

    @property
    def could_tell(self) -> bool:
        return not (self.thin or self.withheld or self.void or self.is_unexplained)

    @property
    def is_unexplained(self) -> bool:
        """A large part of the time is a wait that no rule knows a cure for."""
        return any(f.name == answers.NO_CURE_KNOWN and f.share_of_time >= MAX_UNEXPLAINED for f in self.findings)

    @property
    def healthy(self) -> bool:
        """Enough was seen to say that nothing was found."""
        return self.could_tell and not self.illnesses

    @property
    def exit_code(self) -> int:
        if self.illnesses:
            return answers.FOUND
        return answers.NOTHING_FOUND if self.could_tell else answers.CANNOT_TELL

    def as_json(self) -> dict[str, Any]:
        """Returns the diagnosis and its verdict; each finding with the command that its cure is."""
        shown = msgspec.to_builtins(self)
        for entry, finding in zip(shown["findings"], self.findings, strict=True):
            entry["cure"]["command"] = finding.cure.command
        return {**shown, "healthy": self.healthy, "exit_code": self.exit_code}


def diagnose(books: Books) -> Diagnosis:
    """See the module's docstring. Steps in which none of these requests was in flight are left out."""
    books = _in_their_time(books)
    outside = [rule for rule in answers.RULES.values() if rule.name in OUTSIDE_RULES]
    findings, abstentions = _run(books, outside)
    if books.num_unsound:
        why = f"{books.num_unsound} accounts or steps contradict themselves in their times and were left out"
        abstentions.append(answers.Abstention(name="clocks", why=why))
    abstentions += _gaps(books)
    residual = _residual(books)
    rest = [rule for rule in answers.RULES.values() if rule.name not in OUTSIDE_RULES]
    more, unable = _run(books, rest)
    withheld = residual > MAX_RESIDUAL and all(finding.is_limit for finding in findings)
    if withheld:
        more = []
        why = f"{residual:.0%} of the requests' time is explained by neither book: first find out where that goes"
        unable = [answers.Abstention(name=rule.name, why=why, was_asked=False) for rule in rest]
    findings, abstentions = findings + more, abstentions + unable
    left = None if withheld or _lacks(books, "accounts") else unexplained(books, findings, abstentions)
    told = _in_words_of_the_server(books, findings if left is None else [*findings, left])
    ordered = answers.in_order(told, roots(), of_time())
    facts = books.facts or ServerFacts(version="", model="", max_model_len=0)
    return Diagnosis(
        findings=one_direction(ordered, facts.settings, facts.refuses),
        spent=spent(books, ordered),
        abstentions=tuple(abstentions),
        num_requests=num_requests(served(books.accounts)) or _num_outcomes(books),
        num_refused=num_requests(account for account in books.accounts if account.is_refused),
        num_steps=len(books.steps),
        source=books.source,
        residual=residual,
        thin=not findings and all(_lacks(books, need) for need in ("accounts", "run", "gauges")),
        withheld=withheld,
        still_open=books.still_open,
        void=books.run is not None and books.run.is_void and not books.accounts and _lacks(books, "gauges") is not None,
    )


def found_again(books: Books, name: str) -> answers.Finding | None:
    """Returns what one rule finds in other books, told as `diagnose` tells it where nothing else is found."""
    books, facts = _in_their_time(books), books.facts or ServerFacts(version="", model="", max_model_len=0)
    findings, _ = _run(books, [answers.RULES[name]] if name in answers.RULES else [])
    told = one_direction(_in_words_of_the_server(books, findings), facts.settings, facts.refuses)
    return next(iter(told), None)


def _gaps(books: Books) -> list[answers.Abstention]:
    """What books that are kept inside another's server say of themselves."""
    settings = books.facts.settings if books.facts is not None else {}
    found = []
    if stopped := settings.get("books_stopped"):
        found.append(f"its books ended before the server did ({stopped}): what came later is not in them")
    if lost := settings.get("lost_messages"):
        found.append(f"{lost} messages of its books were lost: some requests or steps are missing")
    return [answers.Abstention(name="books", why=why) for why in found]


def _in_words_of_the_server(books: Books, findings: list[answers.Finding]) -> list[answers.Finding]:
    kind = books.engine or (books.served.kind if books.served is not None else OURS)
    return [in_their_words(finding, kind, ATTACHED.get(books.engine, "")) for finding in findings]


def _in_their_time(books: Books) -> Books:
    if not books.accounts:
        return books
    begin_ns, end_ns = min(a.start_ns for a in books.accounts), max(a.end_ns for a in books.accounts)
    during = tuple(step for step in books.steps if step.end_ns > begin_ns and step.begin_ns < end_ns)
    return msgspec.structs.replace(books, steps=during)


def roots() -> dict[str, tuple[str, ...]]:
    """Returns for each rule the names that it is the root of."""
    return {rule.name: rule.root_of for rule in answers.RULES.values()}


def of_time() -> frozenset[str]:
    """The rules that explain somebody's time."""
    return frozenset(name for name, rule in answers.RULES.items() if rule.explains)


def _run(books: Books, rules: list[answers.Rule]) -> tuple[list[answers.Finding], list[answers.Abstention]]:
    findings: list[answers.Finding] = []
    abstentions: list[answers.Abstention] = []
    for rule in rules:
        lack = next((why for need in rule.needs if (why := _lacks(books, need))), None) or _unknown(books, rule)
        answer = answers.Abstention(name=rule.name, why=lack, was_asked=False) if lack else rule.check(books)
        if isinstance(answer, answers.Finding):
            findings.append(answer)
        elif answer is not None:
            abstentions.append(answer)
    return findings, abstentions


def _unknown(books: Books, rule: answers.Rule) -> str | None:
    """Why a rule cannot tell where its quantities are 0 since nobody could measure them."""
    missing = [name for name in rule.reads if books.facts is not None and name in books.facts.unknown]
    if not missing or books.facts is None:
        return None
    return f"cannot tell: {' and '.join(missing)} could not be measured inside {books.facts.engine}"


def _lacks(books: Books, need: str) -> str | None:
    """Why the books do not hold what a rule needs; None if they do."""
    return _NEEDS[need](books)


def _accounts(books: Books) -> str | None:
    num = len(served(books.accounts))
    if not books.accounts and books.facts is None:
        whose = "only a splittime server keeps them, or vLLM under `splittime attach vllm`"
        return f"no accounts: {whose}, and what happens inside cannot be told without"
    return f"requests served: only {num}; {MIN_REQUESTS} are the least" if num < MIN_REQUESTS else None


def _steps(books: Books) -> str | None:
    return None if books.steps else "no records of steps"


def _machine(books: Books) -> str | None:
    if books.facts is None or books.facts.machine is None:
        return "how many threads and cores the server has is not in these books"
    return None


def _facts(books: Books) -> str | None:
    return "the server's facts (settings, processes) are not in these books" if books.facts is None else None


def _floor(books: Books) -> str | None:
    if books.facts is None or books.facts.cost is None or books.facts.machine is None:
        return "the machine's ceilings or the model's cost are not known, so no step has a floor"
    if books.facts.machine.read_bytes_per_s is None or books.facts.machine.operations_per_s is None:
        return (
            "the machine's ceilings are not measured yet, so no step has a floor: that needs a while without requests"
        )
    return None


def _parts(books: Books) -> str | None:
    return None if any(a.prompt_parts for a in books.accounts) else "no prompt is long enough to be told by its parts"


_NO_RUN = "no client's book: what the client saw is in a run of `splittime bench` only"


def _from_client(books: Books) -> str | None:
    if books.run is None:
        return _NO_RUN
    num = _num_outcomes(books)
    if not books.run.outcomes:
        return "the server was only watched: what a client feels is in a run of `splittime bench` only"
    return f"requests in the run: only {num}; {MIN_REQUESTS} are the least" if num < MIN_REQUESTS else None


def _lacks_metrics(books: Books) -> str | None:
    """A rule about another's server says itself what it lacks."""
    return _NO_RUN if books.run is None else None


def _gauges(books: Books) -> str | None:
    found = reported(books)
    if found is None or len(found.states) < MIN_STATES:
        return "the server's gauges were not seen"
    return None if any(map(inside, found.states)) else "nothing ran in the server while it was watched"


_NEEDS: dict[str, Callable[[Books], str | None]] = {
    "accounts": _accounts,
    "steps": _steps,
    "facts": _facts,
    "machine": _machine,
    "floor": _floor,
    "parts": _parts,
    "run": _from_client,
    "reported": _lacks_metrics,
    "gauges": _gauges,
}


def _num_outcomes(books: Books) -> int:
    return sum(outcome.sent_ns is not None and outcome.end_ns is not None for outcome in sent(books))


def _residual(books: Books) -> float:
    """The larger of what the server's book leaves open and what lies between the books, beyond what is allowed."""
    accounts = served(books.accounts)
    lost = times_ns(accounts, lambda interval: interval.stage is Stage.UNATTRIBUTED)
    inside = sum(lost.values()) / total_ns(accounts)
    both = pairs(books)
    round_trips = sorted(books.served.round_trip_ns) if books.served is not None else []
    allowed_ns = RESIDUAL_NS + (round_trips[len(round_trips) // 2] if round_trips else 0)
    between_ns = sum(max(0, abs(pair.between_ns) - allowed_ns - pair.account.unseen_ns) for pair in both)
    return max(inside, between_ns / felt_ns([pair.outcome for pair in both]) if both else 0.0)
