"""The lexical gate of the semantic cache: what two questions must have in common, word for word, to share an answer.

An embedding puts "5 USD in EUR" beside "5 EUR in USD", and a sentence beside its negation. So a hit needs more than a
cosine: the same numbers, names, units, code and quotations in the same order, the same negations, words of opposition
and question words, and lengths within 0.8 to 1.25 of each other. Words may be added or left out, but no word that
carries something may stand for another. `agrees` compares two `Features`.

The gate knows English. Of a text in which it finds too little English, or whose names no capitals show, it demands the
same words in the same order; in English, what carries nothing is left out.

Each expression here is linear in the text: no part of one can match what the part before it can.
"""

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

from splittime.gateway.cache.gate_words import LIGHT, NEGATIONS, NUMBER_WORDS, OPENERS, OPPOSITES, QUESTIONS, UNITS

MAX_QUESTION_CHARS = 4000
MIN_LENGTH_RATIO, MAX_LENGTH_RATIO = 0.8, 1.25
ENGLISH_SHARE = 0.2  # of a text's words that must be ones that the gate knows
SENTENCE_ENDS = ".!?:\n"
SIGNS_BEFORE = 8  # so far back it is looked what stands before a word
SIGNS = "%$€£¥°+<>=≤≥≠±^*/#&|~"
_FENCED = re.compile(r"```[^`]*```|`[^`]*`")
_QUOTED = re.compile(r'"[^"]*"|“[^“”]*”|«[^«»]*»')
_NUMBER = re.compile(r"\d[\d.,:]*")
_PIECE = re.compile(r"\S+")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_CODE_SIGN = re.compile(r"[_/\\{}\[\]<>=@#|~^*+`]|\w[.(:]\w|\(\)|[a-z][A-Z]|\w\d|\d[A-Za-z_]")


class Features(NamedTuple):
    """What the gate reads of one text. exact: what must be the same in the same order; bags: in any order. names: those
    that capitals show. words: what must be the same where `shows_no_names`."""

    length: int
    exact: tuple[tuple[str, ...], ...]
    bags: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    words: tuple[str, ...]
    shows_no_names: bool


def agrees(one: Features, other: Features) -> bool:
    """Returns whether the answer to one may be given to the other, as far as words tell."""
    if not one.length or not other.length or one.exact != other.exact or one.bags != other.bags:
        return False
    if not MIN_LENGTH_RATIO <= one.length / other.length <= MAX_LENGTH_RATIO:
        return False
    if one.shows_no_names or other.shows_no_names:
        return one.words == other.words
    return one.names == other.names and not _is_replaced(one.words, other.words)


def _is_replaced(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Returns whether each text has a word that the other lacks; one may only have more than the other."""
    return bool(Counter(one) - Counter(other)) and bool(Counter(other) - Counter(one))


def features(text: str) -> Features:
    """Returns what must be the same; the text is looked at in its compatibility form (NFKC)."""
    text = unicodedata.normalize("NFKC", text)
    code = [*_FENCED.findall(text), *_QUOTED.findall(text)]
    rest = _QUOTED.sub(" ", _FENCED.sub(" ", text))
    pieces = [piece for piece in _PIECE.findall(rest) if _CODE_SIGN.search(piece)]
    numbers = [found.rstrip(".,:").replace(",", "") for found in _NUMBER.findall(rest)]
    signs = [sign for sign in rest if sign in SIGNS]
    words = [_plain(found) for found in _WORD.findall(rest)]
    stems = [_stem(word) for word in words]
    counts = (_of(stems, NUMBER_WORDS), _of(stems, UNITS))
    exact = (tuple(code), tuple(pieces), tuple(numbers), tuple(signs), *counts)
    bags = (_bag(_negations(words, stems)), _bag(_of(stems, OPPOSITES)), _bag(_of(stems, QUESTIONS)))
    is_english = _is_english(words, stems)
    heavy = tuple(_heavy(words, stems)) if is_english else tuple(words)
    return Features(len(" ".join(text.split())), exact, bags, _names(rest), heavy, not (is_english and _has_case(rest)))


def _names(text: str) -> tuple[str, ...]:
    """Returns the words with a capital, but for the common ones that begin a sentence."""
    found = []
    for match in _WORD.finditer(text):
        word = match[0]
        if not word[0].isupper() or word == "I" or word.startswith(("I'", "I\u2019")):
            continue
        if not (_plain(word) in OPENERS | NEGATIONS and _begins_sentence(text, match.start())):
            found.append(word.lower())
    return tuple(found)


def _begins_sentence(text: str, start: int) -> bool:
    """Returns whether the sign before a word, spaces and opening quotations left out, ends a sentence."""
    before = text[max(0, start - SIGNS_BEFORE) : start].rstrip(" \t\"'(“\u2018")
    return before[-1] in SENTENCE_ENDS if before else start < SIGNS_BEFORE


def _is_english(words: list[str], stems: list[str]) -> bool:
    known = sum(1 for word, stem in zip(words, stems, strict=True) if _is_known(word, stem))
    return bool(words) and known >= ENGLISH_SHARE * len(words) and "".join(words).isascii()


def _has_case(text: str) -> bool:
    """Returns whether capitals show the names: the text begins with one, and is not written in them."""
    letters = [letter for letter in text if letter.isalpha()]
    capitals = sum(letter.isupper() for letter in letters)
    return bool(letters) and letters[0].isupper() and capitals < 0.5 * len(letters)


def _heavy(words: list[str], stems: list[str]) -> list[str]:
    """Returns the words that carry something, but for negations, which are counted apart."""
    left_out = LIGHT | NEGATIONS
    return [stem for word, stem in zip(words, stems, strict=True) if word not in left_out and stem not in left_out]


def _is_known(word: str, stem: str) -> bool:
    return word in LIGHT or word in QUESTIONS or word in NEGATIONS or stem in OPPOSITES


def _negations(words: list[str], stems: list[str]) -> list[str]:
    """Returns each negation; "don't", "cannot" and "not" are one, since they are what a rewording changes."""
    found = []
    for word, stem in zip(words, stems, strict=True):
        if (word.endswith("nt") and word in NEGATIONS) or word in ("not", "cannot", "no"):
            found.append("not")
        elif word in NEGATIONS or stem in NEGATIONS:
            found.append(stem)
    return found


def _plain(word: str) -> str:
    return word.lower().replace("'", "").replace("\u2019", "")


def _stem(word: str) -> str:
    """Returns the word without the commonest endings: enough to find "increased" where "increase" stands."""
    for ending, least in (("ing", 6), ("ed", 5), ("es", 5), ("s", 4)):
        if word.endswith(ending) and len(word) >= least and not word.endswith("ss"):
            root = word[: -len(ending)]
            if ending in ("ing", "ed") and root[-1:] == root[-2:-1] and root[-1:] not in ("l", "s"):
                root = root[:-1]
            return _known_form(root)
    return word


def _known_form(root: str) -> str:
    """Returns the form of a root that is in a list of words, if one is."""
    for form in (root, root + "e", root + "s"):
        if form in OPPOSITES or form in UNITS or form in NEGATIONS or form in NUMBER_WORDS:
            return form
    return root


def _of(stems: list[str], words: frozenset[str]) -> tuple[str, ...]:
    return tuple(stem for stem in stems if stem in words)


def _bag(words: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(words))
