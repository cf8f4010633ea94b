"""What other kinds of server call what the rules read and prescribe: their metrics, and their own settings.

`WORDS` is the whole table. A metric's names are today's first; () where the server has none. A setting is as its own
command takes it, with the value behind it; "" where it has none. `in_their_words` turns a prescription of ours into
theirs, so that no finding about another's server prints a command of ours.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from splittime.diagnose.finding import OUR_PROGRAM, Finding

OURS = "splittime"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Names = tuple[str, ...]


class MetricNames(NamedTuple):
    """program: how the server is started, before its flags.

    hits, lookups: prompt tokens that came from its prefix cache, and that were looked up in it. prompts: prompt tokens.
    queue_s, ttft_s, prefill_s, decode_s, e2e_s: histograms over requests, without `_sum`, all of them counted when a
    request ends but for ttft_s, at the first token, where prompts are counted too. itl_s: one over outputs.
    refused: requests turned away at the door.
    config: the gauge whose labels are the cache's settings.
    slots, budget, queue_bound, memory, prefixes, metrics: what to set.
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


def in_their_words(finding: Finding, kind: str) -> Finding:
    """The finding about a server of another kind: with its own flag in place of ours, or with none."""
    cure = finding.cure
    if kind == OURS or cure.program != OUR_PROGRAM:
        return finding
    words = WORDS.get(kind)
    theirs = {"--max-queued-requests": words.queue_bound, "--max-num-seqs": words.slots} if words else {}
    flag = theirs.get(cure.flags[0], "") if cure.flags else ""
    flags = (flag, *cure.flags[1:]) if flag else ()
    program = words.program if words else ""
    return msgspec.structs.replace(finding, cure=msgspec.structs.replace(cure, flags=flags, program=program))
