"""Which values of a knob are tried, from what a server has now."""

from typing import Any

import pytest

from splittime.tune import knobs
from splittime.tune.knobs import KNOBS, around, changes_numbers, wide, with_its_needs, words

NOW = {
    **{"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_prefill_tokens": None, "policy": "fcfs"},
    **{"max_model_len": 1000, "block_size": 16, "num_blocks": 64},
    **{"enable_chunked_prefill": True, "enable_prefix_caching": False},
}
OF_VLLM = {"long_prefill_token_threshold": 0}


def values(name: str, **now: Any) -> list[Any]:
    return KNOBS[name].values({**NOW, **now})


def test_fractions_and_multiples_are_tried_and_not_what_is_there() -> None:
    assert around(10, 1, 100) == [1, 2, 5, 20, 40, 100]
    assert around(7, 1, 1000) == [1, 2, 4, 14, 28, 112]
    assert around(1, 1, 1000) == [2, 4, 16]
    assert around(100, 50, 100) == [50]


def test_slots_and_tokens_have_bounds() -> None:
    assert values("max_num_seqs") == [1, 2, 8, 16, 64]
    assert max(values("max_num_seqs", max_num_seqs=512)) == 1024
    assert values("max_num_batched_tokens") == [16, 32, 128, 256, 1024, 2048, 8192]
    assert max(values("max_num_batched_tokens", max_num_batched_tokens=8192)) == 16_384


def test_a_token_budget_has_room_for_each_slot() -> None:
    assert values("max_num_batched_tokens", max_num_seqs=100) == [100, 128, 256, 1024, 2048, 8192]


@pytest.mark.parametrize(
    ("tokens", "tried"),
    [
        (None, [16, 32, 128, 256]),
        (512, [16, 32, 128, 256]),
        (1000, [16, 32, 128, 256]),
        (64, [16, 32, 128, 256, 512]),
    ],
)
def test_prompts_get_at_most_the_whole_step(tokens: int | None, tried: list[int]) -> None:
    assert values("max_prefill_tokens", max_prefill_tokens=tokens) == tried
    assert values("long_prefill_token_threshold", long_prefill_token_threshold=tokens or 0) == (
        tried if tokens != 1000 else [16, 62, 250, 500, 512]
    )


def test_each_engine_has_its_own_knobs() -> None:
    of_vllm = {name: value for name, value in {**NOW, **OF_VLLM}.items() if name != "max_prefill_tokens"}
    assert KNOBS["max_prefill_tokens"].values(of_vllm) == []
    assert KNOBS["policy"].values(of_vllm) == []
    assert values("long_prefill_token_threshold") == []


def test_the_other_values_are_tried_where_there_are_few() -> None:
    assert values("policy") == ["shortest_prefill"]
    assert values("policy", policy="priority") == ["fcfs", "shortest_prefill"]
    assert (values("enable_chunked_prefill"), values("enable_prefix_caching")) == ([False], [True])
    assert values("quantization") == ["int8", "int4"]
    assert values("quantization", quantization="int4") == []
    assert values("kv_cache_dtype", kv_cache_dtype="int8") == []
    assert all(values("kv_cache_dtype", kv_cache_dtype=name) == ["int8"] for name in ("auto", "float32", "bfloat16"))


@pytest.mark.parametrize(("num_blocks", "tried"), [(64, [128, 252]), (252, []), (300, []), (10, [20, 40, 160])])
def test_more_blocks_are_tried_up_to_what_all_slots_can_fill(num_blocks: int, tried: list[int]) -> None:
    assert values("num_blocks", num_blocks=num_blocks) == tried


@pytest.mark.parametrize(("cores", "tried"), [(1, []), (4, [2, 4]), (6, [2, 4, 6])])
def test_threads_are_powers_of_two_and_all_cores(cores: int, tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "num_cores", lambda: cores)
    assert values("num_threads", num_threads=1) == tried


WIDE = {**NOW, "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": 16 * 63}


@pytest.mark.parametrize(
    ("now", "change"),
    [
        ({}, {}),
        ({"max_num_seqs": 63}, {"max_num_seqs": 64}),
        ({"max_num_batched_tokens": 511}, {"max_num_batched_tokens": 512}),
        ({"num_blocks": 16 * 63 - 1}, {"num_blocks": 16 * 63}),
        ({"max_prefill_tokens": 512}, {}),
        ({"max_prefill_tokens": 512, "max_num_batched_tokens": 2048}, {}),
        ({"max_prefill_tokens": 511}, {"max_prefill_tokens": 512}),
        ({"max_prefill_tokens": 511, "max_num_batched_tokens": 2048}, {"max_prefill_tokens": 2048}),
    ],
)
def test_only_what_is_narrow_is_widened(now: dict[str, int], change: dict[str, int]) -> None:
    assert wide({**WIDE, **now}) == change


def test_a_token_budget_grows_with_more_slots_than_it_has_tokens() -> None:
    assert with_its_needs("max_num_seqs", 512, NOW) == {"max_num_seqs": 512}
    assert with_its_needs("max_num_seqs", 513, NOW) == {"max_num_seqs": 513, "max_num_batched_tokens": 513}
    assert with_its_needs("max_prefill_tokens", 513, NOW) == {"max_prefill_tokens": 513}


def test_one_setting_that_changes_numbers_is_enough() -> None:
    assert changes_numbers({"num_threads": 2, "quantization": "int8"})
    assert changes_numbers({"kv_cache_dtype": "int8"})
    assert not changes_numbers({"num_threads": 2, "max_num_seqs": 8})
    assert not changes_numbers({})


def test_a_running_server_takes_no_other_memory_threads_or_weights() -> None:
    fixed = {name for name, knob in KNOBS.items() if not knob.is_live}
    assert {"num_blocks", "num_threads", "quantization", "kv_cache_dtype"} <= fixed
    assert fixed.isdisjoint({"max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "policy"})


def test_a_change_is_told_in_words() -> None:
    assert words({"max_num_seqs": 8, "policy": "fcfs"}) == "max_num_seqs 8, policy fcfs"
    assert words({}) == "the settings as they were"
