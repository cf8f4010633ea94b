"""What one request asks, before anything says when: the piece that workloads make and `draw` puts on a schedule."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from splittime.ledger.client_book import Phase
from splittime.loadgen.schedule import Message


class Content(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Fields as `Planned` has them. `may_hit`: that it shares its beginning with another is meant."""

    output_tokens: int
    prompt: tuple[int, ...] | str = ()
    messages: tuple[Message, ...] | None = None
    exact_output: bool = True
    expected_prompt_tokens: int | None = None
    may_hit: bool = False
    body: dict[str, Any] = {}
    tags: dict[str, str] = {}


Conversation = list[Content]
"""Its turns in order; most have one."""


class Workload(Protocol):
    """Where contents come from. `notes` says, after drawing, what had to be changed."""

    def draw(self, phase: Phase, count: int, begin: int = 0) -> Sequence[Conversation]:
        """A phase's conversations, always the same; warm-up is spread over all lengths. `begin`: where in a file's
        order to begin."""
        ...

    def notes(self) -> list[str]: ...
