"""Which text is learnt from, which is held out, and the teacher's own outputs as text."""

import numpy as np
import pytest

from splittime.core.errors import ConfigError
from splittime.lab.distill import run, text
from splittime.lab.quality.documents import Document, DocumentTokens

DOCUMENTS = [Document(f"{number}", f"text number {number}, of many") for number in range(200)]


class Letters:
    """A tokenizer that gives each character its code, after a 1."""

    def encode(self, words, *, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in words]


def test_a_tenth_is_held_out_and_stays_there():
    found = text.split(DOCUMENTS)
    assert 5 <= len(found.held_out) <= 40
    assert sorted(found.learnt + found.held_out, key=lambda d: int(d.name)) == DOCUMENTS
    fewer = text.split(DOCUMENTS[20:])
    assert set(fewer.held_out) == set(found.held_out) - set(DOCUMENTS[:20])


def test_what_is_held_out_is_never_learnt():
    same_words = [Document("other name", DOCUMENTS[3].text), DOCUMENTS[4]]
    found = text.split(DOCUMENTS, same_words)
    assert found.dropped == 2
    assert not {document.text for document in found.learnt} & {document.text for document in same_words}


@pytest.mark.parametrize(
    ("documents", "held_out", "said"),
    [(DOCUMENTS[:1], (), "held out"), (DOCUMENTS, DOCUMENTS[:1], "1 documents"), (DOCUMENTS, DOCUMENTS, "no document")],
)
def test_too_little_text_is_refused(documents, held_out, said):
    with pytest.raises(ConfigError, match=said):
        text.split(documents, held_out)


def test_a_stream_marks_where_texts_begin_and_end():
    found = text.stream([DocumentTokens("a", [5, 6]), DocumentTokens("b", [7])], Letters(), (9,))
    assert found.tolist() == [1, 5, 6, 9, 1, 7, 9]
    assert text.digest(found) != text.digest(found[:-1])


def test_prompts_are_pieces_of_the_text():
    documents = [DocumentTokens("long", list(range(100, 160))), DocumentTokens("short", [1, 2, 3])]
    found = run.prompts(documents, 50, 8, seed=0)
    assert found == run.prompts(documents, 50, 8, seed=0) != run.prompts(documents, 50, 8, seed=1)
    for prompt in found:
        assert prompt == (1, 2, 3) or prompt == tuple(range(prompt[0], prompt[0] + 8))
    assert len({prompt[0] for prompt in found}) > 10
    assert max(prompt[-1] for prompt in found) <= 159


def test_only_missing_sequences_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GROUP", 2)
    asked, calls = [(number, number) for number in range(5)], []

    def write(prompts, seeds, most):
        calls.append(tuple(seeds))
        return [(seed, most) for seed in seeds]

    first = run.sequences(tmp_path, asked, 0, 7, write, lambda done, of: None)
    assert first.tolist() == [token for number in range(5) for token in (number, number, number, 7)]
    assert calls == [(0, 1), (2, 3), (4,)]
    sorted(tmp_path.iterdir())[1].unlink()
    again = run.sequences(tmp_path, asked, 0, 7, write, lambda done, of: None)
    assert calls[3:] == [(2, 3)]
    np.testing.assert_array_equal(again, first)
