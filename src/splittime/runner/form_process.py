"""Where forms are tried, and where those walk that may take long: processes with limits (`core.forked`), one a form.

A form is a stranger's program, and the library that compiles it cannot be stopped: some take all memory there is, and
for ever. Its process compiles it, asks for some masks of an answer drawn at random, and says what that took. A form
that is small and quick is then compiled once more by the engine, which walks it beside its steps; any other stays here,
where each mask has its limits too. What an answer needs comes whole with each look, so that a process may be ended at
any time and another one goes on.
"""

import json
import resource
import socket
import threading
import time
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

from splittime.core import forked
from splittime.core.errors import ErrorInfo
from splittime.kernels.draw import has_bits
from splittime.runner.form_looks import FormLooks
from splittime.runner.form_size import is_small
from splittime.runner.form_walk import FormPlace, GrammarWalk, said

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
    """allowed, error: as in `form_looks.FoundMask`."""

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
