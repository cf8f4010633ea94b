"""Chat templates: from messages to the prompt's text, as the model's author wrote it in Jinja.

A template comes with the model, so it is somebody else's program: it runs in Jinja's immutable sandbox, sees only the
messages, the request's options and the special tokens, and whatever it raises is the request's error (400), not ours.
It can still loop for hours and fill the memory, so a server lets it run in a worker only (`text.process`). It is
compiled without Jinja's optimizer, which would compute `{{ "x" * 10**10 }}` at start.

It gets what templates of the Hugging Face hub expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes,
loop controls, and the `{% generation %}` block (which marks assistant text for training and prints its body here).

`continue_final_message` leaves the last message open, so that the model goes on with it: a mark is put after its text,
and what the template writes from the mark on is cut off. That is Hugging Face's way of doing it, and vLLM's.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splittime.core.errors import ConfigError, RequestError
from splittime.text.chat_forms import ROLES, ChatForms, described, left_out
from splittime.text.foreign_code import too_costly

MARK = "\ue000end of what is to be continued\ue000 "
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` prints what is between."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template with the special tokens that it may name (`bos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._forms = ChatForms(self._probed)
        self._taken_names = OWN_NAMES | environment.globals.keys() | self._special_tokens.keys()
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
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
                said, param = (
                    f"messages[{index}] has the role {str(role)[:64]!r}, which is none",
                    f"messages[{index}].role",
                )
                hint = f"one of {', '.join(ROLES)}, or one that the model's chat template knows"
                raise RequestError(said, param=param, value=str(role)[:64], limit=list(ROLES), hint=hint)

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
