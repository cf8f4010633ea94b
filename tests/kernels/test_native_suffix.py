"""What followed the last tokens where they stood before: in the text itself, in a corpus, and in neither."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kernels.native.suffix import BETWEEN_TEXTS, CORPUS, OWN, Follower, SuffixText, suffix_batch

pytestmark = pytest.mark.usefixtures("native")
MOST = 6


def follow(
    texts: Sequence[SuffixText], corpora: Sequence[SuffixText | None], new_tokens: Sequence[Sequence[int]]
) -> Follower:
    follower = Follower(MOST)
    follower.follow(suffix_batch(texts, corpora), new_tokens)
    return follower


def followed(
    tokens: Sequence[int], corpus: SuffixText | None = None, capacity: int = 1000
) -> tuple[int, int, list[int]]:
    """Returns the length of the match, its source and the drafts of a text of these tokens."""
    found = follow([SuffixText(capacity)], [corpus], [tokens])
    return found.lengths[0], found.sources[0], found.drafts(0)


def text_of(tokens: Sequence[int], capacity: int = 1000) -> SuffixText:
    text = SuffixText(capacity)
    text.append(tokens)
    return text


def test_what_followed_follows_again() -> None:
    assert followed([1, 2, 3, 4, 5, 9, 1, 2]) == (2, OWN, [3, 4, 5, 9, 1, 2])


def test_a_repetition_goes_on() -> None:
    assert followed([7, 8, 7, 8, 7]) == (3, OWN, [8, 7, 8, 7, 8, 7])
    assert followed([7, 7, 7]) == (2, OWN, [7] * MOST)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4], [1, 2, 1, 3]])
def test_nothing_is_found_where_no_two_tokens_repeat(tokens: list[int]) -> None:
    assert followed(tokens)[0] == 0
    assert followed(tokens)[2] == []


def test_the_newest_place_and_the_longest_end_win() -> None:
    assert followed([1, 2, 5, 1, 2, 6, 1, 2])[2][0] == 6
    long = [11, 12, 13, 14, 15]
    assert followed([*long, 99, 14, 15, 98, *long]) == (5, OWN, [99, 14, 15, 98, 11, 12])


def test_a_match_is_followed_back_beyond_its_n_gram() -> None:
    begin = list(range(100, 140))
    assert followed([*begin, 1, 2, *begin])[0] == 40
    assert followed([*range(100, 200), 1, *range(100, 200)])[0] == 64  # and no further


def test_a_corpus_is_asked_where_it_knows_more() -> None:
    corpus = text_of([5, 6, 7, 8, BETWEEN_TEXTS, 1, 2, 3])
    assert followed([4, 5, 6], corpus) == (2, CORPUS, [7, 8])  # not over the end of a text
    assert followed([5, 6, 9, 5, 6], corpus) == (2, OWN, [9, 5, 6, 9, 5, 6])  # of equals its own
    assert followed([8, 1], corpus)[0] == 0
    assert followed([2, 3, 4, 2, 3], text_of([2, 3]))[1] == OWN
    longer = text_of([1, 2, 3, BETWEEN_TEXTS])  # and nothing behind it
    assert followed([2, 3, 4, 9, 1, 2, 3], longer) == (2, OWN, [4, 9, 1, 2, 3, 4])


def test_what_is_too_old_is_forgotten() -> None:
    assert followed([1, 2, 3, *range(10, 20), 1, 2], capacity=8)[0] == 0
    assert followed([*range(10, 50), 1, 2, 3, 4, 1, 2], capacity=8) == (2, OWN, [3, 4, 1, 2, 3, 4])


def test_each_of_many_texts_goes_on_with_its_own_tokens() -> None:
    one, other = text_of([1, 2, 3, 1]), text_of([4, 5, 6, 4])
    found = follow([one, other, text_of([])], [None, None, None], [[2], [5], []])
    assert found.lengths.tolist() == [2, 2, 0]
    assert [found.drafts(line)[:2] for line in range(3)] == [[3, 1], [6, 4], []]
    found = follow([one], [None], [[3, 1, 2]])
    assert (found.lengths[0], found.drafts(0)[:2]) == (5, [3, 1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120), st.sampled_from([3, 16, 50, 1000]), st.integers(1, 9))
def test_whatever_is_found_stood_there(tokens: list[int], capacity: int, piece: int) -> None:
    text = SuffixText(capacity)
    for begin in range(0, len(tokens), piece):
        found = follow([text], [None], [tokens[begin : begin + piece]])
        known = tokens[: begin + piece]
        length, drafts, kept = found.lengths[0], found.drafts(0), known[-text.capacity :]
        assert length == 0 or 2 <= length < len(kept)
        if length:
            assert any(
                kept[end - length : end] == kept[-length:] and goes_on(kept, end) == drafts
                for end in range(length, len(kept))
            )


def goes_on(tokens: list[int], place: int) -> list[int]:
    """Returns what follows from a place on, the end being repeated."""
    more = list(tokens)
    while len(more) < place + MOST:
        more.append(more[len(more) - (len(tokens) - place)])
    return more[place : place + MOST]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=17, max_size=300), st.integers(2, 3))
def test_a_whole_repetition_is_found(tokens: list[int], times: int) -> None:
    assert followed(tokens * times)[0] >= 2
