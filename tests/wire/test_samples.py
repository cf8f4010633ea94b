"""Prometheus' text form: what is written is read, by the server's own names."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from splittime.wire.dialects import parse, values

FIXTURES = Path(__file__).parents[1] / "bench" / "fixtures"
LABEL_TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.tuples(LABEL_TEXTS, LABEL_TEXTS), FLOATS, min_size=1, max_size=5), FLOATS)
def test_reads_what_the_library_writes(series, plain) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("some:gauge", "Any text.", ["b", "a"], registry=registry)
    Gauge("some:gauge_too", "Of a longer name.", registry=registry).set(plain)
    for (b, a), value in series.items():
        gauge.labels(b=b, a=a).set(value)
    samples = parse(generate_latest(registry).decode())
    assert sorted(values(samples, "some:gauge")) == sorted(series.values())
    assert values(samples, "some:gauge_too") == [plain]
    assert parse(generate_latest(registry).decode(), ("some:gauge",)) == {
        key: value for key, value in samples.items() if not key.startswith("some:gauge_too")
    }


def test_counters_keep_the_servers_names() -> None:
    """prometheus_client's parser would add `_total` to the second."""
    registry = CollectorRegistry()
    Counter("one_total", "A counter.", registry=registry).inc(3)
    text = generate_latest(registry).decode() + "# TYPE two counter\ntwo 4\n"
    assert parse(text)["one_total"] == 3
    assert parse(text)["two"] == 4


def test_labels_are_sorted_and_asked_for_whole() -> None:
    samples = parse('m{b="2",a="1"} 5\nm{a="1",stage="x"} 6 1700000000000\nm{substage="x"} 7\n')
    assert samples['m{a="1",b="2"}'] == 5
    assert values(samples, "m", {"stage": "x"}) == [6]
    assert values(samples, "m") == [5, 6, 7]
    assert values(samples, "absent") == []


def test_what_is_no_finite_number_tells_nothing() -> None:
    assert parse("a +Inf\nb -Inf\nc NaN\nd 1e400\ne 2\n") == {"e": 2.0}


@given(st.text())
def test_anything_else_is_passed_over(text) -> None:
    parse(text)
    parse(f"<html>\n{text}\na 1 2 3 4\n# HELP x\n", ("a",))


def test_fixtures_are_read_whole() -> None:
    for path in FIXTURES.glob("*.txt"):
        text = path.read_text()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert len(parse(text)) == len(lines) > 10, path.name
