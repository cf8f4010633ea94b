"""What ordinary clients send without expecting anything from it is taken; `--strict` refuses it by name."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splittime.api import lenient
from splittime.api.decode import decode_body
from splittime.api.lenient import UNSUPPORTED, WAYS_OUT, Ignored
from splittime.api.limits import ModelInfo
from splittime.api.schema import ChatBody, Message
from splittime.server.config import ServerConfig
from splittime.text.tokenizer import ChatTemplate

from .conftest import EOS, LiveServer, say
from .fake_engine import FakeEngine

USER = [{"role": "user", "content": "x"}]
CACHED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
COMPLETIONS = [
    ({"user": "someone"}, "user"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"safety_identifier": "s"}, "safety_identifier"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key"),
    ({"top_p": 0}, "top_p"),
    ({"stop": ""}, "stop"),
    ({"stop": ["", "never"]}, "stop"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 4096}, "max_tokens"),
]
NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "return_tokens_as_token_ids": False,
    "best_of": 1,
    "mirostat": 0,
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
}
ABSENT = {
    **dict.fromkeys(("truncate_prompt_tokens", "guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs", "request_id")),
    **dict.fromkeys(("prompt_logprobs", "logits_processors", "kv_transfer_params", "vllm_xargs")),
    "n_predict": None,
    "response_format": {"type": "text"},
}
OF_CHATS = {"echo": False, "add_special_tokens": False}
COMPLETIONS += [({name: value}, name) for name, value in {**NEUTRAL, "add_special_tokens": True}.items()]
CHATS = [
    *(({name: value}, name) for name, value in {**NEUTRAL, **OF_CHATS}.items()),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [CACHED]}]}, "messages[0].content[0].cache_control"),
    ({"messages": [{**USER[0], "cache_control": {"type": "ephemeral"}}]}, "messages[0].cache_control"),
]
BOTH = [
    *(("/v1/completions", {"prompt": "x", **more}, param) for more, param in COMPLETIONS),
    *(("/v1/chat/completions", {"messages": USER, **more}, param) for more, param in CHATS),
]


@pytest.fixture(scope="module", params=[False, True], ids=["lenient", "strict"])
def live(request):
    config = ServerConfig(port=0, strict=request.param)
    with LiveServer(FakeEngine(say("ok")), config, ModelInfo(("fake",), 512, 257, (EOS,))) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "param"), BOTH, ids=lambda value: str(value)[:60])
def test_what_expects_no_answer_is_taken_unless_strict(live, path: str, body: dict, param: str) -> None:
    status, _, answer = live.post(path, body)
    assert status == (400 if live.config.strict else 200), answer
    if live.config.strict:
        assert answer["error"]["param"] == param


HONOURED = {
    "min_p": 0,
    "repeat_penalty": 1.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "priority": 0,
    "min_tokens": 0,
}


@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", "x"), ("/v1/chat/completions", USER)])
def test_what_a_client_of_vllm_sends_at_its_defaults_is_answered(live, path: str, prompt: object) -> None:
    is_chat = path.endswith("chat/completions")
    more = {"chat_template": None, "documents": None, "mm_processor_kwargs": None} if is_chat else {}
    body = {"messages" if is_chat else "prompt": prompt, **HONOURED, **ABSENT, **more}
    assert live.post(path, body)[0] == 200
    neutral = NEUTRAL | (OF_CHATS if is_chat else {"add_special_tokens": True})
    assert live.post(path, {**body, **neutral})[0] == (400 if live.config.strict else 200)


OTHER_VALUES = {
    **dict.fromkeys((name for name, value in NEUTRAL.items() if value is True), False),
    **dict.fromkeys((name for name, value in NEUTRAL.items() if value is False), True),
    **dict.fromkeys(("best_of", "mirostat"), 2),
    **dict.fromkeys(("typical_p", "dynatemp_range", "xtc_probability", "dry_multiplier"), 0.5),
    **dict.fromkeys(("prompt_logprobs", "n_predict"), 7),
    "logits_processors": ["a"],
}
del OTHER_VALUES["spaces_between_special_tokens"]  # between what is left out
OTHER_VALUES_OF_CHATS = {
    "echo": True,
    "add_special_tokens": True,
    "chat_template": "{{ 1 }}",
    "documents": [{}],
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *(("/v1/completions", *pair) for pair in {**OTHER_VALUES, "add_special_tokens": False}.items()),
        *(("/v1/chat/completions", *pair) for pair in {**OTHER_VALUES, **OTHER_VALUES_OF_CHATS}.items()),
    ],
)
def test_a_value_that_would_change_something_is_refused_with_the_way_out(live, path, name, value) -> None:
    prompt = {"messages": USER} if path.endswith("chat/completions") else {"prompt": "x"}
    status, _, answer = live.post(path, {**prompt, name: value})
    error = answer["error"]
    assert (status, error["code"], error["param"].split(".")[0]) == (400, "unsupported_field", name)
    assert error["message"].partition(": ")[2].startswith(UNSUPPORTED[name])


HINTS = {
    "detokenize": False,
    "cache_prompt": False,
    "timings_per_token": True,
    "guided_decoding_backend": "a",
    "guided_whitespace_pattern": "a",
    "kv_transfer_params": {"a": "b"},
    "vllm_xargs": {"a": "b"},
    "request_id": "mine",
    "store": True,
    "id_slot": 3,  # a field of llama.cpp's that no body of ours has
    "max_token": 4,
    "clothing": {"hat": 1},
}
HINTS_OF_CHATS = {
    "mm_processor_kwargs": {"a": 1},
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {"user_location": None},
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *(("/v1/completions", *pair) for pair in HINTS.items()),
        *(("/v1/chat/completions", *pair) for pair in {**HINTS, **HINTS_OF_CHATS}.items()),
    ],
)
def test_a_hint_and_an_unknown_field_are_taken_with_a_notice_unless_strict(live, path, name, value) -> None:
    prompt = {"messages": USER} if path.endswith("chat/completions") else {"prompt": "x"}
    status, headers, answer = live.post(path, {**prompt, name: value})
    if live.config.strict:
        assert (status, answer["error"]["param"]) == (400, name)
        return
    (told,) = answer["notices"]
    assert headers["x-splittime-notice"] == told
    assert told.startswith(f"{name} has no effect: ")
    assert ("did you mean max_tokens?" in told) == (name == "max_token")
    assert live.post(path, {**prompt, name: None})[2].get("notices") is None


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})])
def test_what_is_no_generation_tells_in_its_header(live, path: str, body: dict) -> None:
    status, headers, _ = live.post(path, {**body, "hat": 1, "coat": 2})
    assert status == (400 if live.config.strict else 200)
    told = "hat has no effect: there is no such field here; coat has no effect: there is no such field here"
    assert live.config.strict or headers["x-splittime-notice"] == told


def test_many_unknown_fields_are_told_of_by_their_number_and_odd_names_in_plain_letters(launch) -> None:
    odd = {"a\r\nset-cookie: b": 1, "\u00e9" * 200: 1, **{f"field{number}": 1 for number in range(20)}}
    status, headers, answer = launch().post("/v1/completions", {"prompt": "x", **odd})
    assert (status, len(answer["notices"]), "set-cookie" in headers) == (200, 9, False)
    assert answer["notices"][0].startswith("a??set-cookie??b has no effect: there is no such field here")
    assert answer["notices"][-1] == "14 more fields have no effect"


def test_near_names_are_looked_for_of_the_first_unknown_fields_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr("difflib.get_close_matches", lambda name, *_, **__: looked.append(name) or [])
    lenient.taken({f"x{number}": 1 for number in range(99)}, ChatBody, Ignored())
    assert looked == [f"x{number}" for number in range(lenient.MOST_TOLD)]


def test_ignored_fields_are_counted_by_their_kind(launch) -> None:
    live = launch(template="{{ messages }}{{ tools }}")
    tools = [{"name": "f", "input_schema": {}}, {"name": "g", "type": "web_search_20250305"}]
    body = {"messages": USER, "max_tokens": 1, "tools": tools, "context_management": {"edits": []}}
    assert live.post("/v1/messages", {**body, "new": 1, "newer": 2})[0] == 200
    assert live.post("/tokenize", {"prompt": "x", "newest": 3})[0] == 200
    counted = [line for line in live.get("/metrics")[2].decode().splitlines() if "ignored_fields_total{" in line]
    kinds = {"hint": 1, "tool": 1, "unknown": 3}
    assert sorted(counted) == [f'splittime_ignored_fields_total{{kind="{kind}"}} {n}.0' for kind, n in kinds.items()]


def test_an_earlier_answer_may_be_sent_back_as_other_servers_wrote_it(launch) -> None:
    live = launch()
    function = {"name": "f", "arguments": {"a": 1}}
    earlier = {
        **{"role": "assistant", "content": "y", "refusal": None, "annotations": [], "thinking_blocks": []},
        **{"provider_specific_fields": {"refusal": None}, "reasoning_details": [{"type": "reasoning.text"}]},
        "tool_calls": [{"id": "c", "function": function, "index": 0, "caller": {"type": "direct"}}],
    }
    status, _, answer = live.post("/v1/chat/completions", {"messages": [*USER, earlier, earlier, *USER]})
    assert status == 200, answer
    assert [told.partition(" has")[0] for told in answer["notices"]] == [
        *("messages[].provider_specific_fields", "messages[].reasoning_details", "messages[].tool_calls[].caller"),
    ]


EXTRA = st.dictionaries(st.text(min_size=1), st.integers() | st.none() | st.lists(st.text()), max_size=3)


@given(EXTRA, EXTRA, EXTRA)
def test_what_is_unknown_changes_nothing_of_what_is_known(body: dict, message: dict, part: dict) -> None:
    known = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "seed": 1, "tools": []}
    content = [{**part, "type": "text", "text": "x"}]
    given = {**body, "messages": [{**message, "role": "user", "content": content}], "seed": 1.0, "tools": []}
    names = {*ChatBody.__struct_fields__, *Message.__struct_fields__, *WAYS_OUT, "type", "text", "cache_control"}
    assume(not names.intersection((*body, *message, *part)))
    ignored = Ignored()
    read = decode_body(msgspec.json.encode(given), ChatBody, ignored)
    assert read == decode_body(msgspec.json.encode(known), ChatBody, Ignored())
    values = [value for extra in (body, message, part) for value in extra.values()]
    assert bool(ignored.notices()) == any(value not in (None, []) for value in values)


def test_what_a_model_refused_or_thought_by_another_name_is_part_of_the_conversation() -> None:
    body = {
        "messages": [{"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "y", "reasoning": "b"}]
    }
    told = [message.to_template() for message in decode_body(msgspec.json.encode(body), ChatBody).messages]
    assert told == [
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "y", "reasoning_content": "b"},
    ]


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "system"),
        ("{# developer #}{% for m in messages %}[{{ m.role }}]{% endfor %}", "developer"),
    ],
)
def test_a_developer_is_the_system_where_the_template_knows_none(template: str, role: str) -> None:
    rendered = ChatTemplate(template, {}).render([{"role": "developer", "content": "x"}, *USER])
    assert rendered == f"[{role}][user]"


def test_a_template_may_put_messages_behind_a_list() -> None:
    template = "{% for m in [{'role': 'system'}] + messages %}{{ m.role }} {% endfor %}"
    assert ChatTemplate(template, {}).render(tuple(USER)) == "system user "


def test_reasoning_reaches_the_template_and_only_there(live) -> None:
    thought = {"role": "assistant", "content": "y", "reasoning_content": "because"}
    status, _, answer = live.post("/v1/chat/completions", {"messages": [*USER, thought, *USER]})
    assert (status, answer["notices"]) == (200, ["the model's chat template leaves out the reasoning of messages[1]"])


def test_a_clamped_length_is_told_in_header_and_body(launch) -> None:
    live = launch(say("z" * 600, end=False), model={"max_model_len": 512})
    status, headers, answer = live.post("/v1/completions", {"prompt": "abc", "max_tokens": 9999})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 509)
    assert answer["choices"][0]["finish_reason"] == "length"
    told = "max_tokens 9999 was clamped to 509: the context has 512 tokens"
    assert (headers["x-splittime-notice"], answer["notices"]) == (told, [told])


def test_a_length_that_fits_is_told_nothing(launch) -> None:
    live = launch(say("ok"))
    _, headers, answer = live.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
    assert "x-splittime-notice" not in headers
    assert "notices" not in answer


def test_minus_one_means_all_that_is_left(launch) -> None:
    live = launch(say("z" * 600, end=False), model={"max_model_len": 300})
    answer = live.post("/v1/completions", {"prompt": "abc", "max_tokens": -1})[2]
    assert answer["usage"]["completion_tokens"] == 297
    assert "notices" not in answer


def test_a_prompt_without_room_is_refused_however_lenient(launch) -> None:
    live = launch(say("ok"), model={"max_model_len": 8})
    status, _, answer = live.post("/v1/completions", {"prompt": "x" * 8, "max_tokens": -1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_min_tokens_hold_back_stop_strings(launch) -> None:
    live = launch(say("ab ab ab"))
    body = {"prompt": "x", "stop": "ab", "max_tokens": 20}
    texts = [live.post("/v1/completions", {**body, "min_tokens": n})[2]["choices"][0]["text"] for n in (0, 1, 2, 5)]
    assert texts == ["", "", "ab ", "ab ab "]
