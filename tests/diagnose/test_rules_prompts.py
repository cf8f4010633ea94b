"""Prompts that repeat what was known."""

from test_rules_queue import names
from ward import Case, Ward, ids

from splittime.diagnose.doctor import diagnose

SHARED = ids(800, 7)
PROMPTS = {"token_ms": 0.1}


def after_another(*prompts: list[int]) -> list[Case]:
    return [Case(250 * i, prompt, 8) for i, prompt in enumerate(prompts)]


def test_a_shared_prefix_with_the_cache_off():
    cases = after_another(*(SHARED + ids(32, i) for i in range(40)))
    first = diagnose(Ward(**PROMPTS, settings={"enable_prefix_caching": False}).run(*cases)).findings[0]
    assert first.name == "uncached_reuse"
    assert first.cure.flags == ("--enable-prefix-caching",)
    assert first.share_of_time > 0.3


def test_a_shared_prefix_with_the_cache_on():
    assert names(Ward(**PROMPTS).run(*after_another(*(SHARED + ids(32, i) for i in range(40))))) == []


def test_prompts_without_anything_in_common():
    off = {"enable_prefix_caching": False}
    assert names(Ward(**PROMPTS, settings=off).run(*after_another(*(ids(800, i) for i in range(40))))) == []


def test_a_timestamp_at_the_beginning():
    cases = after_another(*(ids(20, 100 + i) + SHARED for i in range(40)))
    first = diagnose(Ward(**PROMPTS).run(*cases)).findings[0]
    assert first.name == "prefix_broken"
    assert first.evidence[0].value.startswith("0 to")
    assert first.cure.flags == ()


def test_a_timestamp_in_the_middle_is_found_there():
    cases = after_another(*(SHARED[:400] + ids(8, 100 + i) + SHARED[400:] for i in range(40)))
    first = diagnose(Ward(**PROMPTS).run(*cases)).findings[0]
    assert first.name == "prefix_broken"
    low, high = (int(word) for word in str(first.evidence[0].value).split(" to "))
    assert low <= 400 <= high < 600


def test_the_same_blob_twice_in_each_prompt():
    cases = after_another(*(2 * ids(400, i) for i in range(40)))
    first = diagnose(Ward(**PROMPTS).run(*cases)).findings[0]
    assert first.name == "repeated_part"
