"""Small files that a config names: keys, certificates, labels, configs. Read whole, within a bound, or refused.

What is no regular file is refused before a byte is read: to open a pipe would wait for who writes into it, and a device
has no end.
"""

import os
import stat
from pathlib import Path

MAX_BYTES = 2**20


def read_small(path: str | Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Returns what is in the file. Raises `OSError` for one that cannot be read, is no regular file or is longer."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is no regular file")
        with os.fdopen(opened, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(opened)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes} bytes")
    return data
