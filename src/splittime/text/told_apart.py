"""Reasoning and content of an answer, and where an answer begins."""

from enum import StrEnum
from typing import NamedTuple


class ReasoningPlace(StrEnum):
    """Where an answer begins. before: it may begin with reasoning. within: its prompt has opened it. behind: its prompt
    has closed it, or its text goes on."""

    BEFORE = "before"
    WITHIN = "within"
    BEHIND = "behind"


class ToldApart(NamedTuple):
    reasoning: str
    content: str
