"""The exports: JSON that reads back, a trace whose slices nest, Prometheus text that parses, a header that conforms."""

import json
import re
from collections import defaultdict
from itertools import pairwise

import books
import orjson
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from splittime.engine.messages import EngineStats
from splittime.ledger.export import account_from_json, account_json
from splittime.ledger.export.chrome_trace import trace
from splittime.ledger.export.histogram import EDGES_NS
from splittime.ledger.export.metrics import METRICS
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.export.server_timing import header
from splittime.ledger.export.vllm_names import ALIASES
from splittime.ledger.facts import ServerFacts
from splittime.ledger.store import Ledger


@given(books.accounts())
def test_account_json_reads_back(account):
    data = orjson.loads(orjson.dumps(account_json(account)))
    assert account_from_json(data) == account
    ends_ns = [stage["end_ns"] for stage in data["stages"]]
    assert [stage["begin_ns"] for stage in data["stages"]] == [0, *ends_ns[:-1]]
    assert ends_ns[-1] == data["end_ns"] - data["start_ns"]


def test_account_json_tokens():
    tokens = account_json(books.example(num_tokens=2))["tokens"]
    assert tokens[1] == {"index": 1, "step_id": 2, "ready_ns": 25_000_000, "written_ns": 25_050_000}


@given(books.accounts(), books.step_runs())
def test_trace_slices_nest_and_do_not_overlap(account, steps):
    events = [e for body in (trace([account], []), trace([], steps)) for e in json.loads(body)["traceEvents"]]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin_ns = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000), event["name"]))
    for slices in tracks.values():
        outer = [s for s in slices if s[2] == "request" or s[2].startswith("step ")]
        inner = [s for s in slices if s not in outer]
        for level in (outer, inner):
            assert all(before[1] <= after[0] for before, after in pairwise(level))
        assert all(any(o[0] <= i[0] and i[1] <= o[1] for o in outer) for i in inner)


def test_trace_names_and_links():
    events = json.loads(trace([books.example()], [books.step(1, 0)]))["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert ("process_name", "engine") in names
    assert ("thread_name", "cmpl-a-0") in names
    assert [e["args"]["step_id"] for e in events if e["ph"] == "i"] == [1, 2, 3, 4]
    assert {e["ph"] for e in json.loads(trace([], []))["traceEvents"]} == {"M"}


def _scrape(exporter):
    families = text_string_to_metric_families(exporter.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_prometheus_text_parses_and_counts():
    ledger = Ledger()
    stats = EngineStats(now_ns=0, num_waiting=3, blocks_used=1, blocks_total=4)
    ledger.tell_facts = lambda: ServerFacts(version="", model='a "model"', max_model_len=100)
    exporter = PrometheusExporter(ledger, lambda: stats)
    ledger.add_account(books.example(num_tokens=4, gap_ns=5_000_000))
    ledger.add_step(books.step(1, 0))
    exporter.count_refusal("queue_full")
    exporter.observe_send_lag(40_000)
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


@given(books.accounts())
def test_server_timing_conforms(account):
    token = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    entry = rf'{token};dur=[0-9.]+(;desc="[^"\\]*")?'
    value = header(account.intervals, account.start_ns)
    assert re.fullmatch(rf"{entry}(, {entry})*", value)
    assert value.isascii()
