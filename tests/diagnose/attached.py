"""A ward's books as if vLLM's scheduler had decided so: kept inside it, without what nobody can measure there."""

from typing import Any

import msgspec

from splittime.attach.engine_books import UNKNOWN
from splittime.diagnose.books import Books
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord, verify_steps

SAME_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "block_size",
    "num_blocks",
)
OWN_SETTINGS: dict[str, Any] = {
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "max_num_active_seqs": None,
    "async_scheduling": False,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "device": "cpu",
}
OUR_WORDS = (
    "--max-prefill-tokens",
    "--max-queued",
    "--policy ",
    "--starvation",
    "starvation_bound",
    "--num-threads",
    "--kernels",
    "--slow-reader",
    "slow_reader",
    "--batching",
    "--remeasure",
    "--kv-offload-memory-bytes",
    "--kv-cache-dtype int8",
    "--api-keys-file",
    "/knobs",
    "/ready",
    "splittime serve",
    "packed_cache",
    "BENCHMARKS.md",
)


def in_vllm(books: Books, **settings: Any) -> Books:
    """settings: of this vLLM's, beside the ward's own."""
    assert books.facts is not None
    same = {name: books.facts.settings[name] for name in SAME_SETTINGS}
    facts = ServerFacts(
        version="0",
        engine="vllm 0.32.0",
        model="fake",
        max_model_len=books.facts.max_model_len,
        settings=same | OWN_SETTINGS | settings,
        processes=books.facts.processes,
        unknown=UNKNOWN,
    )
    steps = tuple(map(_as_seen_inside, books.steps))
    verify_steps(steps)
    accounts = tuple(msgspec.structs.replace(account, unseen_ns=0) for account in books.accounts)
    return msgspec.structs.replace(books, facts=facts, steps=steps, accounts=accounts)


def _as_seen_inside(step: StepRecord) -> StepRecord:
    """From the plan to the result all is the device's."""
    device_ns = step.launch_ns + step.device_ns + step.sample_ns
    nobody = {"launch_ns": 0, "draft_ns": 0, "sample_ns": 0, "cpu_wait_ns": None, "off_cpu_ns": None}
    return msgspec.structs.replace(step, device_ns=device_ns, server_ran_ns=None, others_ran_ns=None, **nobody)
