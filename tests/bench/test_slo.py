"""SLOs: what is read, what is refused and how, and what a run is told."""

import client_runs as runs
import msgspec
import pytest
from client_runs import MS
from hypothesis import given
from hypothesis import strategies as st

from splittime.bench.book.metrics import NS_PER_UNIT, known_metrics, parse_metric, shown
from splittime.bench.book.records import Ending
from splittime.bench.book.slo import DEFAULT_ERROR_RATE, EXAMPLE, check_slo, parse_slo
from splittime.core.errors import ConfigError


def test_terms_in_every_unit():
    assert parse_slo("ttft_p99=300ms, tpot_p99 = 40ms,error_rate=1%,ttft=0.3s,goodput=0.95,throughput=100/s") == {
        "ttft_p99": 300 * MS,
        "tpot_p99": 40 * MS,
        "error_rate": 0.01,
        "ttft": 300 * MS,
        "goodput": 0.95,
        "throughput": 100.0,
    }
    assert parse_slo("max_stall=250us,e2e=1min,e2e_mean=5e3ms,service_ttft_p50=10ns") == {
        "max_stall": 250_000,
        "e2e": 60 * 10**9,
        "e2e_mean": 5 * 10**9,
        "service_ttft_p50": 10,
    }
    parse_slo(EXAMPLE)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("ttft_p98=300ms", "ttft_p98", "did you mean"),
        ("tfft=300ms", "tfft", "'ttft'"),
        ("latency=3s", "latency", "known: of each request ttft"),
        ("ttft_p99", "name=value", "for example"),
        ("ttft_p99=", "no number", "for example"),
        ("ttft_p99=fast", "no number", "for example"),
        ("ttft_p99=-3ms", "no number", "for example"),
        ("ttft_p99=1e999s", "too large a number", "for example"),
        ("ttft_p99=300", "has no unit", "300ms"),
        ("ttft_p99=300kg", "'kg' is no unit of time", "ms"),
        ("ttft_p99=3%", "'%' is no unit of time", "ms"),
        ("error_rate=5", "too much", "error_rate=5%"),
        ("error_rate=150%", "too much", "at most 100%"),
        ("error_rate=5ms", "no unit of a share", "error_rate=1%"),
        ("throughput=5ms", "no unit of a rate", "throughput=100"),
        ("ttft=1s,ttft=2s", "named twice", "one of them"),
        ("", "empty", "for example"),
        (" , ", "empty", "for example"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_way_out(text, message, hint):
    with pytest.raises(ConfigError) as caught:
        parse_slo(text)
    assert message in caught.value.info.message
    assert hint in caught.value.info.hint
    assert caught.value.info.param == "slo"


@given(st.floats(1e-3, 1e6), st.sampled_from(sorted(NS_PER_UNIT)))
def test_a_time_is_read_as_it_is_written(number, unit):
    assert parse_slo(f"ttft={number!r}{unit}") == {"ttft": pytest.approx(number * NS_PER_UNIT[unit])}


@given(st.floats(1, 1e13))
def test_what_is_shown_can_be_read_again(duration_ns):
    assert parse_slo(f"ttft={shown('ttft', duration_ns)}")["ttft"] == pytest.approx(duration_ns, rel=1e-3, abs=1)


def test_every_known_metric_is_a_metric_and_a_term():
    for name in known_metrics():
        assert parse_metric(name).name == name
        value = "0.5" if name in ("goodput", "error_rate", "throughput", "request_rate") else "1s"
        assert name in parse_slo(f"{name}={value},ttft=1s")


def made():
    """Ten requests: TTFT 10, 20 .. 100 ms from the intended start, 10 ms less from sent; the last one failed."""
    return runs.run(
        runs.outcome(
            i,
            sent_ns=10 * MS,
            chunk_ns=((10 * i + 10) * MS, (10 * i + 20) * MS),
            chunk_tokens=(1, 1),
            output_tokens=2,
            end_ns=(10 * i + 20) * MS,
            ending=Ending.FAILED if i == 9 else Ending.COMPLETE,
        )
        for i in range(10)
    )


def results(text: str, run=None) -> dict[str, bool]:
    run = made() if run is None else run
    return {result.name: result.ok for result in check_slo(run, parse_slo(text))}


def test_ttft_is_from_the_intended_start():
    assert results("ttft_p50=50ms,error_rate=10%") == {"ttft_p50": True, "error_rate": True}
    assert results("ttft_p50=49ms,error_rate=10%")["ttft_p50"] is False
    assert results("service_ttft_p50=40ms,error_rate=10%")["service_ttft_p50"] is True
    assert results("ttft_p99=90ms,error_rate=10%")["ttft_p99"] is True  # of those that were answered


def test_errors_are_looked_at_even_if_nobody_asked():
    found = check_slo(made(), parse_slo("ttft_p99=1s"))
    assert [(one.name, one.ok, one.limit) for one in found] == [
        ("ttft_p99", True, 1e9),
        ("error_rate", False, DEFAULT_ERROR_RATE),
    ]
    assert "1 of 10 intended" in found[1].sentence
    assert "none is named" in found[1].sentence


def test_limits_of_each_request_make_goodput():
    assert results("ttft=50ms,goodput=50%,error_rate=10%") == {"goodput": True, "error_rate": True}
    assert results("ttft=50ms,goodput=51%,error_rate=10%")["goodput"] is False
    assert results("ttft=50ms,error_rate=10%")["goodput"] is False  # without a share all must be good
    whole = msgspec.structs.replace(made(), outcomes=made().outcomes[:9])
    assert results("ttft=90ms,error_rate=10%", whole)["goodput"] is True


def test_goodput_counts_by_these_limits_and_not_by_those_of_the_run():
    run = msgspec.structs.replace(made(), slo={"ttft": 1.0})
    found = check_slo(run, parse_slo("ttft=50ms,goodput=50%"))
    assert found[0].value == 0.5


def test_limits_of_the_run_serve_a_goodput_that_brings_none():
    run = msgspec.structs.replace(made(), slo={"ttft": 50.0 * MS, "e2e_p99": 1.0})
    assert check_slo(run, parse_slo("goodput=50%"))[0].value == 0.5
    assert [one.name for one in check_slo(run, parse_slo("ttft_p50=1s"))] == ["ttft_p50", "error_rate"]
    with pytest.raises(ConfigError, match="goodput needs a limit"):
        check_slo(made(), parse_slo("goodput=95%,ttft_p99=1s"))


def test_rates_must_be_reached():
    assert results("throughput=18,error_rate=10%")["throughput"] is True
    assert results("throughput=21,error_rate=10%")["throughput"] is False


def test_what_a_run_cannot_tell_is_not_kept():
    found = check_slo(runs.run([runs.outcome(ending=Ending.UNSENT)]), parse_slo("ttft_p99=1s,itl_p50=1s"))
    assert [one.ok for one in found] == [False, False, False]
    assert found[0].value is None
    assert "not known" in found[0].sentence
