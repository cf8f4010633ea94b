"""What another server's `/metrics` told during a run, in the words that rules need.

    reported(books) -> Reported     of a server that keeps no accounts

Gauges are as the client sampled them, counters grew between two scrapes, before and after the load: what other clients
did to the server meanwhile is in both. A counter that fell was reset by a restart, so no growth is told at all. What
the server has no metric for is None, and `Reported.lacks` says so in a sentence.

Every rule about another's server begins with `asked` or `with_states`: what it told, or an abstention that names what
is missing. By Little's law (1961) the share of the requests' time that is spent waiting is the mean number waiting over
the mean number in the server.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from splittime.bench.book.records import Outcome, Sample
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, RuleEnd
from splittime.diagnose.words import WORDS, MetricNames, Names, labels_of

WATCHED, PROBED = "watched", "probed"  # `bench.observation.ServerKind`


class Reported(NamedTuple):
    """states: samples with a number of waiting requests, while the load ran, in order. outcomes: the client's requests;
    none where it only watched. config: the labels in which the server tells its cache's settings. look: of a live one,
    whether it was WATCHED or PROBED; "" of a run."""

    kind: str
    words: MetricNames
    states: list[Sample]
    outcomes: list[Outcome]
    before: Mapping[str, float]
    after: Mapping[str, float]
    config: dict[str, str]
    is_restarted: bool
    look: str = ""

    def grew(self, names: Names, suffix: str = "") -> float | None:
        """Returns by how much a counter grew, over all its labels; None if it is not there, or was reset."""
        if self.is_restarted:
            return None
        return grown(tuple(name + suffix for name in names), self.before, self.after)

    def mean(self, names: Names) -> float | None:
        """Returns the mean of what a histogram saw between the scrapes."""
        total, count = self.grew(names, "_sum"), self.grew(names, "_count")
        return total / count if total is not None and count else None

    def buckets(self, names: Names) -> list[tuple[float, float, float]]:
        """A histogram's, from the lowest: their edges, and how many more are in each."""
        edges = {} if self.is_restarted else _buckets(names, self.before, self.after)
        rows = [(0.0, 0.0), *sorted(edges.items())]
        return [(low, high, at_high - at_low) for (low, at_low), (high, at_high) in pairwise(rows)]

    def quantile(self, names: Names, part: float) -> float | None:
        """The upper edge of the bucket that this part of a histogram's growth lies below; inf for the last one."""
        buckets = self.buckets(names)
        total, below = sum(number for _, _, number in buckets), 0.0
        for _, high, number in buckets:
            below += number
            if number > 0 and below >= part * total:
                return high
        return None

    @property
    def num_requests(self) -> float:
        """Requests that ended: by the server's own counter, or else the client's requests."""
        ended = self.grew(self.words.requests)
        return float(sum(o.end_ns is not None for o in self.outcomes)) if ended is None else ended

    def lacks(self, what: str, names: Names = ()) -> str:
        """Why something is not known; names: of the histogram that tells it, which may be there and empty."""
        if self.is_restarted:
            return f"{self.kind} was restarted during the run, so its counters tell nothing of it"
        if any(of_name(self.after, f"{name}_count") for name in names):
            return f"cannot tell {what}: no request ended in the time"
        return f"cannot tell: {self.kind} does not publish {what}"

    # ---- its KV cache

    @property
    def block_tokens(self) -> int | None:
        return _whole(self.config.get("block_size") or self.config.get("page_size"))

    @property
    def kv_tokens(self) -> int | None:
        """What the whole cache holds."""
        if size := _whole(self.config.get("kv_cache_size_tokens")):
            return size
        blocks = _whole(self.config.get("num_gpu_blocks") or self.config.get("num_pages"))
        if blocks and self.block_tokens:
            return blocks * self.block_tokens
        told_so = [value for name in self.words.kv_tokens for value in of_name(self.after, name)]
        return int(max(told_so)) if told_so else None

    @property
    def is_cache_on(self) -> bool | None:
        """The prefix cache, as its settings say."""
        return {"True": True, "False": False}.get(self.config.get("enable_prefix_caching", ""))

    @property
    def memory_flag(self) -> str:
        """What gives its KV cache more room."""
        if self.config.get("num_gpu_blocks_override", "None") != "None":
            return f"no --num-gpu-blocks-override (it is {self.config['num_gpu_blocks_override']}); {self.words.memory}"
        return self.words.memory


def reported(books: Books) -> Reported | None:
    """None of a server that keeps accounts, which say more, and of a kind whose words are not known."""
    about = books.served
    if books.run is None or about is None or books.accounts or about.kind not in WORDS:
        return None
    words = WORDS[about.kind]
    before, after = about.metrics_before, about.metrics_after
    outcomes = [outcome for outcome in books.run.outcomes if outcome.arm == books.arm]
    config = labels_of(after, words.config)
    look = str(books.run.settings.get("look", ""))
    counters = (words.prompts, words.outputs, words.hits, words.lookups, words.requests, words.preemptions)
    is_restarted = any((grown(names, before, after) or 0.0) < 0 for names in counters)
    return Reported(about.kind, words, _states(books, outcomes), outcomes, before, after, config, is_restarted, look)


def grown(names: Names, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """By what a counter grew, over all its labels; None if the later scrape has none of these names."""
    for name in names:
        found = of_name(after, name)
        if found:
            return sum(found) - sum(of_name(before, name))
    return None


def of_name(metrics: Mapping[str, float], name: str) -> list[float]:
    """The samples of this name, whatever their labels."""
    return [value for key, value in metrics.items() if key.split("{", 1)[0] == name]


def _buckets(names: Names, before: Mapping[str, float], after: Mapping[str, float]) -> dict[float, float]:
    """Returns, for each upper edge, how many more observations are at or below it."""
    found: dict[float, float] = {}
    for name in names:
        for key, value in after.items():
            if key.split("{", 1)[0] == f"{name}_bucket":
                edge = float(labels_of({key: value}, f"{name}_bucket").get("le", "inf"))
                found[edge] = found.get(edge, 0.0) + value - before.get(key, 0.0)
        if found:
            break
    return found


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def _states(books: Books, outcomes: list[Outcome]) -> list[Sample]:
    """The samples between the first request and the last end; all, where the client only watched."""
    assert books.run is not None
    samples = sorted((s for s in books.run.samples if s.arm == books.arm and s.waiting is not None), key=_at_ns)
    loaded = [o for o in outcomes if o.sent_ns is not None]
    if not loaded:
        return samples
    begin_ns = min(o.sent_ns or 0 for o in loaded)
    end_ns = max(o.end_ns or 0 for o in loaded)
    return [s for s in samples if begin_ns <= s.at_ns <= end_ns]


def _at_ns(sample: Sample) -> int:
    return sample.at_ns


MIN_STATES = 20  # samples; fewer are glimpses


def asked(books: Books) -> Reported:
    """Returns what was told. Raises `RuleEnd` with why nothing can be said."""
    about = books.served
    if about is None or books.accounts:
        raise RuleEnd(None)  # a server that keeps accounts is diagnosed by them
    found = reported(books)
    if found is None:
        raise RuleEnd(Abstention(why=f"a server of kind {about.kind} tells nothing in words that are known here"))
    if not found.after:
        raise RuleEnd(Abstention(why=f"{found.kind} shows no metrics ({found.words.metrics})"))
    return found


def with_states(books: Books) -> Reported:
    """As `asked`, and ends the rule unless the gauges were seen often enough."""
    found = asked(books)
    if len(found.states) < MIN_STATES:
        why = f"only {len(found.states)} samples of how many requests wait in the server; {MIN_STATES} are the least"
        hint = f" (does it show its metrics? {found.words.metrics})" if not found.states else ""
        raise RuleEnd(Abstention(why=why + hint))
    return found


def inside(state: Sample) -> float:
    """Requests in the server."""
    return (state.waiting or 0.0) + (state.running or 0.0)
