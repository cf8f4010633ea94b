"""From token ids to text, one token at a time. No asyncio here: the server's streams and `splittime.LLM` both use it.

A detokenizer never gives out half a character: bytes that do not yet make one wait for the next token, and bytes that
never will become U+FFFD. Each token costs its own bytes once, however long the text grows.
`StopMatcher` looks for stop strings across token borders. Text that may turn out to be the beginning of a stop string
is held back; the match that *ends* first wins (of those, the longest), so the cut does not depend on how the text was
split into tokens. `OutputText` is the two together.
"""

import codecs
from collections.abc import Sequence
from functools import lru_cache

from splittime.text.tokenizer import Tokenizer

_MAX_WINDOW_TOKENS = 16
_MAX_CHARACTER_BYTES = 4
NO_IDS: frozenset[int] = frozenset()


class ByteDetokenizer:
    """For vocabularies whose tokens have bytes. `at_text_start`: nothing visible was before, so that the space which
    the vocabulary writes before a first word goes. `before`: the bytes before; a character that they begin and do not
    finish is given out when it is whole, as it would be if its tokens had come here."""

    def __init__(
        self, tokenizer: Tokenizer, *, at_text_start: bool, hidden_ids: frozenset[int] = NO_IDS, before: bytes = b""
    ) -> None:
        self._token_bytes = tokenizer.bytes_of_tokens
        self._skipped = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(before)
        self._strips = at_text_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Returns the characters that this token completes."""
        if token_id in self._skipped:
            return ""
        spelled = self._token_bytes[token_id]
        if self._strips and spelled:
            self._strips = False
            spelled = spelled.removeprefix(b" ")
        return self._utf8.decode(spelled)

    def flush(self) -> str:
        """Returns what was waiting for more; call once, at the end."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decode a short window of the last tokens with and without the new one; the difference
    is the new text. A window that ends in an unfinished character waits, but not for more than a few tokens."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), hidden_ids: frozenset[int] = NO_IDS
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_ids
        self._context = list(prompt_token_ids[-_MAX_WINDOW_TOKENS:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < _MAX_WINDOW_TOKENS:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._new_text())

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def _accept(self, text: str) -> str:
        if self._pending:
            self._context, self._pending = self._pending, []
        return text


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown_ids: frozenset[int] = NO_IDS,
) -> ByteDetokenizer | WindowDetokenizer:
    """The right kind for this vocabulary. With an empty prompt the text begins here. shown_ids: special tokens that are
    not skipped."""
    hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else NO_IDS
    if not tokenizer.has_token_bytes:
        return WindowDetokenizer(tokenizer, prompt_token_ids, hidden)
    at_text_start = all(token_id in hidden for token_id in prompt_token_ids)
    return ByteDetokenizer(
        tokenizer, at_text_start=at_text_start, hidden_ids=hidden, before=_last_bytes(tokenizer, prompt_token_ids)
    )


def _last_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """Returns as many bytes of the end as a character may have; none from before a special token."""
    found = b""
    for token_id in reversed(token_ids):
        if token_id in tokenizer.special_ids or len(found) >= _MAX_CHARACTER_BYTES:
            break
        found = tokenizer.bytes_of_tokens[token_id] + found
    return found


class StopMatcher:
    """Finds the first of some strings in a text that comes in pieces (Aho's and Corasick's automaton: what a character
    costs does not depend on how many strings there are)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop))
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Returns the text that is now safe to give out. Once `found` is set, that is all there will be. A stop string
        that ends in a text which does not count is passed over."""
        nexts, fallbacks, ended, kept = self._automaton
        state = self._state if self._held else 0
        if not state and nexts[0].keys().isdisjoint(text):
            return text
        for position, character in enumerate(text):
            while state and character not in nexts[state]:
                state = fallbacks[state]
            state = nexts[state].get(character, 0)
            if counts and ended[state]:
                self.found = ended[state]
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[: len(whole) - len(self.found)]
        self._state, whole = state, self._held + text
        self._held = whole[len(whole) - kept[state] :]
        return whole[: len(whole) - kept[state]]

    def flush(self) -> str:
        """Returns what was held back, at the end of a text in which nothing was found."""
        held, self._held = self._held, ""
        return held


@lru_cache(16)  # all the choices of a request have the same stop strings
def _automaton(stop: tuple[str, ...]) -> tuple[list[dict[str, int]], list[int], list[str], list[int]]:
    """Returns for each state, which is a beginning of a stop string, the longest that a text ends with: what follows it
    by character, the next shorter one, the longest string that ends there, and how many characters may become one."""
    nexts, ended, kept = [dict[str, int]()], [""], [0]
    for text in stop:
        state = 0
        for length, character in enumerate(text, 1):
            if character not in nexts[state]:
                nexts[state][character] = len(nexts)
                nexts.append({})
                ended.append("")
                kept.append(length)
            state = nexts[state][character]
        ended[state] = text
    fallbacks, states = [0] * len(nexts), [0]
    for state in states:  # the short ones first
        ended[state] = ended[state] or ended[fallbacks[state]]
        kept[state] = kept[state] if nexts[state] else kept[fallbacks[state]]
        for character, following in nexts[state].items():
            states.append(following)
            before = fallbacks[state]
            while before and character not in nexts[before]:
                before = fallbacks[before]
            fallbacks[following] = nexts[before].get(character, 0) if state else 0
    return nexts, fallbacks, ended, kept


class OutputText:
    """The text of one output as its tokens come.

    `num_chars` counts all characters decoded so far, also those held back: it is the next token's text offset.
    `stop_string` is set when one was found; tokens after that are not looked at. One that ends within the first
    `min_tokens` tokens does not count, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = NO_IDS,
    ) -> None:
        self._detokenizer = make_detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids
        )
        self._matcher = StopMatcher(stop) if stop else None
        self._num_exempt = min_tokens  # tokens still to come in which no stop string counts
        self.num_chars = 0

    @property
    def stop_string(self) -> str | None:
        return self._matcher.found if self._matcher else None

    def push(self, token_id: int) -> str:
        """The text that this token makes safe to give out, possibly none."""
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        self._num_exempt -= 1
        return self._matcher.push(text, counts=self._num_exempt < 0) if self._matcher else text

    def flush(self) -> str:
        """The rest, when the output ends for another reason than a stop string. Call once."""
        if self._matcher is None:
            return self._detokenizer.flush()
        rest = self._matcher.push(self._detokenizer.flush(), counts=self._num_exempt < 0)
        return rest if self._matcher.found else rest + self._matcher.flush()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token alone as text, for logprobs. Bytes that are no whole characters are spelled `bytes:\\xe2\\x82`, so that
    different tokens stay different."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
