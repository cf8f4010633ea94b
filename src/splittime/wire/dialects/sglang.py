"""SGLang, after the names and definitions in its code as of 2026 (the 0.5 versions); not run here."""

from splittime.wire.dialects.dialect import Dialect, growth, mean, ratio, state, states

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
