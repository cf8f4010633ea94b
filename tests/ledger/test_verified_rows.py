"""A step's record of rows with drafts: what was computed, and how much of it was right."""

import books
import msgspec
import pytest

from splittime.ledger.steps import verify_steps


@pytest.mark.parametrize(
    ("verified", "is_right"),
    [
        ((("a", 3, 0),), True),
        ((("a", 3, 3),), True),
        ((("a", 3, 4),), False),  # more are right than there were
        ((("a", 4, 0),), False),  # a row of four tokens has at most three drafts
        ((("b", 1, 0),), False),  # it had no row
        ((("a", 3, -1),), False),
    ],
)
def test_no_more_drafts_are_right_than_were_computed(verified, is_right) -> None:
    record = msgspec.structs.replace(books.step(1, 5_000_000, (1, 2, 3, 4, 5), rows={"a": 4}), verified=verified)
    if is_right:
        verify_steps([record])
        return
    with pytest.raises(ValueError, match="drafts accepted"):
        verify_steps([record])
