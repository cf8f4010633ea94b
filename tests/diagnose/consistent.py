"""What every finding keeps, whichever rule it is of: share, sentence, evidence and cure say one thing, and the server
would start with the cure. The settings' own checks say so, beside what the books say is set."""

import re
from pathlib import Path

from splittime.assemble.settings import BY_NAME, load, worker_settings
from splittime.diagnose.books import Books
from splittime.diagnose.finding import OF_TIME, OUR_PROGRAM, Finding, changed_by, flags_of

NEGATIVE = re.compile(r"(?<![\w.,)\]])-\d")
TOLD = re.compile(r"([\d.]+)% of (?:all|the) requests' time")
OF_CEILING = re.compile(r"runs at (\d+) %")
SIGNED = ("expected at the most", "if guesses cost nothing", "Mann-Kendall")  # what may be below 0


def require_consistent(finding: Finding, books: Books) -> None:
    _require_one_quantity(finding)
    _require_signs(finding)
    if finding.cure.program == OUR_PROGRAM and not books.engine:
        require_accepted(finding.cure.flags, books)


def _require_one_quantity(finding: Finding) -> None:
    share = finding.share_of_time
    assert 0 <= share <= 1, finding.name
    if finding.share_interval is not None:
        low, high = finding.share_interval
        assert 0 <= low <= share <= high <= 1, finding.name
    told = TOLD.findall(finding.claim)
    assert all(float(percent) <= 100 for percent in told), finding.claim
    if finding.share_of == OF_TIME and told:
        assert min(abs(100 * share - float(percent)) for percent in told) <= 0.5, (finding.name, share, finding.claim)


def _require_signs(finding: Finding) -> None:
    assert not NEGATIVE.search(finding.claim), finding.claim
    for fact in finding.evidence:
        if any(words in fact.what for words in SIGNED):
            continue
        assert not isinstance(fact.value, int | float) or fact.value >= 0, (finding.name, fact)
        assert all(int(percent) <= 100 for percent in OF_CEILING.findall(str(fact.value))), fact
    assert 0 < finding.confidence <= 1
    assert finding.cure.sentence


def require_accepted(flags: tuple[str, ...], books: Books) -> None:
    """Make the settings as `splittime serve` would. What the machine decided is not asked for again."""
    assert books.facts is not None or not flags
    wanted = dict(map(changed_by, flags_of(flags)))
    if not wanted:
        return
    told = {name: value for name, value in books.facts.settings.items() if name in BY_NAME and value is not None}
    load({**told, **wanted})
    worker_settings(load({**told, **wanted}), Path("model"))
    if "quantization" in wanted:
        assert ": " not in str(books.facts.settings["weights"]), "a checkpoint that came quantised refuses it"
