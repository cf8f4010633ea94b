"""Names in a bundle: those that the operator gave and codes stay, those that others gave are renamed."""

import re
import secrets
from hashlib import blake2b

from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import PREFIX_BYTES
from splittime.ledger.store import ID_PREFIXES

LEFT_OUT = "(left out)"
_OUR_ID = re.compile(r"[0-9a-f]{24}(?:-\d{1,4})?")
_WORD = re.compile(r"(?=.{1,48}$)(?:[a-z]+(?:_[a-z]+)*|(?:http|upstream)_\d{3})")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,63}")


def word(text: str) -> str:
    """Returns a code as it is, and `other` for what is no code: upstreams write codes too."""
    return text if not text or _WORD.fullmatch(text) else "other"


def label(text: str) -> str:
    """Returns a name that the operator gave."""
    return text if not text or _LABEL.fullmatch(text) else LEFT_OUT


class SharedNames:
    """Renames within one bundle: what was equal stays equal. facts: name the models that are served."""

    def __init__(self, facts: ServerFacts | None) -> None:
        self._key = secrets.token_bytes(32)
        self._models = frozenset(facts.model.split(", ")) if facts is not None else frozenset()
        self._ids: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Returns what tells a text from others, and does not tell it; empty for an empty one."""
        return self.hashed(text.encode("utf-8", "surrogatepass")).hex() if text else ""

    def request_id(self, name: str) -> str:
        """Returns an id that a server made as it is, one that a client chose renamed."""
        if name not in self._ids:
            prefix = next((prefix for prefix in ID_PREFIXES if name.startswith(prefix)), "")
            own, at, tenant = name[len(prefix) :].partition("@")
            shown = own if _OUR_ID.fullmatch(own) or not own else f"id-{self.mark(own)}"
            self._ids[name] = f"{prefix}{shown}{at}{self.tenant(tenant)}"
        return self._ids[name]

    def tenant(self, name: str) -> str:
        return f"tenant-{self.mark(name)}" if name else ""

    def model(self, name: str) -> str:
        """Returns the name of a model that is served, without its folders; a name that a client wrote is renamed."""
        if not name or name in self._models:
            return re.split(r"[/\\]", name)[-1] if name.startswith(("/", ".", "~")) or "\\" in name else name
        return f"model-{self.mark(name)}"

    def hashed(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=PREFIX_BYTES).digest()
