"""What `/metrics` tells: each figure from its record, under our names and vLLM's, in buckets that add up."""

import re
from itertools import pairwise

import books
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from splittime.core.engine import ASLEEP, EngineStats, Rest, SleepReport
from splittime.ledger.account import Account
from splittime.ledger.export.metrics import EDGES_NS, METRICS, Histogram, MetricSpec
from splittime.ledger.export.prometheus import ALIASES, STEP_PARTS, PrometheusExporter, request_amounts
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.store import Ledger


def _scrape(exporter):
    families = text_string_to_metric_families(exporter.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2 * 10**11)), max_size=30))
def test_a_histogram_counts_each_sample_in_the_buckets_that_hold_it(samples):
    one_by_one, at_once, spec = Histogram(), Histogram(), MetricSpec("m", "histogram", ("l",), "h")
    for label in "ab":
        durations_ns = [ns for of, ns in samples if of == label]
        for duration_ns in durations_ns:
            one_by_one.observe((label,), duration_ns)
        for some in (durations_ns[:2], durations_ns[2:]):
            if some:
                at_once.observe_all((label,), some)
    merged = one_by_one.merged(("c",))
    shown = {}
    for histogram in (one_by_one, at_once, merged):
        for family in text_string_to_metric_families("".join(histogram.lines(spec))):
            shown |= {(s.name, *s.labels.values()): s.value for s in family.samples}
    for label, members in (("a", "a"), ("b", "b"), ("c", "ab")):
        durations_ns = [ns for of, ns in samples if of in members]
        if not durations_ns:
            assert ("m_count", label) not in shown
            continue
        for edge_ns in EDGES_NS:
            assert shown["m_bucket", label, str(edge_ns / 1e9)] == sum(ns <= edge_ns for ns in durations_ns)
        assert shown["m_bucket", label, "+Inf"] == shown["m_count", label] == len(durations_ns)
        assert shown["m_sum", label] == pytest.approx(sum(durations_ns) / 1e9)
    assert (one_by_one.series, one_by_one.sums) == (at_once.series, at_once.sums)


def test_amounts_under_vllms_names_hold_stalls_and_leave_out_what_no_step_computed():
    account = Account("r", 0, Stage.RECEIVE)
    stages = (Stage.QUEUE, Stage.PREFILL, Stage.PREFILL_STALL, Stage.DECODE, Stage.DECODE_STALL, Stage.PREEMPTED)
    for number, stage in enumerate(stages):
        account.enter(stage, 10**number)
    account.close(10**6)
    facts = {"prompt_tokens": 7, "cached_tokens": 4, "output_tokens": 2, "num_preemptions": 1}
    assert dict(request_amounts(books.closed(account, **facts))) == {
        "vllm:request_queue_time_seconds": 9,
        "vllm:request_prefill_time_seconds": 90 + 900,
        "vllm:request_decode_time_seconds": 9_000 + 90_000,
        "vllm:request_inference_time_seconds": 99_990,
        "vllm:request_prompt_tokens": 7,
        "vllm:request_generation_tokens": 2,
        "vllm:request_prefill_kv_computed_tokens": 3,
        "vllm:request_num_preemptions": 1,
    }
    for stage in (Stage.PREFILL, Stage.DECODE_STALL):
        computed = Account("r", 0, stage)
        computed.close(5)
        assert len(dict(request_amounts(books.closed(computed)))) == 8
    refused = Account("r", 0, Stage.QUEUE)
    refused.close(5)
    assert dict(request_amounts(books.closed(refused))) == {}


def test_prometheus_text_parses_and_counts():
    ledger = Ledger()
    stats = EngineStats(now_ns=0, num_waiting=3, blocks_used=1, blocks_total=4)
    ledger.describe_by(lambda: ServerFacts(version="", model='a "model"', max_model_len=100))
    exporter = PrometheusExporter(ledger, lambda: stats)
    ledger.add_account(books.example(num_tokens=4, gap_ns=5_000_000))
    ledger.add_step(books.step(1, 0))
    exporter.count_refusal("queue_full")
    exporter.observe_send_lags([40_000])
    exporter.observe_cancel_to_freed(2_000_000)
    samples = _scrape(exporter)
    labels = (("engine", "0"), ("model_name", 'a "model"'))
    assert samples[("vllm:num_requests_waiting", *labels)] == 3
    assert samples[("vllm:kv_cache_usage_perc", *labels)] == 0.25
    assert samples[("vllm:inter_token_latency_seconds_sum", *labels)] == 0.015
    assert samples[("vllm:request_queue_time_seconds_sum", *labels)] == 0.0095
    assert samples[("vllm:generation_tokens_total", *labels)] == 4
    assert samples[("splittime_refusals_total", ("reason", "queue_full"))] == 1
    assert samples[("splittime_tokens_total", ("kind", "output"))] == 4
    bucket = ("prompt_tokens", "33-64")
    name = "splittime_inter_token_latency_seconds"
    assert samples[(f"{name}_count", bucket)] == 3
    assert samples[(f"{name}_sum", bucket)] == 0.015
    assert samples[(f"{name}_bucket", ("le", "0.003"), bucket)] == 0
    assert samples[(f"{name}_bucket", ("le", "0.005"), bucket)] == 3
    stage = (("cause", "kv_blocks"), ("stage", "queue"))
    assert samples[("splittime_stage_seconds_sum", *stage)] == 0.0095
    assert samples[("splittime_send_lag_seconds_count",)] == 1
    assert samples[("splittime_step_seconds_count", ("part", "device"))] == 1


def test_guesses_are_counted_by_row_and_by_position():
    ledger = Ledger()
    exporter = PrometheusExporter(ledger, lambda: EngineStats(now_ns=0))
    for number, verified in enumerate(((("a", 3, 2), ("b", 1, 0)), (("a", 2, 1),), ()), 1):
        record = books.step(number, number * 10_000_000, (1, 2, 3, 4, 5), rows={"a": 4, "b": 2})
        ledger.add_step(msgspec.structs.replace(record, verified=verified, draft_ns=500_000 if verified else 0))
    samples = _scrape(exporter)
    assert samples[("splittime_drafted_rows_total",)] == 3
    right = {"0": 2, "1": 1}
    name = "splittime_accepted_drafts_by_position_total"
    assert {dict(labels)["position"]: v for (each, *labels), v in samples.items() if each == name} == right
    theirs = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert {dict(labels)["position"]: v for (each, *labels), v in samples.items() if each == theirs} == right
    assert samples[("splittime_step_seconds_sum", ("part", "draft"))] == 0.001


def test_totals_and_gauges_are_each_their_own():
    stats = EngineStats(
        now_ns=0, num_steps=11, num_preemptions=12, prefix_query_tokens=13, prefix_hit_tokens=14,
        prefix_host_hit_tokens=15, offloaded_tokens=16, restored_tokens=17, gc_pause_ns=1_500_000_000,
        gc_collections=18, num_waiting=19, num_running=20, waiting_prompt_tokens=21, blocks_used=22,
        blocks_cached=23, blocks_total=24, host_blocks_used=25, host_blocks_total=26, is_paused=True,
        rest=Rest(ASLEEP, 2),
    )  # fmt: skip
    samples = _scrape(PrometheusExporter(Ledger(), lambda: stats))
    values = {name.removeprefix("splittime_"): value for (name, *labels), value in samples.items() if not labels}
    expected = {
        "steps_total": 11, "preemptions_total": 12, "prefix_query_tokens_total": 13, "prefix_hit_tokens_total": 14,
        "prefix_host_hit_tokens_total": 15, "offloaded_tokens_total": 16, "restored_tokens_total": 17,
        "gc_pause_seconds_total": 1.5, "gc_collections_total": 18, "requests_waiting": 19, "requests_running": 20,
        "waiting_prompt_tokens": 21, "blocks_used": 22, "blocks_cached": 23, "blocks_total": 24,
        "host_blocks_used": 25, "host_blocks_total": 26, "paused": 1, "asleep": 2, "padded_rows_total": 0,
        "invalid_accounts_total": 0,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    states = {dict(labels)["sleep_state"]: v for (name, *labels), v in samples.items() if "sleep_state" in name}
    assert states == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}


def test_an_account_goes_into_each_figure_once():
    ledger = Ledger()
    exporter = PrometheusExporter(ledger, lambda: EngineStats(now_ns=0))
    account = msgspec.structs.replace(books.example(num_tokens=4, gap_ns=5_000_000), cached_tokens=32, unseen_ns=9)
    ledger.add_account(account)
    ledger.add_account(msgspec.structs.replace(account, end_ns=account.end_ns + 1))  # breaks the law; counted too
    ledger.add_step(books.step(1, 0))
    exporter.observe_cancel_to_freed(-5)
    samples = _scrape(exporter)
    bucket = ("prompt_tokens", "33-64")
    for name, total_ns in (
        ("time_to_first_token", 2 * 20_050_000),
        ("time_per_output_token", 2 * 5_016_666),
        ("e2e", 2 * 35_100_000 + 1),
        ("max_stall", 2 * 5_000_000),
    ):
        assert samples[(f"splittime_{name}_seconds_sum", bucket)] == pytest.approx(total_ns / 1e9, abs=2e-9)
        assert samples[(f"splittime_{name}_seconds_count", bucket)] == 2
    assert samples[("splittime_unseen_seconds_sum",)] == 18e-9
    assert samples[("splittime_cancel_to_freed_seconds_sum",)] == 0
    assert samples[("splittime_invalid_accounts_total",)] == 1
    assert samples[("splittime_requests_total", ("finish_reason", "stop"))] == 2
    tokens = {kind: samples[("splittime_tokens_total", ("kind", kind))] for kind in ("prompt", "cached", "output")}
    assert tokens == {"prompt": 80, "cached": 64, "output": 8}
    assert ("splittime_step_seconds_count", ("part", "offload")) not in samples  # as there were no copies
    parts = {part: samples[("splittime_step_seconds_sum", ("part", part))] * 1e9 for part in STEP_PARTS}
    assert {part: round(ns) for part, ns in parts.items()} == {
        "plan": 1, "launch": 2, "device": 30, "sample": 4, "commit": 5, "host_gap": 0, "idle": 0,
    }  # fmt: skip


def test_the_records_that_a_file_lacks_are_told_by_reason(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger._file.num_dropped, ledger._file.num_unwritten = 3, 5
    samples = _scrape(PrometheusExporter(ledger, lambda: EngineStats(now_ns=0)))
    ledger.close()
    lacks = {reason: samples[("splittime_ledger_drops_total", ("reason", reason))] for reason in ("queue_full", "disk")}
    assert lacks == {"queue_full": 3, "disk": 5}


def test_falling_asleep_is_told_by_its_parts_and_a_restart_as_one():
    exporter = PrometheusExporter(Ledger(), lambda: EngineStats(now_ns=0))
    parts = (("kv", 5, 2_000_005), ("weights", 2_000_005, 3_000_005))
    report = SleepReport(action="sleep", level=1, begin_ns=5, end_ns=9_000_005, parts=parts)
    exporter.observe_sleep(report)
    exporter.observe_sleep(msgspec.structs.replace(report, action="wake", restarted=True))
    samples = _scrape(exporter)
    sums = {
        tuple(value for _, value in labels): v
        for (name, *labels), v in samples.items()
        if name == "splittime_sleep_seconds_sum"
    }
    assert sums == {("sleep", "kv"): 0.002, ("sleep", "weights"): 0.001, ("wake", "start"): 0.009}


def test_every_metric_of_the_table_is_exported_and_no_other():
    exporter = PrometheusExporter(Ledger(), lambda: EngineStats(now_ns=0))
    text = exporter.render().decode()
    exported = set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert exported == {(spec.name, spec.kind) for spec in (*METRICS, *(alias.spec for alias in ALIASES))}


def test_edges_resolve_a_millisecond():
    assert EDGES_NS[0] == 10_000
    assert EDGES_NS[-1] == 100 * 10**9
    assert 1_000_000 in EDGES_NS
    assert all(after / before <= 5 / 3 for before, after in pairwise(EDGES_NS))
