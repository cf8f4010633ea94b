"""Text Generation Inference (TGI), after the names and definitions in the code of its version 3; not run here."""

from splittime.wire.dialects.dialect import Dialect, growth, mean, states

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
