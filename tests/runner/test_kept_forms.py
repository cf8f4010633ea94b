"""What is kept of forms: by weight, and fairly among who asked for them."""

from splittime.runner.kept_forms import LEAST_BYTES, MOST_FORMS, KeptForms

A = LEAST_BYTES + 1  # of a form whose text has one character


def kept_of(most: int, most_of_owner: int) -> KeptForms[str]:
    return KeptForms(most * A, most_of_owner * A)


def names(kept: KeptForms[str], owner: str) -> str:
    return "".join(name for name in "abcdefgh" if kept.has(owner, name))


def test_the_one_asked_for_longest_ago_makes_room_within_an_owners_share() -> None:
    kept = kept_of(8, 3)
    for name in "abc":
        kept.keep("one", name, name, 0)
    assert kept.get("one", "a") == "a"
    kept.keep("one", "d", "d", 0)
    assert names(kept, "one") == "acd"
    assert kept.num_bytes == 3 * A


def test_who_keeps_most_loses_first() -> None:
    kept = kept_of(4, 4)
    kept.keep("small", "a", "a", 0)
    for name in "abcdef":
        kept.keep("large", name, name, 0)
    assert (names(kept, "small"), names(kept, "large")) == ("a", "def")
    kept.keep("small", "b", "b", 0)
    assert (names(kept, "small"), names(kept, "large")) == ("ab", "ef")


def test_a_form_is_its_owners_alone_and_weighs_what_it_was_said_to() -> None:
    kept = kept_of(100, 50)
    kept.keep("one", "a", "of one", 10 * A)
    assert kept.get("other", "a") is None
    assert kept.num_bytes == 11 * A
    kept.keep("one", "a", "again", 20 * A)
    assert (kept.num_bytes, kept.num_forms, kept.get("one", "a")) == (21 * A, 1, "again")
    kept.drop("one", "a")
    assert (kept.num_bytes, kept.num_forms, kept.get("one", "a")) == (0, 0, None)


def test_one_form_that_is_too_heavy_alone_is_kept_while_it_is_the_only_one() -> None:
    kept = kept_of(2, 2)
    kept.keep("one", "a", "a", 9 * A)
    assert names(kept, "one") == "a"
    kept.keep("one", "b", "b", 9 * A)
    assert names(kept, "one") == "b"


def test_what_failed_counts_too() -> None:
    kept = KeptForms[str]()
    for number in range(MOST_FORMS + 5):
        kept.keep("one", str(number), "it failed", 0)
    assert kept.num_forms == MOST_FORMS
