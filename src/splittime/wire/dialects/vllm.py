"""vLLM, after the metrics of version 0.32.0 (its code, and a recorded `/metrics`)."""

from splittime.wire.dialects.dialect import Dialect, growth, mean, ratio, state, states

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
