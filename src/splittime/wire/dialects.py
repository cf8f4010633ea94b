"""How one kind of server speaks of itself on `/metrics`: which of its names is which of our quantities, and what to
mind when reading it. A dialect is data; `read` reads by it, `bench.join_view` shows it beside what the client
measured.

Everything is read between two scrapes, before and after the load. So other clients of the same server are in it too,
and what was in flight at a scrape is in it in part.

A counter that fell was reset by a restart in between: what it grew by is then what it shows, since the restart, and
`read` says so. What is not there is left out, never 0.

Metrics in Prometheus' text form, read.

    parse(text)             every sample by its name with labels, as the server wrote it, labels in alphabetical order
    parse(text, names)      a few names only, at little cost: for scraping while a load runs
    labels(samples, name)   what a server tells in labels, such as its settings
    values(samples, name)   the samples of one name: of all its label values, or of those asked for

(prometheus_client's own parser gives counters other names than the server does, and takes five times as long.)

The dialects of vLLM, TGI, SGLang and llama.cpp.

* vLLM: after the metrics of version 0.32.0 (its code, and a recorded `/metrics`).
* Text Generation Inference (TGI): after the names and definitions in the code of its version 3; not run here.
* SGLang: after the names and definitions in its code as of 2026 (the 0.5 versions); not run here.
* llama.cpp's `llama-server`: after the code inside llama-cpp-python 0.3.36, and a recorded `/metrics`.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")  # name {labels} value time stamp
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, float]


def parse(text: str, names: tuple[str, ...] | None = None) -> Samples:
    """Every sample, or those of some names, by name with labels. Lines that are no samples are passed over."""
    found: Samples = {}
    for line in text.split("\n"):
        if names is not None and not line.startswith(names):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or (names is not None and match[1] not in names):
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if math.isfinite(value):  # NaN, as a summary has it that saw nothing yet, tells nothing; JSON has no word
                found[_key(match[1], match[2])] = value
    return found


def _key(name: str, labels: str | None) -> str:
    """`name{a="1",b="2"}`, or the bare name."""
    pairs = sorted(_LABEL.findall(labels)) if labels else []
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name


def labels(samples: Samples, name: str) -> dict[str, str]:
    """The labels of the first sample of this name; {} if there is none."""
    key = next((key for key in samples if key.startswith(name + "{")), "")
    return dict(_LABEL.findall(key))


def values(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
    """Returns what samples of this name say, of all label values or of those with these."""
    pairs = [f'{label}="{value}"' for label, value in (labels or {}).items()]

    def is_wanted(key: str) -> bool:
        rest = key.removeprefix(name)
        is_of_name = key == name or (len(rest) < len(key) and rest.startswith("{"))
        return is_of_name and all("{" + pair in rest or "," + pair in rest for pair in pairs)

    return [value for key, value in samples.items() if is_wanted(key)]


class Notation(StrEnum):
    MEAN = "mean"  # of a histogram or summary: growth of NAME_sum over growth of NAME_count
    GROWTH = "growth"  # of a counter
    PER = "per"  # growth of one counter over growth of another, `per`
    STATE = "state"  # a gauge, as sampled during the load


class Quantity(NamedTuple):
    """One of our words in one of a server's.

    name: as in the docstring of `bench.join_view`. older: names that earlier versions gave it.
    trap: a sentence on what the server means by it, where that is not what one would think.
    """

    name: str
    metric: str
    trap: str = ""
    form: Notation = Notation.MEAN
    per: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    older: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return UNITS.get(self.name, "s")


mean = partial(Quantity, form=Notation.MEAN)
growth = partial(Quantity, form=Notation.GROWTH)
ratio = partial(Quantity, form=Notation.PER)
state = partial(Quantity, form=Notation.STATE)
UNITS = {
    **dict.fromkeys(("requests", "refused", "waiting", "running", "deferred"), "requests"),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "prefix_hit_tokens"), "tokens"),
    **dict.fromkeys(("preemptions", "preempted"), "preemptions"),
    **dict.fromkeys(("prefix_hits", "kv_usage"), "share"),
    "steps": "steps",
}


class Dialect(NamedTuple):
    """cannot: what no metric of it tells. beware: sentences that belong to no one quantity.
    cheap_path: answers without a model. metrics_hint: how to get metrics from a server that shows none.
    cache_config, block_label: the gauge whose labels are its cache's settings, and the label of a block's tokens.
    """

    kind: str
    prefix: str
    quantities: tuple[Quantity, ...]
    cannot: tuple[str, ...]
    cheap_path: str
    metrics_hint: str
    beware: tuple[str, ...] = ()
    cache_config: str = ""
    block_label: str = ""

    def metrics(self, name: str) -> tuple[str, ...]:
        """The server's own names of a quantity, today's first; none if it has none."""
        return next(((quantity.metric, *quantity.older) for quantity in self.quantities if quantity.name == name), ())

    def state_values(self, name: str, samples: Samples) -> list[float]:
        """Returns what a scrape says of a state, of each of the server's engines."""
        labels = next((dict(quantity.labels) for quantity in self.quantities if quantity.name == name), {})
        return [value for metric in self.metrics(name) for value in values(samples, metric, labels)]


def states(waiting: str, running: str, waiting_trap: str = "", running_trap: str = "") -> tuple[Quantity, ...]:
    """The two gauges that every server has."""
    return state("waiting", waiting, waiting_trap), state("running", running, running_trap)


RESTARTED = "A counter fell between the scrapes: the server was restarted, and what it told covers the time since."


class Stated(NamedTuple):
    """One quantity as the server tells it. observations: how many a mean is of."""

    quantity: Quantity
    metric: str
    value: float
    observations: float | None = None


class Reading(NamedTuple):
    told: tuple[Stated, ...]
    notes: tuple[str, ...]


def read(dialect: Dialect, before: Samples, after: Samples) -> Reading:
    """All quantities that are there, but for the states, which two scrapes cannot tell."""
    growth = Growth(before, after)
    found = [known for quantity in dialect.quantities if (known := _read_one(quantity, growth)) is not None]
    return Reading(tuple(found), (RESTARTED,) if growth.has_reset else ())


class Growth:
    """What counters grew by between two scrapes; notices resets."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after
        self.has_reset = False

    def of(self, name: str, labels: Mapping[str, str]) -> float | None:
        """None if the later scrape has no such counter. One that appeared meanwhile grew from 0."""
        found = values(self._after, name, labels)
        if not found:
            return None
        after, before = sum(found), sum(values(self._before, name, labels))
        if after < before:
            self.has_reset = True
            return after
        return after - before


def _read_one(quantity: Quantity, growth: Growth) -> Stated | None:
    if quantity.form is Notation.STATE:
        return None
    labels = dict(quantity.labels)
    for metric in (quantity.metric, *quantity.older):
        if quantity.form is Notation.GROWTH:
            grown = growth.of(metric, labels)
            if grown is not None:
                return Stated(quantity, metric, grown)
            continue
        above, below = (
            (metric + "_sum", metric + "_count") if quantity.form is Notation.MEAN else (metric, quantity.per)
        )
        part, whole = growth.of(above, labels), growth.of(below, labels)
        if part is not None and whole:
            return Stated(quantity, metric, part / whole, whole)
    return None


VLLM = Dialect(
    kind="vllm",
    prefix="vllm:",
    quantities=(
        mean(
            "queue",
            "vllm:request_queue_time_seconds",
            "From the engine's queue to the first step that has it; the way from the API process to the engine and "
            "a later wait after a preemption are not in it.",
        ),
        mean(
            "prefill",
            "vllm:request_prefill_time_seconds",
            "From the first step that has it to its first token: waits between the chunks of its prompt and "
            "preemptions are inside, unnamed.",
        ),
        mean(
            "decode",
            "vllm:request_decode_time_seconds",
            "From its first token to its last, with every stall and preemption between them.",
        ),
        mean(
            "ttft",
            "vllm:time_to_first_token_seconds",
            "By the wall clock, from arrival in the API process until that process handles the first output: the queue "
            "is in it, the network, the client's lateness and the writing are not. (The field of that name in a "
            "response counts from the first step instead.)",
        ),
        mean(
            "itl",
            "vllm:inter_token_latency_seconds",
            "One value an output of the engine, not a token: with speculative decoding several tokens count as one.",
            older=("vllm:time_per_output_token_seconds",),
        ),
        mean(
            "tpot",
            "vllm:request_time_per_output_token_seconds",
            "Decode time over the tokens after the first; a request of one token counts as 0.",
        ),
        mean("e2e", "vllm:e2e_request_latency_seconds", "Counted when the request has ended."),
        growth("requests", "vllm:request_success_total", "Aborted ones are among them."),
        growth("prompt_tokens", "vllm:prompt_tokens_total", "Cached ones are counted too."),
        growth("output_tokens", "vllm:generation_tokens_total"),
        ratio(
            "prefix_hits",
            "vllm:prefix_cache_hits_total",
            "Tokens found over tokens looked up; whole blocks only, so a short prompt never hits.",
            per="vllm:prefix_cache_queries_total",
        ),
        growth(
            "prefix_hit_tokens",
            "vllm:prompt_tokens_cached_total",
            "Of all its caches; prompt_tokens_cached_by_source_total says which.",
        ),
        growth("preemptions", "vllm:num_preemptions_total"),
        mean("preempted", "vllm:request_num_preemptions", "Of a request that ended, how often it was thrown out."),
        growth(
            "refused",
            "vllm:admission_rejections_total",
            "Turned away at --max-num-queued-reqs or --max-num-queued-tokens.",
        ),
        growth(
            "steps",
            "vllm:iteration_tokens_total_count",
            "Steps that brought a token. (The histogram's sum is not of tokens computed: a prompt cut into many "
            "steps is counted whole in the one of its first token.)",
        ),
        state(
            "deferred",
            "vllm:num_requests_waiting_by_reason",
            "Of the waiting ones, those that wait for something of their own: a grammar, an adapter, a transfer.",
            labels=(("reason", "deferred"),),
        ),
        *states(
            "vllm:num_requests_waiting",
            "vllm:num_requests_running",
            "Of the last step that was reported; an engine that is busy reports late.",
        ),
        state(
            "kv_usage",
            "vllm:kv_cache_usage_perc",
            "0 to 1, in spite of its name.",
            older=("vllm:gpu_cache_usage_perc",),
        ),
    ),
    cannot=(
        "why a request waited: there is a count of waiting requests by reason (capacity, deferred), and no time",
        "which requests made another wait: a prefill beside a decode shows only as a slower decode",
        "any one request: all is pooled, and a percentile is only known to lie between two edges of a histogram",
        "tokenising, the way to the engine and back, and writing to the socket: they are in TTFT and E2E, unnamed",
        "the network and the client",
    ),
    cache_config="vllm:cache_config_info",
    block_label="block_size",
    cheap_path="/health",
    metrics_hint="It was started with --disable-log-stats, or something between hides /metrics.",
)
TGI = Dialect(
    kind="tgi",
    prefix="tgi_",
    quantities=(
        mean(
            "tokenize",
            "tgi_request_validation_duration",
            "Tokenising and checking, with the wait for a free worker that does it.",
        ),
        mean("queue", "tgi_request_queue_duration", "From having been checked to being put into a batch."),
        mean(
            "prefill",
            "tgi_batch_inference_duration",
            "Of a prefill batch, not of a request: the mean over batches, however many requests each held.",
            labels=(("method", "prefill"),),
        ),
        mean(
            "inference",
            "tgi_request_inference_duration",
            "Prefill and decode together, with every stall that another's prefill made.",
        ),
        mean(
            "tpot",
            "tgi_request_mean_time_per_token_duration",
            "Inference time over all tokens: the prefill is in it, so for short answers it is far above TPOT.",
        ),
        mean("e2e", "tgi_request_duration", "Of requests that succeeded."),
        growth("requests", "tgi_request_success"),
        growth("prompt_tokens", "tgi_request_input_length_sum"),
        growth("output_tokens", "tgi_request_generated_tokens_sum"),
        *states(
            "tgi_queue_size",
            "tgi_batch_current_size",
            running_trap="The size of the batch at its last step; 0 between batches.",
        ),
    ),
    cannot=(
        "TTFT: no metric ends at the first token",
        "KV use: it reserves for the whole request at admission (tgi_batch_current_max_tokens is what it reserved)",
        "preemptions: it has none, because it reserves",
        "prefix hits",
        "why a request waited, and which requests made another wait",
        "any one request (but its answers carry x-queue-time, x-inference-time and others when they do not stream)",
        "the network and the client",
    ),
    cheap_path="/info",
    metrics_hint="It may serve them on a port of their own (--prometheus-port); /metrics is not behind every proxy.",
)
SGLANG = Dialect(
    kind="sglang",
    prefix="sglang:",
    quantities=(
        mean(
            "queue",
            "sglang:queue_time_seconds",
            "From the scheduler's queue to its first prefill batch; a wait after a retraction is not in it.",
        ),
        mean(
            "prefill",
            "sglang:per_stage_req_latency_seconds",
            "Its forward pass, the last chunk's if the prompt was cut; earlier chunks are a stage of their own.",
            labels=(("stage", "prefill_forward"),),
        ),
        mean(
            "ttft",
            "sglang:time_to_first_token_seconds",
            "Taken in the tokenizer's process, from the request's arrival there until its first output is back: the "
            "queue is in it, HTTP is not. The first edge of its histogram is 100 ms: no percentile below is known.",
        ),
        mean(
            "itl",
            "sglang:inter_token_latency_seconds",
            "The time between two outputs is divided evenly among the tokens of the later one, which hides stalls.",
        ),
        mean("e2e", "sglang:e2e_request_latency_seconds", "Counted when the request has ended."),
        growth("requests", "sglang:num_requests_total", "Finished ones."),
        growth(
            "prompt_tokens", "sglang:prompt_tokens_total", "Added when a request finishes; cached ones are counted too."
        ),
        growth("output_tokens", "sglang:generation_tokens_total", "Added when a request finishes."),
        ratio(
            "prefix_hits",
            "sglang:cached_tokens_total",
            "Cached tokens of finished requests over all their prompt tokens; absent until there was a hit. "
            "The gauge cache_hit_rate is of the last batch only.",
            per="sglang:prompt_tokens_total",
        ),
        growth(
            "preemptions",
            "sglang:num_retracted_requests_total",
            "It calls them retractions; older versions have a gauge of the last step only.",
        ),
        *states(
            "sglang:num_queue_reqs",
            "sglang:num_running_reqs",
            "Requests whose grammar is being compiled are counted elsewhere; the gauges are written when a prefill "
            "starts and every so many decode steps, so they lag.",
        ),
        state(
            "kv_usage",
            "sglang:token_usage",
            "Of the fullest of its pools; what is cached and could be evicted does not count as used.",
        ),
    ),
    cannot=(
        "decode time and TPOT of a request",
        "why a request waited, and which requests made another wait",
        "any one request: all is pooled, and a percentile is only known to lie between two edges of a histogram",
        "tokenising and the way between its processes: they are in TTFT and E2E, unnamed",
        "the network and the client",
    ),
    cache_config="sglang:cache_config_info",
    block_label="page_size",
    cheap_path="/v1/models",
    metrics_hint="Start it with --enable-metrics.",
)
LLAMA_CPP = Dialect(
    kind="llama.cpp",
    prefix="llamacpp:",
    quantities=(
        growth(
            "prefill_busy",
            "llamacpp:prompt_seconds_total",
            "The time of batches that held prompt tokens, each batch once: not a sum over requests, and what decoded "
            "in the same batch is in it.",
        ),
        ratio(
            "itl",
            "llamacpp:tokens_predicted_seconds_total",
            "The first token of a request is counted but comes out of its prompt "
            "and takes no time, so with n tokens this is (n - 1) / n of the true gap.",
            per="llamacpp:tokens_predicted_total",
        ),
        growth(
            "decode_slots",
            "llamacpp:tokens_predicted_seconds_total",
            "A total over slots that decode at the same time, so it may grow by more than a second a second; each "
            "request is added when it ends.",
        ),
        growth(
            "prompt_tokens",
            "llamacpp:prompt_tokens_total",
            "Those that were computed: unlike elsewhere, cached ones are not counted.",
        ),
        growth("output_tokens", "llamacpp:tokens_predicted_total", "Added at the end."),
        growth(
            "prefix_hit_tokens",
            "llamacpp:prompt_tokens_cached_total",
            "A prefix that was still in the slot the request came to, not of a shared cache.",
        ),
        growth("steps", "llamacpp:n_decode_total"),
        *states(
            "llamacpp:requests_deferred",
            "llamacpp:requests_processing",
            "Those that the HTTP threads have handed on and that found no slot.",
            "Slots at work.",
        ),
    ),
    cannot=(
        "TTFT, queue time and E2E: it has totals only, no histogram",
        "how many requests there were",
        "KV use (older versions had a gauge), preemptions",
        "why a request waited, and which requests made another wait",
        "the network and the client",
    ),
    beware=(
        "A scrape is answered between two steps: it waits for the one that runs.",
        "Its two throughput gauges are means since the last scrape by anyone: two scrapers spoil them for each other.",
    ),
    cheap_path="/health",
    metrics_hint="Start it with --metrics.",
)


DIALECTS = {dialect.kind: dialect for dialect in (VLLM, SGLANG, TGI, LLAMA_CPP)}  # by `Arm.kind`
