"""What the answers themselves tell of faults: of the workload, of the server, of what lies between.

Only one of these voids a run: prompts that were found in the server's prefix cache beyond what was meant, because then
the figures are about the cache. The rest are notes: the figures stand, and mean what the sentence says.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from splittime.ledger.client_book import Check, Ending, Outcome
from splittime.ledger.derive import percentile

CONTAMINATION_LIMIT = 0.05
STEP_BAND_MS = (38.0, 44.5)  # Linux acknowledges after 40 ms when it has nothing to send
STEP_SHARE_LIMIT = 0.02
MIN_GAPS = 50
TOGETHER_SHARE = 0.1  # of the mean gap: chunks closer than that came together
TOGETHER_NS = 50_000  # and so did those closer than that, whatever the mean
CLUSTERED_LIMIT = 0.6
MIN_CHUNKS = 8


def audit_answers(measured: Sequence[Outcome]) -> list[Check]:
    """The checks that have something to go by."""
    whole = [outcome for outcome in measured if outcome.ending is Ending.COMPLETE]
    found = [_cached(whole), _lengths(whole), _prompts(whole), _steps(whole), _buffered(whole)]
    return [check for check in found if check is not None]


def _lengths(whole: Sequence[Outcome]) -> Check | None:
    return _as_expected(
        "output_length", "answers", "asked", whole, lambda o: (o.expected_output_tokens, o.output_tokens)
    )


def _prompts(whole: Sequence[Outcome]) -> Check | None:
    return _as_expected(
        "prompt_length", "prompts", "expected", whole, lambda o: (o.expected_prompt_tokens, o.prompt_tokens)
    )


def _as_expected(
    name: str,
    things: str,
    verb: str,
    whole: Sequence[Outcome],
    lengths: Callable[[Outcome], tuple[int | None, int | None]],
) -> Check | None:
    """Whether a length that the server told is the one that was meant."""
    pairs = [(meant, told) for meant, told in map(lengths, whole) if meant is not None]
    told = [(meant, told) for meant, told in pairs if told is not None]
    if not pairs:
        return None
    if not told:
        sentence = f"the server does not tell its token counts: whether {things} were as long as {verb} is not known"
        return Check(name=name, ok=False, value=None, limit=None, unit="", sentence=sentence, voids=False)
    wrong = [(meant, found) for meant, found in told if meant != found]
    sentence = f"all {len(told)} {things} had as many tokens as {verb}"
    if wrong:
        mean = sum(found - meant for meant, found in wrong) / len(wrong)
        sentence = f"{len(wrong)} of {len(told)} {things} were not as long as {verb}: {mean:+.1f} tokens on average"
    share = len(wrong) / len(told)
    return Check(name=name, ok=not wrong, value=share, limit=0, unit="", sentence=sentence, voids=False)


def _cached(whole: Sequence[Outcome]) -> Check | None:
    """Prefix hits beyond the expected ones, as a share of all prompt tokens."""
    told = [o for o in whole if o.cached_tokens is not None and o.expected_cached_tokens is not None]
    prompt_tokens = sum(o.prompt_tokens or o.expected_prompt_tokens or 0 for o in told)
    if not prompt_tokens:
        return None
    cached = sum(o.cached_tokens or 0 for o in told) / prompt_tokens
    expected = sum(o.expected_cached_tokens or 0 for o in told) / prompt_tokens
    sentence = f"{cached:.1%} of the prompt tokens were cached, {expected:.1%} expected"
    ok = cached <= expected + CONTAMINATION_LIMIT
    if not ok:
        sentence += ": prompts were seen before, use another --seed or restart the server"
    return Check(name="cached", ok=ok, value=cached, limit=expected + CONTAMINATION_LIMIT, unit="", sentence=sentence)


def chunk_gaps_ns(outcome: Outcome) -> list[int]:
    return [later - earlier for earlier, later in pairwise(outcome.chunk_ns)]


def _steps(whole: Sequence[Outcome]) -> Check | None:
    """Gaps of about 40 ms among shorter ones: a server that waits for an acknowledgement (Nagle) before it sends."""
    gaps = [gap / 1e6 for outcome in whole for gap in chunk_gaps_ns(outcome)]
    low, high = STEP_BAND_MS
    if len(gaps) < MIN_GAPS or (percentile(gaps, 50) or 0.0) > low / 2:
        return None
    width = high - low
    inside = sum(low <= gap < high for gap in gaps)
    beside = sum(low - width <= gap < low or high <= gap < high + width for gap in gaps) / 2
    share = inside / len(gaps)
    ok = share <= STEP_SHARE_LIMIT or inside <= 4 * beside
    sentence = f"{share:.1%} of the gaps between chunks are steps of 40 ms"
    if not ok:
        sentence += ": the server, or a proxy, sends with Nagle's algorithm (set TCP_NODELAY there)"
    limit = STEP_SHARE_LIMIT
    return Check(name="steps_40ms", ok=ok, value=share, limit=limit, unit="", sentence=sentence, voids=False)


def clustered_share(outcome: Outcome) -> float | None:
    """The share of gaps far shorter than the mean gap: near 0 for a stream, near 1 for one that was buffered."""
    gaps = chunk_gaps_ns(outcome)
    if len(gaps) < MIN_CHUNKS - 1:
        return None
    together_ns = max(TOGETHER_NS, TOGETHER_SHARE * sum(gaps) / len(gaps))
    return sum(gap < together_ns for gap in gaps) / len(gaps)


def _buffered(whole: Sequence[Outcome]) -> Check | None:
    shares = [share for outcome in whole if (share := clustered_share(outcome)) is not None]
    value = percentile(shares, 50)
    if value is None:
        return None
    ok = value <= CLUSTERED_LIMIT
    sentence = f"{value:.0%} of the chunks came together with the one before"
    if not ok:
        sentence += ": something buffers the stream, so TTFT is too long and gaps are too short"
    limit = CLUSTERED_LIMIT
    return Check(name="buffered", ok=ok, value=value, limit=limit, unit="", sentence=sentence, voids=False)
