"""What of one prompt was known and computed all the same, and why: `explain` tells it of each request."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_rules_prompts import PROMPTS, SHARED, after_another, blocks_of
from ward import Case, Ward, ids

from splittime.diagnose.explain import explain
from splittime.diagnose.known_prompts import computed_again
from splittime.diagnose.rules.prompts import uncached_reuse
from splittime.ledger import derive
from splittime.ledger.stages import Stage

OFF = {"enable_prefix_caching": False}


def told_of(books, place: int):
    """What is told of the request that came at this place, and the ids in their order."""
    accounts = sorted(books.accounts, key=lambda account: account.start_ns)
    return computed_again(accounts[place], books), [account.request_id for account in accounts]


def test_a_prefix_that_no_cache_kept():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(*(SHARED + ids(32, i) for i in range(3))))
    (again,), names = told_of(books, 2)
    assert (again.why, again.earlier) == ("cache_off", names[0])
    assert 750 < again.tokens <= 800
    assert again.took_ns > 0
    assert told_of(books, 0)[0] == []


def test_a_prefix_that_is_shorter_than_a_block():
    books = blocks_of(256).run(*after_another(*(SHARED[:250] + ids(31, i) for i in range(3))))
    assert [again.why for again in told_of(books, 1)[0]] == ["within_a_block"]


def test_a_prefix_that_was_given_up():
    prompts = [ids(1500, n) for n in (1, 2, 3, 4, 1)]
    (again,), names = told_of(blocks_of(16, num_blocks=260).run(*after_another(*prompts)), 4)
    assert (again.why, again.earlier) == ("not_kept", names[0])


@settings(max_examples=20)
@given(st.data())
def test_an_edit_of_the_history_is_found_where_it_is(data):
    """A session of several turns, in one of which a piece of the history is another, gone or new."""
    pieces = [ids(data.draw(st.integers(150, 500)), 100 + n) for n in range(5)]
    turn = data.draw(st.integers(2, 4))
    piece = data.draw(st.integers(0, turn - 2))
    at_token = sum(map(len, pieces[:piece])) + data.draw(st.integers(0, len(pieces[piece]) - 40))
    gone, new = data.draw(st.sampled_from([(30, 30), (40, 0), (0, 12)]))
    prompts = [list(chain.from_iterable(pieces[:n])) for n in range(1, turn + 1)]
    prompts[-1] = prompts[-1][:at_token] + ids(new, 9) + prompts[-1][at_token + gone :]
    books = Ward(**PROMPTS).run(*after_another(*prompts))
    found, names = told_of(books, turn - 1)
    behind = len(prompts[-2]) - at_token - gone
    changed = [again for again in found if again.why in ("differs", "lacks")]
    for again in changed:
        assert again.earlier == names[turn - 2]
        assert again.from_token <= at_token <= again.until_token
        assert again.tokens <= behind
        assert again.lacks in (0, gone - new)
    assert changed or behind < 300, "whole parts only are known: a short rest may hold none"
    assert all(not told_of(books, n)[0] for n in range(turn - 1))


def under(books, **changes):
    """The same books, where the second request is another in this."""
    first, second = sorted(books.accounts, key=lambda account: account.start_ns)
    return replace(books, accounts=(first, replace(second, **changes)))


def test_what_another_salt_or_model_had_is_no_loss_of_the_cache():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(SHARED, SHARED))
    (again,), (first, _) = told_of(under(books, cache_salt="other"), 1)
    assert (again.why, again.earlier) == ("salted_apart", first)
    assert told_of(under(books, model="an adapter"), 1)[0] == []
    assert uncached_reuse(under(books, cache_salt="other")) is None


def test_a_prompt_that_was_to_be_computed_missed_nothing():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(SHARED, SHARED))
    assert told_of(under(books, computes_prompt=True), 1)[0] == []


def test_without_the_servers_settings_no_reason_is_guessed():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(SHARED, SHARED))
    assert [again.why for again in told_of(replace(books, facts=None), 1)[0]] == ["not_given"]


def test_an_id_that_comes_again_is_another_request():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(SHARED, SHARED))
    first = min(books.accounts, key=lambda account: account.start_ns)
    same = under(books, request_id=first.request_id)
    assert told_of(same, 0)[0] == []
    assert len(told_of(same, 1)[0]) == 1


def test_what_it_took_is_these_tokens_part_of_the_prefill():
    books = Ward(**PROMPTS, settings=OFF).run(*after_another(SHARED[:512] + ids(512, 1), SHARED[:512] + ids(512, 2)))
    (again,), _ = told_of(books, 1)
    second = max(books.accounts, key=lambda account: account.start_ns)
    prefill_ns = derive.stage_ns(second)[Stage.PREFILL]
    assert again.took_ns == pytest.approx(prefill_ns * again.tokens / 1024, rel=0.01)


def test_who_is_named_had_the_tokens_by_then():
    """Two prompts that begin in one step: neither had anything before the other."""
    old = ids(16, 1) + SHARED
    cases = [Case(0, old, 8), Case(900, ids(16, 2) + SHARED, 8), Case(900, ids(16, 3) + SHARED, 8)]
    found, names = told_of(Ward(**PROMPTS).run(*cases), 2)
    assert [again.earlier for again in found] == [names[0]]


def test_explain_says_it():
    shown = [SHARED[:400] + ids(8, 100 + i) + SHARED[400:] for i in range(2)]
    books = Ward(**PROMPTS).run(*after_another(*shown))
    first, second = sorted(books.accounts, key=lambda account: account.start_ns)
    told = " ".join(str(explain(second, books)).split())
    assert f"prompt tokens that {first.request_id} had were computed again, in " in told
    assert "They stand behind the first difference, within prompt tokens " in told
    assert "computed again" not in str(explain(first, books))
