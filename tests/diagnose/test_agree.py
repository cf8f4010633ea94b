"""One flag, one direction, over all of a diagnosis."""

import msgspec
import pytest
from test_diagnosis import finding

from splittime.core.facts import RefusedValues
from splittime.diagnose.finding import Cure, direction, flags_of, one_direction


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


def test_what_the_server_would_refuse_is_no_prescription():
    """By the scheduler's own checks, beside what is set."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 512, "kernels": "native"}
    refused, fitting = one_direction(
        [asking("a", "--max-num-seqs", "256"), asking("b", "--max-num-seqs", "128", "--num-threads", "2")], settings
    )
    assert refused.cure.flags == ()
    assert "--max-num-seqs 256 would be refused: max_num_batched_tokens is 128" in refused.cure.sentence
    assert fitting.cure.flags == ("--max-num-seqs", "128", "--num-threads", "2")
    (elsewhere,) = one_direction([asking_of_vllm("--max-num-seqs", "256")], settings)
    assert elsewhere.cure.flags == ("--max-num-seqs", "256"), "another server has other checks"


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        (("--quantization", "int8"), False),
        (("--quantization", "int4"), True),
        (("--speculative-config", """'{"method": "suffix", "num_speculative_tokens": 4}'"""), False),
        (("--speculative-config", """'{"method": "ngram"}'"""), True),
        (("--async-scheduling",), False),
        (("--num-threads", "1"), False),
        (("--num-threads", "4"), True),
        (("--kv-cache-memory-bytes", "64MiB"), True),
        (("--kv-cache-memory-bytes", "4MiB"), False),
        (("--kv-cache-memory-bytes", "64GiB"), False),
    ],
)
def test_what_its_runner_would_refuse_is_no_prescription(flags, is_kept):
    """By the facts of that server: the doctor of a file has neither its model nor its machine."""
    why = "the checkpoint is already quantised (gguf)"
    refuses = (
        RefusedValues(name="quantization", value="int8", why=why),
        RefusedValues(name="speculative_config", value='{"method":"suffix"', why=why),
        RefusedValues(name="async_scheduling", value="True", why=why),
        RefusedValues(name="num_threads", least=2, why=why),
        RefusedValues(name="kv_cache_memory_bytes", least=8 * 2**20, most=16 * 2**30, why=why),
    )
    (told,) = one_direction([asking("a", *flags)], {}, refuses)
    assert told.cure.flags == (flags if is_kept else ())
    assert (f"would be refused: {why}" in told.cure.sentence) is not is_kept
    (elsewhere,) = one_direction([asking_of_vllm(*flags)], {}, refuses)
    assert elsewhere.cure.flags == flags


def asking_of_vllm(*flags: str):
    return msgspec.structs.replace(finding("a", 0.5), cure=Cure(sentence="s", flags=flags, program="vllm serve MODEL"))


def test_what_is_set_already_is_no_prescription():
    (only,) = one_direction([asking("a", "--num-threads", "1")], {"num_threads": 1})
    assert only.cure.flags == ()
