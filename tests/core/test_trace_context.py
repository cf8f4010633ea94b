"""`traceparent` as W3C has it: what is read, and what is as none."""

import pytest

from splittime.core.trace_context import NO_TRACE, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what"]
)
def test_a_valid_one_is_read(value):
    assert read_traceparent(value) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", "00", f"{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more"),
        f"ff-{TRACE}-{SPAN}-01",
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"),
        *(f"cc-{TRACE}-{SPAN}-01.what", f"cc-{TRACE}-{SPAN}-01-{'x' * 300}", f" 00-{TRACE}-{SPAN}-01"),
    ],
)
def test_any_other_is_as_none(value):
    assert read_traceparent(value) == NO_TRACE


def test_what_is_written_is_read():
    context = read_traceparent(f"cc-{TRACE}-{SPAN}-00-more")
    assert read_traceparent(context.traceparent) == context
