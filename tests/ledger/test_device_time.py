"""What steps say of a device apart from the host: its law, its shares, and that they come out of every export."""

import json

import books
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from splittime.core.engine import EngineStats
from splittime.ledger.export.chrome_trace import trace
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.steps import StepRecord, device_time, is_paced, sentence, verify_steps
from splittime.ledger.store import Ledger, open_readonly


def step(step_id: int, begin_ns: int, **told) -> StepRecord:
    """Of 42 ns: plan 1, launch 2, device 30, sample 4, commit 5; the host took 10 before it."""
    return msgspec.structs.replace(books.step(step_id, begin_ns, gap_ns=10 if step_id > 1 else 0), **told)


@pytest.fixture
def three() -> list[StepRecord]:
    return [
        step(1, 0, execution="eager", enqueue_ns=33),
        step(2, 52, execution="captured", padded_rows=3, gap_ns=18, enqueue_ns=2),
        step(3, 104, execution="eager", gap_ns=20, enqueue_ns=5),
    ]


def test_shares(three):
    verify_steps(three)
    found = device_time([*three, step(4, 156)])
    assert found is not None
    assert (found.num_steps, found.num_captured, found.num_padded, found.num_rows) == (3, 1, 3, 1)
    assert found.elapsed_ns == 3 * 42 + 2 * 10
    assert found.busy_share == 3 * 34 / found.elapsed_ns
    assert found.gap_share == 38 / found.elapsed_ns
    assert found.padded_share == 0.75
    assert [is_paced(one) for one in three] == [True, False, False]
    assert found.paced_ns == 34
    assert "captured" in sentence(found)


def test_where_the_host_computes_there_is_nothing_to_tell():
    assert device_time([step(1, 0)]) is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"gap_ns": 21}, "waited 21 ns"),  # launch 2 and commit 5 of the one before, 10 between, plan 1, launch 2
        ({"gap_ns": -1}, "step 2: gap"),
        ({"padded_rows": 1}, "padded"),
        ({"execution": "host", "enqueue_ns": 1}, "run host"),
        ({"execution": "somehow"}, "somehow"),
        ({"collective_ns": 35}, "collective 35 of 34"),
        ({"host_gap_ns": 9}, "gap 10 ns is not host_gap"),
        ({"asleep_ns": 1}, "asleep for 1 ns of 0"),
        ({"cpu_wait_ns": 30, "off_cpu_ns": 23}, "30 ns without a processor and 23 ns off it, of 52"),
        ({"off_cpu_ns": -1}, "-1 ns off it"),
    ],
)
def test_the_law_can_fail(told, words):
    first, second = step(1, 0), step(2, 52, execution="eager", gap_ns=20)
    verify_steps([first, second])
    with pytest.raises(ValueError, match=words):
        verify_steps([first, msgspec.structs.replace(second, **told)])


def test_it_comes_out_of_the_file_and_the_trace(three, tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for one in three:
        ledger.add_step(one)
    ledger.close()
    file = open_readonly(tmp_path / "ledger.sqlite")
    assert file.steps() == three
    file.close()
    slices = [e for e in json.loads(trace([], three))["traceEvents"] if e["name"].startswith("step ")]
    assert [e["args"]["execution"] for e in slices] == ["eager", "captured", "eager"]
    assert [e["args"]["gap_ns"] for e in slices] == [0, 18, 20]


def test_a_step_that_was_kept_before_there_were_devices():
    known = msgspec.to_builtins(step(1, 0))
    for name in ("execution", "padded_rows", "gap_ns", "enqueue_ns", "collective_ns"):
        del known[name]
    assert msgspec.convert(known, StepRecord) == step(1, 0)


def test_metrics(three):
    ledger = Ledger()
    exporter = PrometheusExporter(ledger, lambda: EngineStats(now_ns=0))
    for one in (*three, step(4, 156)):
        ledger.add_step(one)
    families = text_string_to_metric_families(exporter.render().decode())
    samples = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    executed = {name: samples["splittime_executions_total", name] for name in ("host", "eager", "captured")}
    assert executed == {"host": 1, "eager": 2, "captured": 1}
    assert samples["splittime_device_seconds_total", "gap"] == pytest.approx(38e-9)
    assert samples["splittime_device_seconds_total", "busy"] == pytest.approx(102e-9)
    assert samples["splittime_padded_rows_total",] == 3
