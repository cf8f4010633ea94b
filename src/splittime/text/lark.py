"""Texts as they stand in a grammar of Lark's form. A mark that is an added token of the vocabulary is spelled by that
token alone: llguidance tells it from the same characters in a text, and the model was taught it.

token_ids, in all of these: the ids of such marks, by their text.
"""

import json
import re
from collections.abc import Mapping, Sequence

_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/]")


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns the text as a part of a rule; "" for none."""
    return " ".join(
        f"<[{token_ids[part]}]>" if part in token_ids else json.dumps(part) for part in pieces(text, token_ids)
    )


def up_to(rule: str, mark: str, token_ids: Mapping[str, int]) -> str:
    """Returns the rule of this name: any text and then the mark, where it first comes."""
    parts = pieces(mark, token_ids)
    first = next((at for at, part in enumerate(parts) if part in token_ids), None)
    if first is None:
        return f"{rule}[lazy]: /(?s:.*){as_regex(mark)}/"
    text = f"{rule}_text".upper()
    return f"{without(text, parts[first])}\n{rule}: {text} {literal(''.join(parts[first:]), token_ids)}"


def without(name: str, mark: str) -> str:
    """Returns the terminal of this name: any text in which the mark does not stand."""
    return f"{name}: /(?s:.*)/ & ~/(?s:.*){as_regex(mark)}(?s:.*)/"


def pieces(text: str, token_ids: Mapping[str, int]) -> Sequence[str]:
    """Returns the text, cut before and behind each mark that is a token."""
    if not token_ids:
        return [text] if text else []
    marks = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True)))
    return [part for part in re.split(f"({marks})", text) if part]


def as_regex(text: str) -> str:
    """Returns the regular expression of this text alone, as it stands between slashes."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")
