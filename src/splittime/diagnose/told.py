"""What another server's `/metrics` told during a run, in the words that rules need.

    told(books) -> Told     of a server that keeps no accounts; each part is None where the server has no such metric

Gauges are as the client sampled them, counters grew between two scrapes, before and after the load: what other clients
did to the server meanwhile is in both. A counter that fell was reset by a restart, so no growth is told at all.
"""

from collections.abc import Mapping
from typing import NamedTuple

from splittime.diagnose.books import Books
from splittime.ledger.client_book import Sample


class Words(NamedTuple):
    """A kind of server's names for what is read here, today's first; () where it has none. `flag_*`: its own settings.

    hits: prompt tokens that came from its prefix cache. prefill_s: the sum over requests of the time of their prefills.
    """

    preemptions: tuple[str, ...] = ()
    hits: tuple[str, ...] = ()
    prefill_s: tuple[str, ...] = ()
    flag_slots: str = ""
    flag_memory: str = ""
    flag_prefixes: str = ""
    flag_metrics: str = ""


WORDS: dict[str, Words] = {
    "vllm": Words(
        preemptions=("vllm:num_preemptions_total",),
        hits=("vllm:prefix_cache_hits_total",),
        prefill_s=("vllm:request_prefill_time_seconds_sum",),
        flag_slots="--max-num-seqs",
        flag_memory="--gpu-memory-utilization or --kv-cache-dtype fp8",
        flag_prefixes="--enable-prefix-caching",
        flag_metrics="leave out --disable-log-stats",
    ),
    "sglang": Words(
        preemptions=("sglang:num_retracted_requests_total",),
        hits=("sglang:cached_tokens_total",),
        flag_slots="--max-running-requests",
        flag_memory="--mem-fraction-static or --kv-cache-dtype fp8_e5m2",
        flag_prefixes="no --disable-radix-cache",
        flag_metrics="--enable-metrics",
    ),
    "tgi": Words(
        flag_slots="--max-batch-size",
        flag_memory="--max-batch-total-tokens",
        flag_prefixes="PREFIX_CACHING=1",
        flag_metrics="--prometheus-port",
    ),
    "llama.cpp": Words(
        hits=("llamacpp:prompt_tokens_cached_total",),
        flag_slots="--parallel",
        flag_memory="--ctx-size or --cache-type-k q8_0",
        flag_prefixes="--cache-reuse 256, and requests of one prefix to one slot (id_slot)",
        flag_metrics="--metrics",
    ),
}


class Told(NamedTuple):
    """states: samples with a number of waiting requests, while the load ran, in order."""

    kind: str
    words: Words
    states: list[Sample]
    preemptions: float | None
    hit_tokens: float | None
    prefill_s: float | None
    is_restarted: bool


def told(books: Books) -> Told | None:
    """None of a server that keeps accounts, which say more, and of a kind whose words are not known."""
    about = books.served
    if books.run is None or about is None or books.accounts or about.kind not in WORDS:
        return None
    words = WORDS[about.kind]
    before, after = about.metrics_before, about.metrics_after
    preemptions, hits, prefill_s = (
        grown(names, before, after) for names in (words.preemptions, words.hits, words.prefill_s)
    )
    grew = (preemptions, hits, prefill_s)
    is_restarted = any(growth is not None and growth < 0 for growth in grew)
    if is_restarted:
        preemptions = hits = prefill_s = None
    return Told(about.kind, words, _states(books), preemptions, hits, prefill_s, is_restarted)


def grown(names: tuple[str, ...], before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """By what a counter grew, over all its labels; None if the later scrape has none of these names."""
    for name in names:
        of_name = [key for key in after if key.split("{", 1)[0] == name]
        if of_name:
            return sum(after[key] for key in of_name) - sum(
                value for key, value in before.items() if key.split("{", 1)[0] == name
            )
    return None


def _states(books: Books) -> list[Sample]:
    assert books.run is not None
    loaded = [o for o in books.run.outcomes if o.arm == books.arm and o.sent_ns is not None]
    begin_ns = min((o.sent_ns or 0 for o in loaded), default=0)
    end_ns = max((o.end_ns or 0 for o in loaded), default=0)
    samples = [s for s in books.run.samples if s.arm == books.arm and begin_ns <= s.at_ns <= end_ns]
    return sorted((s for s in samples if s.waiting is not None), key=lambda sample: sample.at_ns)
