"""How another's server computes prompts: in too many small steps.

The server says how long a prompt takes (a histogram); into how many steps that is cut, and how long a step with a part
of a prompt takes beside one without, the chunks of the other streams tell (`diagnose.chunks`). A step with a piece that
takes hardly longer than one without wastes it: the pieces are too small. One that takes many times as long holds all
others up (`reported_interference`): the pieces are too large. So the two never prescribe the one flag in both
directions.

Streams of another's server stand still while it computes somebody else's prompt.

With a client's book the gaps between chunks tell it, in the time before another's first chunk that the server says a
prompt takes. A server that was only watched tells less: how many gaps of its own histogram are long, and that prompts
take as long. The prompts of a probe are none of the user's, so of an idle server nothing is said.
"""

from collections.abc import Mapping
from typing import NamedTuple

from splittime.diagnose.books import Books
from splittime.diagnose.chunks import Gaps, split, stalled_ns, steps_per_prompt
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import PROBED, Reported, asked, inside
from splittime.diagnose.rules.client import of_outcomes
from splittime.diagnose.rules.evidence import LIKELY, POSSIBLE, Share, counted, ms, worst

MIN_STEPS = 6  # of a prompt: fewer are no crumbs
SURELY_CUT = 3  # a prompt in fewer steps than this may be in one: a gap in a histogram is known to a factor of two
SMALL_TOKENS = 256  # of a prompt in a step: the least that any server has as its default is twice that
MAX_RATIO = 2.0  # a step with a piece to one without, where the piece is too small
MIN_STREAMS = 2.0  # at once, on average: one whose prompt is computed, and one beside it
USUAL_TOKENS = 2048  # what vLLM and SGLang start with
HARDLY = 0.1  # of the samples
NO_PREFILL = "how long the prompts of requests take to compute"


class Steps(NamedTuple):
    """Into how many steps one prompt is cut, and how many of its tokens are in each."""

    number: float
    tokens: float
    how: str
    is_least: bool = False  # there may be more of them


def prefill_ns(found: Reported) -> float | None:
    """How long a prompt takes, on average. While no request has ended, the time to first tokens, if nothing waits."""
    mean_s = found.mean(found.words.prefill_s)
    waiting = sum(bool(state.waiting) for state in found.states)
    if mean_s is None and found.words.prefill_s and waiting <= HARDLY * len(found.states):
        mean_s = found.mean(found.words.ttft_s)
    return None if mean_s is None else mean_s * 1e9


def prompt_tokens(found: Reported) -> float | None:
    """Computed ones of a request, on average."""
    prompts = found.grew(found.words.prompts)
    requests = found.grew(found.words.ttft_s, "_count") or found.num_requests
    hits = found.grew(found.words.hits) or 0.0
    return (prompts - hits) / requests if prompts is not None and requests else None


def cut_into(found: Reported) -> Steps | None:
    """None where that cannot be told."""
    takes_ns, tokens = prefill_ns(found), prompt_tokens(found)
    if not takes_ns or not tokens:
        return None
    number = steps_per_prompt(found.outcomes, takes_ns)
    is_least = number is None
    how = "chunks that other streams got meanwhile"
    if number is None:
        longest_s = _longest_gap_s(found)
        if longest_s is None:
            return None
        number, how = takes_ns / (longest_s * 1e9), "at least, by the longest gaps between tokens in its histogram"
    return Steps(max(1.0, number), tokens / max(1.0, number), how, is_least)


def _longest_gap_s(found: Reported) -> float | None:
    """A prompt that is computed in one step leaves each stream beside it one gap as long: one in as many as an answer
    has tokens. So gaps that are rarer than half of that are something else. None if there were hardly two streams."""
    outputs = found.grew(found.words.outputs)
    if not found.states or sum(s.running or 0.0 for s in found.states) < MIN_STREAMS * len(found.states):
        return None
    if not outputs or not found.num_requests:
        return None
    return found.quantile(found.words.itl_s, 1 - 0.5 / max(1.0, outputs / found.num_requests))


def small_steps(found: Reported) -> Steps | None:
    """The steps, where they are too many and too small."""
    steps = cut_into(found)
    if steps is None or steps.number < MIN_STEPS or steps.tokens > SMALL_TOKENS:
        return None
    gaps = split(found.outcomes, prefill_ns(found) or 0.0)
    ratio = step_ratio(gaps)
    return steps if ratio is None or ratio <= MAX_RATIO else None


def step_ratio(gaps: Gaps) -> float | None:
    """A step with a part of a prompt to one without."""
    return gaps.during_ns / gaps.quiet_ns if gaps.during_ns and gaps.quiet_ns else None


@rule("reported", root_of=("overload", "reported_queue", "reported_slots"))
def reported_budget(books: Books) -> Answer:
    """Another server cuts prompts into many steps that take hardly longer than steps without them."""
    found = asked(books)
    if prefill_ns(found) is None:
        return Abstention(why=found.lacks(NO_PREFILL, found.words.prefill_s))
    if cut_into(found) is None:
        why = "cannot tell: no other stream had its tokens while a prompt was computed"
        return Abstention(why=why)
    steps = small_steps(found)
    if steps is None:
        return _may_be_small(cut_into(found))
    share = _share_before_first(found, 1 - 1 / steps.number)
    return _budget(found, steps, share) if share.is_worth_it else share.unsure()


def _may_be_small(steps: Steps | None) -> Abstention | None:
    """A bound that is only a least number does not rule out that there are more."""
    if steps is None or not steps.is_least or not SURELY_CUT <= steps.number < MIN_STEPS:
        return None
    why = f"cannot tell: a prompt is computed in {steps.number:.0f} steps {steps.how}, and {MIN_STEPS} would be many"
    return Abstention(why=f"{why}; a run of `splittime bench` tells how many")


def _share_before_first(found: Reported, part: float) -> Share:
    """Returns this part of the time to first chunks; by the server's own histograms where there is no client's book."""
    first_ns = {
        o.request_id: part * (o.chunk_ns[0] - (o.sent_ns or o.intended_ns)) for o in found.outcomes if o.chunk_ns
    }
    if first_ns:
        return of_outcomes(first_ns, found.outcomes)
    takes_s = (found.mean(found.words.prefill_s) or 0.0) + (found.mean(found.words.queue_s) or 0.0)
    e2e_s = found.mean(found.words.e2e_s)
    return counted(part * takes_s / e2e_s if e2e_s else 0.0, int(found.num_requests or 0))


def _budget(found: Reported, steps: Steps, share: Share) -> Finding:
    return Finding(
        claim=f"{found.kind} computes a prompt in {steps.number:.0f} steps of about {steps.tokens:.0f} of its tokens: "
        f"at most {share.value:.0%} of the requests' time goes by before their first tokens because of it.",
        evidence=(
            Fact("a prompt takes, mean", ms(prefill_ns(found) or 0.0), "ms"),
            Fact("steps in that time", round(steps.number, 1), steps.how),
            Fact("computed tokens of a prompt, mean", round(prompt_tokens(found) or 0.0), "tokens"),
            Fact("a step with a part of a prompt, to one without", _told_ratio(found)),
        ),
        request_ids=worst({o.request_id: o.chunk_ns[0] - o.intended_ns for o in found.outcomes if o.chunk_ns}),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="its histogram of prefill times against the steps that were seen in them; the queue for the "
        "budget is in the share",
        cure=Cure(
            sentence=f"More tokens in a step ({found.words.budget} {USUAL_TOKENS}).",
            flags=(found.words.budget, str(USUAL_TOKENS)),
            program=found.words.program,
        ),
        cost="The gaps between the others' tokens grow while a prompt is computed.",
        counter_check="With the larger budget and the same load prefill time does not fall.",
        regime="prompts much longer than a step's budget",
    )


def _told_ratio(found: Reported) -> str:
    ratio = step_ratio(split(found.outcomes, prefill_ns(found) or 0.0))
    return "not told" if ratio is None else f"{ratio:.1f} times"


MIN_RATIO = 3.0  # a step with a part of a prompt to one without, where the part is too large
AS_LONG = 2.0  # a gap beyond so many times what a prompt takes is not a prompt's doing


@rule("reported", root_of=("reported_queue",))
def reported_interference(books: Books) -> Answer:
    """Streams stand still while another server computes somebody else's prompt."""
    found = asked(books)
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
    share = of_outcomes(lost_ns, found.outcomes).require()
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
    share = counted(lost_s / max(1e-9, _felt_s(found)), int(sum(number for _, number in long))).require()
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
    takes_ns, tokens, steps = (prefill_ns(found), prompt_tokens(found), cut_into(found))
    if not takes_ns or not tokens:
        return None
    wanted = int(max(2.0 * SMALL_TOKENS, 2 * quiet_ns * tokens / takes_ns))
    gentle = 2 ** (wanted.bit_length() - 1)
    return gentle if gentle < (steps.tokens if steps is not None else tokens) else None
