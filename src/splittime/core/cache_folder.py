"""Where this user's programs keep what may be deleted at any time (the XDG base directory specification)."""

import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path | None:
    """Returns our folder in it; None for a user without a home, as in many containers."""
    with suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (home if home.is_absolute() else Path.home() / ".cache") / "splittime"
    return None
