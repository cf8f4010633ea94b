"""One flag, one direction, over all of a diagnosis."""

import msgspec
import pytest
from test_diagnosis import finding

from splittime.diagnose.agree import direction, flags_of, one_direction
from splittime.diagnose.finding import Cure


def asking(name: str, *flags: str):
    return msgspec.structs.replace(finding(name, 0.5), cure=Cure(sentence="s", flags=flags))


def test_flags_as_they_are_typed():
    typed = ("--enable-chunked-prefill", "--max-prefill-tokens", "16")
    assert flags_of(typed) == [("--enable-chunked-prefill", None), ("--max-prefill-tokens", "16")]


@pytest.mark.parametrize(
    ("flag", "settings", "way"),
    [
        (("--num-threads", "2"), {"num_threads": 1}, "up"),
        (("--num-threads", "1"), {"num_threads": 8}, "down"),
        (("--num-threads", "1"), {"num_threads": 1}, ""),
        (("--kv-cache-memory-bytes", "2MiB"), {"kv_cache_memory_bytes": 1 << 20}, "up"),
        (("--no-enable-prefix-caching", None), {"enable_prefix_caching": True}, "False"),
        (("--enable-prefix-caching", None), {"enable_prefix_caching": True}, ""),
        (("--policy", "fcfs"), {"policy": "priority"}, "fcfs"),
        (("--quantization", "int8"), {"quantization": None}, "int8"),
    ],
)
def test_which_way_a_flag_goes(flag, settings, way):
    assert direction(flag, settings)[1] in (way, "up" if way == "int8" else way)


def test_the_later_of_two_opposed_flags_goes():
    settings = {"num_threads": 2, "max_prefill_tokens": 64}
    first, second, third = one_direction(
        [
            asking("a", "--num-threads", "4", "--max-prefill-tokens", "16"),
            asking("b", "--num-threads", "1"),
            asking("c", "--max-prefill-tokens", "32"),
        ],
        settings,
    )
    assert first.cure.flags == ("--num-threads", "4", "--max-prefill-tokens", "16")
    assert second.cure.flags == ()
    assert second.cure.command is None
    assert "a" in second.cure.sentence
    assert third.cure.flags == ("--max-prefill-tokens", "32")


def test_what_is_set_already_is_no_prescription():
    (only,) = one_direction([asking("a", "--num-threads", "1")], {"num_threads": 1})
    assert only.cure.flags == ()
