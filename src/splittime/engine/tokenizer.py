"""Text to token ids and back, read from a model's folder (`tokenizer.json`, `tokenizer_config.json`, chat template).

A tokenizer also knows the *bytes* of each token. Byte-level BPE and sentencepiece-style vocabularies (byte fallback)
spell a text as the concatenation of their tokens' bytes, which is what lets `engine.output` turn tokens into text one
by one, without decoding anything twice. Vocabularies of another kind have no such bytes (`has_token_bytes` is false)
and are decoded in small windows.

`encode` follows Hugging Face: the post-processor in `tokenizer.json` adds begin-of-sequence; `add_bos_token` of
`tokenizer_config.json`, where it stands, overrules it. A prompt rendered from a chat template gets nothing added,
since the template writes its own special tokens. Encoding one text with `encode_batch` looks odd and is on purpose:
`encode` holds the interpreter's lock for as long as it runs (0.5 s for 400 kB), the batch form lets go of it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from splittime.core.errors import ConfigError, RequestError
from splittime.engine.chat_template import ChatTemplate

_PLAIN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        config = config or {}
        self.special_tokens = _special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._add_bos: bool | None = config.get("add_bos_token")
        self._decoders = _flatten(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._templates = {
            name: ChatTemplate(source, self.special_tokens) for name, source in (chat_templates or {}).items()
        }

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a model's folder. Raises `ConfigError` naming the file that is missing or cannot be understood."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {folder.name}", hint="only tokenizers of that form are supported")
        config = _read_json(folder / "tokenizer_config.json")
        return cls(_backend(path), config=config, chat_templates=_chat_templates(folder, config))

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if token else None

    # ---- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile."""
        ids = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self._with_bos(ids) if add_special_tokens and self._add_bos is not None else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Make the ids begin with begin-of-sequence or not, as `add_bos_token` says."""
        bos = self.bos_token_id
        if bos is None:
            return ids
        has_bos = bool(ids) and ids[0] == bos
        if self._add_bos and not has_bos:
            return [bos, *ids]
        return ids[1:] if has_bos and not self._add_bos else ids

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    @property
    def chat_templates(self) -> dict[str, str]:
        """The templates' sources, by name."""
        return {name: template.source for name, template in self._templates.items()}

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text for `messages`; encode it with `add_special_tokens=False`."""
        template = self._templates.get("default")
        if template is None:
            raise RequestError(
                "this model has no chat template",
                code="no_chat_template",
                param="messages",
                hint="use /v1/completions, or give the model's folder a chat_template.jinja",
            )
        return template.render(messages, **{"add_generation_prompt": True, **options})

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`)."""
        return self._backend.id_to_token(token_id)

    @property
    def has_token_bytes(self) -> bool:
        """Text is the concatenation of `token_bytes`."""
        kinds = {decoder["type"] for decoder in self._decoders}
        if kinds == {"ByteLevel"}:
            return True
        replaces = [d for d in self._decoders if d["type"] == "Replace"]
        return bool(kinds) and kinds <= _PLAIN_DECODERS and all("String" in d["pattern"] for d in replaces)

    @property
    def strips_leading_space(self) -> bool:
        """The vocabulary writes a space before a text's first word, and decoding takes it away again."""
        for decoder in self._decoders:
            if decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] >= 1:
                return True
            if decoder["type"] == "Metaspace":
                return decoder.get("prepend_scheme", "always") != "never"
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for in a text (of its name, for a special token)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.has_token_bytes:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if self._decoders[0]["type"] == "ByteLevel":
            return _byte_level_bytes(token)
        return _plain_bytes(token, self._decoders)


def _byte_level_bytes(token: str) -> bytes:
    """A token whose characters all stand for bytes is those bytes; any other (an added one) is its own text."""
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


@lru_cache(1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others, in order, the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _plain_bytes(token: str, decoders: Sequence[Mapping[str, Any]]) -> bytes:
    """Apply a sentencepiece-style chain of decoders to one token."""
    for decoder in decoders:
        if decoder["type"] == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                continue
        elif decoder["type"] == "Replace":
            token = token.replace(decoder["pattern"]["String"], decoder["content"])
        elif decoder["type"] == "Metaspace":
            token = token.replace(decoder["replacement"], " ")
    return token.encode()


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's parts as plain data, in order. No decoder is a part of its own: it joins tokens with spaces."""
    if decoder is None:
        return [{"type": "none"}]
    described = json.loads(decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... whether written as text or as an object with a `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: a file of its own comes first, then the config's, which is one text or a named list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    declared = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in declared or ()}
    except (TypeError, KeyError):
        raise ConfigError("chat_template is neither a text nor a list of {name, template}", param="model") from None


def _backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path.name} is no tokenizer: {error}", param="model") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}", param="model") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} holds no JSON object", param="model")
    return found
