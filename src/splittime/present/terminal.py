"""Text from strangers, made safe to print on a terminal and short enough to quote."""

from unicodedata import category

MAX_QUOTED_CHARS = 500


def plain(text: str) -> str:
    """Replaces the characters that a terminal would obey instead of showing; line ends, tabs and spaces stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" or category(char) == "Zs" else "\ufffd" for char in text
    )


def clipped(text: str) -> str:
    """Returns the text as `plain` does, cut to `MAX_QUOTED_CHARS` characters."""
    text = plain(text[: MAX_QUOTED_CHARS + 1])
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]} ..."
