"""What other kinds of server call what the rules read and prescribe: their metrics, and their own settings.

`WORDS` is the whole table. A metric's names are today's first; () where the server has none. A setting is as its own
command takes it, with the value behind it; "" where it has none. `in_their_words` turns a prescription of ours into
theirs, so that no finding about another's server prints a command of ours: what a rule says of that server
(`Cure.elsewhere`), else the flags that have another name there and mean the same (`MetricNames.renamed`).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from splittime.diagnose.finding import OUR_PROGRAM, Cure, Finding, OtherCure

OURS = "splittime"
ATTACHED = {"vllm": "splittime attach vllm -- serve MODEL"}  # the program whose books are kept inside the server
RESTART = "It is set at start only: the change takes a restart."
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Names = tuple[str, ...]


class MetricNames(NamedTuple):
    """program: how the server is started, before its flags.

    hits, lookups: prompt tokens that came from its prefix cache, and that were looked up in it. prompts: prompt tokens.
    queue_s, ttft_s, prefill_s, decode_s, e2e_s: histograms over requests, without `_sum`, all of them counted when a
    request ends but for ttft_s, at the first token, where prompts are counted too. itl_s: one over outputs.
    refused: requests turned away at the door.
    config: the gauge whose labels are the cache's settings.
    slots, budget, queue_bound, memory, prefixes, metrics: what to set. renamed: flags of ours, and their names there.
    """

    program: str
    preemptions: Names = ()
    hits: Names = ()
    lookups: Names = ()
    prompts: Names = ()
    outputs: Names = ()
    requests: Names = ()
    queue_s: Names = ()
    ttft_s: Names = ()
    prefill_s: Names = ()
    decode_s: Names = ()
    e2e_s: Names = ()
    itl_s: Names = ()
    refused: Names = ()
    kv_tokens: Names = ()
    config: str = ""
    slots: str = ""
    budget: str = ""
    queue_bound: str = ""
    memory: str = ""
    prefixes: str = ""
    metrics: str = ""
    renamed: Mapping[str, str] = {}

    @property
    def flags(self) -> Mapping[str, str]:
        """By our flag, theirs that takes the same value."""
        known = {"--max-num-seqs": self.slots, "--max-queued-requests": self.queue_bound} | dict(self.renamed)
        return {ours: theirs for ours, theirs in known.items() if theirs}


_SAME_IN_VLLM = (
    *("--max-num-batched-tokens", "--max-model-len", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--enable-chunked-prefill", "--block-size", "--kv-cache-memory-bytes", "--async-scheduling"),
    *("--tensor-parallel-size", "--max-loras"),
)

WORDS: dict[str, MetricNames] = {
    "vllm": MetricNames(
        program="vllm serve MODEL",
        preemptions=("vllm:num_preemptions_total",),
        hits=("vllm:prefix_cache_hits_total",),
        lookups=("vllm:prefix_cache_queries_total",),
        prompts=("vllm:prompt_tokens_total",),
        outputs=("vllm:generation_tokens_total",),
        requests=("vllm:request_success_total",),
        queue_s=("vllm:request_queue_time_seconds",),
        ttft_s=("vllm:time_to_first_token_seconds",),
        prefill_s=("vllm:request_prefill_time_seconds",),
        decode_s=("vllm:request_decode_time_seconds",),
        e2e_s=("vllm:e2e_request_latency_seconds",),
        itl_s=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        refused=("vllm:admission_rejections_total",),
        config="vllm:cache_config_info",
        slots="--max-num-seqs",
        budget="--max-num-batched-tokens",
        queue_bound="--max-num-queued-reqs",
        memory="--gpu-memory-utilization, or on a CPU VLLM_CPU_KVCACHE_SPACE; --kv-cache-dtype fp8",
        prefixes="--enable-prefix-caching",
        metrics="leave out --disable-log-stats",
        renamed={name: name for name in _SAME_IN_VLLM}
        | {
            "--policy": "--scheduling-policy",
            "--max-prefill-tokens": "--long-prefill-token-threshold",
            "--max-queued-prompt-tokens": "--max-num-queued-tokens",
        },
    ),
    "sglang": MetricNames(
        program="python -m sglang.launch_server --model-path MODEL",
        preemptions=("sglang:num_retracted_requests_total",),
        hits=("sglang:cached_tokens_total",),
        prompts=("sglang:prompt_tokens_total",),
        outputs=("sglang:generation_tokens_total",),
        requests=("sglang:num_requests_total",),
        queue_s=("sglang:queue_time_seconds",),
        e2e_s=("sglang:e2e_request_latency_seconds",),
        itl_s=("sglang:inter_token_latency_seconds",),
        kv_tokens=("sglang:max_total_num_tokens",),
        config="sglang:cache_config_info",
        slots="--max-running-requests",
        budget="--chunked-prefill-size",
        queue_bound="--max-queued-requests",
        memory="--mem-fraction-static or --kv-cache-dtype fp8_e5m2",
        prefixes="no --disable-radix-cache",
        metrics="--enable-metrics",
    ),
    "tgi": MetricNames(
        program="text-generation-launcher --model-id MODEL",
        prompts=("tgi_request_input_length_sum",),
        outputs=("tgi_request_generated_tokens_sum",),
        requests=("tgi_request_success",),
        queue_s=("tgi_request_queue_duration",),
        e2e_s=("tgi_request_duration",),
        slots="--max-batch-size",
        budget="--max-batch-prefill-tokens",
        queue_bound="--max-concurrent-requests",
        memory="--max-batch-total-tokens",
        prefixes="PREFIX_CACHING=1",
        metrics="--prometheus-port",
    ),
    "llama.cpp": MetricNames(
        program="llama-server -m MODEL",
        hits=("llamacpp:prompt_tokens_cached_total",),
        prompts=("llamacpp:prompt_tokens_total",),
        outputs=("llamacpp:tokens_predicted_total",),
        slots="--parallel",
        budget="--batch-size",
        memory="--ctx-size or --cache-type-k q8_0",
        prefixes="--cache-prompt and --cache-reuse 256, and requests of one prefix to one slot (id_slot)",
        metrics="--metrics",
    ),
}


def labels_of(metrics: Mapping[str, float], name: str) -> dict[str, str]:
    """The labels of the first sample of this name; {} if there is none."""
    key = next((key for key in metrics if name and key.split("{", 1)[0] == name), "")
    return dict(_LABEL.findall(key))


def in_their_words(finding: Finding, kind: str, program: str = "") -> Finding:
    """The finding about a server of another kind, with its own flags or with none. program: how it was started, where
    not as usual."""
    if kind == OURS:
        return finding
    cure, told = finding.cure, finding.cure.elsewhere.get(kind, "")
    if isinstance(told, OtherCure):
        cost, check = told.cost or finding.cost, told.counter_check or finding.counter_check
        finding = replace(finding, cost=cost, counter_check=check)
        cure = replace(cure, sentence=told.sentence, flags=told.flags)
    elif cure.program == OUR_PROGRAM:
        cure = _renamed(cure, kind, told)
    words = WORDS.get(kind)
    cure = replace(cure, program=program or (words.program if words is not None else ""))
    return replace(finding, cure=cure, cost=f"{finding.cost} {RESTART}" if cure.flags else finding.cost)


def _renamed(cure: Cure, kind: str, hint: str) -> Cure:
    """hint: what it is called there, for whom none of the flags is left."""
    theirs = WORDS[kind].flags if kind in WORDS else {}
    flags: list[str] = []
    is_known = False
    for word in cure.flags:
        if word.startswith("--"):
            is_known = word in theirs
        if is_known:
            flags.append(theirs.get(word, word))
    sentence = cure.sentence if flags or not hint else f"{cure.sentence} For {kind}: {hint}."
    return replace(cure, flags=tuple(flags), sentence=sentence)
