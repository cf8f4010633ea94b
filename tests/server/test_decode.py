"""What a body may cost the event loop: its objects and lists are bounded, ids are counted before they are looked at,
and long answers are written elsewhere."""

import difflib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.api import decode, params
from splittime.api.decode import JsonShape
from splittime.api.lenient import MAX_PLACE_CHARS
from splittime.api.schema import MAX_DETOKENIZED
from splittime.core.errors import RequestError

from .conftest import say

texts = st.text(st.sampled_from('{}[]",:\\ a1é\n'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def num_texts(value: object) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(num_texts, value.values()))
    return sum(map(num_texts, value)) if isinstance(value, list) else isinstance(value, str)


def num_names(value: object) -> int:
    own, inner = (len(value), value.values()) if isinstance(value, dict) else (0, value)
    return own + sum(map(num_names, inner)) if isinstance(value, dict | list) else 0


def num_commas(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return max(0, len(value) - 1) + sum(map(num_commas, inner)) if isinstance(value, dict | list) else 0


def num_parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_parts, value.values()))
    return 1 + sum(map(num_parts, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize(("bound", "count"), [("MAX_PARTS", num_parts), ("MAX_TEXTS", num_texts)])
@given(values, st.integers(0, 12), st.booleans())
def test_parts_and_texts_are_counted_wherever_brackets_and_quotes_stand(bound, count, value, limit, is_ascii) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LONG_BYTES", 0)
        patch.setattr(decode, bound, limit)
        if count(value) > limit:
            with pytest.raises(RequestError, match="texts" if bound == "MAX_TEXTS" else None) as caught:
                decode.decode_once(body, object)
            assert caught.value.info.limit == limit
        else:
            assert msgspec.json.encode(decode.decode_once(body, object)) == msgspec.json.encode(value)


@pytest.mark.parametrize("body", [b'"[[[[' + b"[" * 40_000, b'"' + b'\\"[' * 40_000, b'"\\'])
def test_what_is_no_json_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode.decode_body(body, decode.Strict)
    assert caught.value.info.code == "invalid_json"


@given(values, st.booleans())
def test_a_shape_counts_what_is_there(value, is_ascii: bool) -> None:
    shape = JsonShape(json.dumps(value, ensure_ascii=is_ascii).encode())
    assert (shape.num_texts, shape.num_parts) == (num_texts(value), num_parts(value))
    assert (shape.num_names, shape.num_commas) == (num_names(value), num_commas(value))
    assert shape.repeated_name() is None


LONG = "so_long_a_name_that_it_differs_%s_in_the_middle_alone"
names = st.sampled_from(
    [
        '"a"',
        '"b"',
        '""',
        '"é"',
        '"[1]"',
        '"{"',
        '"}"',
        '"a:"',
        '"\\u0061"',
        '"\\"a\\":"',
        '"\\\\"',
    ]
    + [f'"{LONG % letter}"' for letter in "xy"]
)
scalars = st.sampled_from(
    ["[1,2]", "[ -1.5e+3 ]", "[[1],[2]]", '["{",2]', "3", '"a"', '"a\\\\"', '"\\\\\\":{"', "null"]
)
objects = st.recursive(
    st.lists(st.tuples(names, scalars), max_size=4),
    lambda inner: st.lists(st.tuples(names, inner | scalars), max_size=4),
    max_leaves=12,
)


def written(value, space: str) -> str:
    if isinstance(value, str):
        return value
    return "{" + f"{space},{space}".join(f"{name}{space}:{space}{written(inner, space)}" for name, inner in value) + "}"


def has_twice(value) -> bool:
    if isinstance(value, str):
        return False
    return len({json.loads(name) for name, _ in value}) < len(value) or any(has_twice(inner) for _, inner in value)


@pytest.mark.parametrize("long_bytes", [0, 2**14])
@given(value=objects, space=st.sampled_from(["", " ", "\n\t "]))
def test_a_name_twice_is_found_wherever_it_stands(long_bytes: int, value, space: str) -> None:
    body = f'[{written(value, space)}, "{{"]'.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LONG_BYTES", long_bytes)
        if not has_twice(value):
            decode.decode_once(body, msgspec.Raw)
            return
        with pytest.raises(RequestError) as caught:
            decode.decode_once(body, msgspec.Raw)
    assert caught.value.info.code == "duplicate_field"


@pytest.mark.parametrize(
    ("body", "twice"),
    [
        (b'{"a": 1, "\\u0061": 2}', "a"),
        (b'{"\\"a\\":": 1, "b": {"\\"a\\":": 2}, "\\"a\\":": 3}', '"a":'),
        (b'[{"a": 1}, {"a": 2}, {"b": {"a": 1}, "a": 2}]', None),
        (b'{"%b": 1, "%b": 2}' % (b"x" * 20 + b"y" + b"x" * 20, b"x" * 20 + b"z" + b"x" * 20), None),
        (b'{"x": {"a": 1}, "y": [{"a": 1}, [{"c": 1}]], "x" :2}', "x"),
    ],
)
def test_a_shape_knows_which_name_stands_twice(body: bytes, twice: str | None) -> None:
    assert JsonShape(body).repeated_name() == twice


@given(st.binary(max_size=300) | st.text(st.sampled_from('{}[]":,\\ 1'), max_size=300).map(str.encode))
def test_a_shape_is_made_of_any_bytes(body: bytes) -> None:
    JsonShape(body).repeated_name()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 2**17 - 1, 2**17, 2**17 + 1])
def test_a_backslash_escapes_across_pieces_and_words(size: int) -> None:
    for end in ("\\", '"', '\\"', '"\\', '\\\\"[{:,'):
        shape = JsonShape(json.dumps(["x" * size + end, end]).encode())
        assert (shape.num_texts, shape.num_parts, shape.num_names, shape.num_commas) == (2, 1, 0, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/v1/completions", {"prompt": [[1]] * 20_000}),
        ("/v1/completions", {"prompt": [""] * 90_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 0 for i in range(40_000)}}),
        ("/v1/completions", {"prompt": [1] * 1_100_000}),
        ("/v1/completions", {"prompt": [1.0] * 70_000}),
        ("/v1/completions", {"prompt": [1e300] * 2_000}),
    ],
)
def test_a_body_of_too_many_parts_is_refused_with_the_limit(launch, path: str, body: dict) -> None:
    status, _, answer = launch().post(path, body)
    assert (status, answer["error"]["code"]) == (400, "body_too_complex")
    bounds = (decode.MAX_PARTS, decode.MAX_TEXTS, decode.MAX_NAMES, decode.MAX_COMMAS, decode.MAX_FLOATS)
    assert answer["error"]["limit"] in (*bounds, decode.MAX_SLOW_NUMBERS)


SLOW = ("1e-310", "5E-324", "2.2250738585072011e-308", "1e+5", "-1234567890123456789012", "0." + "1" * 18)
QUICK = (
    "1",
    "-1.5",
    "1234567890123456789",
    "0." + "1" * 17,
    "true",
    '"1e-310"',
    '"\\"1e5"',
    '"' + "1" * 40 + '"',
    "[]",
)


@pytest.mark.parametrize("size", [0, 1, 50, 63, 64, 2**17 - 10])
@given(values=st.lists(st.sampled_from((*SLOW, *QUICK)), min_size=1))
def test_a_shape_counts_the_numbers_that_are_slow_to_read(size: int, values: list[str]) -> None:
    shape = JsonShape(f'["{"x" * size}",{",".join(values)}]'.encode())
    beyond = sum(len(value) - 19 for value in values if value in SLOW and "e" not in value.lower())
    assert shape.slow_numbers() == (sum(value in SLOW for value in values), beyond)
    assert shape.num_floats() == sum("." in value for value in values)
    assert shape.most_numbers == 1 + len(values)
    assert JsonShape(b'[[{"a":[1]}],2]').most_numbers == 2


@pytest.mark.parametrize(
    ("number", "count", "limit"),
    [
        ("1e-310", 600_000, decode.MAX_SLOW_NUMBERS),
        ("1e-310", 2_000, decode.MAX_SLOW_NUMBERS),  # 14 KB, which are read on the event loop
        ("1.2345678901234567890123456e-300", decode.MAX_SLOW_NUMBERS + 1, decode.MAX_SLOW_NUMBERS),
        ("12345678901234567890", 1_000, decode.MAX_SLOW_NUMBERS),
        ("1" * 4000, 20, decode.MAX_SLOW_BYTES),
        ("1.5", decode.MAX_FLOATS + 1, decode.MAX_FLOATS),
    ],
)
def test_numbers_that_are_slow_to_read_are_bounded_in_any_field(number: str, count: int, limit: int) -> None:
    around = '{"model":"m","messages":[],"chat_template_kwargs":{"a":[%s]}}'
    with pytest.raises(RequestError) as caught:
        decode.decode_once((around % ",".join([number] * count)).encode(), Any)
    assert (caught.value.info.code, caught.value.info.limit) == ("body_too_complex", limit)


@pytest.mark.parametrize(
    ("number", "count"),
    [
        ("1e-310", decode.MAX_SLOW_NUMBERS),
        ("12345678901234567890", decode.MAX_SLOW_NUMBERS),
        ("1" * 4000, 16),
        ("1.5", decode.MAX_FLOATS),
        ("1234567890123456789", 20_000),
    ],
)
def test_as_many_slow_numbers_as_may_be_are_read(number: str, count: int) -> None:
    assert len(decode.decode_once(f"[{','.join([number] * count)}]".encode(), list)) == count


@pytest.mark.parametrize("size", [1000, decode.SOME_BYTES, decode.LONG_BYTES])
def test_a_shorter_body_is_read_without_its_shape(monkeypatch, size: int) -> None:
    monkeypatch.setattr(decode, "JsonShape", None)
    decode.decode_once(b'["%b"]' % (b"1e-310, " * (size // 8 - 1))[: 8 * decode.MAX_SLOW_NUMBERS], Any)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"max_tokens": 1.0, "prompt": "x"', "invalid_json"),
        (b'{"max_tokens": 1.0, "prompt": "\xff"}', "invalid_json"),
        (b'{"max_tokens": 1.0, "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "invalid_json"),
        (b'{"max_tokens": 1.0, "prompt": "x", "max_tokens": 2}', "duplicate_field"),
        (b'{"max_tokens": 1.0, "prompt": "x", "temperature": 1e400}', "invalid_type"),
        (b'{"max_tokens": 1e300, "prompt": "x"}', "invalid_type"),
        (b'{"max_tokens": 9223372036854775808.0, "prompt": "x"}', "invalid_type"),
    ],
)
def test_what_is_wrong_behind_a_float_is_refused_too(launch, body: bytes, code: str) -> None:
    status, _, answer = launch().post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, code)


def test_a_float_is_the_whole_number_that_it_is(launch) -> None:
    server = launch(say("hello"))
    body = b'{"prompt": [65.0, 6.6e1], "max_tokens": 2.0, "temperature": 0.5, "logit_bias": {"65": 1.5}}'
    assert server.post("/v1/completions", body)[0] == 200
    asked = server.engine.submitted[0]
    assert (asked.prompt_token_ids, asked.sampling.max_tokens, asked.sampling.temperature) == ((65, 66), 2, 0.5)


def test_nothing_like_a_long_name_is_looked_for(launch, monkeypatch) -> None:
    """The search for it took half a second for a name of 4 MB."""
    looked_for = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *_, **__: looked_for.append(name) or [])
    for is_strict, longest in ((False, MAX_PLACE_CHARS), (True, decode.MAX_NAME_CHARS)):
        status, _, answer = launch(config={"strict": is_strict}).post(
            "/v1/completions", {"prompt": "x", "x" * 100_000: 1}
        )
        assert (status, answer.get("error", {}).get("code")) == ((400, "unknown_field") if is_strict else (200, None))
        assert looked_for.pop() == "x" * longest


def test_a_long_text_full_of_brackets_is_no_such_body(launch) -> None:
    server = launch(model={"max_model_len": 200_000})
    assert server.post("/v1/completions", {"prompt": "[{" * 20_000, "max_tokens": 1})[0] == 200


def test_ids_beyond_a_limit_are_counted_and_not_looked_at(launch, monkeypatch) -> None:
    server = launch()
    monkeypatch.setattr(params, "check_token_ids", None)
    status, _, answer = server.post("/v1/completions", {"prompt": [65] * 4096})
    assert (status, answer["error"]["code"], answer["error"]["limit"]) == (400, "context_length_exceeded", 4095)
    status, _, answer = server.post("/detokenize", {"tokens": [65] * (MAX_DETOKENIZED + 1)})
    assert (status, answer["error"]["param"], answer["error"]["limit"]) == (400, "tokens", MAX_DETOKENIZED)


def test_the_answer_to_a_text_to_tokenise_is_written_by_a_worker(launch) -> None:
    """What reaches the event loop is the answer's bytes, and no list of ids."""
    server = launch(say("x"))
    done = []
    submit = server.service.texts.submit

    def noted(work, **sharer):
        task = submit(work, **sharer)
        task.done.add_done_callback(lambda future: done.append(future.result()))
        return task

    server.service.texts.submit = noted
    for body in ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}], "return_token_strs": True}):
        status, headers, answer = server.post("/tokenize", body)
        assert (status, headers["content-type"], answer["max_model_len"]) == (200, "application/json", 4096)
        assert len(answer["tokens"]) == answer["count"]
        assert ("token_strs" in answer) == ("return_token_strs" in body)
        assert (done[-1].ids, json.loads(bytes(done[-1].answer))) == ((), answer)
