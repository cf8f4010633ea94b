"""Text to token ids and back, and chat templates, read from a model's folder or a GGUF file (`gguf_tokenizer`).

A tokenizer also knows the *bytes* of each token (`TokenBytes`). Byte-level BPE and sentencepiece-style vocabularies
(byte fallback) spell a text as the concatenation of their tokens' bytes, so that `text.output` turns tokens into text
one by one and decodes nothing twice. Vocabularies of another kind have no such bytes (`is_by_token` is false) and are
decoded in small windows.

`encode` follows Hugging Face: the post-processor in `tokenizer.json` adds begin-of-sequence; `add_bos_token` of
`tokenizer_config.json`, where it stands, overrules it. A prompt rendered from a chat template gets nothing added,
since the template writes its own special tokens. A tokenizer's own wish to cut texts short, or to fill them up, is not
heeded: it is meant for training. Encoding one text with `encode_batch_fast` looks odd and is on purpose: `encode` holds
the interpreter's lock for as long as it runs (0.5 s for 400 kB), the batch form lets go of it, and the fast one makes
no offsets, which nobody reads and which take most of the memory.

A folder's chat template may stand in a file of its own (`chat_template.jinja` or `.json`). Of a list of named templates
only the one called "default" is used and looked at. Special tokens are those of `tokenizer_config.json`;
`special_tokens_map.json` says what that leaves out, and, as for Hugging Face, has the last word for older folders,
whose config has no `added_tokens_decoder`.

A chat template comes with the model, so it is somebody else's program: it runs in Jinja's immutable sandbox, sees only
the messages, the request's options and the special tokens, and whatever it raises is the request's error (400), not
ours. It can still loop for hours and fill the memory, so a server lets it run in a worker only (`text.process`). It is
compiled without Jinja's optimizer, which would compute `{{ "x" * 10**10 }}` at start.

It gets what templates of the Hugging Face hub expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes,
loop controls, and the `{% generation %}` block (which marks assistant text for training and prints its body here).

`continue_final_message` leaves the last message open, so that the model goes on with it: a mark is put after its text,
and what the template writes from the mark on is cut off. That is Hugging Face's way of doing it, and vLLM's.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splittime.core.errors import ConfigError, RequestError
from splittime.text import foreign_code
from splittime.text.chat_forms import ROLES, ChatForms, described, left_out
from splittime.text.foreign_code import too_costly

MARK = "\ue000end of what is to be continued\ue000 "
Clock = Callable[[], datetime.datetime]
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
MAX_TOKENIZER_BYTES = 128 << 20  # four times the largest published; reading one takes ten times as much


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` prints what is between."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def environment(clock: Clock = datetime.datetime.now) -> ImmutableSandboxedEnvironment:
    """Returns what templates of the Hugging Face hub expect. clock: what they are told of the time."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda format: clock().strftime(format)
    return made


class ChatTemplate:
    """One compiled template with the special tokens that it may name (`bos_token`, ...). clock: as of `environment`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock = datetime.datetime.now) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        made = environment(clock)
        self._forms = ChatForms(self._probed)
        self._taken_names = OWN_NAMES | made.globals.keys() | self._special_tokens.keys()
        try:
            self._template = made.from_string(source)
        except Exception as error:  # Jinja's, or Python's of what Jinja made: a break outside a loop, 5,000 digits
            raise ConfigError(f"the model's chat template does not parse: {error}", param="chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. variables: what a request wants the template to see besides. tools: as OpenAI's API has
        them. Raises `RequestError`, with the template's own words if it refuses the messages."""
        options = {**self._checked(variables or {}), "add_generation_prompt": add_generation_prompt}
        options["tools"] = tools
        if not continue_final_message:
            return self._render(messages, options)
        if add_generation_prompt or not messages:
            why = "add_generation_prompt must be false" if messages else "there is no message"
            raise _refusal(f"{why} where the final message is to be continued", "continue_final_message")
        *before, last = messages
        text = str(last.get("content") or "")
        rendered = self._render([*before, {**last, "content": text + MARK}], options)
        at = rendered.rfind(MARK.rstrip())
        if at < 0 or text.strip() not in rendered[:at]:
            raise _refusal("it leaves out the last message, which was to be continued", "continue_final_message")
        keeps_space = rendered.startswith(MARK, at)
        return rendered[:at] if keeps_space else rendered[:at].rstrip()

    def _checked(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse names that the template reads as something else."""
        for name in sorted(variables.keys() & self._taken_names):
            raise RequestError(
                f"chat_template_kwargs: the name {name!r} is taken",
                param="chat_template_kwargs",
                value=name,
                hint="a field of the request of that name says it" if name in OWN_NAMES else "leave it out",
            )
        return dict(variables)

    def _probed(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        given = {"tools": tools, "documents": None, "add_generation_prompt": True}
        return self._template.render({**self._special_tokens, **given, "messages": list(messages)})

    def _as_known(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a developer's message as the system's where the template knows no developer."""
        is_known = message.get("role") != "developer" or "developer" in self.source
        return message if is_known else {**message, "role": "system"}

    def _require_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A role that neither the API nor the template knows would be left out, or taken for another."""
        for index, role in enumerate(message.get("role") for message in messages):
            if role not in ROLES and not any(f"{quote}{role}{quote}" in self.source for quote in "\"'" if role):
                named = str(role)[:64]
                said = f"messages[{index}] has the role {named!r}, which is none"
                hint = f"one of {', '.join(ROLES)}, or one that the model's chat template knows"
                raise RequestError(said, param=f"messages[{index}].role", value=named, limit=list(ROLES), hint=hint)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Returns what the template writes of the messages as they came, unless it refuses them or leaves something
        out of which it writes more when they are put another way."""
        self._require_roles(messages)
        told = [self._as_known({**message, "content": message.get("content") or ""}) for message in messages]
        text, refusal = self._tried(told, options)
        lost = () if text is None else left_out(told, None, text, with_reasoning=False)
        other = self._forms.as_written(told) if text is None or lost else told
        if other is not told:
            saved, _ = self._tried(other, options)
            if saved is not None and (not lost or len(left_out(told, None, saved, with_reasoning=False)) < len(lost)):
                return saved
        if text is None:
            raise refusal or too_costly()
        return text

    def _tried(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[str | None, RequestError | None]:
        """Returns what the template writes, or why it does not."""
        variables = {"tools": None, "documents": None, **self._special_tokens, **options, "messages": list(messages)}
        try:
            return self._template.render(variables), None
        except MemoryError:
            raise too_costly() from None
        except Exception as error:  # whatever it does: Jinja calls methods of the values that it is given
            tools = list(options.get("tools") or ())
            if described(tools) != tools:
                return self._tried(messages, {**options, "tools": described(tools)})
            said = "it calls itself without end" if isinstance(error, RecursionError) else str(error)
            return None, _refusal(said)


def _refusal(why: str, param: str = "messages") -> RequestError:
    return RequestError(
        f"the model's chat template refuses these messages: {why}", code="chat_template_error", param=param
    )


class TokenizerFiles(NamedTuple):
    """config: `bos_token`, `eos_token`, ..., `add_bos_token`. chat_template: the default one, in Jinja."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    chat_template: str | None


def read_folder(folder: Path, chat_template: str | None = None) -> TokenizerFiles:
    """chat_template: instead of the folder's own, which is not looked at then. Raises `ConfigError` naming the file
    that is missing or cannot be understood."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in {folder.name}", hint="only tokenizers of that form are supported")
    config = _read_json(folder / "tokenizer_config.json")
    listed = special_tokens(_read_json(folder / "special_tokens_map.json"))
    is_old = "added_tokens_decoder" not in config
    found = {**listed, **config, **(listed if is_old else {})}
    return TokenizerFiles(_backend(path), found, chat_template or _template(folder, config))


def read_template(path: str | Path) -> str:
    """The text of a template file that a user named."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        message = f"cannot read the chat template: {error}"
        raise ConfigError(message, param="chat_template", value=str(path)) from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... whether written as text or as an object with a `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own comes first, then the config's, which is one text or a named list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_template(path)
    declared = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if declared is None or isinstance(declared, str):
        return declared
    named = [entry for entry in declared if isinstance(entry, dict)] if isinstance(declared, list) else []
    if not named:
        raise ConfigError("chat_template is neither a text nor a list of {name, template}", param="model")
    texts = [entry.get("template") for entry in named if entry.get("name") == "default"]
    if texts and not isinstance(texts[0], str):
        raise ConfigError("the default chat_template is no text", param="model")
    return texts[0] if texts else None


def _backend(path: Path) -> tokenizers.Tokenizer:
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        said = f"{path.name} has {size} bytes, more than the {MAX_TOKENIZER_BYTES} that are read"
        raise ConfigError(said, param="model", value=size, limit=MAX_TOKENIZER_BYTES)
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


_PLAIN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTES = foreign_code.byte_alphabet()


class _Description(msgspec.Struct):
    """All that makes a tokenizer, to make an equal one in another process."""

    backend: str
    config: dict[str, Any]
    chat_template: str | None


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        config = config or {}
        self.special_tokens = special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._add_bos: bool | None = config.get("add_bos_token")
        self.bytes_of_tokens = TokenBytes(backend)
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Read a model's folder; `chat_template` stands in for the model's own. Raises `ConfigError` naming the file
        that is missing or cannot be understood."""
        found = read_folder(Path(folder), chat_template)
        return cls(found.backend, config=found.config, chat_template=found.chat_template)

    def describe(self) -> bytes:
        """For `described`, in another process."""
        config: dict[str, Any] = {**self.special_tokens, "add_bos_token": self._add_bos}
        source = None if self._template is None else self._template.source
        return msgspec.msgpack.encode(_Description(self._backend.to_str(), config, source))

    @classmethod
    def described(cls, description: bytes) -> "Tokenizer":
        read = msgspec.msgpack.decode(description, type=_Description)
        backend = tokenizers.Tokenizer.from_str(read.backend)
        return cls(backend, config=read.config, chat_template=read.chat_template)

    def to_json(self) -> str:
        """Returns the tokenizer as a tokenizer.json holds it."""
        return self._backend.to_str()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if token else None

    def with_own_end(self, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """Returns these ends of an answer with the tokenizer's own, which for some models no config names."""
        own = self.eos_token_id
        return tuple(dict.fromkeys((*token_ids, *(() if own is None or own >= vocab_size else (own,)))))

    # ---- text to ids

    @cached_property
    def bound(self) -> foreign_code.TokenBound | None:
        """Returns how few tokens a text can be, where that can be proved."""
        return foreign_code.token_bound(self._backend)

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile. Raises `RequestError` as soon as they are known to be more
        than `most_tokens`; where a text cannot be worked on in pieces that is when it is done."""
        if most_tokens is not None and self.bound is not None:
            foreign_code.require_at_most(self.bound.least_tokens(text), most_tokens)
        with foreign_code.tokenizer_faults():
            is_whole = len(text) <= foreign_code.PIECE_CHARS or not self._can_be_cut
            ids = (
                self._ids(text, add_special_tokens)
                if is_whole
                else self._in_pieces(text, add_special_tokens, most_tokens)
            )
        ids = self._with_bos(ids) if add_special_tokens and self._add_bos is not None else ids
        if most_tokens is not None:
            foreign_code.require_at_most(len(ids), most_tokens)
        return ids

    def encode_pair(self, one: str, other: str, most_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids of two texts as one prompt, with the special tokens that the vocabulary puts around a pair. Raises
        `RequestError` where they are more than `most_tokens`."""
        with foreign_code.tokenizer_faults():
            ids = self._backend.encode_batch_fast([(one, other)], add_special_tokens=True)[0].ids
        if most_tokens is not None:
            foreign_code.require_at_most(len(ids), most_tokens)
        return tuple(ids)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _in_pieces(self, text: str, add_special_tokens: bool, most_tokens: int | None) -> list[int]:
        before, after = self._ends if add_special_tokens else ([], [])
        ids = [*before]
        for piece in foreign_code.pieces(text):
            ids += self._ids(piece, False)
            if most_tokens is not None:
                foreign_code.require_at_most(len(ids) - 1, most_tokens)  # `add_bos_token` may take one away
        return [*ids, *after]

    @cached_property
    def is_quick(self) -> bool:
        """A short text surely takes a short time."""
        return foreign_code.is_quick(self._backend)

    @property
    def shortcuts(self) -> str:
        """Says in words which shortcuts with a text this tokenizer allows."""
        bound = self.bound
        said = (
            "no text is refused by its length: no bound is proved"
            if bound is None
            else f"refused by length: a token has at most {bound.most_bytes} bytes",
            "long ones in pieces" if self._can_be_cut else "long ones whole: no place to cut is proved",
            "short ones on the event loop" if self.is_quick else "none on the event loop: parts may be slow",
        )
        return "; ".join(said)

    @cached_property
    def _can_be_cut(self) -> bool:
        return foreign_code.can_be_cut(self._backend)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Returns what the post-processor puts before and after a text."""
        plain, whole = self._ids("a", False), self._ids("a", True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

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
        return self._template is not None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja source by name: of the default one, the only one that is used."""
        return {} if self._template is None else {"default": self._template.source}

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text for `messages`, by `ChatTemplate.render`; encode it with `add_special_tokens=False`."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template",
                code="no_chat_template",
                param="messages",
                hint="use /v1/completions, or start the server with --chat-template FILE",
            )
        return self._template.render(messages, **options)

    @property
    def merges(self) -> list[Any] | None:
        """The merges of byte-level BPE, in order; None for other vocabularies, whose merges a GGUF file makes up."""
        model = json.loads(self._backend.to_str())["model"]
        return model.get("merges") if self.bytes_of_tokens.is_byte_level else None

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with foreign_code.tokenizer_faults():
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`)."""
        return self._backend.id_to_token(token_id)

    @property
    def has_token_bytes(self) -> bool:
        """Text is the concatenation of `token_bytes`."""
        return self.bytes_of_tokens.is_by_token

    @property
    def strips_leading_space(self) -> bool:
        """The vocabulary writes a space before a text's first word, and decoding takes it away again."""
        return self.bytes_of_tokens.strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for in a text (of its name, for a special token)."""
        return self.bytes_of_tokens[token_id]


# ---- the bytes of tokens


class TokenBytes(dict[int, bytes]):
    """The bytes of each token that was asked for so far; any other is spelled when it is asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._decoders = _flatten(backend.decoder)

    @property
    def is_byte_level(self) -> bool:
        return {decoder["type"] for decoder in self._decoders} == {"ByteLevel"}

    @property
    def is_by_token(self) -> bool:
        """Text is the concatenation of the tokens' bytes."""
        kinds = {decoder["type"] for decoder in self._decoders}
        replaces = [d for d in self._decoders if d["type"] == "Replace"]
        is_plain = bool(kinds) and kinds <= _PLAIN_DECODERS and all("String" in d["pattern"] for d in replaces)
        return self.is_byte_level or is_plain

    @property
    def strips_leading_space(self) -> bool:
        """The vocabulary writes a space before a text's first word, and decoding takes it away again."""
        for decoder in self._decoders:
            if decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] >= 1:
                return True
            if decoder["type"] == "Metaspace":
                return decoder.get("prepend_scheme", "always") != "never"
        return False

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = spelled = self._spell(token_id)
        return spelled

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_by_token:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return _byte_level_bytes(token) if self.is_byte_level else _plain_bytes(token, self._decoders)


def _byte_level_bytes(token: str) -> bytes:
    """A token whose characters all stand for bytes is those bytes; any other (an added one) is its own text."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


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
