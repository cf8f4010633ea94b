"""The gate's rules, one by one, and what an upstream's words may not make slow."""

import time

import numpy as np
import pytest

from splittime.gateway.cache.gate import MAX_QUESTION_CHARS, agrees, features
from splittime.gateway.cache.ngrams import embedded
from splittime.gateway.cache.questions import QuestionIndex
from splittime.gateway.cache.shadow import CLOSE, DIFFERENT, SAME, outcome, wilson

PASS = [
    ("What is the capital of France?", "what is the capital of france"),
    ("What is the capital of France?", "Please, what is the capital of France"),
    ("Can't I use the card abroad?", "Cannot I use the card abroad?"),
    ("What does inertia mean?", "Tell me what inertia is"),
    ("Warum ist der Himmel blau?", "warum ist der himmel blau"),
]
STOP = [
    ("Convert 5 USD to EUR", "Convert 5 EUR to USD"),
    ("Convert 5 km for me", "Convert 6 km for me"),
    ("Is 1.5 the same for me?", "Is 15 the same for me?"),
    ("Convert 5 km for me", "Convert 5 mi for me"),
    ("Convert five km for me", "Convert six km for me"),
    ("What is the capital of France?", "What is the capital of Spain?"),
    ("what is the capital of france", "what is the capital of spain"),
    ("What is the capital of France?", "what is the capital of spain"),
    ("Is the card accepted there?", "Is the card not accepted there?"),
    ("Can I use the card there?", "Can't I use the card there?"),
    ("How do I open the account?", "How do I close the account?"),
    ("How are prices increasing here?", "How are prices decreased here?"),
    ("Who made the first phone call?", "When made the first phone call?"),
    ("What does `a + b` mean here?", "What does `a - b` mean here?"),
    ("What does foo.bar do to me?", "What does foo.baz do to me?"),
    ('Translate "good day" for me', 'Translate "good night" for me'),
    ("Was the transfer good for her?", "Was the refund good for her?"),
    ("Is this a question?", "Is this a question? And is this, then, one more of them?"),
    ("Warum ist der Himmel blau?", "Warum ist der Himmel nicht blau?"),
    ("Wer ist in Berlin?", "Wer war in Berlin?"),
    ("Is 5 < 6 to you?", "Is 5 > 6 to you?"),
    ("", ""),
]


@pytest.mark.parametrize(("one", "other"), PASS)
def test_what_passes(one, other):
    assert agrees(features(one), features(other))
    assert agrees(features(other), features(one))


@pytest.mark.parametrize(("one", "other"), STOP)
def test_what_is_stopped(one, other):
    assert not agrees(features(one), features(other))
    assert not agrees(features(other), features(one))


@pytest.mark.parametrize("part", ["`", "“", "«", '"', "a'", "A ", "1,", "```", "a.b", "\n", "\u2019a", "(“", "é"])
def test_no_text_takes_long(part):
    """Twice as long takes about twice as long: a text of squares would take minutes."""
    begin_s = time.process_time()
    features(part * (200_000 // len(part)))
    assert time.process_time() - begin_s < 20
    assert MAX_QUESTION_CHARS <= 4000


def test_ngrams_are_of_length_one_and_know_wording():
    one, same, other = (embedded(text) for text in ("Open an account", "open an ACCOUNT!", "The weather is fine"))
    assert float(one @ one) == pytest.approx(1)
    assert float(one @ same) == pytest.approx(1)
    assert float(one @ other) < 0.3
    assert not embedded("?!").any()


def test_an_index_is_exact_bounded_and_parted():
    drawn = np.random.default_rng(3)
    vectors = drawn.normal(size=(60, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    text, index = features("What is this?"), QuestionIndex(40)
    for number, vector in enumerate(vectors):
        index.add(f"k{number}", "l", text, vector)
    index.add("elsewhere", "m", text, vectors[59])
    for number in range(25, 60, 3):
        index.discard(f"k{number}")
    held = [number for number in range(21, 60) if number not in range(25, 60, 3)]
    assert len(index) == len(held) + 1
    for asked in vectors[:10]:
        cosines = {number: float(vectors[number] @ asked) for number in held}
        near = sorted((number for number in held if cosines[number] >= 0.3), key=lambda number: -cosines[number])
        assert index.alike("l", text, asked, 0.3) == [f"k{number}" for number in near][:16]
    assert index.alike("l", features("Who is this?"), vectors[59], -1.0) == []
    assert index.alike("l", text, np.ones(3, dtype=np.float32), -1.0) == []


def test_answers_are_compared():
    assert outcome("It is 5.", "It  is 5. ") == SAME
    assert outcome("It is about 5, I think.", "It is about 5, so I think.") == CLOSE
    assert outcome("It is about 5, I think.", "It is about 6, I think.") == DIFFERENT
    assert outcome("It is so.", "It is not so.") == DIFFERENT


def test_wilsons_interval():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert wilson(1, 10) == pytest.approx((0.017876, 0.40415), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-4)
