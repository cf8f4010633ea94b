"""The corpus: splits are stable, disjoint and of the promised sizes; duplicates and tables are left out."""

from pathlib import Path

import pytest

from training.corpus import is_number_table, load_corpus, split_of


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with one of each thing that is left out."""
    files = {f"module_{number}.py": f"value = {number}\n" for number in range(60)}
    files |= {"copy.py": "value = 0\n", "empty.py": "\n", "site-packages/other.py": "x = 1\n"}
    files["table.py"] = "TABLE = (\n" + "    0x00, 0x01,\n" * 50 + ")\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "split"),
    [("json/decoder.py", "train"), ("abc.py", "train"), ("functools.py", "heldout"), ("bisect.py", "validation")],
)
def test_a_known_name_stays_in_its_split(name: str, split: str) -> None:
    assert split_of(name) == split


def test_one_name_in_twenty_is_held_out() -> None:
    splits = [split_of(f"package/module_{number}.py") for number in range(20_000)]
    assert 900 < splits.count("heldout") < 1100
    assert 900 < splits.count("validation") < 1100


def test_adding_a_file_moves_no_other_file(library: Path) -> None:
    before = load_corpus(library)
    (library / "aaa_new.py").write_text("new = True\n")
    after = load_corpus(library)
    for split in ("train", "validation", "heldout"):
        kept = [document for document in getattr(after, split) if document.name != "aaa_new.py"]
        assert kept == getattr(before, split)


def test_what_is_left_out_is_counted(library: Path) -> None:
    corpus = load_corpus(library)
    assert corpus.skipped == {"duplicate": 1, "empty": 1, "number_table": 1, "not_utf8": 1}
    texts = [document.text for document in corpus.train + corpus.validation + corpus.heldout]
    assert len(texts) == len(set(texts)) == 60


def test_code_with_a_few_escapes_is_no_table() -> None:
    assert not is_number_table("def mask(x):\n    return x & 0xff\n\n\nprint(mask(3))\n")
