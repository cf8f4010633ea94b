"""Drafts from a request's own text and from past answers: whose, how many, and what is learnt of them."""

from collections.abc import Mapping, Sequence

import pytest

from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, RowResult, StepPlan, StepResult
from splittime.runner import suffix_drafter
from splittime.runner.drafting import Draft, Look
from splittime.runner.suffix_drafter import EXPLORE, LONGEST_PAUSE, SuffixDrafter

pytestmark = pytest.mark.usefixtures("native")
GREEDY = SamplingParams(temperature=0.0, seed=0)


def admit(drafter: SuffixDrafter, name: str, tokens: Sequence[int], salt: str = "") -> None:
    drafter.admit(Admitted(name, tuple(tokens), 0, GREEDY, (), salt))


def drafted(
    drafter: SuffixDrafter,
    new_tokens: Mapping[str, Sequence[int]],
    least_survival: float = 0.0,
    look: Look = Look.EVERYWHERE,
) -> Mapping[str, Draft] | None:
    """A step that gave these requests so many tokens."""
    rows = tuple(RowResult(name, tuple(tokens)) for name, tokens in new_tokens.items())
    return drafter.draft(
        StepPlan(0, (), least_survival=least_survival),
        StepResult(0, rows),
        look,
    )


def answered(drafter: SuffixDrafter, name: str, tokens: Sequence[int], salt: str = "") -> None:
    """A request that has come and gone."""
    admit(drafter, name, (99,), salt)
    drafted(drafter, {name: tuple(tokens)}, 0.0)
    drafter.release(name)


def test_a_prompt_that_is_quoted_is_guessed() -> None:
    drafter = SuffixDrafter(4, 1000)
    admit(drafter, "a", (1, 2, 3, 4, 5, 6, 7))
    assert drafted(drafter, {"a": (9,)}, 0.0) == {}
    assert drafted(drafter, {"a": (2,)}, 0.0) == {}
    draft = drafted(drafter, {"a": (3,)}, 0.0)["a"]
    assert draft.token_ids == (4, 5, 6, 7)
    assert list(draft.survival) == sorted(draft.survival, reverse=True)


def test_what_was_answered_is_guessed_for_the_same_tenant_alone() -> None:
    drafter = SuffixDrafter(3, 1000)
    answered(drafter, "a", (1, 2, 3, 4, 5), salt="ours")
    for name, salt in (("b", "ours"), ("c", "theirs"), ("d", "")):
        admit(drafter, name, (1,), salt)
    assert drafted(drafter, {"b": (2,), "c": (2,), "d": (2,)}, 0.0)["b"].token_ids == (3, 4, 5)
    assert set(drafted(drafter, {"b": (3,), "c": (3,), "d": (3,)}, 0.0)) == {"b"}


def test_a_text_alone_has_no_corpus() -> None:
    drafter = SuffixDrafter(3, 1000, has_corpus=False)
    answered(drafter, "a", (1, 2, 3, 4, 5))
    admit(drafter, "b", (1,))
    assert drafted(drafter, {"b": (2,)}, 0.0) == {}


def test_prompts_are_in_no_corpus() -> None:
    drafter = SuffixDrafter(3, 1000)
    admit(drafter, "a", (1, 2, 3, 4))
    drafted(drafter, {"a": (9,)}, 0.0)
    drafter.release("a")
    admit(drafter, "b", (1,))
    assert drafted(drafter, {"b": (2,)}, 0.0) == {}


def test_a_short_match_may_be_too_short() -> None:
    drafter = SuffixDrafter(3, 1000, min_match=3)
    admit(drafter, "a", (1, 2, 3, 4, 5, 6))
    assert drafted(drafter, {"a": (2,)}, 0.0) == {}
    assert drafted(drafter, {"a": (3,)}, 0.0) == {}
    assert drafted(drafter, {"a": (4,)}, 0.0)["a"].token_ids == (5, 6, 2)


def test_one_that_is_always_wrong_is_asked_no_more_but_now_and_then() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2, 5))
    asked = []
    for number in range(6 * EXPLORE):
        drafts = drafted(drafter, {"a": (3 + number % 2 * 4 + number, 1, 2)}, 0.0)
        asked.append(len(drafts["a"].token_ids) if drafts else 0)
    assert asked[0] == 4
    late = asked[3 * EXPLORE :]
    assert 0 < sum(late) < 0.1 * len(late)
    assert max(late) <= 1


def test_what_came_behind_the_end_of_an_answer_is_not_guessed() -> None:
    drafter = SuffixDrafter(4, 1000)
    drafter.admit(Admitted("a", (1, 2, 3, 0, 4, 5), 0, GREEDY, (0,)))
    assert drafted(drafter, {"a": (1, 2)}, 0.0)["a"].token_ids == (3, 0)


def test_a_place_that_was_long_wrong_is_tried_now_and_then() -> None:
    drafter = SuffixDrafter(4, 100_000)
    admit(drafter, "a", (1, 2, 3, 4))
    asked = []
    for number in range(6 * EXPLORE):
        drafts = drafted(drafter, {"a": (5, 10 + number, 1, 2)}, 0.0)
        asked.append(len(drafts["a"].token_ids))
    assert asked[-EXPLORE:].count(2) == 1
    assert asked[-EXPLORE:].count(1) == EXPLORE - 1


def test_an_explored_draft_is_told_as_one_to_be_taken() -> None:
    drafter = SuffixDrafter(4, 100_000)
    admit(drafter, "a", (1, 2, 3, 4))
    told = [drafted(drafter, {"a": (10 + number, 1, 2)}, 2.0) or {} for number in range(EXPLORE)]
    assert [len(drafts) for drafts in told] == [0] * (EXPLORE - 1) + [1]
    assert (len(told[-1]["a"].token_ids), told[-1]["a"].survival) == (1, ())


def test_of_the_tenants_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together have room for three answers of four tokens, each with its end."""
    monkeypatch.setattr(suffix_drafter, "MOST_TOKENS", 15)
    drafter = SuffixDrafter(3, 1000)
    for salt in ("one", "two", "one", "three"):
        answered(drafter, "a", (1, 2, 3, 4), salt)
    admit(drafter, "b", (1,), "one")
    admit(drafter, "d", (1,), "three")
    assert set(drafted(drafter, {"b": (2,), "d": (2,)}) or ()) == {"b", "d"}
    admit(drafter, "c", (1,), "two")
    assert drafted(drafter, {"c": (2,)}) == {}


def test_what_was_answered_is_forgotten_when_asked() -> None:
    drafter = SuffixDrafter(3, 1000)
    answered(drafter, "a", (1, 2, 3, 4, 5))
    drafter.forget()
    admit(drafter, "b", (1,))
    assert drafted(drafter, {"b": (2,)}) == {}


def test_where_time_is_short_a_text_without_repetitions_is_searched_less_and_less() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1,))
    steps = range(1, 4 * LONGEST_PAUSE + 1)
    looked = [step for step in steps if drafted(drafter, {"a": (10 + step,)}, look=Look.WHERE_DUE) is not None]
    assert looked == [1, 2, 4, 8, 16, 32, 48, 64]


def test_a_draft_ends_the_pause_and_no_token_was_missed() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2, 3, 4, 5, 6, 7, 8))
    for step in range(LONGEST_PAUSE - 2):
        drafted(drafter, {"a": (10 + step,)}, look=Look.WHERE_DUE)
    assert drafted(drafter, {"a": (1, 2)}, look=Look.WHERE_DUE) is None
    told = drafted(drafter, {"a": (3,)}, look=Look.WHERE_DUE)
    assert told is not None
    assert told["a"].token_ids == (4, 5, 6, 7)
    told = drafted(drafter, {"a": (4, 5, 30, 31, 10, 11)}, look=Look.WHERE_DUE)
    assert told is not None
    assert told["a"].token_ids == (12, 13, 14, 15)


def test_where_not_even_a_sure_draft_would_pay_nobody_looks_but_now_and_then() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2, 3, 4))
    told = [drafted(drafter, {"a": (10 + step, 1, 2)}, 1.0) for step in range(2 * EXPLORE)]
    assert [step for step, one in enumerate(told, 1) if one is not None] == [EXPLORE, 2 * EXPLORE]


def test_one_that_is_unknown_or_gone_is_no_error() -> None:
    drafter = SuffixDrafter(3, 1000)
    drafter.release("never")
    admit(drafter, "a", (1, 2))
    assert drafted(drafter, {"a": (7,)}, 0.0) == {}


def test_while_there_is_no_time_nothing_is_searched_and_nothing_is_lost() -> None:
    drafter = SuffixDrafter(4, 1000)
    admit(drafter, "a", (1, 2, 3, 4, 5, 6, 7))
    for token in (9, 2, 3):
        assert drafted(drafter, {"a": (token,)}, look=Look.NOWHERE) is None
    drafter.release("a")
    admit(drafter, "b", (8,))
    for _ in range(EXPLORE):
        assert drafted(drafter, {"b": (50,)}, look=Look.NOWHERE) is None
    assert drafted(drafter, {"b": (9, 2)})["b"].token_ids == (3,)


def told_after(is_right: bool) -> list[Draft | None]:
    """Returns the last drafts of a tenant whose drafts were all right, or all wrong, and the first of another."""
    drafter = SuffixDrafter(4, 10_000)
    told = []
    for name, steps in (("ours", 60), ("theirs", 1)):
        admit(drafter, name, (1, 2, 3, 4, 5, 6), name)
        for step in range(steps):
            last = (drafted(drafter, {name: (9 if is_right else 9 + step, 1, 2)}) or {}).get(name)
        told.append(last)
        drafter.release(name)
    return told


def test_what_is_learnt_of_one_tenants_drafts_is_not_believed_of_anothers() -> None:
    (ours_wrong, wrong), (ours_right, right) = told_after(False), told_after(True)
    assert ours_wrong != ours_right
    assert wrong == right
    assert right is not None


def test_a_request_that_comes_is_searched_though_others_pause() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1,))
    for step in range(1, LONGEST_PAUSE + 2):
        drafted(drafter, {"a": (10 + step,)}, look=Look.WHERE_DUE)
    admit(drafter, "b", (1, 2, 3, 4))
    told = drafted(drafter, {"a": (50,), "b": (1, 2)}, look=Look.WHERE_DUE)
    assert told is not None
    assert told["b"].token_ids == (3, 4, 1, 2)


def test_an_answer_that_was_preempted_has_not_ended() -> None:
    drafter = SuffixDrafter(3, 1000)
    admit(drafter, "a", (99,))
    drafted(drafter, {"a": (1, 2, 3, 4, 5)})
    drafter.release("a", is_preempted=True)
    admit(drafter, "b", (1,))
    assert drafted(drafter, {"b": (2,)}) == {}
    drafter.admit(Admitted("a", (99, 1, 2, 3, 4, 5), 5, GREEDY, ()))
    drafter.release("a")
    admit(drafter, "c", (1,))
    assert (drafted(drafter, {"c": (2,)}) or {})["c"].token_ids == (3, 4, 5)


@pytest.mark.parametrize(("look", "most"), [(Look.EVERYWHERE, 60), (Look.WHERE_DUE, 12 * LONGEST_PAUSE)])
def test_drafts_that_nobody_verifies_are_believed_by_the_text_alone(look: Look, most: int) -> None:
    """0.6 is believed at first, and 0.9 would pay."""
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2, 7))
    told = [(drafted(drafter, {"a": (1, 2, 7)}, 0.9, look) or {}).get("a") for _ in range(most)]
    assert told[0] is None
    assert told[-1] is not None
    assert told[-1].token_ids[0] == 1


def test_a_text_that_begins_to_repeat_itself_is_believed_again() -> None:
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2))
    for number in range(40):
        wrong = drafted(drafter, {"a": (100 + number, 1, 2)}, 0.2)
    assert not wrong
    told = [bool(drafted(drafter, {"a": (7, 1, 2)}, 0.2)) for _ in range(20)]
    assert not told[0]
    assert told[-1]


def test_what_was_found_is_held_against_as_many_tokens_as_it_has() -> None:
    """Four tokens that come one by one are one trial of each place, and a wrong one ends it at once."""
    drafter = SuffixDrafter(4, 10_000)
    admit(drafter, "a", (1, 2, 3, 4, 5, 6))
    seen: list[tuple[int, int]] = []
    acceptance = drafter._requests["a"].acceptance
    acceptance.learn = lambda kind, num_found, num_right: seen.append((num_found, num_right))  # type: ignore[method-assign]
    for token, expected in ((1, []), (2, []), (3, []), (4, []), (5, []), (6, [(4, 4)]), (9, [(4, 4), (4, 0)])):
        drafted(drafter, {"a": (token,)})
        assert seen == expected
