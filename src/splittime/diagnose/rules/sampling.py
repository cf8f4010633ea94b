"""Choosing tokens that takes as long as computing them."""

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import CERTAIN, median, ms, served, slowest_steps, worst
from splittime.diagnose.rules.share import of_requests

SAMPLE_SHARE = 0.2  # of the requests' time: an argmax or a plain draw takes a few hundredths


@rule("accounts", "steps", root_of=("overload", "slot_bound"), explains=(Computed.SAMPLE,))
def sampling_bound(books: Books) -> Answer:
    """Choosing the tokens takes a large part of each step."""
    accounts = served(books.accounts)
    lost = attribution(books).of(Computed.SAMPLE)
    share = of_requests(lost, accounts, SAMPLE_SHARE)
    if not share.is_worth_it:
        return share.unsure("sampling_bound")
    of_step = [s.sample_ns / max(1, s.end_ns - s.begin_ns) for s in books.steps if s.decode_tokens]
    rows = sum(s.decode_tokens for s in books.steps)
    each_ns = sum(s.sample_ns for s in books.steps) / max(1, rows)
    return Finding(
        name="sampling_bound",
        claim=f"Choosing tokens takes {median(of_step) or 0:.0%} of a step (median), {ms(each_ns):.2f} ms for each "
        f"token: "
        f"{share.value:.0%} of all requests' time.",
        evidence=(
            Fact("sampling, the median step", ms(median(s.sample_ns for s in books.steps) or 0), "ms"),
            Fact("device, the median step", ms(median(s.device_ns for s in books.steps) or 0), "ms"),
            Fact("for each sampled token", ms(each_ns), "ms"),
            Fact("requests' time in it", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        step_ids=slowest_steps(s for s in books.steps if s.sample_ns > s.device_ns / 2),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="each step's own split, which sums to its length",
        cure=Cure(
            sentence="Ask for less with each token: fewer logprobs (`logprobs`, `top_logprobs`), no penalties, no "
            "logit_bias, no grammar where none is needed, top_k before top_p; temperature 0 is the cheapest."
        ),
        cost="Answers without what is not asked for any more; other draws, where top_k is new.",
        counter_check="With plain requests (temperature 0, nothing else) of the same lengths sampling takes as long.",
        regime="small models, whose steps are short beside what is done with their vocabulary",
    )
