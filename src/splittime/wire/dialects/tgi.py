"""Text Generation Inference (TGI), after the names and definitions in the code of its version 3; not run here."""

from splittime.wire.dialects.dialect import Dialect, Notation, Quantity, states

TGI = Dialect(
    kind="tgi",
    prefix="tgi_",
    quantities=(
        Quantity(
            "tokenize",
            "tgi_request_validation_duration",
            Notation.MEAN,
            "Tokenising and checking, with the wait for a free worker that does it.",
        ),
        Quantity(
            "queue", "tgi_request_queue_duration", Notation.MEAN, "From having been checked to being put into a batch."
        ),
        Quantity(
            "prefill",
            "tgi_batch_inference_duration",
            Notation.MEAN,
            "Of a prefill batch, not of a request: the mean over batches, however many requests each held.",
            labels=(("method", "prefill"),),
        ),
        Quantity(
            "inference",
            "tgi_request_inference_duration",
            Notation.MEAN,
            "Prefill and decode together, with every stall that another's prefill made.",
        ),
        Quantity(
            "tpot",
            "tgi_request_mean_time_per_token_duration",
            Notation.MEAN,
            "Inference time over all tokens: the prefill is in it, so for short answers it is far above TPOT.",
        ),
        Quantity("e2e", "tgi_request_duration", Notation.MEAN, "Of requests that succeeded."),
        Quantity("requests", "tgi_request_success", Notation.GROWTH, unit="requests"),
        Quantity("prompt_tokens", "tgi_request_input_length_sum", Notation.GROWTH, unit="tokens"),
        Quantity("output_tokens", "tgi_request_generated_tokens_sum", Notation.GROWTH, unit="tokens"),
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
