"""What every rule about another's server begins with: what it told, or an abstention that names what is missing.

The rules themselves: `reported_queue` (what waits inside, and for what), `reported_memory` (its KV cache),
`reported_prompts` (the prefix cache, and how prompts are cut into steps). They read gauges that were sampled from
outside and counters that grew (`diagnose.reported`). By Little's law (1961) the share of the requests' time that is
spent waiting is the mean number waiting over the mean number in the server.
"""

from splittime.bench.book.records import Sample
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer
from splittime.diagnose.reported import Reported, reported

MIN_STATES = 20  # samples; fewer are glimpses


def asked(books: Books, name: str) -> Reported | Answer:
    """What was told, or why nothing can be said."""
    about = books.served
    if about is None or books.accounts:
        return None  # a server that keeps accounts is diagnosed by them
    found = reported(books)
    if found is None:
        return Abstention(name, f"a server of kind {about.kind} tells nothing in words that are known here")
    if not found.after:
        return Abstention(name, f"{found.kind} shows no metrics ({found.words.metrics})")
    return found


def with_states(books: Books, name: str) -> Reported | Answer:
    """The same of a server whose gauges were seen often enough."""
    found = asked(books, name)
    if isinstance(found, Reported) and len(found.states) < MIN_STATES:
        why = f"only {len(found.states)} samples of how many requests wait in the server; {MIN_STATES} are the least"
        hint = f" (does it show its metrics? {found.words.metrics})" if not found.states else ""
        return Abstention(name, why + hint)
    return found


def inside(state: Sample) -> float:
    """Requests in the server."""
    return (state.waiting or 0.0) + (state.running or 0.0)
