"""Where forms are tried, and where those walk that may take long: processes with limits (`core.forked`), one a form.

A form is a stranger's program, and the library that compiles it cannot be stopped: some take all memory there is, and
for ever. Its process compiles it, asks for some masks of an answer drawn at random, and says what that took. A form
that is small and quick is then compiled once more by the engine, which walks it beside its steps; any other stays here,
where each mask has its limits too. What an answer needs comes whole with each look, so that a process may be ended at
any time and another one goes on.

How large a form is, written out: bounded from its text alone, before anything is built of it.

The library writes repetitions out as it walks, looks at all of a text that must come at once, and goes through the
product of what must hold together. So the size counts the characters of names, texts and patterns, each as often as it
is repeated, and is `math.inf` where patterns must hold together. A form below `SMALL` walks beside the engine's steps,
once it was tried (its process also asks this: whoever wrote the form makes it long); all others walk in
processes of their own. It is a bound, not a judgement: a large form is served too.
"""

import json
import math
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

from splittime.core import forked
from splittime.core.errors import ErrorInfo
from splittime.core.this_process import share_one_heap
from splittime.kernels.draw import has_bits
from splittime.runner.form_walk import FormLooks, FormPlace, GrammarWalk, said

SMALL = 20_000
MOST_MULTIPLE = 1000  # of multipleOf: the library counts remainders
MOST_ALTERNATIVES = 512  # of a form: answers of each are followed at once
MOST_RULES = 256
MOST_COUNTED = 16  # of what may begin at many places: there are up to 2**16 sets of these
MOST_HELD_TOGETHER = 8  # `&` and `~` of a form in Lark's: each of our own calls of tools has some
_AT_ONCE = ("pattern", "format", "multipleOf", "minLength", "maxLength", "minimum", "maximum", "allOf", "$ref")
_LARK = re.compile(
    r"//[^\n]*|%json\s*(?P<json>\{)|(?P<text>\"(?:[^\"\\\n]|\\.)*\")|/(?P<regex>(?:[^/\\\n]|\\.)+)/"
    r"|[{~]\s*(?P<least>\d*)\s*(?:(?:,|\.\.)\s*(?P<most>\d*))?|(?P<held>&)|(?P<or>\|)|(?P<name>!?\w+)"
)
_DEFINED = re.compile(r"^[ \t]*[!?]?(\w+)(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:", re.MULTILINE)


def is_small(grammar: str) -> bool:
    """Returns whether the form is so small that each of its masks takes little. grammar: in the form of
    `text.grammars`."""
    try:
        parts = json.loads(grammar)["grammars"]
        return sum(_size_of_part(part) for part in parts) <= SMALL
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _size_of_part(part: Mapping[str, Any]) -> float:
    return _Schema(part["json_schema"]).size() if "json_schema" in part else _size_of_lark(part["lark_grammar"])


# ---- JSON schemas


class _Schema:
    """root: the whole schema, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, float] = {}  # of references
        self._num_alternatives = 0

    def size(self) -> float:
        size = self._of(self._root)
        return size if self._num_alternatives <= MOST_ALTERNATIVES else math.inf

    def _of(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return 1
        size = self._own(schema) + sum(self._of(part) for part in _parts(schema))
        size += sum(len(name) + 4 for name in _mapping(schema, "properties"))
        size += self._referred(schema.get("$ref"))
        return size * max(1, _number(schema.get("minItems")), _number(schema.get("minProperties")))

    def _own(self, schema: Mapping[str, Any]) -> float:
        """Returns the size of what the schema itself says of a value."""
        alternatives = [part for name in ("anyOf", "oneOf", "type") for part in _listed(schema, name)]
        self._num_alternatives += len(alternatives)
        if _holds_together(schema) or _number(schema.get("multipleOf")) > MOST_MULTIPLE:
            return math.inf
        texts = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        size = sum(len(json.dumps(text)) for text in texts) + _number(schema.get("minLength"))
        found = [
            name for name in (schema.get("pattern"), *_mapping(schema, "patternProperties")) if isinstance(name, str)
        ]
        return size + sum(size_of_regex(pattern, is_anywhere=not pattern.startswith("^")) for pattern in found)

    def _referred(self, reference: Any) -> float:
        if not isinstance(reference, str):
            return 0
        if reference not in self._known:
            self._known[reference] = 1  # it refers to itself: what must come is written out once
            found = _behind(self._root, reference)
            self._known[reference] = math.inf if found is None else self._of(found)
        return self._known[reference]


def _holds_together(schema: Mapping[str, Any]) -> bool:
    """Returns whether more than one thing is said of the same text or number, so that the library builds their
    product."""
    each = [part for part in _listed(schema, "allOf") if isinstance(part, Mapping)]
    said = [
        part
        for part in (*each, schema)
        if any(name in part for name in _AT_ONCE if part is not schema or name != "allOf")
    ]
    texts = [name for name in ("pattern", "format", "maxLength", "minLength") if name in schema]
    is_cut = bool({"pattern", "format"} & set(texts)) and len(texts) > 1
    return (bool(each) and len(said) > 1) or (is_cut and max(_number(schema.get(name)) for name in texts) > 256)


def _parts(schema: Mapping[str, Any]) -> Iterable[Any]:
    """Yields the schemas in this one, but for those that are only referred to."""
    for name in ("properties", "patternProperties"):
        yield from _mapping(schema, name).values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from _listed(schema, name)
    for name in ("items", "additionalProperties", "additionalItems", "not", "if", "contains"):
        yield from (schema[name] if isinstance(schema.get(name), list) else [schema.get(name)])


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _behind(root: Any, reference: str) -> Any:
    """Returns the part of the schema that this leads to; None where it leads out of it, or nowhere."""
    found = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        if name:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


# ---- regular expressions


def size_of_regex(pattern: str, *, is_anywhere: bool = False) -> float:
    """Returns how many characters the pattern has where each is written as often as it may be repeated, and once where
    that has no end; `math.inf` of one that Python cannot read, or whose states are many more than its characters.
    is_anywhere: what it matches may stand behind any text."""
    try:
        return _Pattern(is_anywhere).size(patterns.parse(pattern))
    except (re.error, RecursionError, OverflowError, ValueError):
        return math.inf


class _Pattern:
    """is_open: what comes may begin at more than one place, as behind a repetition without an end. A count there has
    a state for each set of places where it may have begun."""

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open

    def size(self, nodes: Iterable[Any]) -> float:
        return sum(map(self._of_node, nodes))

    def _of_node(self, node: tuple[Any, Any]) -> float:
        kind, value = node
        if kind is codes.SUBPATTERN:
            return self.size(value[-1])
        if kind is codes.BRANCH:
            return sum(map(self.size, value[1]))
        if kind not in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            return 1
        least, most, inner = value
        self._is_open |= most is codes.MAXREPEAT
        times = max(1, least if most is codes.MAXREPEAT else most)
        return math.inf if self._is_open and times > MOST_COUNTED else times * self.size(inner)


# ---- Lark's grammars


def _size_of_lark(written: str) -> float:
    """Returns a bound of a grammar's size: each rule counts as often as all of its repetitions together could say, and
    each name as all that it stands for."""
    begins = [(found.start(), found.end(), found[1]) for found in _DEFINED.finditer(written)]
    ends = [begin for begin, _, _ in begins[1:]] + [len(written)]
    rules = {name: written[begin:end] for (_, begin, name), end in zip(begins, ends, strict=True)}
    if not rules or len(rules) > MOST_RULES or written.count("|") > MOST_ALTERNATIVES:
        return math.inf
    lark = _Lark(rules)
    size = sum(lark.size_of(name) for name in rules)
    return size if lark.num_held <= MOST_HELD_TOGETHER else math.inf


class _Lark:
    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules, self.num_held = rules, 0
        self._known: dict[str, float] = {}

    def size_of(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = 1  # it refers to itself
            self._known[name] = self._written(self._rules[name])
        return self._known[name]

    def _written(self, rule: str) -> float:
        size, times, at = 0.0, 1.0, 0
        while (found := _LARK.search(rule, at)) is not None:
            at = found.end()
            if found["json"]:
                schema, at = json.JSONDecoder().raw_decode(rule, found.start("json"))
                size += _Schema(schema).size()
            elif found["regex"]:
                size += size_of_regex(found["regex"].replace("\\/", "/"))
            elif found["name"]:
                size += self.size_of(found["name"]) if found["name"] in self._rules else 1
            elif found["text"]:
                size += len(found["text"])
            elif found["held"] or found[0] == "~":
                self.num_held += 1
            else:
                times *= max(1, *(int(found[name] or 1) for name in ("least", "most")))
        return size * times


STACK_BYTES = 256 << 20  # the deepest that fits into `core.sampling.MAX_GRAMMAR_CHARS` took less than 64 MiB
MAX_GRAMMAR_SIZE = 50_000  # in the compiler's units; at most 15 MB and a second
ANY = json.dumps({"grammars": [{"json_schema": {}}]})
LIMITS = forked.ForkLimits(cpu_s=1.0, memory_bytes=256 << 20)  # of compiling and of each mask; of a form in all
TRIED_TOKENS, TRIED_NS = 24, 200_000_000  # of an answer, and at most


class Compile(msgspec.Struct, frozen=True, tag=True):
    grammar: str


class FormLook(msgspec.Struct, frozen=True, tag=True):
    """walk: the number of an answer. outputs: of int64; the first num_sure are known, the others drafts. ended: the
    numbers of answers that go on no more."""

    walk: int
    outputs: bytes
    num_sure: int
    end_token_ids: tuple[int, ...]
    ended: tuple[int, ...] = ()


class Tried(msgspec.Struct, frozen=True, tag=True):
    """said: why it cannot be compiled; "" if it can. num_bytes: what the process took. slowest_ns: of its masks, of a
    processor; num_grown_bytes: what the masks took: both beyond what those of any form do. is_small: by its text."""

    said: str
    slowest_ns: int = 0
    num_bytes: int = 0
    num_grown_bytes: int = 0
    is_small: bool = False


class Looked(msgspec.Struct, frozen=True, tag=True):
    """allowed, error: as in `form_walk.FoundMask`."""

    allowed: bytes | None
    error: str | ErrorInfo | None
    num_bytes: int


Ask = Compile | FormLook
Answer = Tried | Looked


def described(tokenizer_json: str, vocab_size: int) -> bytes:
    """Returns what the parent makes its tokenizer of."""
    return msgspec.msgpack.encode((tokenizer_json, vocab_size))


class MaskLimits(NamedTuple):
    """The bounds of the library's parser. step_items: of a mask, of each some microseconds. step_fuel: of its lexer, of
    a mask; the library's own 200,000 refuse four patterns of a password's length. states: that walks leave in a form,
    of up to a kilobyte."""

    step_items: int = 20_000
    step_fuel: int = 5_000_000
    states: int = 250_000


FAR = MaskLimits()


def compiled(tokenizer: Any, grammar: str, limits: MaskLimits = FAR) -> llguidance.LLMatcher:
    """Compiles. It calls itself as deep as rules refer to rules, so the thread needs a stack of STACK_BYTES."""
    parser = llguidance.LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SIZE,
        step_max_items=limits.step_items,
        step_lexer_fuel=limits.step_fuel,
        max_lexer_states=limits.states,
    )
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser)


class FormServer:
    """What a process does for its form."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._looks = FormLooks(vocab_size, tokenizer.eos_token, 1)
        self._walks: dict[int, GrammarWalk] = {}
        self._begin: llguidance.LLMatcher | None = None
        self._held_bytes, self._usual = 0, Tried("")
        self._usual = self._try(ANY)  # what each form takes with this vocabulary, and is held against none
        self._held_bytes = _resident_bytes()

    def answer(self, ask: Ask) -> Answer:
        return self._try(ask.grammar) if isinstance(ask, Compile) else self._look(ask)

    def _num_bytes(self) -> int:
        return max(0, _resident_bytes() - self._held_bytes)

    def _try(self, grammar: str) -> Tried:
        self._begin = compiled(self._tokenizer, grammar)
        if self._begin.is_error():
            return Tried(said(self._begin))
        num_bytes, walk = self._num_bytes(), GrammarWalk(self._begin)
        slowest_ns = self._slowest_ns(walk)
        if walk.matcher.is_error():  # so may be what all copies share
            self._begin = compiled(self._tokenizer, grammar)
        grown_bytes = self._num_bytes() - num_bytes - self._usual.num_grown_bytes
        return Tried("", slowest_ns - self._usual.slowest_ns, self._num_bytes(), grown_bytes, is_small(grammar))

    def _slowest_ns(self, walk: GrammarWalk) -> int:
        """Returns how long the slowest look of an answer took that is drawn of its own masks."""
        rng, outputs, slowest_ns, begin_ns = np.random.default_rng(0), np.zeros(0, np.int64), 0, time.thread_time_ns()
        for _ in range(TRIED_TOKENS):
            place = FormPlace(walk, outputs, len(outputs), ())
            look_ns = time.thread_time_ns()
            found = self._looks.look([place])[place.key]
            now_ns = time.thread_time_ns()
            slowest_ns = max(slowest_ns, now_ns - look_ns)
            may_come = np.flatnonzero(has_bits(found.allowed, self._vocab_size)) if found.allowed is not None else ()
            if len(may_come) == 0 or now_ns - begin_ns > TRIED_NS:
                break
            outputs = np.append(outputs, rng.choice(may_come))
        return slowest_ns

    def _look(self, ask: FormLook) -> Looked:
        for number in ask.ended:
            self._walks.pop(number, None)
        assert self._begin is not None, "no form was compiled here"
        walk = self._walks.get(ask.walk) or self._walks.setdefault(ask.walk, GrammarWalk(self._begin))
        place = FormPlace(walk, np.frombuffer(ask.outputs, np.int64), ask.num_sure, ask.end_token_ids)
        found = self._looks.look([place])[place.key]
        allowed = None if found.allowed is None else found.allowed.tobytes()
        return Looked(allowed, found.error, self._num_bytes())


def _resident_bytes() -> int:
    """Returns how much memory the process has that is in no file."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * resource.getpagesize()


def main() -> None:
    share_one_heap()
    tokenizer_json, vocab_size = msgspec.msgpack.decode(forked.description())
    tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    FormServer(tokenizer, vocab_size)  # what the library makes for all forms, it has made then

    def work(channel: socket.socket, limits: forked.ForkLimits) -> None:
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_work, args=(channel, tokenizer, vocab_size, limits))
        thread.start()
        thread.join()

    forked.serve(work)


def _work(channel: socket.socket, tokenizer: Any, vocab_size: int, limits: forked.ForkLimits) -> None:
    forked.begin(channel, limits)
    server = FormServer(tokenizer, vocab_size)
    decoder, encoder = msgspec.msgpack.Decoder(Ask), msgspec.msgpack.Encoder()
    forked.answer_each(channel, limits.cpu_s, lambda message: encoder.encode(server.answer(decoder.decode(message))))


if __name__ == "__main__":
    main()
