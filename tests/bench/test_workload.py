"""Prompts: exact lengths, a safe range of ids, what groups share and what nothing shares, salts, and users' files."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book.records import Phase
from splittime.bench.distributions import Fitter, parse_distribution, spread, stream, token_ids
from splittime.bench.draw import EndlessCache, draw
from splittime.bench.spec import LoadSpec
from splittime.core.errors import ConfigError, NotFound

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
VOCAB = 4096


def drawn(salt: str | None = None, vocab_size: int | None = VOCAB, max_model_len: int | None = 2048, **fields):
    block_size = fields.pop("block_size", 16)
    spec = LoadSpec(**{"concurrency": 2, "num_requests": 40, **fields})
    schedule = draw(spec, vocab_size=vocab_size, max_model_len=max_model_len, block_size=block_size, salt=salt)
    return schedule


def prompts(schedule) -> list:
    return [planned.prompt for planned in schedule.requests]


# ---- lengths


def test_distributions_have_their_means_and_ends():
    u = stream(0, "u").random(200_000)
    assert parse_distribution("512", "x").at(u[:3]).tolist() == [512.0] * 3
    uniform = parse_distribution("uniform:3:6", "x").whole_at(u)
    assert np.unique(uniform, return_counts=True)[1] == pytest.approx([50_000] * 4, rel=0.02)
    lognormal = parse_distribution("lognormal:400:0.8", "x").at(u)
    assert (np.mean(lognormal), np.std(lognormal) / np.mean(lognormal)) == pytest.approx((400, 0.8), rel=0.02)
    assert np.mean(parse_distribution("exponential:2.5", "x").at(u)) == pytest.approx(2.5, rel=0.02)


@pytest.mark.parametrize(
    "text",
    ["", "many", "normal:1:2", "uniform:5", "uniform:9:2", "lognormal:5:0", "0", "-3", "nan", "uniform:0:5", "2e9"],
)
def test_other_texts_are_no_lengths(text):
    with pytest.raises(ConfigError, match="input_tokens") as caught:
        parse_distribution(text, "input_tokens", 1)
    assert caught.value.info.hint


@given(st.integers(1, 300))
def test_a_spread_reaches_every_part(count):
    numbers = np.sort(spread(stream(1, "x"), count))
    assert np.all(numbers >= np.arange(count) / count)
    assert np.all(numbers < (np.arange(count) + 1) / count)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1), st.integers(2, 4000))
def test_fitted_lengths_fit_and_what_fits_is_left(lengths, limit):
    inputs, outputs = (np.array(one) for one in zip(*lengths, strict=True))
    fitter = Fitter(limit)
    fitted_in, fitted_out = fitter.fit(inputs, outputs)
    too_long = np.maximum(1, inputs) + np.maximum(1, outputs) > limit
    assert fitter.num_cut == np.sum(too_long)
    assert np.all(fitted_in + fitted_out <= limit)
    assert np.all((fitted_in >= 1) & (fitted_out >= 1))
    assert np.array_equal(fitted_in[~too_long], np.maximum(1, inputs)[~too_long])
    assert np.all((fitted_in + fitted_out == limit)[too_long])


def test_cut_requests_are_counted_and_said():
    schedule = drawn(input_tokens="lognormal:500:1.5", max_model_len=600)
    assert all(one.expected_prompt_tokens + one.output_tokens <= 600 for one in schedule.requests)
    assert any("cut" in note for note in schedule.notes)


def test_lengths_that_never_fit_are_refused():
    with pytest.raises(ConfigError, match="640") as caught:
        drawn(input_tokens="512", output_tokens="128", max_model_len=600)
    assert caught.value.info.limit == 600


def test_lengths_from_a_file_stay_together(tmp_path):
    rows = [(10, 100), (20, 200), (30, 300)]
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{i},{o}\n" for i, o in rows))
    schedule = drawn(lengths_file=str(path), num_requests=300)
    found = [(one.expected_prompt_tokens, one.output_tokens) for one in schedule.requests]
    assert set(found) == set(rows)
    assert min(found.count(row) for row in rows) > 60


@pytest.mark.skipif(not SHARED.exists(), reason=f"no data in {SHARED}")
def test_lengths_of_sharegpt():
    path = SHARED / "traces" / "lengths_sharegpt.csv.gz"
    schedule = drawn(lengths_file=str(path), length_scale=0.1, num_requests=2000, max_model_len=None)
    assert np.mean([one.output_tokens for one in schedule.requests]) == pytest.approx(43.9, rel=0.1)


# ---- ids


@pytest.mark.parametrize("vocab_size", [16, 105, 512, 4096, 32_768, 128_256, 151_936, 201_088])
def test_ids_keep_away_from_both_ends(vocab_size):
    alphabet = token_ids(vocab_size)
    ids = alphabet.draw(stream(0, "x"), 10_000)
    assert ids.min() >= 3
    assert ids.max() < vocab_size - max(1, vocab_size // 50) <= vocab_size - 1
    assert alphabet.high - alphabet.low > vocab_size // 2


def test_special_ids_of_known_vocabularies_are_outside():
    for vocab_size, special in ((128_256, 128_000), (151_936, 151_643), (129_280, 128_000), (201_088, 199_998)):
        assert token_ids(vocab_size).high <= special
    assert token_ids(32_768).low > 767  # Mistral's control tokens


def test_no_vocabulary_no_ids():
    with pytest.raises(ConfigError, match="vocabulary"):
        drawn(vocab_size=None)
    with pytest.raises(ConfigError, match="too few"):
        drawn(vocab_size=8)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 300),
    st.floats(0, 1),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 99),
    st.none() | st.text(),
)
def test_prompts_are_exact_and_share_exactly_what_they_should(length, share, groups, block_size, seed, salt):
    """The closed form for equal lengths (all but the first of a group hit the shared part's full blocks, and never the
    last token) against the endless cache's."""
    schedule = drawn(
        salt, input_tokens=str(length), prefix_share=share, prefix_groups=groups, block_size=block_size, seed=seed
    )
    seen = set()
    for planned in schedule.requests:
        assert len(planned.prompt) == planned.expected_prompt_tokens == length
        group = planned.tags.get("group")
        alike = min(int(length * share), length - 1) if group in seen else 0
        shared = alike // block_size * block_size
        by_chance = block_size - alike % block_size <= 2  # so few own tokens are the same in two prompts now and then
        assert planned.expected_cached_tokens == shared or (by_chance and planned.expected_cached_tokens > shared)
        seen.add(group) if share else None
    assert len(seen) <= groups


def test_longer_prompts_have_more_of_the_same_prefix():
    schedule = drawn(input_tokens="uniform:10:400", prefix_share=0.5, num_requests=60)
    longest = max(prompts(schedule), key=len)
    for prompt in prompts(schedule):
        half = len(prompt) // 2
        assert prompt[:half] == longest[:half]
        assert prompt[half : half + 8] != longest[half : half + 8] or prompt is longest


def test_nothing_in_common_unless_asked():
    schedule = drawn(num_requests=300, input_tokens="64", block_size=4)
    assert {one.expected_cached_tokens for one in schedule.requests} == {0}


def cached_tokens(prompts_in_order, block_size):
    """What an endless cache finds of each prompt."""
    cache = EndlessCache(block_size)
    return [cache.cached_tokens(prompt) for prompt in prompts_in_order]


def test_another_run_finds_nothing_of_this_one_unless_reuse_is_asked_for():
    for fields in ({}, {"prefix_share": 0.7, "prefix_groups": 3}, {"turns": "3"}):
        first, second = (prompts(drawn(salt, **fields)) for salt in ("one", "two"))
        assert sum(cached_tokens(first + second, 4)[len(first) :]) == sum(cached_tokens(second, 4))
        assert [len(one) for one in first] == [len(one) for one in second]
        again, more = (prompts(drawn(salt, reuse_prompts=True, **fields)) for salt in ("one", "two"))
        assert again == more


def test_with_reuse_nothing_is_expected_for_certain():
    assert {one.expected_cached_tokens for one in drawn(reuse_prompts=True).requests} == {None}


def test_hits_are_not_known_without_a_block_size_if_something_is_shared():
    assert {one.expected_cached_tokens for one in drawn(block_size=None).requests} == {0}
    assert {one.expected_cached_tokens for one in drawn(block_size=None, prefix_share=0.5).requests} == {None}


def test_words_for_servers_that_take_no_ids():
    text, chat = (drawn(prompt_form=form, vocab_size=None, input_tokens="50") for form in ("text", "chat"))
    assert {len(one.prompt.split(" ")) for one in text.requests} == {50}
    assert {one.messages[0]["role"] for one in chat.requests} == {"user"}
    assert len({one.messages[0]["content"] for one in chat.requests}) == 40
    assert {one.expected_prompt_tokens for one in text.requests + chat.requests} == {None}


def test_warm_up_reaches_the_shapes_that_are_measured():
    """Twenty warm-up requests come within a few percent of both ends of 5,000 measured lengths."""
    schedule = drawn(input_tokens="uniform:10:1900", output_tokens="1", num_requests=5000, warm_up_requests=20)
    warm = [len(one.prompt) for one in schedule.requests if one.phase is Phase.WARM_UP]
    assert len(warm) == 20
    assert min(warm) < 10 + 1890 / 20
    assert max(warm) > 1900 - 1890 / 20


def test_measured_prompts_do_not_depend_on_the_warm_up():
    bare, warmed = (
        [one.prompt for one in drawn(warm_up_requests=n).requests if one.phase is Phase.MEASURED] for n in (0, 17)
    )
    assert bare == warmed


# ---- files

TALKS = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello, how are you?"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "Three?"},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "Nobody asked."}]},
]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TALKS).encode()))
    return str(path)


def test_conversations_become_chats(talks):
    schedule = drawn(dataset=talks, num_requests=20)
    texts = [[one["content"] for one in planned.messages] for planned in schedule.requests]
    assert {len(text) for text in texts} == {1, 2}
    assert any(text[0].endswith("] Hi") for text in texts)
    assert any(text[0].endswith("] Be brief.") and text[1] == "One?" for text in texts)
    assert not any(planned.exact_output for planned in schedule.requests)
    assert any("1 conversations" in note for note in schedule.notes)


def test_each_use_of_a_conversation_has_a_salt_of_its_own(talks):
    first = [planned.messages[0]["content"] for planned in drawn(dataset=talks, num_requests=20).requests]
    assert len(set(first)) == 20
    bare = {planned.messages[0]["content"] for planned in drawn(dataset=talks, reuse_prompts=True).requests}
    assert bare == {"Hi", "Be brief."}


def test_conversations_as_text(talks):
    schedule = drawn(dataset=talks, prompt_form="text", reuse_prompts=True)
    assert {planned.prompt for planned in schedule.requests} == {"Hi", "Be brief.\nOne?"}


@pytest.mark.skipif(not SHARED.exists(), reason=f"no data in {SHARED}")
def test_the_sharegpt_sample_is_read():
    schedule = drawn(dataset=str(SHARED / "eval" / "sharegpt_format_sample.json.gz"), num_requests=400)
    assert len(schedule.requests) == 400
    assert schedule.notes == ()


def jsonl(tmp_path, *lines: object) -> str:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_requests_of_jsonl_in_order(tmp_path):
    path = jsonl(
        tmp_path,
        {"prompt": "Say A", "max_tokens": 7, "body": {"temperature": 0.5}, "tags": {"kind": "a"}},
        {"messages": [{"role": "user", "content": "Say B"}]},
        "",
        {"prompt": [5, 6, 7]},
    )
    schedule = drawn(dataset=path, num_requests=6, output_tokens="9")
    a, b, c, *_ = schedule.requests
    assert (a.prompt[-5:], a.output_tokens, a.body, a.tags) == ("Say A", 7, {"temperature": 0.5}, {"kind": "a"})
    assert (b.messages[0]["content"][-5:], b.output_tokens) == ("Say B", 9)
    assert (c.prompt[-3:], len(c.prompt), c.expected_prompt_tokens) == ((5, 6, 7), 11, 11)
    assert schedule.requests[3].prompt[-5:] == "Say A"
    assert schedule.requests[3].prompt != a.prompt
    chat = drawn(dataset=path, num_requests=1, prompt_form="chat", reuse_prompts=True)
    assert chat.requests[0].messages == ({"role": "user", "content": "Say A"},)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ({"promt": "x"}, "promt"),
        ({"max_tokens": 5}, "one of prompt and messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "one of prompt and messages"),
        ({"prompt": "x", "max_tokens": 0}, "at least 1"),
        ({"prompt": ""}, "empty"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"prompt": ["x"]}, "prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, why):
    with pytest.raises(ConfigError, match="line 3") as caught:
        drawn(dataset=jsonl(tmp_path, {"prompt": "fine"}, "", line))
    assert why in str(caught.value)
    assert caught.value.info.hint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "array"),
        ("[]", "no conversation"),
        ('[{"conversations": [{"from": "cat", "value": "x"}]}]', "cat"),
        ('[{"conversations": [{"from": "human", "value": 5}]}]', "no text"),
        ('[{"chats": []}]', "conversation 0"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path, text, why):
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"talks\.json") as caught:
        drawn(dataset=str(path))
    assert why in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(NotFound):
        drawn(dataset=str(tmp_path / "missing.jsonl"))
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(ConfigError, match="cannot read"):
        drawn(dataset=str(broken))


def test_text_is_no_ids(tmp_path):
    with pytest.raises(ConfigError, match="holds text"):
        drawn(dataset=jsonl(tmp_path, {"prompt": "x"}), prompt_form="ids")
