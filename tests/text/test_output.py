"""Tokens to text, one at a time: never half a character, stop strings found wherever the tokens part."""

import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from server.conftest import byte_tokenizer
from splittime.text.output import OutputText, StopMatcher, WindowDetokenizer, make_detokenizer, token_text
from splittime.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"


def gpt2() -> Tokenizer:
    folder = DATA / "tokenizers" / "gpt2"
    if not folder.is_dir():
        pytest.skip("no shared tokenizers here")
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def stories() -> Tokenizer:
    folder = DATA / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("no shared models here")
    return Tokenizer.load(folder)


BYTES = byte_tokenizer()


def pieces_of(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    output = OutputText(tokenizer, **options)
    pieces = []
    for token_id in ids:
        pieces.append(output.push(token_id))
        if output.stop_string is not None:
            return pieces
    return [*pieces, output.flush()]


@settings(deadline=None)
@given(st.text(max_size=60))
def test_bytes_one_by_one_give_the_text_and_never_half_a_character(text: str) -> None:
    pieces = pieces_of(BYTES, list(text.encode()))
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_become_what_a_whole_decoding_makes_of_them(raw: bytes) -> None:
    assert "".join(pieces_of(BYTES, list(raw))) == raw.decode("utf-8", "replace")
    assert "".join(pieces_of(BYTES, list(raw))) == BYTES.decode(list(raw))


@pytest.mark.parametrize("make", [gpt2, stories])
def test_real_vocabularies_give_back_what_they_encode(make) -> None:
    tokenizer = make()

    @settings(max_examples=150, deadline=None)
    @given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("make", [gpt2, stories])
def test_continuing_a_prompt_gives_the_end_of_the_whole_text(make) -> None:
    tokenizer = make()
    ids = tokenizer.encode("Once upon a time, there was a tree — über 木 tall.")
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        output = OutputText(tokenizer, ids[:cut])
        assert before + "".join(output.push(i) for i in ids[cut:]) + output.flush() == whole


@pytest.mark.parametrize("make", [gpt2, stories])
def test_whoever_goes_on_from_the_tokens_goes_on_with_the_text(make) -> None:
    """One begins, another goes on from its token ids, wherever that is: within a character too."""
    tokenizer = make()
    ids = tokenizer.encode("naïve 🦙 text, 木木木 and more 🚀🚀")
    for cut in range(1, len(ids)):
        first, second = OutputText(tokenizer, ids[:1]), OutputText(tokenizer, ids[:cut])
        begun = "".join(first.push(i) for i in ids[1:cut])
        assert tokenizer.decode(ids).endswith(begun + "".join(second.push(i) for i in ids[cut:]) + second.flush())


def test_a_window_decodes_like_bytes_do() -> None:
    tokenizer = gpt2()
    ids = tokenizer.encode("naïve 🦙 text, 木木木 and more 🚀🚀")
    windowed = WindowDetokenizer(tokenizer)
    assert "".join(windowed.push(i) for i in ids) + windowed.flush() == tokenizer.decode(ids)


def test_a_vocabulary_without_bytes_is_decoded_in_windows() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend)
    detokenizer = make_detokenizer(tokenizer)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(detokenizer.push(i) for i in (0, 1, 0)) + detokenizer.flush() == "a b a"


def test_an_unfinished_character_waits_and_ends_as_a_replacement() -> None:
    output = OutputText(BYTES)
    first, second = "木".encode()[:2]
    assert output.push(first) == ""
    assert output.push(second) == ""
    assert output.flush() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_have_no_text_unless_asked() -> None:
    assert "".join(pieces_of(BYTES, [104, 256, 105])) == "hi"
    assert "".join(pieces_of(BYTES, [104, 256, 105], skip_special_tokens=False)) == "h<|end|>i"


def naive_cut(text: str, stop: list[str], min_bytes: int = 0) -> tuple[str, str | None]:
    """The text up to the match that ends first (of those the longest), of those that end after `min_bytes`."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended and len(text[:end].encode()) > min_bytes:
            found = max(ended, key=len)
            return text[: end - len(found)], found
    return text, None


SMALL = st.text("ab", min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(SMALL, min_size=1, max_size=3))
def test_stop_strings_are_found_wherever_the_pieces_part(parts: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    given_out = []
    for part in parts:
        given_out.append(matcher.push(part))
        if matcher.found is not None:
            break
    else:
        given_out.append(matcher.flush())
    assert ("".join(given_out), matcher.found) == naive_cut("".join(parts), stop)


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(SMALL, min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(parts: list[str], stop: list[str]) -> None:
    matcher, seen, out = StopMatcher(stop), "", ""
    for part in parts:
        seen += part
        out += matcher.push(part)
        if matcher.found is not None:
            return
        held = seen[len(out) :]
        assert not held or any(s.startswith(held) for s in stop)


@settings(deadline=None)
@given(
    st.text(max_size=30) | st.text("ab", max_size=30),
    st.lists(st.text(min_size=1, max_size=5) | SMALL, min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_stop_strings_over_tokens_are_cut_from_the_text(text: str, stop: list[str], min_tokens: int) -> None:
    pieces = pieces_of(BYTES, list(text.encode()), stop=stop, min_tokens=min_tokens)
    assert "".join(pieces) == naive_cut(text, stop, min_tokens)[0]


def test_a_long_output_costs_the_same_for_each_token() -> None:
    """Bytes that never make a character are what makes naive detokenisers quadratic."""

    def seconds(count: int) -> float:
        output = OutputText(BYTES, stop=["never"])
        began = time.thread_time()  # what others take from us is not in it
        for _ in range(count):
            output.push(0x80)
        return time.thread_time() - began

    seconds(1000)
    few, many = (min(seconds(count) for _ in range(3)) for count in (4_000, 40_000))
    assert many < 40 * max(few, 1e-3)


def test_tokens_alone_are_spelled_so_that_they_stay_apart() -> None:
    assert token_text(BYTES, 104) == "h"
    assert token_text(BYTES, 0xE2) == "bytes:\\xe2"
    assert token_text(BYTES, 256) == "<|end|>"


def test_a_character_costs_the_same_however_many_stop_strings_there_are() -> None:
    """64 of them took 1 ms of the event loop for a token of 40 spaces, for each of 64 answers."""

    def taken_ns(stop: list[str]) -> int:
        matcher, begin_ns = StopMatcher(stop), time.thread_time_ns()
        for _ in range(200):
            assert matcher.push(" " * 40) != "found"
        return time.thread_time_ns() - begin_ns

    few, many = [" " * 7 + "x"], [" " * 7 + f"x{number}" for number in range(64)]
    assert min(taken_ns(many) for _ in range(5)) < 5 * min(taken_ns(few) for _ in range(5))
