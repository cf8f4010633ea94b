"""Prompts that repeat what was known."""

import msgspec
import pytest
from test_rules_queue import names
from ward import Case, Ward, ids

from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.rules.evidence import total_ns
from splittime.diagnose.rules.prompts import history_differs, uncached_reuse

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


def asked_three_times(has_cache: bool, deadline_ms: float | None):
    cases = [Case(700 * i + 230 * n, ids(1500, i), 4, deadline_ms=deadline_ms) for i in range(20) for n in range(3)]
    settings = {"max_num_batched_tokens": 512, "max_prefill_tokens": 512, "enable_prefix_caching": has_cache}
    return Ward(**PROMPTS, settings=settings).run(*cases)


def test_what_was_never_computed_was_not_known():
    """Prompts that are given up after a step or two, and asked again: the cache gives all that there is of them."""
    books = asked_three_times(True, 90)
    assert sum(account.cached_tokens > 0 for account in books.accounts) == 40
    assert uncached_reuse(books) is None


def test_what_was_computed_before_it_was_given_up_was_known():
    """Without a cache: what the steps' rows reached is computed again each time, and no more of the prompt is."""
    books = asked_three_times(False, 90)
    found = uncached_reuse(books)
    assert isinstance(found, Finding)
    reached = max(start + num for step in books.steps for _, start, num in step.rows)
    assert 500 < reached < 1500
    assert f"{40 * reached} such tokens" in found.claim


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


def blocks_of(size: int, *prompts: list[int], **settings) -> Ward:
    return Ward(**PROMPTS, settings={"block_size": size, "num_blocks": 16384 // size, "max_num_seqs": 4} | settings)


@pytest.mark.parametrize(("size", "shared"), [(256, 250), (256, 100), (128, 120), (512, 500)])
def test_a_shared_prefix_that_is_shorter_than_a_block(size, shared):
    prompts = [SHARED[:shared] + ids(shared // 8, i) for i in range(40)]
    first = diagnose(blocks_of(size).run(*after_another(*prompts))).findings[0]
    assert first.name == "uncached_reuse"
    assert first.cure.flags == ("--block-size", "16")
    assert first.share_of_time > 0.1
    assert f"blocks of {size} tokens" in next(fact.value for fact in first.evidence if fact.what == "prefix caching")


def test_blocks_that_hold_what_is_shared():
    prompts = [SHARED[:530] + ids(32, i) for i in range(40)]
    assert names(blocks_of(256).run(*after_another(*prompts))) == []


def test_large_blocks_and_no_cache():
    """Both are to be changed: a cache of such blocks would find nothing."""
    prompts = [SHARED[:200] + ids(32, i) for i in range(40)]
    first = diagnose(blocks_of(256, enable_prefix_caching=False).run(*after_another(*prompts))).findings[0]
    assert first.cure.flags == ("--enable-prefix-caching", "--block-size", "16")


def agent(seed: int, drops: bool) -> list[list[int]]:
    """The prompts of a conversation: in each turn a user asks, and the model thinks, calls and gets a result, twice.
    drops: a template leaves the thoughts of earlier turns out; those of the latest one stay."""
    prompts, past = [], ids(100, 1)
    for turn in range(3):
        past = past + ids(60, 1000 * seed + turn)
        steps = [(ids(150, 1000 * seed + 10 * turn + i), ids(450, 500 + 1000 * seed + 10 * turn + i)) for i in range(2)]
        prompts += [past + flat(steps[:i]) for i in range(2)]
        past = past + flat([((), rest) for _, rest in steps] if drops else steps)
    return prompts


def flat(steps) -> list[int]:
    return [token for pieces in steps for piece in pieces for token in piece]


def conversation(drops: bool):
    books = Ward(**PROMPTS).run(*after_another(*(prompt for seed in range(12) for prompt in agent(seed, drops))))
    told = (msgspec.structs.replace(account, reasoning_tokens=40) for account in books.accounts)
    return msgspec.structs.replace(books, accounts=tuple(told))


def test_a_template_that_drops_the_thoughts_of_earlier_turns():
    first = diagnose(conversation(True)).findings[0]
    assert first.name == "history_differs"
    assert "send them back (reasoning_content" in first.cure.sentence
    lacks = next(fact.value for fact in first.evidence if fact.what.startswith("there before"))
    assert lacks == 150
    assert "24 of 72 prompts" in first.claim


@pytest.mark.parametrize(("reasoning", "is_named"), [(0, False), (1, False), (30, True)])
def test_thoughts_are_named_where_about_as_many_were_made_as_are_lacking(reasoning, is_named):
    """One short thought in one answer is not what conversations of 150 tokens a turn lack."""
    books = conversation(True)
    accounts = tuple(msgspec.structs.replace(account, reasoning_tokens=reasoning) for account in books.accounts)
    found = history_differs(msgspec.structs.replace(books, accounts=accounts))
    assert ("Keep thoughts" in found.cure.sentence) is is_named


def test_thoughts_that_stay_break_nothing():
    assert names(conversation(False)) == []


@pytest.mark.parametrize(("system", "seed"), [(100, 1), (60, 2), (150, 3)])
def test_a_window_that_slides_over_the_history(system, seed):
    """A client that sends the latest messages behind a system's, and cuts one off at each turn. A short system message
    is no part by itself."""
    messages = [ids(150, 50 + i) for i in range(50)]
    cases = [ids(system, seed) + [token for message in messages[i : i + 6] for token in message] for i in range(40)]
    first = diagnose(Ward(**PROMPTS).run(*after_another(*cases))).findings[0]
    assert first.name == "history_differs"
    assert "rarely and many at once" in first.cure.sentence


def test_several_conversations_with_one_system_message_lose_their_own_history():
    """The latest prompt that begins alike is another conversation's."""
    said = [[ids(150, 100 * talk + i) for i in range(16)] for talk in range(4)]
    windows = [one[i : i + 6] for i in range(10) for one in said]
    cases = [ids(100, 1) + [token for message in window for token in message] for window in windows]
    first = diagnose(Ward(**PROMPTS).run(*after_another(*cases))).findings[0]
    assert first.name == "history_differs"
    assert next(fact.value for fact in first.evidence if fact.what.startswith("there before")) == 150


def test_what_is_longer_as_often_as_shorter_varies():
    prompts = [SHARED[:300] + ids(10 + 80 * (i % 2), 100 + i) + SHARED[300:] for i in range(40)]
    assert names(Ward(**PROMPTS).run(*after_another(*prompts))) == ["prefix_broken"]


def test_a_name_of_any_length_is_something_that_varies():
    """Longer or shorter than the one before: it is no history that was left out."""
    prompts = [SHARED[:300] + ids(5 + i * 7 % 60, 100 + i) + SHARED[300:] for i in range(40)]
    assert names(Ward(**PROMPTS).run(*after_another(*prompts))) == ["prefix_broken"]


@pytest.mark.parametrize(("budget", "together"), [(64, 1), (64, 4), (4096, 1), (4096, 4), (4096, 8)])
def test_a_share_is_no_more_than_what_prompts_without_the_repetition_spare(budget, together):
    """Those that come at once are computed in one step: each one's prefill holds the others'."""

    def time_with(prefix):
        settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        cases = [Case(700 * (i // together), prefix + ids(256, i), 1) for i in range(48)]
        return Ward(step_ms=1, token_ms=0.1, settings=settings).run(*cases)

    books, spared = time_with(ids(256, 999)), time_with([])
    answer = uncached_reuse(books)
    assert isinstance(answer, Finding) or budget == 64, "of a long line only a lower bound is known"
    if isinstance(answer, Finding):
        assert 0.1 <= answer.share_of_time <= 1.01 * (1 - total_ns(spared.accounts) / total_ns(books.accounts))
