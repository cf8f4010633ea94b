"""What real chat templates leave out of conversations, what is put another way for them, and what is told.

    python -m benchmarks.scenarios.templates FOLDER [--transformers] [--json]

Each *.jinja in FOLDER writes each of `CHATS`, whose words stand nowhere else. Of each conversation the table says

* lost: what the template alone leaves out or refuses, as the one before these forms were known
* now: what is left out or refused still; told: of that, what the client reads in a notice or an error
* equal: with `--transformers`, where that is installed: of the conversations that need no other way (unchanged), those
  whose text is the one of `apply_chat_template`
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import file_result
from splittime.core.errors import ConfigError, RequestError
from splittime.text.chat_forms import left_out
from splittime.text.tokenizer import ChatTemplate
from splittime.text.tool_families import family_of_template

WORD = {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": WORD}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
Turn = dict[str, Any]


def turn(role: str, content: str, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def calls(content: str, *cities: str, ids: tuple[str, ...] = ("call_602906a60a92", "call_602906a60a93")) -> Turn:
    each = [
        (name, {"name": "get_weather", "arguments": {"city": city}}) for city, name in zip(cities, ids, strict=False)
    ]
    return turn(
        "assistant", content, tool_calls=[{"type": "function", "id": name, "function": one} for name, one in each]
    )


def result(content: str, call_id: str = "call_602906a60a92") -> Turn:
    return turn("tool", content, tool_call_id=call_id, name="get_weather")


USER, LATER = turn("user", "userone"), turn("user", "usertwo")
CHATS = {
    "system": ([turn("system", "systemone"), USER], "systemone userone"),
    "developer": ([turn("developer", "developerone"), USER], "developerone userone"),
    "second system": ([USER, turn("assistant", "answerone"), turn("system", "systemtwo"), LATER], "systemtwo usertwo"),
    "two users": ([USER, LATER], "userone usertwo"),
    "two answers": (
        [USER, turn("assistant", "answerone"), turn("assistant", "answertwo"), LATER],
        "answerone answertwo",
    ),
    "call": ([USER, calls("", "parisone"), result("resultone"), LATER], "parisone resultone usertwo"),
    "text and call": ([USER, calls("textone", "parisone"), result("resultone")], "textone parisone resultone"),
    "two calls": (
        [USER, calls("", "parisone", "rometwo"), result("resultone"), result("resulttwo", "call_602906a60a93"), LATER],
        "parisone rometwo resultone resulttwo",
    ),
    "thoughts": ([USER, turn("assistant", "answerone", reasoning_content="thoughtone"), LATER], "answerone thoughtone"),
}


class Written(NamedTuple):
    """lost: words that are not in the text, or why it was refused. is_told: the client reads that."""

    text: str
    lost: str
    is_told: bool


def written(template: ChatTemplate, name: str, *, is_alone: bool) -> Written:
    chat, words = CHATS[name]
    tools = TOOLS if "call" in name else None
    try:
        if is_alone:
            text = template._template.render(
                {**TOKENS, "tools": tools, "messages": chat, "add_generation_prompt": True}
            )
        else:
            text = template.render(chat, tools=tools)
    except Exception as error:
        if not is_alone and not isinstance(error, RequestError):
            raise
        return Written("", f"refused: {str(error)[-60:]}", True)
    lost = [word for word in words.split() if word not in text]
    return Written(text, " ".join(lost), bool(left_out(chat, tools, text)))


def by_transformers(source: str, name: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = TOOLS if "call" in name else None
    chat = copy.deepcopy(CHATS[name][0])
    more = {"tools": tools, "add_generation_prompt": True, **TOKENS}
    try:
        return str(render_jinja_template(conversations=[chat], chat_template=source, **more)[0][0])
    except Exception as error:
        return f"refused: {error}"


def row(path: Path, has_transformers: bool) -> dict[str, Any]:
    source = path.read_text()
    template = ChatTemplate(source, TOKENS)
    alone = {name: written(template, name, is_alone=True) for name in CHATS}
    now = {name: written(template, name, is_alone=False) for name in CHATS}
    same = [name for name in CHATS if alone[name].text and alone[name].text == now[name].text]
    return {
        "template": path.stem,
        "calls": family_of_template(source).name,
        "lost": {name: one.lost for name, one in alone.items() if one.lost},
        "now": {name: one.lost for name, one in now.items() if one.lost},
        "untold": [name for name, one in now.items() if one.lost and not one.is_told],
        "equal": sum(by_transformers(source, name) == now[name].text for name in same) if has_transformers else None,
        "unchanged": len(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, unread = [], {}
    for path in sorted(arguments.folder.glob("*.jinja")):
        try:
            rows.append(row(path, arguments.transformers))
        except ConfigError as error:
            unread[path.stem] = str(error)
    summary = {
        "templates": len(rows),
        **{kind: sum(bool(each[kind]) for each in rows) for kind in ("lost", "now", "untold")},
        **{f"{kind} conversations": sum(len(each[kind]) for each in rows) for kind in ("lost", "now", "untold")},
        **{kind: sum(each[kind] or 0 for each in rows) for kind in ("unchanged", "equal")},
        "unread": unread,
    }
    settings = vars(arguments) | {"folder": arguments.folder.name}
    file_result("templates", {"summary": summary, "rows": rows}, settings, arguments.json)
    if arguments.json:
        return
    for each in rows:
        lost, now = (", ".join(each[kind]) or "nothing" for kind in ("lost", "now"))
        print(f"{each['template']:50} {each['calls']:12} alone: {lost}\n{'':63} now: {now}")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
