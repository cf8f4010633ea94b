"""The name that the books have for a request: its id, or of a long one the beginning, and a hash of all of it.

vLLM sets no limit to the id that a client gives (`X-Request-Id`, or `request_id` in a body), and the record of each
step repeats the ids of its rows: a million characters over 8,000 steps would be gigabytes. The engine's process and
the API process each call `name_of` where an id comes into their books, and so does who is asked for an account.
"""

from hashlib import blake2b

from splittime.ledger.store import ID_PREFIXES

MOST_CHARACTERS = 128  # behind the prefix of a response's id
HASH_BYTES = 16


def name_of(given: str) -> str:
    """Returns the name; of a name, itself. A prefix is kept, so that an account is found by either id of its request.

    An id may hold half of a character's two codes, which no encoder takes: the name has a `?` instead."""
    prefix = next((each for each in ID_PREFIXES if given.startswith(each)), "")
    own = given[len(prefix) :].encode("utf-8", "replace").decode()
    if len(own) <= MOST_CHARACTERS:
        return prefix + own
    digest = blake2b(own.encode(), digest_size=HASH_BYTES).hexdigest()
    return f"{prefix}{own[: MOST_CHARACTERS - len(digest) - 2]}..{digest}"
