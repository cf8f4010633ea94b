"""GGUF files byte by byte, right ones and wrong ones."""

import struct


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def key(name: str, kind: int, content: bytes) -> bytes:
    return text(name) + u32(kind) + content


def tensor(name: str, dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def content(keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = bytes(64), **header) -> bytes:
    """A file of these parts; header: version, num_tensors, num_keys, in the place of the true ones."""
    counts = u64(header.get("num_tensors", len(tensors))) + u64(header.get("num_keys", len(keys)))
    head = b"GGUF" + u32(header.get("version", 3)) + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data
