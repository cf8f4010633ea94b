"""Calls of tools: what the grammar of a family allows, its parser reads back, wherever the text is cut into pieces."""

import json
from collections.abc import Sequence
from pathlib import Path

import llguidance
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import splittime
from splittime.core.errors import ConfigError, RequestError
from splittime.text.call_arguments import MOST_WORD_CHARS, JsonPieces
from splittime.text.grammars import of_json_schema
from splittime.text.marks import HarmonyParser, ReasoningPlace, trigger
from splittime.text.tool_families import FAMILIES, Tool, family_named, family_of_template
from splittime.text.tool_grammar import grammar_of_calls
from splittime.text.tool_parser import PIECE_CHARS, READERS, ToolParser

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}, "required": ["city"]}
CITY |= {"$defs": {"name": {"type": "string"}}, "additionalProperties": False}
MIXED = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "is_on": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["count", "kinds"],
}
TOOLS = [Tool("weather", CITY, False), Tool("now", {"type": "object"}, False), Tool("mix", MIXED, False)]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
ARGUMENTS = '{"city": "a } \\" <tool_call> [é"}'
TWO = (("weather", ARGUMENTS), ("now", "{}"))
MIXTURE = ("mix", '{"count": 3, "is_on": true, "note": "12 (", "kinds": ["a", "b"], "colour": "red"}')
SHORT_MIXTURE = ("mix", '{"count": -1, "kinds": []}')


def members(arguments: str, calls: Sequence[tuple[str, str]]) -> list[str]:
    return [f'{{"name": "{name}", "{arguments}": {given}}}' for name, given in calls]


def tagged(before: str, between: str, after: str, given: str) -> str:
    """A text as it is; a text that could be taken for something else, and anything else, as JSON."""
    values = json.loads(given).items()
    shown = [(key, value if isinstance(value, str) and value != "12 (" else json.dumps(value)) for key, value in values]
    return "".join(f"{before}{key}{between}{value}{after}" for key, value in shown)


def pythonic(calls: Sequence[tuple[str, str]]) -> list[str]:
    def value(given: object) -> str:
        return str(given) if isinstance(given, bool) else json.dumps(given, ensure_ascii=False)

    listed = [(name, json.loads(given).items()) for name, given in calls]
    return [f"{name}({', '.join(f'{key}={value(each)}' for key, each in given)})" for name, given in listed]


def quoted(quote: str, given: object) -> str:
    """A value as Gemmas write it."""
    match given:
        case str():
            return quote + given + quote
        case list():
            return f"[{','.join(quoted(quote, each) for each in given)}]"
        case dict():
            return "{" + ",".join(f"{name}:{quoted(quote, each)}" for name, each in given.items()) + "}"
    return json.dumps(given)


def dsml(around: str, calls: Sequence[tuple[str, str]]) -> str:
    def one(key: str, value: object) -> str:
        is_text = isinstance(value, str) and value != "12 ("
        shown = value if is_text else json.dumps(value)
        return f'<{bar}parameter name="{key}" string="{str(is_text).lower()}">{shown}</{bar}parameter>\n'

    bar = "\uff5cDSML\uff5c"
    args = [(name, "".join(one(*each) for each in json.loads(given).items())) for name, given in calls]
    listed = "\n".join(f'<{bar}invoke name="{name}">\n{given}</{bar}invoke>' for name, given in args)
    return f"<{bar}{around}>\n{listed}\n</{bar}{around}>"


def written(family: str, *calls: tuple[str, str]) -> str:
    """The calls as models of this family were taught to write them."""
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in members("arguments", calls))
        case "llama3_json":
            return "; ".join(members("parameters", calls))
        case "qwen3_coder":
            args = [(name, tagged("<parameter=", ">\n", "\n</parameter>\n", given)) for name, given in calls]
            return "\n".join(
                f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>" for name, given in args
            )
        case "glm45":
            marks = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
            return "\n".join(f"<tool_call>{name}\n{tagged(*marks, given)}</tool_call>" for name, given in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls)
        case "mistral_list":
            return f"[TOOL_CALLS] [{', '.join(members('arguments', calls))}]"
        case "deepseek_v3":
            begin, end = (
                "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
                "\n```<\uff5ctool▁call▁end\uff5c>",
            )
            listed = "\n".join(f"{begin}{name}\n```json\n{given}{end}" for name, given in calls)
            return f"<\uff5ctool▁calls▁begin\uff5c>{listed}<\uff5ctool▁calls▁end\uff5c>"
        case "deepseek_v31":
            begin, end = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
            listed = "".join(f"{begin}{name}<\uff5ctool▁sep\uff5c>{given}{end}" for name, given in calls)
            return f"<\uff5ctool▁calls▁begin\uff5c>{listed}<\uff5ctool▁calls▁end\uff5c>"
        case "kimi_k2":
            begin, between = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
            numbered = [
                f"{begin}{name}:{at}{between}{given}<|tool_call_end|>" for at, (name, given) in enumerate(calls)
            ]
            return f"<|tool_calls_section_begin|>{''.join(numbered)}<|tool_calls_section_end|>"
        case "pythonic":
            return f"[{', '.join(pythonic(calls))}]"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(pythonic(calls))}]<|tool_call_end|>"
        case "deepseek_v32":
            return dsml("function_calls", calls)
        case "deepseek_v4":
            return dsml("tool_calls", calls)
        case "openai":
            head, end = "<|channel|>commentary to=functions.", "<|call|>"
            listed = [f"{head}{name} <|constrain|>json<|message|>{given}{end}" for name, given in calls]
            return "<|start|>assistant".join(listed)
        case "functiongemma" | "gemma4":
            begin, end, quote = {
                "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
                "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
            }[family]
            return "".join(f"{begin}call:{name}{quoted(quote, json.loads(given))}{end}" for name, given in calls)
        case "olmo3":
            return "<function_calls>\n" + "\n".join(pythonic(calls)) + "\n</function_calls>"
    raise AssertionError(family)


def parsed(family: str, *texts: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(FAMILIES[family], SCHEMAS)
    apart = HarmonyParser(ReasoningPlace.BEFORE, SCHEMAS) if family == "openai" else None
    content, calls = "", []
    for piece, is_end in [*((piece, False) for piece in texts), ("", True)]:
        told = piece if apart is None else apart.push(piece, is_end=is_end).content
        found = parser.push(told, is_end=is_end)
        content += found.content
        for delta in found.calls:
            if delta.name is not None:
                assert delta.number == len(calls)
                calls.append((delta.name, ""))
            name, before = calls[delta.number]
            calls[delta.number] = (name, before + delta.arguments)
    return content, calls


def vocabulary(*added: str) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    folder = Path(splittime.__file__).parent / "packaged" / "code"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(added))
    return backend, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())


@pytest.fixture(scope="module")
def plain() -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    return vocabulary()


def allows(vocabulary, grammar: str, text: str) -> bool:
    backend, tokens = vocabulary
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CASES = [
    (family, text, content, calls)
    for family in FAMILIES
    for text, content, calls in [
        ("a plain <b> text, {} and <tool [", "a plain <b> text, {} and <tool [", []),
        (written(family, TWO[0]), "", [TWO[0]]),
        (written(family, *TWO), "", list(TWO)),
        (written(family, MIXTURE, SHORT_MIXTURE), "", [MIXTURE, SHORT_MIXTURE]),
    ]
]
CASES += [
    (family, written(family, *TWO)[:-1], "", list(TWO)) for family in FAMILIES if family not in ("glm45", "mistral")
]  # whose last character says that the arguments end
CASES += [
    (family, f"first\n{written(family, *TWO)}\n then ", "first\n\n then", list(TWO))
    for family in FAMILIES
    if not FAMILIES[family].is_bare
]
CASES += [
    ("hermes", written("hermes", ("other", "{}")) + "x", "x", [("other", "{}")]),
    (
        "hermes",
        '<tool_call>\n{"name": "no name", "arguments": {}}\n</tool_call>',
        '\n{"name": "no name", "arguments": {}}\n',
        [],
    ),
    ("hermes", "<tool_call>\nnothing of it", "\nnothing of it", []),
    ("hermes", '<tool_call>{"type": "function", "name": "now", "parameters": {}}</tool_call>', "", [("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "mix", "arguments": {"note": "a\n\tb,}", "kinds": ["x", ], "count": 1,\n}}</tool_call>',
        "",
        [("mix", '{"note": "a\\n\\tb,}", "kinds": ["x" ], "count": 1\n}')],
    ),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama3_json", '{"type": "functor", "name": "now"}', '{"type": "functor", "name": "now"}', []),
    ("mistral", '[TOOL_CALLS]now{"a": 1}', "", [("now", '{"a": 1}')]),
    (
        "kimi_k2",
        "x<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "x",
        [("now", "{}")],
    ),
    ("hermes", '<tool_call>\n{"name": "wea', "", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    ("llama3_json", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "x', "", [("weather", '{"city": "x')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=other>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("other", '{"a": [1]}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n  x\n", "", [("weather", '{"city": "  x\\n')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n  x\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"city": "\\n  x\\n"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call> <function=mix> <parameter=is_on>True</parameter> <parameter=note>None</parameter>"
        "<parameter=other>7</parameter></function></tool_call>",
        "",
        [("mix", '{"is_on": true, "note": null, "other": 7}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=mix>\n<parameter=note>\n12\n</parameter>\n</function>\n</tool_call>",
        "",
        [("mix", '{"note": "12"}')],  # a text by its schema
    ),
    ("glm45", "<tool_call>other\n</tool_call>!", "!", [("other", "{}")]),
    ("glm45", "Write <tool_call> to call, </tool_call> to end.", "Write  to call,  to end.", []),
    (
        "glm45",
        "<tool_call>mix <arg_key>count</arg_key> <arg_value>5</arg_value> </tool_call>",
        "",
        [("mix", '{"count": 5}')],
    ),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", "", [("other", "{}")]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", [("now", "{}")]),
    ("mistral_list", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a}[bcdefgh"}]', "", [("now", "{}")]),
    *(
        ("mistral_list", f'[TOOL_CALLS]{gap}{{"name": "now", "arguments": {{}}}}', "", [("now", "{}")])
        for gap in ("", " ")
    ),
    ("mistral_list", "[TOOL_CALLS] {now}", "{now}", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|to", "", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[]", "[]", []),
    ("pythonic", "[", "[", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    (
        "pythonic",
        "[mix(count=1, note='it\\'s (', kinds=('a', {'b': None}), is_on=False)]",
        "",
        [("mix", '{"count": 1, "note": "it\'s (", "kinds": ["a", {"b": null}], "is_on": false}')],
    ),
    ("pythonic", "[now(1, 'x'), now()]", "", [("now", "{}"), ("now", "{}")]),
    ("pythonic", f"[mix(note='{'-[(' * 99}')]", "", [("mix", json.dumps({"note": "-[(" * 99}))]),
    (
        "pythonic",
        """[mix(note=\"\"\"a "b", c)'' \"\"\", is_on=True)]""",
        "",
        [("mix", '{"note": "a \\"b\\", c)\'\' ", "is_on": true}')],
    ),
    ("pythonic", "[weather(city='x", "", [("weather", '{"city": ')]),
    ("pythonic", '[now("a=b"), now([1, c=2])]', "", [("now", "{}"), ("now", "{}")]),
    (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {"a": NaN, "b": [-Infinity, 1e999, 1e9, true, None], "NaN": "NaN",'
        ' "c": "\\ud800 \\ud83d\\ude00 \\udc00\\n\\\\ud800", "d": 123456789012345678901234567890}}\n</tool_call>',
        "",
        [
            (
                "now",
                '{"a": "NaN", "b": ["-Infinity", "1e999", 1e9, true, null], "NaN": "NaN",'
                ' "c": "\\\\ud800 \\ud83d\\ude00 \\\\udc00\\n\\\\ud800", "d": 123456789012345678901234567890}',
            )
        ],
    ),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": Na', "", [("now", '{"a": Na')]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "\\ud8', "", [("now", '{"a": "\\ud8')]),
    (
        "gemma4",
        """<|tool_call>call:mix{count: 3, note:<|"|>a "}, <b> \\ <|"|>,<|"|>n<|"|>:{a:[],b:{},c:true},"""
        """k:["x\\n", y ]}<tool_call|>""",
        "",
        [
            (
                "mix",
                '{"count": 3, "note": "a \\"}, <b> \\\\ ", "n": {"a": [], "b": {}, "c": true}, "k": ["x\\n", "y"]}',
            )
        ],
    ),
    ("gemma4", "<|tool_call>call:other{a:1}<tool_call|>!", "!", [("other", '{"a": 1}')]),
    (
        "functiongemma",
        "<start_function_call>call:now{a:Nan,b:NaN}<end_function_call>",
        "",
        [("now", '{"a": "Nan", "b": "NaN"}')],
    ),
    (
        "deepseek_v32",
        dsml("function_calls", [MIXTURE]).replace('string="false">"12 ("', 'string="false">"7"').replace(">3<", ">x<"),
        "",
        [("mix", '{"count": "x", "is_on": true, "note": "7", "kinds": ["a", "b"], "colour": "red"}')],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>"
        "{}<|call|><|start|>assistant<|channel|>final<|message|>done<|return|>",
        "done",
        [("now", "{}")],
    ),
    (
        "openai",
        "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>",
        "",
        [("other", "{}")],
    ),
    ("openai", "to be", "to be", []),
    ("openai", "to", "to", []),
    ("openai", "<|channel|>final<|mess", "", []),
]

NOW, MIX = ("now", "{}"), ("mix", '{"count": 1}')
CASES += [  # as models write them all the same: members in any order or left out, marks left out, other families' forms
    ("hermes", '<tool_call>{"arguments": {"count": 1}, "name": "mix"}</tool_call> x', " x", [MIX]),
    (
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "mix", "arguments": "{\\"count\\": 1}"}',
        "",
        [NOW, MIX],
    ),
    ("hermes", "<tool_call>\n{'name': 'mix', 'arguments': {'count': 1}}\n</tool_call>", "", [MIX]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "mix", "arguments": {"count": 1}}}', "", [MIX]),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>x', '{"name": 3, "arguments": {}}x', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>x', '{"name": "now", "arguments": [1]}x', []),
    ("hermes", "<tool_call>{name: now}</tool_call>x", "{name: now}x", []),
    ("hermes", 'a <tool_call> is a mark. <tool_call>{"name": "now", "arguments": {}}', "a  is a mark. ", [NOW]),
    ("llama3_json", '{"function": "mix", "parameters": {"count": 1}}', "", [MIX]),
    ("llama3_json", '{"name": "now", "parameters": null}', "", [NOW]),
    ("llama3_json", '{"parameters": {"count": 1}, "name": "mix"} x', " x", [MIX]),
    ("llama3_json", '[{"name": "now", "parameters": {}}, {"name": "mix", "parameters": {"count": 1}}]', "", [NOW, MIX]),
    ("llama3_json", '```json\n{"name": "now", "parameters": {}}\n```', "", [NOW]),
    ("llama3_json", 'I will. {"name": "mix", "parameters": {"count": 1}}', "I will. ", [MIX]),
    ("llama3_json", 'if (x) { y } {"name": "now", "parameters": {}}', "if (x) { y } ", [NOW]),
    ("llama3_json", '<function=mix>{"count": 1}</function> x', " x", [MIX]),
    ("llama3_json", "a <function=b> <function", "a <function=b> <function", []),
    (
        "llama3_json",
        '{"steps": [{"name": "now", "parameters": {}}]}',
        '{"steps": [{"name": "now", "parameters": {}}]}',
        [],
    ),
    ("llama3_json", '{"name": "Ada", "parameters": "{}"}', '{"name": "Ada", "parameters": "{}"}', []),
    ("llama3_json", '{"parameters": {}, "name": "Ada"} x {', '{"parameters": {}, "name": "Ada"} x {', []),
    ("llama3_json", ' [1, {"a": 2}]', ' [1, {"a": 2}]', []),
    ("qwen3_coder", '<tool_call>\n{"name": "mix", "arguments": {"count": 1}}\n</tool_call>x', "x", [MIX]),
    ("qwen3_coder", "<function=mix>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>", "", [MIX]),
    ("qwen3_coder", "a <function=b> c", "a <function=b> c", []),
    ("qwen3_coder", "<function=b>\n<function=now>\n</function>\n</tool_call>", "<function=b>\n", [NOW]),
    ("qwen3_coder", '<tool_call>\n<function="mix">\n<parameter="count">\n1\n</parameter>\n</function>', "", [MIX]),
    (
        "qwen3_coder",
        "<tool_call><function=mix><parameter=count>1<parameter=is_on>\ntrue\n</function></tool_call>x",
        "x",
        [("mix", '{"count": 1, "is_on": true}')],
    ),
    ("glm45", "<tool_call>mix\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n", "", [MIX]),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("kimi_k2", "<|tool_call_begin|>f()<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}", "f()", [NOW]),
    ("pythonic", "mix(count=1)", "", [MIX]),
    ("pythonic", "mix(count=1), now() and more", "and more", [MIX, NOW]),
    ("pythonic", "mixture", "mixture", []),
    ("pythonic", "mix", "mix", []),
    ("pythonic", "See [a](b): [mix(count=1), now()]", "See [a](b): ", [MIX, NOW]),
    ("pythonic", "[1, [now]] [", "[1, [now]] [", []),
    *(
        ("pythonic", text, text, [])
        for text in (
            "mix(query) looks things up.",
            "mix() is a function.",
            "See [mix(q)](http://x) for details.",
            "    return [mix(y) for y in x]",
            "[1, [now]] [mix(",
        )
    ),
    *(
        ("llama3_json", text, text, [])
        for text in (
            '{"name": "mix", "description": "finds pages", "author": "me"}',
            '{"function": "mix", "complexity": "O(n)"}',
            '```json\n[{"name": "mix", "description": "d", "parameters": {}}]\n```',
            'Write <function=mix> {"count": 1} </function> to call it.',
        )
    ),
    (
        "qwen3_coder",
        "To call, write <function=mix> then parameters.",
        "To call, write <function=mix> then parameters.",
        [],
    ),
    ("qwen3_coder", "<function=now>\n</function>\n<function=now></function>\nbye", "bye", [NOW, NOW]),
    ("qwen3_coder", "<tool_call><function=now></function><tool_call><function=now></function>", "", [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now"}\nbye', "bye", [NOW, NOW]),
    ("hermes", '<tool_call>{"id": "1", "name": "mix", "arguments": {"count": 1}}</tool_c', "", [MIX]),
    (
        "glm45",
        "<tool_call>mix<arg_key>count</arg_key><arg_value>1</arg_value><tool_call>now</tool_call>",
        "",
        [MIX, NOW],
    ),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_an_answer_is_read_the_same_wherever_it_is_cut(family: str, text: str, content: str, calls: list) -> None:
    assert parsed(family, text) == (content, calls)
    for at in range(len(text)):
        assert parsed(family, text[:at], text[at:]) == (content, calls), at
    assert parsed(family, *text) == (content, calls)


SNIPPETS = (
    '"',
    "'",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\n",
    "\\",
    "<",
    '{"name": "now"',
    "<function=mix>",
    "mix(",
    "```json",
    "; ",
)
DAMAGE = st.tuples(st.floats(0, 1), st.integers(0, 6), st.sampled_from(("", *SNIPPETS)))


@given(st.sampled_from(CASES), st.lists(DAMAGE, max_size=4), st.floats(0, 1))
def test_a_damaged_answer_is_read_the_same_wherever_it_is_cut(case: tuple, damages: list, cut: float) -> None:
    family, text = case[:2]
    for place, size, snippet in damages:
        at = int(place * len(text))
        text = text[:at] + snippet + text[at + size :]
    at = int(cut * len(text))
    assert parsed(family, text) == parsed(family, text[:at], text[at:]) == parsed(family, *text)


@pytest.mark.parametrize("family", ["gemma4", "pythonic", "qwen3_coder"])
def test_a_long_answer_is_read_piece_by_piece(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a call leaves a rest, which is copied: it must not be all of the answer."""
    wide = ("mix", json.dumps({f"word{number}": "a b" for number in range(3000)}))
    reader, seen = READERS[FAMILIES[family].style], []
    read = reader._arguments
    monkeypatch.setattr(reader, "_arguments", lambda self, text: (seen.append(len(text)), read(self, text))[1])
    content, (found,) = parsed(family, written(family, wide))
    assert (content, json.loads(found[1])) == ("", json.loads(wide[1]))
    assert len(seen) > 3000
    assert max(seen) <= 2 * PIECE_CHARS


def test_a_number_without_end_is_not_held_back() -> None:
    given, pieces = '{"a": ' + "1" * (2 * MOST_WORD_CHARS), JsonPieces()
    came = "".join(pieces.push(character, is_end=False)[0] for character in given)
    assert came == given
    assert pieces.push('1, "b": None} ]', is_end=True) == ('1, "b": null}', " ]")
    assert JsonPieces().push(given + '1, "b": None}', is_end=True) == (given + '1, "b": null}', "")


@pytest.mark.parametrize(
    "given",
    [
        '{"a": (1}',
        '{"a": [{"b": "} ]"}]}',
        '{"a": "\\\\"}',
        '{"a": "\\""}',
        '{"a": "\\u"}',
        '{"a": "\\ud83d\\ude00\\u"}',
        "{}",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_an_object_ends_at_its_brace_wherever_it_is_cut(given: str, size: int) -> None:
    pieces, text, said = JsonPieces(), given + "} x", ""
    for at in range(0, len(text), size):
        sure, rest = pieces.push(text[at : at + size], is_end=False)
        said += sure
        if pieces.is_closed:
            break
    assert (said, rest + text[at + size :]) == (given, "} x")


def test_a_text_of_json_among_quoted_ones_is_looked_through_once() -> None:
    """Where the family would have its own quotes; what was looked through is remembered, and forgotten behind it."""
    call = '<|tool_call>call:mix{note:"a \\" b \\\\",colour:"c"}<tool_call|>'
    for texts in ((call,), tuple(call)):
        assert parsed("gemma4", *texts) == ("", [("mix", '{"note": "a \\" b \\\\", "colour": "c"}')])


def check_grammar(vocabulary, family: str, token_ids: dict[str, int]) -> None:
    form = FAMILIES[family]
    forced = grammar_of_calls(form, TOOLS, may_answer=False, may_repeat=True, token_ids=token_ids)
    for calls in (TWO, (MIXTURE,), (SHORT_MIXTURE, TWO[1])):
        assert allows(vocabulary, forced, written(family, *calls)), calls
    for wrong in (("other", "{}"), ("weather", "{}"), ("mix", '{"count": "x", "kinds": []}'), ("mix", '{"count": 1}')):
        assert not allows(vocabulary, forced, written(family, wrong)), wrong
    assert not any(allows(vocabulary, forced, text) for text in ("text", ""))
    once = grammar_of_calls(form, TOOLS, may_answer=False, may_repeat=False, token_ids=token_ids)
    assert allows(vocabulary, once, written(family, TWO[0]))
    assert not allows(vocabulary, once, written(family, *TWO))
    free = grammar_of_calls(form, TOOLS, may_answer=True, may_repeat=True, token_ids=token_ids)
    assert allows(vocabulary, free, form.answer + "a text")
    assert allows(vocabulary, free, written(family, *TWO))
    assert not allows(vocabulary, free, written(family, ("weather", "{}")))
    if not form.is_bare and not form.answer:
        assert allows(vocabulary, free, "before " + written(family, TWO[1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_allows_what_the_parser_reads_and_no_other_call(plain, family: str) -> None:
    check_grammar(plain, family, {})


MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral_list": ("[TOOL_CALLS]",),
    "deepseek_v3": (
        *("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", "<\uff5ctool▁call▁begin\uff5c>"),
        *("<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁sep\uff5c>"),
    ),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v32": ("\uff5cDSML\uff5c",),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
}


@pytest.mark.parametrize("family", MARKS)
def test_marks_that_are_tokens_are_spelled_by_those_tokens(family: str) -> None:
    backend, tokens = vocabulary(*MARKS[family])
    ids = {mark: backend.token_to_id(mark) for mark in MARKS[family]}
    call = TWO[1] if family == "hermes" else TWO[0]  # a mark within an argument is a token too
    forced = grammar_of_calls(FAMILIES[family], TOOLS, may_answer=False, may_repeat=True, token_ids=ids)
    assert allows((backend, tokens), forced, written(family, call).replace("<tool_call> [é", "é"))
    free = grammar_of_calls(FAMILIES[family], TOOLS, may_answer=True, may_repeat=True, token_ids=ids)
    assert allows((backend, tokens), free, "before " + written(family, TWO[1]))
    assert not allows((backend, tokens), free, "before " + written(family, ("other", "{}")))
    matcher = llguidance.LLMatcher(tokens, free, log_level=0)
    mark = trigger(FAMILIES[family].opens or FAMILIES[family].begin)
    spelled = [token for letter in "a " + mark for token in backend.encode(letter).ids]
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


TEMPLATES = {
    "hermes": """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
        between <tool_call></tool_call>: <tool_call>\\n{"name": .., "arguments": ..}{% endif %}""",
    "llama3_json": 'Write {"name": the function, "parameters": its arguments by name}.',
    "qwen3_coder": "<tool_call>\\n<function=a_name>\\n<parameter=a_key>\\nits value\\n</parameter>\\n</function>",
    "glm45": "<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>",
    "mistral": "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}",
    "mistral_list": "{{ '[TOOL_CALLS] [' }}",
    "deepseek_v3": "'<\uff5ctool▁calls▁begin\uff5c>' + name + '\\n```json\\n' + tool['function']['arguments']",
    "deepseek_v31": "'<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>' + name + '<\uff5ctool▁sep\uff5c>'",
    "kimi_k2": "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}{% endif %}",
    "pythonic": "Write [func_name1(params_name1=params_value1), func_name2(params)].",
    "lfm2": "List of tools: <|tool_list_start|>[",
    "olmo3": "<function_calls></function_calls>",
    "deepseek_v32": "'<\uff5cDSML\uff5cfunction_calls>' + call",
    "deepseek_v4": "'<\uff5cDSML\uff5ctool_calls>' + call",
    "openai": '"<|channel|>commentary json<|message|>"',
    "functiongemma": "'<start_function_call>call:' + name",
    "gemma4": """'<|tool_call>call:' + name + '{' + '<|"|>' """,
}


def test_families_are_found_by_template_and_by_name() -> None:
    assert {name: family_of_template(template).name for name, template in TEMPLATES.items()} == {
        name: name for name in FAMILIES
    }
    assert family_of_template("").name == "hermes"
    assert family_named("llama3_json").arguments == "parameters"
    with pytest.raises(ConfigError, match="xlam") as refused:
        family_named("xlam")
    assert "hermes, llama3_json" in str(refused.value.info.hint)


def test_a_schema_too_deep_is_refused_by_the_tools_place() -> None:
    deep: dict = {"type": "string"}
    for _ in range(80):
        deep = {"items": deep}
    with pytest.raises(RequestError) as refused:
        grammar_of_calls(FAMILIES["hermes"], [Tool("f", deep, False)], may_answer=False, may_repeat=True)
    assert refused.value.info.param == "tools[0].function.parameters"


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("schema", [{"properties": {"a": {"type": "string", "pattern": "x"}}}, {"minProperties": 1}])
def test_what_texts_between_marks_cannot_be_held_to_is_refused_by_keyword(family: str, schema: dict) -> None:
    with pytest.raises(RequestError) as refused:
        grammar_of_calls(FAMILIES[family], [Tool("f", schema, True)], may_answer=False, may_repeat=True)
    assert refused.value.info.value in ("pattern", "minProperties")
    assert refused.value.info.param == "tools[0].function.parameters"


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_tool_that_is_not_strict_is_held_to_what_can_be_said(plain, family: str) -> None:
    city = {"anyOf": [{"type": "string", "minLength": 1}]} if family in ("gemma4", "functiongemma") else {}
    schema = {**SCHEMAS["weather"], "properties": {"city": {"type": "string", "minLength": 1} | city}}
    made = grammar_of_calls(FAMILIES[family], [Tool("weather", schema, False)], may_answer=False, may_repeat=False)
    assert allows(plain, made, written(family, TWO[0]))
    assert not allows(plain, made, written(family, *TWO))
    assert not allows(plain, made, written(family, ("weather", "{}")))


@pytest.mark.parametrize("family", [*FAMILIES])
def test_beside_tools_an_answer_is_a_call_or_has_the_form(plain, family: str) -> None:
    form = of_json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "p")
    made = grammar_of_calls(FAMILIES[family], TOOLS, may_answer=True, may_repeat=True, form=form)
    assert allows(plain, made, written(family, *TWO))
    assert allows(plain, made, FAMILIES[family].answer + '{"a": 5}')
    for wrong in ("text", '{"a": "x"}', '{"a": 5}' + written(family, *TWO)):
        assert not allows(plain, made, FAMILIES[family].answer + wrong), wrong
    forced = grammar_of_calls(FAMILIES[family], TOOLS, may_answer=False, may_repeat=True, form=form)
    assert not allows(plain, forced, FAMILIES[family].answer + '{"a": 5}')


def test_what_follows_a_comma_for_long_is_not_held_back() -> None:
    """A small model goes round in line breaks: to look at all of them again with each would take ever longer."""
    pieces, said = JsonPieces(), ""
    for character in '{"a": 1,' + "\n" * 5000:
        said += pieces.push(character, is_end=False)[0]
        assert len(pieces._held) <= 100
    assert said.count("\n") >= 4900


def test_a_tagged_call_that_goes_on_as_json_is_no_call_without_arguments() -> None:
    text = '<tool_call>\n<function=f{"a": 1}</function>\n</tool_call>'
    assert [arguments for _, arguments in parsed("qwen3_coder", text)[1]] != ["{}"]


@pytest.mark.parametrize("begin", ['{"parameters": {"text": "', '{"name": "now", "text": "'])
def test_an_object_without_a_mark_is_not_held_back_for_long(begin: str) -> None:
    parser, given = ToolParser(FAMILIES["llama3_json"], SCHEMAS), 0
    for _ in range(1000):
        given += len(parser.push(begin + "x" * 99).content)
        begin = ""
    assert given > 80_000
