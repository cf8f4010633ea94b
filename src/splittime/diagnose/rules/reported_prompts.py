"""How another's server computes prompts: in too many small steps.

The server says how long a prompt takes (a histogram); into how many steps that is cut, and how long a step with a part
of a prompt takes beside one without, the chunks of the other streams tell (`diagnose.chunks`). A step with a piece that
takes hardly longer than one without wastes it: the pieces are too small. One that takes many times as long holds all
others up (`reported_interference`): the pieces are too large. So the two never prescribe the one flag in both
directions.
"""

from typing import NamedTuple

from splittime.diagnose.books import Books
from splittime.diagnose.chunks import Gaps, split, steps_per_prompt
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import Reported, asked
from splittime.diagnose.rules.client import of_outcomes
from splittime.diagnose.rules.evidence import LIKELY, ms, worst
from splittime.diagnose.rules.share import Share, counted

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
    if not isinstance(found, Reported):
        return found
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
