"""Prefix affinity: a request goes where the longest beginning of its prompt was served of late, within a cap of load.

What counts is what goes beyond the beginning that everybody shares (`PrefixTable`): a prefix cache has that anywhere.
The upstream may have more in flight than the least loaded one: `load_cap` times as much, `slack_tokens`, and as many
tokens as it need not compute again. Of those within the cap the one that served most of the prompt has it, the latest
of equal ones; without any, load decides. It goes by what was sent there; an attempt that fails is forgotten.

A prompt is read as bytes to which a chat's next turn only appends: messages, and tools and instructions before them,
one after the other in one form (names in order, no spaces, no nulls) without a closing bracket. None of it is sent on.

The table cuts a prompt into blocks of `BLOCK_BYTES`. A block's key is a keyed hash of tenant, `cache_salt`, model and
all text up to its end, so it says nothing to other tenants or processes. Of each block the table knows who served it,
and how many conversations had it, older ones weighing less (`RECENT`). A request goes on with a known conversation if
it holds the same blocks and the same bytes behind them. A beginning that more than half of the latest conversations
have, and more than `FEW`, is everybody's. Of at most `max_blocks` the longest unused go first, ends before beginnings.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from splittime.gateway.config import AffinityConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, ForwardedRequest
from splittime.ledger.attempts import CAPPED, HIT, NO_AFFINITY, AffinityDecision

BLOCK_BYTES = 256
MAX_BLOCKS = 2048  # of one prompt: what differs beyond half a MiB is not seen
KEY_BYTES = 12
MAX_HOLDERS = 8  # remembered of a block
RECENT = 64  # conversations, in which their number falls to 1/e
FEW = 3
RESULTS = (HIT, CAPPED, NO_AFFINITY)


class SeenPrefix(NamedTuple):
    """The blocks of one request's prompt, and how many of its first ones are everybody's."""

    keys: tuple[bytes, ...]
    shared: int


class KnownBlock:
    """holders: upstreams that served it, the latest first. conversations: that had it, as of the scope's conversation
    `at`. tail, tail_bytes: a hash of what the latest request that ended here had behind it; -1 if none ended here."""

    __slots__ = ("at", "conversations", "holders", "tail", "tail_bytes")

    def __init__(self, at: int) -> None:
        self.at, self.conversations = at, 1.0
        self.holders: tuple[str, ...] = ()
        self.tail, self.tail_bytes = b"", -1

    def at_conversation(self, number: int) -> float:
        """Returns its number of conversations as it weighs at a later one."""
        return self.conversations * (1 - 1 / RECENT) ** max(0, number - self.at)

    def count(self, number: int) -> None:
        self.conversations, self.at = self.at_conversation(number) + 1, number

    def end_with(self, tail: bytes) -> None:
        self.tail, self.tail_bytes = _digest(tail), len(tail)

    def is_gone_on_with(self, rest: bytes) -> bool:
        """Returns whether this follows, in a text, where the latest request ended."""
        return 0 <= self.tail_bytes <= len(rest) and _digest(rest[: self.tail_bytes]) == self.tail


class PrefixTable:
    """key: for tests; default: a random one. All calls come from one thread."""

    def __init__(self, max_blocks: int, key: bytes | None = None) -> None:
        self._max_blocks, self._key = max_blocks, secrets.token_bytes(16) if key is None else key
        self._blocks: OrderedDict[bytes, KnownBlock] = OrderedDict()  # each scope's beginning is a block too

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def see(self, scope: bytes, text: bytes) -> SeenPrefix:
        """Returns the blocks of a prompt that has come. scope: within which prompts are compared."""
        text = text[: MAX_BLOCKS * BLOCK_BYTES]
        root, keys = self._keys(scope, text)
        known = 0
        while known < len(keys) and keys[known] in self._blocks:
            known += 1
        beginning = self._blocks.get(root)
        if beginning is None:
            beginning = self._blocks[root] = KnownBlock(0)
        else:
            self._count(beginning, [beginning, *(self._blocks[key] for key in keys[:known])], text)
        for key in keys[known:]:
            self._blocks[key] = KnownBlock(beginning.at)
        self._blocks[keys[-1] if keys else root].end_with(text[len(keys) * BLOCK_BYTES :])
        self._touch((root, *keys))
        return SeenPrefix(keys, self._num_shared(beginning, keys[:known]))

    def note_served(self, keys: Sequence[bytes], upstream: str) -> None:
        """A request of these blocks goes to this upstream."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.holders[:1] != (upstream,):
                others = [name for name in block.holders if name != upstream]
                block.holders = (upstream, *others[: MAX_HOLDERS - 1])

    def forget(self, keys: Sequence[bytes], upstream: str) -> None:
        """This upstream failed at a request of these blocks: whether it has any of them, nobody knows."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.holders = tuple(name for name in block.holders if name != upstream)

    def depths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns how many of these blocks, from the first on, each upstream served: those with most last, and of equal
        ones the latest last."""
        found: dict[str, int] = {}
        for depth, key in enumerate(keys, 1):
            block = self._blocks.get(key)
            if block is None:
                break
            for name in reversed(block.holders):
                found.pop(name, None)
                found[name] = depth
        return found

    def _keys(self, scope: bytes, text: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """Returns the key of the scope's beginning, and those of the whole blocks of a text."""
        running = blake2b(scope, key=self._key, digest_size=KEY_BYTES)
        root, keys = running.digest(), []
        for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
            running.update(text[end - BLOCK_BYTES : end])
            keys.append(running.digest())
        return root, tuple(keys)

    def _count(self, beginning: KnownBlock, known: Sequence[KnownBlock], text: bytes) -> None:
        """Count a conversation if this is a new one. known: the blocks that are known, from the scope's beginning."""
        rest = text[(len(known) - 1) * BLOCK_BYTES :]
        if not known[-1].is_gone_on_with(rest):
            number = beginning.at + 1
            for block in known:
                block.count(number)

    def _num_shared(self, beginning: KnownBlock, keys: Sequence[bytes]) -> int:
        most = max(FEW, beginning.conversations / 2)
        for number, key in enumerate(keys):
            of_block = self._blocks.get(key)
            if of_block is None or of_block.at_conversation(beginning.at) <= most:
                return number
        return len(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=KEY_BYTES).digest()


UNREAD = SeenPrefix((), -1)
MAX_BODY_BYTES = 2**20  # a longer request is passed on, and chosen for by load


class LoadedUpstream(Protocol):
    """An upstream, as far as affinity looks at it. tokens: that it has in flight."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...


Candidate = TypeVar("Candidate", bound=LoadedUpstream)


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
        self, prefix: SeenPrefix | None, able: Sequence[Candidate], free: Sequence[Candidate]
    ) -> tuple[Candidate | None, AffinityDecision | None]:
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
