"""A step's record of rows with drafts: what was computed, how much of it was right, and what was told of the next."""

from pathlib import Path

import books
import msgspec
import pytest
from msgspec import UNSET

from splittime.ledger.steps import Told, verify_steps
from splittime.ledger.store import Ledger, open_readonly


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


@pytest.mark.parametrize(
    ("name", "told", "is_right"),
    [
        ("a", 3, True),
        ("a", (1000, 500, 0), True),
        ("b", 3, False),  # it had no row
        ("a", 0, False),
        ("a", (), False),
        ("a", (1001,), False),
        ("a", (500, -1), False),
    ],
)
def test_chances_are_thousandths_of_a_row_of_the_step(name: str, told: Told, is_right: bool) -> None:
    record = msgspec.structs.replace(books.step(1, 5_000_000, (1, 2, 3, 4, 5)), drafts=((name, told),))
    if is_right:
        verify_steps([record])
        return
    with pytest.raises(ValueError, match=f"drafts of chances .* told for {name}"):
        verify_steps([record])


def test_a_file_tells_drafts_as_they_were_and_of_other_steps_nothing(tmp_path: Path) -> None:
    plain = books.step(1, 5_000_000)
    drafted = msgspec.structs.replace(
        books.step(2, 6_000_000, rows={"a": 1, "b": 1}), drafts=(("a", (923, 7)), ("b", 4))
    )
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_step(plain)
    ledger.add_step(drafted)
    ledger.close()
    file = open_readonly(tmp_path / "ledger.sqlite")
    assert file.steps() == [plain, drafted]
    file.close()
    assert plain.drafts is UNSET
    assert plain.told_drafts == ()
    assert b"drafts" not in msgspec.json.encode(plain)
    assert b'"drafts":[["a",[923,7]],["b",4]]' in msgspec.json.encode(drafted)


def test_a_record_of_before_is_one_without_drafts() -> None:
    drafted = msgspec.structs.replace(books.step(1, 5_000_000), drafts=(("a", 4),))
    fields = msgspec.to_builtins(drafted)
    del fields["drafts"]
    assert msgspec.convert(fields, type(drafted)) == books.step(1, 5_000_000)
