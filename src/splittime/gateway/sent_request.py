"""A request to an upstream: as it goes over a connection, and that there is none."""

from collections.abc import Mapping
from urllib.parse import quote

from splittime.wire.target import Address

IN_A_PATH = "/%:@!$&'()*+,;=~-._"  # and what a config has escaped already


class NoConnection(ConnectionError):
    """An upstream could not be reached. is_too_late: it did not answer in time."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.is_too_late = isinstance(error, TimeoutError)


def request_bytes(method: str, address: Address, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """headers: without line ends."""
    authority = address.authority
    if not authority.isascii():
        authority = authority.encode("idna").decode()
    lines = [f"{method} {quote(address.path + path, IN_A_PATH)} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + (body or b"")
