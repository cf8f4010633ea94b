"""llama.cpp's `llama-server`, after the code inside llama-cpp-python 0.3.36, and a recorded `/metrics`."""

from splittime.wire.dialects.dialect import Dialect, growth, ratio, states

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
