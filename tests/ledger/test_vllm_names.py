"""vLLM's names on `/metrics`, held to a recorded `/metrics` of vLLM 0.32: kinds, labels, edges, and true values."""

from pathlib import Path

import books
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from splittime.core.engine import EngineStats
from splittime.ledger.account import REFUSED, Account, ClosedAccount
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.store import Ledger

RECORDED = Path(__file__).parents[1] / "bench" / "fixtures" / "vllm_after.txt"
MAX_MODEL_LEN = 512  # of the recorded server
SETTINGS = {"block_size": 16, "kv_cache_dtype": "int8", "enable_prefix_caching": True}
NOTHING_TO_SAY = (  # this server has no such thing, or does not measure it
    "vllm:estimated_",  # work of each card, by vLLM's own model of it
    "vllm:external_prefix_cache_",  # prefixes fetched from another server
    "vllm:mm_cache_",  # images
)


def families(text: str) -> dict:
    """By name; without the instants at which prometheus_client made a counter or a histogram."""
    found = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def samples(text: str) -> dict:
    """By name and the labels that not all have."""
    always = {"engine", "model_name"}
    return {
        (s.name, *(value for label, value in sorted(s.labels.items()) if label not in always)): s.value
        for family in families(text).values()
        for s in family.samples
    }


def refused() -> ClosedAccount:
    account = Account("r", 0, Stage.RECEIVE)
    account.close(1)
    return books.closed(account, finish_reason=REFUSED)


@pytest.fixture
def exporter() -> PrometheusExporter:
    ledger = Ledger()
    ledger.describe_by(lambda: ServerFacts(version="", model="m", max_model_len=MAX_MODEL_LEN, settings=SETTINGS))
    stats = EngineStats(
        now_ns=0, num_waiting=3, blocks_total=9, host_blocks_total=4, prefix_hit_tokens=48, prefix_host_hit_tokens=16
    )
    made = PrometheusExporter(ledger, lambda: stats)
    ledger.add_account(replace(books.example(), cached_tokens=8, num_preemptions=2))
    ledger.add_account(replace(books.example(), finish_reason="error"))
    ledger.add_account(refused())
    ledger.add_step(replace(books.step(1, 0), prefill_tokens=20))
    made.observe_prompt([64, 64], 40)
    made.count_refusal("queued_requests")
    return made


def test_every_name_of_vllms_is_here_or_listed_with_the_reason(exporter) -> None:
    theirs, ours = families(RECORDED.read_text()), families(exporter.render().decode())
    missing = {name for name in theirs if name not in ours}
    assert missing == {name for name in theirs if name.startswith(NOTHING_TO_SAY)}
    assert {name: ours[name].type for name in theirs if name in ours} == {
        name: family.type for name, family in theirs.items() if name in ours
    }


def test_series_are_selected_by_the_labels_that_vllm_has(exporter) -> None:
    theirs, ours = families(RECORDED.read_text()), families(exporter.render().decode())
    for name in (theirs.keys() & ours.keys()) - {"vllm:cache_config_info"}:
        labels = {label for sample in theirs[name].samples for label in sample.labels}
        assert {label for sample in ours[name].samples for label in sample.labels} == labels | {"engine"}, name


def test_what_counts_tokens_has_vllms_edges(exporter) -> None:
    def edges(text: str) -> dict:
        histograms = {name: f for name, f in families(text).items() if f.type == "histogram" and "seconds" not in name}
        return {name: {s.labels["le"] for s in f.samples if "le" in s.labels} for name, f in histograms.items()}

    assert edges(exporter.render().decode()) == edges(RECORDED.read_text())


def test_values_are_those_of_the_books(exporter) -> None:
    found = samples(exporter.render().decode())
    sums = {
        "request_prompt_tokens": (80, 2),
        "request_generation_tokens": (8, 2),
        "request_prefill_kv_computed_tokens": (72, 2),
        "request_num_preemptions": (2, 2),
        "iteration_tokens_total": (21, 1),
        "request_params_n": (2, 1),
        "request_params_max_tokens": (128, 2),
        "request_max_num_generation_tokens": (40, 1),
    }
    for name, told in sums.items():
        assert (found[f"vllm:{name}_sum",], found[f"vllm:{name}_count",]) == told, name
    assert found["vllm:request_prompt_tokens_bucket", "20.0"] == 0
    assert found["vllm:request_prompt_tokens_bucket", "50.0"] == 2
    assert found["vllm:prompt_tokens_cached_total",] == found["vllm:prompt_tokens_by_source_total", "local_cache_hit"]
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 72
    assert found["vllm:prompt_tokens_cached_by_source_total", "device"] == 32
    assert found["vllm:prompt_tokens_cached_by_source_total", "host"] == 16
    assert found["vllm:request_success_total", "error"] == 1
    assert found["vllm:admission_rejections_total", "max_num_queued_reqs"] == 1
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == found["vllm:num_requests_waiting",] == 3
    assert found["vllm:cache_config_info", "16", "int8", "True", "4", "9"] == 1


def test_no_cache_is_described_before_the_engine_has_said_what_it_is() -> None:
    exporter = PrometheusExporter(Ledger(), lambda: EngineStats(now_ns=0))
    assert not families(exporter.render().decode())["vllm:cache_config_info"].samples
