"""Blocks of KV cache on their way from one server to another: what is asked (`BlocksAsk`), what is told (`BlocksTold`),
and how a block is known to be the right one.

A block's name is the chained hash of its tokens and all before them under a tenant's salt (`kv.blocks`), so who can
name a block has the text and the salt. `layout` is the hash of all that the block's bytes depend on besides: weights,
types, kernels, shape. A block whose bytes, name or layout are not those that were sent has another digest.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

DIGEST_BYTES = 16
MAX_NAMES = 4096  # in one asking
MAX_TOLD_BYTES = 16 << 20  # of blocks in one answer; its receiver takes no more
NAME_BYTES = 16
OVERHEAD_BYTES = 64  # of a block in an answer, beside its content
PATH = "/kv/blocks"

Name = Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


class BlocksAsk(msgspec.Struct, frozen=True):
    """names: of the blocks that are wanted; None: those that were used latest, but for the first `skip` of them."""

    layout: str
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)] | None = None
    skip: Annotated[int, Meta(ge=0, le=1 << 32)] = 0


class BlocksTold(msgspec.Struct, frozen=True):
    """The wanted blocks that there are, as many as fit into an answer. digests: of each, `digest_of`."""

    names: tuple[Name, ...]
    blobs: tuple[bytes, ...]
    digests: tuple[bytes, ...] = ()


def digest_of(layout: str, name: bytes, blob: bytes) -> bytes:
    return blake2b(blob, digest_size=DIGEST_BYTES, key=blake2b(layout.encode() + name).digest()).digest()


def with_digests(layout: str, told: BlocksTold) -> bytes:
    """Returns the answer as it is sent."""
    digests = tuple(digest_of(layout, name, blob) for name, blob in zip(told.names, told.blobs, strict=True))
    return msgspec.msgpack.encode(msgspec.structs.replace(told, digests=digests))


def sound_blocks(raw: bytes, ask: BlocksAsk, block_bytes: int) -> dict[bytes, bytes]:
    """Returns the blocks of an answer by name: those that were asked for, of the right size, whole. Raises
    `msgspec.MsgspecError` for what is no answer."""
    told = msgspec.msgpack.decode(raw, type=BlocksTold)
    wanted = None if ask.names is None else set(ask.names)
    return {
        name: blob
        for name, blob, digest in zip(told.names, told.blobs, told.digests)  # noqa: B905  # lengths may be any
        if (wanted is None or name in wanted)
        and len(blob) == block_bytes
        and digest == digest_of(ask.layout, name, blob)
    }
