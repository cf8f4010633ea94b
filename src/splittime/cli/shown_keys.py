"""Keys that stand in a command line, where every user of the machine reads them in the list of processes."""

import re
from collections.abc import Iterator, Sequence

_FLAG = re.compile(r"(--(?!ttft)(?:[a-z]+-)*(?:key|keys|token|password|secret))(?:=.*)?", re.DOTALL)
_IN_URL = re.compile(r"[a-z+]+://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)
_IN_HEADER = re.compile(r"(?:authorization|x-api-key)\s*[:=]", re.IGNORECASE)


def shown_keys(words: Sequence[str]) -> Iterator[str]:
    """Yields what in a command line has a key: a flag, a URL with a password, a header."""
    for word in words:
        flag = _FLAG.fullmatch(word)
        if flag is not None:
            yield flag[1]
        elif _IN_URL.match(word):
            yield "a URL with a password"
        elif _IN_HEADER.match(word):
            yield "a header with a key"


def warning_of(words: Sequence[str]) -> str | None:
    """Returns what the user is told; None where no key is shown."""
    found = ", ".join(dict.fromkeys(shown_keys(words)))
    way_out = "give keys by the environment (SPLITTIME_API_KEY) or in a file (api_keys_file, key_file)"
    return (
        f"warning: {found}: every user of this machine can read it in the list of processes; {way_out}"
        if found
        else None
    )
