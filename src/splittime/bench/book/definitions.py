"""What each word of a report means, in a sentence: printed under every table and in every page."""

from splittime.bench.book.rates import DRIFT_CONFIDENCE, DRIFT_MARGIN
from splittime.bench.book.requests import MAX_UNSEEN_SHARE
from splittime.stats.intervals import CONFIDENCE, MIN_FOR_LOW, MIN_INDEPENDENT, MOST_ABOVE

DEFINITIONS = (
    ("response time", "from the intended start to the end. What a user waits: a late client or a full pool is in it."),
    ("service time", "from the request's last byte given to the socket to the end. What most tools publish."),
    ("TTFT", "time to the first chunk with content; response TTFT from the intended start, service TTFT from sent."),
    ("E2E", "time to the end of the answer; response E2E from the intended start, service E2E from sent."),
    (
        "TPOT",
        "(E2E - TTFT) / (output tokens - tokens in the first chunk), the same by both clocks. Where chunks tell no "
        f"tokens, the first is taken for one token if at most {MAX_UNSEEN_SHARE:.0%} of the tokens came without a "
        "chunk of their own; otherwise TPOT is not known.",
    ),
    ("chunk gap", "between chunks with content, as the client read them; all gaps of all requests together."),
    ("token gap", "the chunk gap, and 0 between tokens that came in one chunk; only where chunks tell their tokens."),
    ("ITL", "between tokens by the server's own clock, from its accounts; only of a splittime server."),
    ("max stall", "a request's longest chunk gap."),
    (
        "schedule lag",
        "from the intended start to when the client turned to the request, less what it was held back on purpose.",
    ),
    (
        "start lag",
        "from the intended start to sent, less what it was held back on purpose and what connecting took: all that the "
        "client itself was late; checked, not shown.",
    ),
    (
        "throughput",
        "tokens that arrived, or requests that ended whole, within the measured window, whichever phase they belong to,"
        " over its length: neither ramp nor tail biases it. A chunk that tells no tokens has its request's mean.",
    ),
    (
        "goodput",
        "intended requests answered whole within every per-request limit / all intended. What failed, was refused,"
        " timed out or was never sent counts against; what the schedule cancelled is left out. So for the error rate.",
    ),
    ("window", "what was intended in it is measured; no drain before it. Latencies are of its complete requests."),
    ("percentiles", "nearest rank: a value that did occur."),
    (
        "intervals",
        f"{CONFIDENCE:.0%}: neighbours share a queue, so n requests are worth fewer independent ones, by their "
        f"autocorrelation. An end shown as .. cannot be known from so few; below {MIN_FOR_LOW} independent ones there "
        f"is no interval, below {MIN_INDEPENDENT} no upper end, nor where it would be over {MOST_ABOVE:.0f} times the "
        "figure. It reaches further up than down: a run that met no long queue cannot show it.",
    ),
    (
        "drift",
        f"the second half's mean over the first half's, {DRIFT_CONFIDENCE:.0%} interval; steady if wholly within "
        f"{DRIFT_MARGIN:.0%}, rising or falling if it leaves out 1, else unclear.",
    ),
)
