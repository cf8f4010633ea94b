"""The dialects of vLLM, TGI, SGLang and llama.cpp.

* vLLM: after the metrics of version 0.32.0 (its code, and a recorded `/metrics`).
* Text Generation Inference (TGI): after the names and definitions in the code of its version 3; not run here.
* SGLang: after the names and definitions in its code as of 2026 (the 0.5 versions); not run here.
* llama.cpp's `llama-server`: after the code inside llama-cpp-python 0.3.36, and a recorded `/metrics`.
"""

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
