"""`splittime run`, and `generate`, its other name: one answer, or a chat, from an engine in this process.

    splittime run "def f(x):"              the packaged model answers, then its account is shown
    splittime run MODEL "PROMPT"           another model; `-` reads the prompt from standard input
    splittime run MODEL                    a chat, if a person sits at the terminal; else standard input is the prompt

A prompt becomes a message of a chat where the model has a chat template; without one, with `--raw`, and by the packaged
models, which were trained on code alone, its text is continued as it stands. One word could be either: `words_of` says
how it is read.

A chat at the terminal, several turns long, with the model in this process.

The whole conversation is the prompt of each turn, so the prefix cache computes only what is new. When it no longer
fits into the model's context, the oldest turns are forgotten, and that is said. Ctrl-C ends an answer, not the chat.
"""

import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import orjson
from rich.console import Console

from splittime.assemble import model_source
from splittime.assemble.settings import Settings
from splittime.cli import options
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError, RequestError
from splittime.core.sampling import SamplingParams
from splittime.ledger.account_json import account_json
from splittime.present.tables import Sentence
from splittime.present.terminal import WordWriter

if TYPE_CHECKING:
    from splittime.llm import LLM, Output, Prompt

PANEL = "Sampling"
ADVISED = "Default: the model's own advice."
STDIN = "-"

EXAMPLES = f"""\b
Examples:
  splittime run "def read_json(path):" --max-tokens 60
  splittime run Qwen/Qwen3-0.6B "Why is the sky blue?"
  splittime run Qwen/Qwen3-0.6B              a chat; /exit ends it
  echo "def main(" | splittime run - --temperature 0 --json

{options.EXIT_CODES}"""
PROMPT = ">>> "
EXITS = ("/exit", "/quit", "/bye")
HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer."
LEAST_ROOM = 4  # an answer may fill this part of the context, unless --max-tokens says otherwise
TOY = "The packaged model: its text looks like Python and means nothing. splittime run smollm2 tells of one that chats."
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
    words = WordWriter(sys.stdout, get_terminal_size().columns) if sys.stdout.isatty() else None
    try:
        for piece in llm.stream(prompt, sampling):
            if words is not None and is_shown:
                words.write(piece.text)
            elif is_shown:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            output = piece.output or output
    finally:
        if words is not None:
            words.end()
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


class RunWords(NamedTuple):
    """What the command line says; None for what it leaves open."""

    model: str | None
    prompt: str | None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    words: list[str] | None = options.argument(
        "[MODEL] [PROMPT]", "As serve has it, and what to answer. - is standard input."
    )
    prompt: str | None = options.flag(None, "The prompt, whatever it looks like.", None, "--prompt", "-p")
    raw: bool = options.switch("--raw", "Continue the text, without the model's chat template.")
    max_tokens: int | None = options.flag(
        None,
        f"Default: {MAX_TOKENS}; in a chat, a quarter of the context.",
        None,
        "--max-tokens",
        "-n",
        rich_help_panel=PANEL,
    )
    temperature: float | None = options.flag(None, ADVISED, None, "--temperature", "-t", rich_help_panel=PANEL)
    top_p: float | None = options.flag(None, ADVISED, rich_help_panel=PANEL)
    top_k: int | None = options.flag(None, f"0 is off. {ADVISED}", rich_help_panel=PANEL)
    seed: int | None = options.flag(
        None, "The same seed draws the same answer. Default: a new one.", rich_help_panel=PANEL
    )
    stop: list[str] | None = options.flag(None, "Text that ends the answer. May be repeated.", rich_help_panel=PANEL)
    json: options.JsonFlag = False

    def sampling(self) -> dict[str, Any]:
        """Returns what was given of the sampling parameters. Raises `RequestError` for what they may not be."""
        values = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
        given = {name: value for name, value in values.items() if value is not None}
        given["stop"] = tuple(self.stop or ())
        SamplingParams(**given).validate()
        return given


@options.with_settings("runner", "scheduler", options=GenerateOptions)
def run(settings: Settings, given: GenerateOptions) -> None:
    """Answer a prompt, or chat at the terminal; then show where the time went."""
    sampling_given = given.sampling()
    model, text = words_of(given.words or [], given.prompt)
    is_chat = text is None and sys.stdin.isatty() and not given.json
    text = "" if is_chat else _read(text)
    llm = _loaded(settings, model)
    sampling = msgspec.structs.replace(llm.default_sampling, **sampling_given)
    if not (model or settings["model"]) and model_source.is_packaged(None):
        options.talk().print(Sentence(TOY))
    if is_chat:
        return chat(llm, sampling, given.raw)
    raw = given.raw or model_source.is_packaged(model or settings["model"])
    output = stream(llm, *asked(llm, [{"role": "user", "content": text}], sampling, raw), is_shown=not given.json)
    if given.json:
        answer = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        options.write_data(orjson.dumps({**answer, "account": account_json(output.account)}))


def words_of(words: list[str], prompt: str | None = None) -> RunWords:
    """Tells the model from the prompt. Raises `ConfigError`, with what to type, where it cannot.

    Of two words the first is the model. One word is a model if it names one or looks like a path or an id
    (`model_source.is_meant`), else a prompt if no name looks like it; a bare word that names nothing is refused.
    """
    if len(words) + (prompt is not None) > 2:
        raise _unclear(
            "more words than a model and a prompt", f"quote the prompt: splittime run {shlex.quote(' '.join(words))}"
        )
    if prompt is not None:
        return RunWords(words[0] if words else None, prompt)
    if len(words) == 2:
        return RunWords(words[0], words[1])
    if not words:
        return RunWords(None, None)
    (word,) = words
    if word in ("", STDIN) or (model_source.reads_like_a_prompt(word) and not model_source.is_meant(word)):
        return RunWords(None, word)
    if not model_source.is_meant(word):
        raise _unclear(f"{word!r} is no model that is here", f"to give it as a prompt: splittime run -p {word}")
    return RunWords(word, None)


def _loaded(settings: Settings, model: str | None) -> "LLM":
    name = model or settings["model"]
    model_source.locate(name, settings["load_format"])  # a download shows its own progress, before the spinner
    with loading("loading the model") as say:
        from splittime.llm import LLM  # brings torch

        given = settings.part("runner") | settings.part("scheduler")
        return LLM(name, on_loading=lambda told, share: say(f"starting the model: {told}", share), **given)


def _read(text: str | None) -> str:
    """Returns the prompt itself: that of the command line, or standard input's."""
    if text == STDIN or (text is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    return text or _no_prompt()


def _unclear(message: str, hint: str) -> ConfigError:
    return ConfigError(message, param="prompt", hint=hint)


def _no_prompt() -> NoReturn:
    raise _unclear("no prompt", 'splittime run "PROMPT", or --prompt TEXT, or pipe one into standard input')


def chat(llm: "LLM", sampling: SamplingParams, raw: bool) -> None:
    """Returns when the person leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and an editor)
    has_turns = llm.tokenizer.has_chat_template and not raw
    kind = "a chat" if has_turns else "each line is continued by itself" + ("" if raw else ": it has no chat template")
    options.talk().print(Sentence(f"{llm.name}, {kind}. {HELP}"))
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
            options.talk().print(Sentence(f"{known}{HELP}"))
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
        options.talk().print("\n(/exit or Ctrl-D ends the chat)", style="dim", markup=False)
        return ""


def _turn(llm: "LLM", messages: list[dict[str, str]], sampling: SamplingParams, raw: bool) -> None:
    """Answers the last message and adds the answer; a message that got none is taken back."""
    try:
        output = stream(llm, *_fitting(llm, messages, sampling, raw))
    except KeyboardInterrupt:
        print()
        messages.pop()
    except RequestError as error:
        options.say_error(error)
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
        options.talk().print("(the context is full: the oldest turns are forgotten)", style="dim", markup=False)
        while len(messages) > 1 and len(prompt) + room_tokens > context_tokens:
            del messages[:2]
            prompt, params = asked(llm, messages, sampling, raw)
    return prompt, params
