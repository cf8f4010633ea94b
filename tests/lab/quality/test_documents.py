"""From files to documents and windows: what is one document, which tokens are scored, how the budget is spent."""

import gzip
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import Bytes

from splittime.core.errors import ConfigError
from splittime.lab.quality import documents
from splittime.lab.quality.documents import DocumentTokens, distinct, longest_length, plan, prefix_of, read_documents


def test_a_file_is_a_document_and_its_marks_part_it(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("first<|endoftext|>\nsecond\n<|endoftext|>\n")
    (tmp_path / "c.jsonl").write_text('{"text": "of a line"}\n\n{"text": "of another"}\n')
    (tmp_path / "d.bin").write_text("left out")
    found = read_documents([tmp_path])
    assert [document.text for document in found] == ["one", "first", "second", "of a line", "of another"]
    assert [document.name for document in found][:3] == ["a.txt", "b.txt#1", "b.txt#2"]


def test_articles_of_wikitext_are_documents(tmp_path):
    with gzip.open(tmp_path / "w.txt.gz", "wt") as file:
        file.write(" \n = One = \n\n text \n = = Part = = \n more \n = Two = \n\n other \n")
    found = read_documents([tmp_path / "w.txt.gz"])
    assert len(found) == 2
    assert "Part" in found[0].text
    assert "other" in found[1].text


def test_the_same_text_twice_is_one_document(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same")
    assert len(read_documents([tmp_path, tmp_path / "a.txt"])) == 1


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.txt", b"\xff\xfe", "cannot read"),
    ("a.txt", b" \n", "no text"),
    ("a.jsonl", b"{", "is not JSON"),
    ("a.jsonl", b'{"body": "x"}', 'no "text"'),
    ("a.jsonl", b"[1]", 'no "text"'),
    ("a.txt.gz", b"no gzip", "cannot read"),
])  # fmt: skip
def test_files_that_are_no_texts_are_refused(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_documents([tmp_path / name])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such text"):
        read_documents([tmp_path / "none.txt"])


def test_python_s_own_sources_are_those_that_training_held_out():
    found = documents.python_documents(50)
    path = Path(__file__).parents[3] / "training" / "corpus.py"
    spec = importlib.util.spec_from_file_location("corpus", path)
    corpus = importlib.util.module_from_spec(spec)
    __import__("sys").modules["corpus"] = corpus
    spec.loader.exec_module(corpus)
    assert len(found) > 20
    assert {corpus.split_of(document.name) for document in found} == {"heldout"}


TEXTS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(TEXTS, st.integers(40, 120), st.integers(0, 30), st.integers(0, 2), st.integers(50, 3000))
@settings(max_examples=80, deadline=None)
def test_windows_score_what_lies_beyond_the_shorter_length(sizes, length, shorter, prefix, budget):
    texts = [DocumentTokens(str(i), list(range(1000 * i, 1000 * i + size))) for i, size in enumerate(sizes)]
    windows = plan(texts, length, shorter, (-1,) * prefix, budget)
    for window in windows:
        assert len(window.token_ids) <= length
        assert window.token_ids[:prefix] == (-1,) * prefix
        assert window.first >= max(1, prefix, shorter)
        assert window.first < len(window.token_ids)
        body = window.token_ids[prefix:]
        ids = texts[window.document].ids
        assert list(body) == ids[ids.index(body[0]) : ids.index(body[0]) + len(body)]
    bodies = [token for window in windows for token in window.token_ids[prefix:]]
    assert len(bodies) == len(set(bodies))
    assert sum(len(window.token_ids) for window in windows[:-1]) < budget


def test_each_document_has_its_turn_before_any_has_its_second():
    texts = [
        DocumentTokens("long", list(range(1000))),
        DocumentTokens("short", list(range(100))),
        DocumentTokens("other", list(range(300))),
    ]
    drawn = [window.document for window in plan(texts, 100, 0, (), 10_000)]
    assert sorted(drawn[:3]) == [0, 1, 2]
    assert sorted(drawn[3:5]) == [0, 2]


def test_windows_are_drawn_over_positions_and_documents_and_the_same_again():
    texts = [DocumentTokens(str(i), list(range(10_000 * i, 10_000 * i + 2000))) for i in range(40)]
    windows = plan(texts, 100, 0, (), 2000)
    starts = [window.token_ids[0] % 10_000 for window in windows]
    assert len({window.document for window in windows}) == len(windows) == 20
    assert sum(start == 0 for start in starts) <= 4  # the first window of a document, of 20, once in 20
    assert max(starts) > 1200
    assert max(window.document for window in windows) > 25
    assert plan(texts, 100, 0, (), 2000) == windows


def test_documents_that_are_nearly_the_same_are_one():
    own = [DocumentTokens(str(i), [(i * 7919 + k * k) % 997 for k in range(400)]) for i in range(5)]
    copy = DocumentTokens("copy", [*own[2].ids[:200], 5, *own[2].ids[201:]])
    part = DocumentTokens("half of it", own[2].ids[:200])
    assert [text.name for text in distinct([*own, copy, part])] == [*"01234", "half of it"]


def test_the_longest_length_is_one_that_enough_documents_fill():
    texts = [DocumentTokens(str(size), [0] * size) for size in (100, 600, 700, 900, 5000)]
    assert longest_length(texts, 4096, 256, 3) == 700
    assert longest_length(texts, 650, 256, 3) == 650
    assert longest_length(texts, 4096, 256, 5) is None
    assert longest_length(texts, 4096, 256, 6) is None


@pytest.mark.parametrize(("bos", "want"), [(False, ()), (True, (0,))])
def test_windows_begin_with_what_the_tokenizer_puts_before_a_text(bos, want):
    assert prefix_of(Bytes(bos)) == want
