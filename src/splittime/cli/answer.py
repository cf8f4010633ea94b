"""One answer at the terminal: the prompt as the model wants it, the text as it comes, and then its account."""

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from splittime.core.errors import RequestError
from splittime.core.sampling import SamplingParams
from splittime.present.terminal import plain

if TYPE_CHECKING:
    from splittime.llm import LLM, Output, Prompt

MAX_TOKENS = 128  # of a text that is continued: nothing else would end it


def asked(
    llm: "LLM", messages: list[dict[str, str]], sampling: SamplingParams, raw: bool
) -> "tuple[Prompt, SamplingParams]":
    """Returns the prompt of a conversation: by the model's chat template, or its last text as it stands."""
    if not raw and llm.tokenizer.has_chat_template:
        return llm.chat_prompt(messages), sampling
    return messages[-1]["content"], msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens or MAX_TOKENS)


def stream(llm: "LLM", prompt: "Prompt", sampling: SamplingParams, is_shown: bool = True) -> "Output":
    """Writes the answer as it comes, and then its account as a bar. Raises `RequestError` if it ended in an error."""
    output = None
    for piece in llm.stream(prompt, sampling):
        if is_shown:
            sys.stdout.write(plain(piece.text) if sys.stdout.isatty() else piece.text)
            sys.stdout.flush()
        output = piece.output or output
    assert output is not None
    if output.error is not None:
        raise RequestError(output.error.message, hint=output.error.hint)
    if is_shown:
        sys.stdout.write("\n")
        sys.stdout.flush()
        show_account(output)
    return output


def show_account(output: "Output") -> None:
    from splittime.diagnose.explain import bar

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("\n", bar(output.account), sep="")
