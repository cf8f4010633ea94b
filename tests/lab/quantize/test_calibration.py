"""Which text a file gives: windows of ids, and how much is missing."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from tiny import make_text

from splittime.core.errors import ConfigError, RequestError
from splittime.lab.quantize.calibration import read


class Bytes:
    """A token is a byte; 0 comes before each document."""

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + list(text.encode())

    def render_chat(self, messages, **options):
        if not all("content" in message for message in messages):
            raise RequestError("a message has no content")
        assert options == {"add_generation_prompt": False}
        return "".join(f"<{message['content']}>" for message in messages)


def write(folder, text):
    path = folder / "text"
    path.write_text(text)
    return path


def test_plain_text_is_one_document(tmp_path):
    found = read(write(tmp_path, "abcdefghij\nk"), Bytes(), 3, 4, 0)
    assert found.windows.tolist() == [[0, *b"abc"], [*b"defg"], [*b"hij\n"]]


def test_lines_are_documents_and_chats_go_through_the_template(tmp_path):
    lines = [{"text": "abc"}, {"messages": [{"role": "user", "content": "de"}]}, {"text": "fg", "id": 3}]
    found = read(write(tmp_path, "\n\n".join(map(json.dumps, lines))), Bytes(), 1, 11, 0)
    assert bytes(found.windows[0].tolist()) == b"\0abc<de>\0fg"


def test_the_seed_draws_the_windows_and_nothing_else_does(tmp_path):
    path = write(tmp_path, "".join(chr(33 + n % 90) for n in range(1000)))
    draws = [read(path, Bytes(), 5, 10, seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0].windows, draws[1].windows)
    assert draws[0].digest == draws[1].digest != draws[2].digest
    (tmp_path / "other").write_bytes(path.read_bytes())
    assert read(tmp_path / "other", Bytes(), 5, 10, 0).digest == draws[0].digest


@given(st.integers(0, 60), st.integers(1, 6), st.integers(2, 12))
@budget(max_examples=60, deadline=None)
def test_there_is_enough_text_or_it_says_how_much_is_needed(tmp_path_factory, size, samples, length):
    path = write(tmp_path_factory.mktemp("text"), "x" * size)
    found = size + 1 if size else 0  # an empty file has no document
    if found // length >= samples:
        assert read(path, Bytes(), samples, length, 0).windows.shape == (samples, length)
        return
    with pytest.raises(ConfigError) as caught:
        read(path, Bytes(), samples, length, 0)
    assert f"has {found} tokens; {samples} samples of {length} need {samples * length}" in str(caught.value)
    hint = caught.value.info.hint or ""
    if found >= length:
        assert f"--samples {found // length}" in hint
        assert len(read(path, Bytes(), found // length, length, 0).windows) == found // length


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": 3}', "line 1: a line is"),
        ('{"text": "a"}\n{"messages": [{}]}', "line 2: a message has no content"),
        ('{"text": "a"}\n[1]', "line 2: a line is"),
        ('{"text": "a"\n', "line 1: Expecting"),
        ("", "has 0 tokens"),
    ],
)
def test_what_is_no_text_is_refused_by_line(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read(write(tmp_path, text), Bytes(), 2, 4, 0)


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "none", Bytes(), 1, 4, 0)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 50)
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "bytes", Bytes(), 1, 4, 0)


def test_the_digest_tells_shapes_apart():
    assert make_text(2, 8).digest != make_text(4, 4).digest
