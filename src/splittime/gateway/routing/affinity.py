"""Prefix affinity: a request goes where the longest beginning of its prompt was served of late, within a cap of load.

What counts is what goes beyond the beginning that everybody shares (`prefix_table`): a prefix cache has that anywhere.
The upstream may have more in flight than the least loaded one: `load_cap` times as much, `slack_tokens`, and as many
tokens as it need not compute again. Of those within the cap, the one that served most of the prompt has it, the latest
of equal ones; if there is none, load decides as ever. Nobody knows what an upstream still has: this goes by what was
sent there, and an attempt that fails is forgotten.

What affinity reads of a request: its prompt as bytes to which the next turn of a chat only appends.

Messages (or items of a response's input), and tools and instructions before them, are written in one form (names in
order, no spaces, no nulls), one after the other with nothing around them: a chat's turn begins with the whole of the
turn before. A prompt lacks its closing quote or bracket for the same reason. Nothing of this is sent anywhere;
`prefix_table` keeps hashes of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from splittime.gateway.config import AffinityConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, ForwardedRequest
from splittime.gateway.routing.prefix_table import BLOCK_BYTES, PrefixTable, SeenPrefix
from splittime.ledger.attempts import CAPPED, HIT, NO_AFFINITY, AffinityDecision

if TYPE_CHECKING:
    from splittime.gateway.upstreams import Upstream
from typing import Any, NamedTuple

RESULTS = (HIT, CAPPED, NO_AFFINITY)
UNREAD = SeenPrefix((), -1)
MAX_BODY_BYTES = 2**20  # a longer request is passed on, and chosen for by load


class PrefixAffinity:
    """config: None for no affinity. results: of attempts; those of the config before go on being counted."""

    def __init__(self, config: AffinityConfig | None, results: Counter[str] | None = None) -> None:
        self._config = config
        self._table = None if config is None else PrefixTable(config.max_blocks)
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0)) if results is None else results

    @property
    def num_blocks(self) -> int:
        return 0 if self._table is None else len(self._table)

    # ---- of a request

    def seen(self, request: ForwardedRequest, tenant: str) -> SeenPrefix | None:
        """Returns what the choice is made by; None where there is no affinity."""
        if self._table is None or not request.is_written:
            return None
        prompt = salted_prompt(request.body)
        if prompt is None:
            return UNREAD
        scope = msgspec.json.encode([tenant, prompt.salt.decode(), request.model, request.endpoint])
        return self.see(scope, prompt.text)

    def see(self, scope: bytes, text: bytes) -> SeenPrefix | None:
        """Returns the same of a prompt's text; scope: within which prompts are compared."""
        return None if self._table is None else self._table.see(scope, text)

    def note_sent(self, prefix: SeenPrefix | None, upstream: str, decision: AffinityDecision | None) -> None:
        """The request goes there, and others of its beginning that come meanwhile may follow."""
        self.note_answered(prefix, upstream)
        if decision is not None:
            self.results[decision.result] += 1

    def note_answered(self, prefix: SeenPrefix | None, upstream: str) -> None:
        """The upstream is the latest to have served this prompt."""
        if self._table is not None and prefix is not None:
            self._table.note_served(prefix.keys, upstream)

    def note_failed(self, prefix: SeenPrefix | None, upstream: str) -> None:
        if self._table is not None and prefix is not None:
            self._table.forget(prefix.keys, upstream)

    # ---- the choice

    def served(self, prefix: SeenPrefix | None) -> list[str]:
        """Returns the upstreams that served more of a prompt than everybody's beginning."""
        if self._table is None or prefix is None:
            return []
        return [name for name, depth in self._table.depths(prefix.keys).items() if depth > prefix.shared]

    def preferred(
        self, prefix: SeenPrefix | None, able: Sequence["Upstream"], free: Sequence["Upstream"]
    ) -> tuple["Upstream | None", AffinityDecision | None]:
        """Returns who shall have the request, None to leave it to load, and why. able: those that may be asked; free:
        of these, the ones with room, at least one."""
        if self._config is None or self._table is None or prefix is None:
            return None, None
        depths = self._table.depths(prefix.keys)
        by_name = {upstream.name: upstream for upstream in able}
        held = [by_name[name] for name, depth in depths.items() if depth > prefix.shared and name in by_name]
        if not held:
            return None, AffinityDecision(result=NO_AFFINITY, why=_why_none(prefix, depths))
        least = min(upstream.tokens for upstream in free)
        caps = {one.name: self._cap(least, depths[one.name] - prefix.shared) for one in held}
        within = [one for one in held if one in free and one.tokens <= caps[one.name]]
        best = (within or held)[-1]
        why = "" if within else "over_cap" if best in free else "no_room"
        return (best if within else None), AffinityDecision(
            result=HIT if within else CAPPED,
            why=why,
            upstream=best.name,
            matched_bytes=depths[best.name] * BLOCK_BYTES,
            shared_bytes=prefix.shared * BLOCK_BYTES,
            tokens=best.tokens,
            cap_tokens=caps[best.name],
        )

    def _cap(self, least: int, blocks: int) -> int:
        """Returns the most tokens that an upstream may have in flight that served so many blocks beyond the shared."""
        assert self._config is not None
        return int(self._config.load_cap * least) + self._config.slack_tokens + blocks * BLOCK_BYTES // BYTES_PER_TOKEN


def _why_none(prefix: SeenPrefix, depths: Mapping[str, int]) -> str:
    if prefix is UNREAD:
        return "unread"
    if not prefix.keys:
        return "short"
    return "shared" if depths else "unseen"


class PromptBody(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None
    tools: Any = None
    functions: Any = None
    system: Any = None
    instructions: Any = None
    cache_salt: Any = None


class SaltedPrompt(NamedTuple):
    """text: the prompt in its one form. salt: the client's own, as JSON: prefixes are shared within one."""

    text: bytes
    salt: bytes


def salted_prompt(body: bytes) -> SaltedPrompt | None:
    """Returns the prompt of a request's body; None for one that is too long or cannot be read."""
    if len(body) > MAX_BODY_BYTES:
        return None
    try:
        told = msgspec.json.decode(body, type=PromptBody)
        first = (told.tools, told.functions, told.system, told.instructions)
        before = [_encoded(each) for each in first if each is not None]
        return SaltedPrompt(b"".join([*before, *_pieces(told)]), _encoded(told.cache_salt))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _pieces(told: PromptBody) -> list[bytes]:
    turns = told.input if told.messages is None else told.messages
    if isinstance(turns, list):
        return [_encoded(_without_nulls(turn)) for turn in turns]
    prompt = told.prompt if turns is None else turns
    return [] if prompt is None else [_encoded(prompt)[:-1]]


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
