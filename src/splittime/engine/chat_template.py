"""Chat templates: from messages to the prompt's text, as the model's author wrote it in Jinja.

A template comes with the model, so it is somebody else's program: it runs in Jinja's immutable sandbox, sees only the
messages and the special tokens, and whatever it raises is the request's error (400), not ours. It gets what templates
of the Hugging Face hub expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, and the
`{% generation %}` block (which marks assistant text for training and prints its body here).
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
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
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
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template does not parse: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text. Raises `RequestError` with the template's own words if it refuses the messages."""
        variables = {"tools": None, "documents": None, **self._special_tokens, **options, "messages": messages}
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}",
                code="chat_template_error",
                param="messages",
            ) from error
