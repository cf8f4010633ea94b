"""Who served which beginnings of prompts of late, and which beginnings most conversations share.

A prompt is cut into blocks of `BLOCK_BYTES`. A block's key is a keyed hash of its tenant, the client's `cache_salt`,
the model, and all of the text up to its end: nobody's prompts say anything of another tenant's, and keys mean nothing
to another process. Of each block the table knows who served it, the latest first, and how many conversations of its
scope had it, where older ones weigh less (`RECENT`).

A request belongs to a conversation that is known if it goes on where another request ended: in the same blocks, and
with the same bytes behind the last of them. Anything else is a new conversation. A beginning that more than half of the
latest ones have, and more than `FEW`, is everybody's: a system prompt, the same tools. It does not say who should have
a request.

The table has at most `max_blocks`; what nobody has asked for longest goes first, and of one prompt its end before its
beginning, since a request looks at all of its blocks.
"""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

BLOCK_BYTES = 256
MAX_BLOCKS = 2048  # of one prompt: what differs beyond half a MiB is not seen
KEY_BYTES = 12
MAX_HOLDERS = 8  # remembered of a block
RECENT = 64  # conversations, in which their number falls to 1/e
FEW = 3


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
