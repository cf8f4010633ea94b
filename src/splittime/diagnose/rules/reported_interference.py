"""Streams of another's server stand still while it computes somebody else's prompt.

With a client's book the gaps between chunks tell it, in the time before another's first chunk that the server says a
prompt takes. A server that was only watched tells less: how many gaps of its own histogram are long, and that prompts
take as long. The prompts of a probe are none of the user's, so of an idle server nothing is said.
"""

from collections.abc import Mapping

from splittime.diagnose.books import Books
from splittime.diagnose.chunks import split, stalled_ns
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import PROBED, Reported, asked, inside
from splittime.diagnose.rules.client import of_outcomes
from splittime.diagnose.rules.evidence import POSSIBLE, ms, worst
from splittime.diagnose.rules.reported_prompts import (
    NO_PREFILL,
    SMALL_TOKENS,
    cut_into,
    prefill_ns,
    prompt_tokens,
    step_ratio,
)
from splittime.diagnose.rules.share import Share, counted

MIN_RATIO = 3.0  # a step with a part of a prompt to one without, where the part is too large
AS_LONG = 2.0  # a gap beyond so many times what a prompt takes is not a prompt's doing


@rule("reported", root_of=("reported_queue",))
def reported_interference(books: Books) -> Answer:
    """Streams stand still while another server computes somebody else's prompt."""
    found = asked(books)
    if not isinstance(found, Reported):
        return found
    if found.look == PROBED:
        return Abstention(why="cannot tell from a probe, whose prompts are its own: only a run of your load can")
    takes_ns = prefill_ns(found)
    if takes_ns is None:
        return Abstention(why=found.lacks(NO_PREFILL, found.words.prefill_s))
    return _by_client(found, takes_ns) if found.outcomes else _by_server(found, takes_ns)


def _by_client(found: Reported, takes_ns: float) -> Answer:
    gaps = split(found.outcomes, takes_ns)
    ratio, quiet_ns = step_ratio(gaps), gaps.quiet_ns
    if ratio is None or quiet_ns is None:
        return Abstention(why="cannot tell: too few tokens came while a prompt was computed, as the client saw it")
    if ratio < MIN_RATIO:
        return None
    lost_ns = stalled_ns(gaps)
    share = of_outcomes(lost_ns, found.outcomes)
    if not share.is_worth_it:
        return share.unsure()
    facts = (
        Fact("gap between chunks, nobody's prompt computed, usual", ms(quiet_ns), "ms"),
        Fact("while one is, usual", ms(gaps.during_ns or 0.0), "ms"),
        Fact("such gaps", f"{len(gaps.during)} of {len(gaps.during) + len(gaps.quiet)}"),
    )
    return _finding(found, quiet_ns, gaps.during_ns or 0.0, share, facts, lost_ns)


def _by_server(found: Reported, takes_ns: float) -> Answer:
    """Gaps are counted with the lower edge of their bucket: at least so long."""
    if found.grew(found.words.preemptions):
        return Abstention(why="cannot tell: requests that were thrown out of the KV cache stand still too")
    buckets = found.buckets(found.words.itl_s)
    count = sum(number for _, _, number in buckets)
    if not count:
        return Abstention(why=found.lacks("how far apart tokens come, or none came"))
    usual_s = next(high for i, (_, high, _) in enumerate(buckets) if sum(n for *_, n in buckets[: i + 1]) * 2 >= count)
    most_s = AS_LONG * takes_ns / 1e9
    long = [(low, number) for low, _, number in buckets if MIN_RATIO * usual_s <= low <= most_s and number > 0]
    if not long or takes_ns < MIN_RATIO * usual_s * 1e9:
        return None
    lost_s = sum((low - usual_s) * number for low, number in long)
    share = counted(lost_s / max(1e-9, _felt_s(found)), int(sum(number for _, number in long)))
    if not share.is_worth_it:
        return share.unsure()
    facts = (
        Fact("gaps between tokens of three times the median and more", f"{sum(n for _, n in long):.0f} of {count:.0f}"),
    )
    return _finding(found, usual_s * 1e9, long[-1][0] * 1e9, share, facts, {})


def _felt_s(found: Reported) -> float:
    """Little's law: the mean number in the server times the time watched."""
    states = found.states
    span_s = (states[-1].at_ns - states[0].at_ns) / 1e9 if states else 0.0
    return span_s * sum(map(inside, states)) / max(1, len(states))


def _finding(
    found: Reported,
    quiet_ns: float,
    during_ns: float,
    share: Share,
    facts: tuple[Fact, ...],
    lost_ns: Mapping[str, float],
) -> Finding:
    tokens = _gentler(found, quiet_ns)
    apart = "end long prompts to a server of their own, or at another time."
    flag = found.words.budget
    return Finding(
        claim=f"A token comes every {quiet_ns / 1e6:.0f} ms, and every {during_ns / 1e6:.0f} ms while {found.kind} "
        f"computes another's prompt: {min(1.0, share.value):.0%} of the requests' time.",
        evidence=(*facts, Fact("a prompt takes, mean", ms(prefill_ns(found) or 0.0), "ms")),
        request_ids=worst(lost_ns),
        share_of_time=min(1.0, share.value),
        share_interval=share.interval,
        confidence=POSSIBLE,
        confidence_from="the client's gaps between chunks, in the time before another's first chunk that its server "
        "says a prompt takes; the server does not publish what was in a step"
        if lost_ns
        else "the server's own histograms of gaps and of prompts' times; what was in a step it does not publish",
        cure=Cure(
            sentence=f"S{apart}" if tokens is None else f"Fewer tokens in a step ({flag} {tokens}), or s{apart}",
            flags=() if tokens is None else (flag, str(tokens)),
            program=found.words.program,
        ),
        cost="Long prompts take longer until their first token.",
        counter_check="With the change and the same load the gaps while prompts are computed stay as long.",
        regime="long prompts beside running streams",
    )


def _gentler(found: Reported, quiet_ns: float) -> int | None:
    """A budget that is computed in about twice a quiet step, a power of two above what `reported_budget` calls small;
    None if it is no less than today's."""
    takes_ns, tokens, steps = prefill_ns(found), prompt_tokens(found), cut_into(found)
    if not takes_ns or not tokens:
        return None
    wanted = int(max(2.0 * SMALL_TOKENS, 2 * quiet_ns * tokens / takes_ns))
    gentle = 2 ** (wanted.bit_length() - 1)
    return gentle if gentle < (steps.tokens if steps is not None else tokens) else None
