"""A chat at the terminal, several turns long, with the model in this process.

The whole conversation is the prompt of each turn, so the prefix cache computes only what is new. When it no longer
fits into the model's context, the oldest turns are forgotten, and that is said. Ctrl-C ends an answer, not the chat.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from splittime.cli.answer import asked, stream
from splittime.cli.options import say_error, talk
from splittime.core.errors import RequestError
from splittime.core.sampling import SamplingParams
from splittime.present.tables import Sentence

if TYPE_CHECKING:
    from splittime.llm import LLM, Prompt

PROMPT = ">>> "
EXITS = ("/exit", "/quit", "/bye")
HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer."
LEAST_ROOM = 4  # an answer may fill this part of the context, unless --max-tokens says otherwise


def chat(llm: "LLM", sampling: SamplingParams, raw: bool) -> None:
    """Returns when the person leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and an editor)
    has_turns = llm.tokenizer.has_chat_template and not raw
    kind = "a chat" if has_turns else "each line is continued by itself" + ("" if raw else ": it has no chat template")
    talk().print(f"{llm.name}, {kind}. {HELP}", markup=False)
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=llm.max_model_len // LEAST_ROOM)
    messages: list[dict[str, str]] = []
    while (line := _line()) is not None:
        if line in EXITS:
            return
        if line == "/clear":
            messages.clear()
        elif line.startswith("/") and " " not in line:
            known = "" if line == "/help" else f"{line} is no command. "
            talk().print(Sentence(f"{known}{HELP}"))
        elif line:
            messages.append({"role": "user", "content": line})
            _turn(llm, messages, sampling, raw)
            if not has_turns:
                messages.clear()


def _line() -> str | None:
    """Returns what the person typed; None at the end of the input."""
    try:
        return input(PROMPT).strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:  # meant for an answer that had just ended
        talk().print("\n(/exit or Ctrl-D ends the chat)", style="dim", markup=False)
        return ""


def _turn(llm: "LLM", messages: list[dict[str, str]], sampling: SamplingParams, raw: bool) -> None:
    """Answers the last message and adds the answer; a message that got none is taken back."""
    try:
        output = stream(llm, *_fitting(llm, messages, sampling, raw))
    except KeyboardInterrupt:
        print()
        messages.pop()
    except RequestError as error:
        say_error(error)
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": output.text})


def _fitting(
    llm: "LLM", messages: list[dict[str, str]], sampling: SamplingParams, raw: bool
) -> "tuple[Prompt, SamplingParams]":
    """Returns the prompt with as many of the latest turns as leave room for an answer; the others are forgotten."""
    context_tokens = llm.max_model_len
    room_tokens = min(sampling.max_tokens or context_tokens, context_tokens // LEAST_ROOM)
    prompt, params = asked(llm, messages, sampling, raw)
    if len(messages) > 1 and len(prompt) + room_tokens > context_tokens:
        talk().print("(the context is full: the oldest turns are forgotten)", style="dim", markup=False)
        while len(messages) > 1 and len(prompt) + room_tokens > context_tokens:
            del messages[:2]
            prompt, params = asked(llm, messages, sampling, raw)
    return prompt, params
