"""How families of models write calls of tools: a table, of which the grammar that holds an answer to calls
(`text.tool_grammar`) and the parser that reads them (`text.tool_parser`) are both made.

A call stands between the family's marks, in one of five styles (`Style`). A model whose template says none of the known
forms is taken for one that writes JSON in tags (`hermes`).
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from splittime.core.errors import ConfigError
from splittime.text.marks import ANSWER, CALL_BEGIN, CALL_END, CALL_NAMED, CHANNEL, MESSAGE, START

MAX_TOOLS = 128


class Style(StrEnum):
    """How a call is written between its marks. member: an object of JSON with the name and then the arguments.
    named: the name, a mark, and the arguments as JSON. tagged: the name, and each argument between marks, a text as it
    is and anything else as JSON. python: `f(a="x", b=1)`. quoted: the name and an object whose names are
    bare and whose texts stand between the family's quotes."""

    MEMBER = "member"
    NAMED = "named"
    TAGGED = "tagged"
    PYTHON = "python"
    QUOTED = "quoted"


class ToolFamily(NamedTuple):
    """opens, closes: what stands around all calls. begin, end: around each. Without `opens` and `begin`, or where
    `is_bare`, calls begin the answer, without a text before them. between: two calls.

    arguments: the name that arguments have (member). before_name, after_name: what stands around the name (not
    member). is_numbered: behind the name comes a colon and the call's number. id_mark: behind the name may come this
    and an id. before_key, after_key, after_value: around an argument's name and value (tagged). after_json_key: behind
    the name where the value is JSON; "" as where it is a text. quote: on both sides of a text (quoted). answer: what a
    text that is no call begins with. ids: what a call's id looks like, for templates that ask for it.
    """

    name: str
    style: Style
    begin: str = ""
    end: str = ""
    between: str = ""
    opens: str = ""
    closes: str = ""
    is_bare: bool = False
    arguments: str = "arguments"
    before_name: str = ""
    after_name: str = ""
    is_numbered: bool = False
    id_mark: str = ""
    before_key: str = ""
    after_key: str = ""
    after_json_key: str = ""
    after_value: str = ""
    quote: str = ""
    answer: str = ""
    ids: str = "call"

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may hold a mark which is a token of its own."""
        around = (self.opens, self.begin, self.before_name, self.after_name, self.id_mark, self.end, self.closes)
        return (*around, self.before_key, self.after_key, self.after_json_key, self.after_value, self.quote)


def _dsml(name: str, around: str) -> ToolFamily:
    """Returns the form of DeepSeek's markup. around: what stands around all calls."""
    mark, key = "\uff5cDSML\uff5c", '" string="'
    return ToolFamily(
        name,
        Style.TAGGED,
        end=f"</{mark}invoke>\n",
        opens=f"<{mark}{around}>\n",
        closes=f"</{mark}{around}>",
        before_name=f'<{mark}invoke name="',
        after_name='">\n',
        before_key=f'<{mark}parameter name="',
        after_key=f'{key}true">',
        after_json_key=f'{key}false">',
        after_value=f"</{mark}parameter>\n",
    )


class Tool(NamedTuple):
    """parameters: the schema of its arguments. is_strict: they are to be held to it even if the model chose to call."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEP = (  # DeepSeek's, with a bar as wide as a letter
    f"<\uff5c{name}\uff5c>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("hermes", Style.MEMBER, "<tool_call>\n", "\n</tool_call>", "\n"),
        ToolFamily("llama3_json", Style.MEMBER, between="; ", is_bare=True, arguments="parameters"),
        ToolFamily(
            "qwen3_coder",
            Style.TAGGED,
            *("<tool_call>\n", "</function>\n</tool_call>", "\n"),
            before_name="<function=",
            after_name=">\n",
            before_key="<parameter=",
            after_key=">\n",
            after_value="\n</parameter>\n",
        ),
        ToolFamily(
            "glm45",
            Style.TAGGED,
            *("<tool_call>", "</tool_call>", "\n"),
            after_name="\n",
            before_key="<arg_key>",
            after_key="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n",
        ),
        ToolFamily("mistral", Style.NAMED, "[TOOL_CALLS]", after_name="[ARGS]", id_mark="[CALL_ID]", ids="nine"),
        ToolFamily("mistral_list", Style.MEMBER, between=", ", opens="[TOOL_CALLS] [", closes="]", ids="nine"),
        ToolFamily(
            "deepseek_v3",
            Style.NAMED,
            *(_CALL_BEGIN, f"\n```{_CALL_END}", "\n"),
            opens=_CALLS_BEGIN,
            closes=_CALLS_END,
            before_name=f"function{_SEP}",
            after_name="\n```json\n",
        ),
        ToolFamily(
            "deepseek_v31",
            Style.NAMED,
            *(_CALL_BEGIN, _CALL_END),
            opens=_CALLS_BEGIN,
            closes=_CALLS_END,
            after_name=_SEP,
        ),
        ToolFamily(
            "kimi_k2",
            Style.NAMED,
            *("<|tool_call_begin|>", "<|tool_call_end|>"),
            opens="<|tool_calls_section_begin|>",
            closes="<|tool_calls_section_end|>",
            before_name="functions.",
            after_name="<|tool_call_argument_begin|>",
            is_numbered=True,
            ids="numbered",
        ),
        ToolFamily("pythonic", Style.PYTHON, between=", ", opens="[", closes="]", is_bare=True),
        ToolFamily("lfm2", Style.PYTHON, between=", ", opens="<|tool_call_start|>[", closes="]<|tool_call_end|>"),
        _dsml("deepseek_v32", "function_calls"),
        _dsml("deepseek_v4", "tool_calls"),
        ToolFamily(
            "openai", Style.NAMED, *(CALL_BEGIN, CALL_END, f"{START}assistant"), after_name=CALL_NAMED, answer=ANSWER
        ),
        ToolFamily(
            "functiongemma",
            Style.QUOTED,
            *("<start_function_call>", "<end_function_call>"),
            before_name="call:",
            quote="<escape>",
        ),
        ToolFamily("gemma4", Style.QUOTED, "<|tool_call>", "<tool_call|>", before_name="call:", quote='<|"|>'),
        ToolFamily("olmo3", Style.PYTHON, between="\n", opens="<function_calls>\n", closes="\n</function_calls>"),
    )
}
_SIGNS = (  # of a template, the first that are all in it
    ("openai", (CHANNEL, MESSAGE)),
    ("gemma4", ("<|tool_call>", '<|"|>')),
    ("functiongemma", ("<start_function_call>",)),
    ("deepseek_v32", ("\uff5cDSML\uff5c", "function_calls")),
    ("deepseek_v4", ("\uff5cDSML\uff5c",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>", "<arg_value>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k2", ("tool_declare<|im_middle|>",)),
    ("deepseek_v3", (_CALLS_BEGIN, "```json")),
    ("deepseek_v31", (_CALLS_BEGIN,)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
)
_LLAMA_JSON = re.compile(r"""\{["']name["']:.{0,40}["']parameters["']""", re.DOTALL)


def family_named(name: str) -> ToolFamily:
    """Returns the family of this name (vLLM's names). Raises ConfigError with the list for another."""
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"no tool-call parser {name!r}", param="tool_call_parser", value=name, hint=f"there are: {known}"
        )
    return FAMILIES[name]


def family_of_template(template: str) -> ToolFamily:
    """Returns the family whose form the chat template describes; JSON in tags where it describes none."""
    found = next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
    if found is None:
        found = "llama3_json" if _LLAMA_JSON.search(template) else "hermes"
    return FAMILIES[found]
