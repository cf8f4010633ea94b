"""What bodies are checked against: the limits of the server, and the model that it serves.

`truncate_prompt_tokens`: how much of a prompt is kept, of what a client would have cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from splittime.api.lenient import Ignored
from splittime.core.errors import RequestError
from splittime.core.facts import Pooling
from splittime.core.settings import Doc

CUT = (
    "So many last tokens of each prompt are kept, its special ones among them; -1: as many as there is room for. "
    "A notice says how much was cut."
)
FIELD = "truncate_prompt_tokens"
KeepLast = Annotated[int | None, Meta(description=CUT)]


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """max_choices: largest prompts x n of one HTTP request."""

    strict: Annotated[bool, Doc("Refuse request fields that have no effect, and clamp nothing.")] = False
    max_n: Annotated[int, Doc("Largest n.", 1, 128)] = 16
    max_choices: int = 128
    tool_call_parser: Annotated[
        str | None, Doc("How the model writes calls of tools, as hermes or mistral. Default: by its chat template.")
    ] = None
    reasoning_parser: Annotated[
        str | None, Doc("How it marks reasoning, as think or harmony; none: it is text. Default: by its chat template.")
    ] = None

    def new_ignored(self) -> Ignored | None:
        """Returns what notes the fields of one body that have no effect; None where such are refused."""
        return None if self.strict else Ignored()


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """adapter_id: by which the engine knows it."""

    adapter_id: str
    created_unix_s: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model being served, as the API shows it and as requests are checked against it.

    names: the first is what responses say; the others are accepted too.
    eos_token_ids: end a generation unless it asks otherwise.
    default_sampling: of what a request does not say, by the names of `SamplingParams`; what is not in it is neutral.
        Its max_tokens is what a chat gets at most that names no number itself.
    pooling: how its embeddings are made.
    adapters: what a request may name instead, to have it computed by the model with this adapter.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    created_unix_s: int = 0
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    pooling: Pooling = field(default_factory=Pooling)
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """All that a request may name."""
        return (*self.names, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """Returns the id of the adapter that this name, which is served, stands for; "" for the model itself."""
        return self.adapters[name].adapter_id if name in self.adapters else ""

    def require_generating(self) -> None:
        """Raises RequestError where the model is an encoder, which answers nothing with tokens."""
        if self.pooling.is_all:
            does, hint = ("makes embeddings", "/v1/embeddings")
            if self.pooling.score:
                does, hint = ("judges pairs", "/v1/rerank")
            said = f"{self.name} is an encoder: it {does} and generates nothing"
            raise RequestError(said, code="unsupported_model", param="model", value=self.name, hint=f"POST {hint}")


def keep_last(asked: int | None, model: ModelInfo, max_tokens: int) -> int | None:
    """Returns how many last tokens of a prompt are kept; None for all. max_tokens: that are to have room behind it.
    Raises `RequestError` for a number that makes no sense."""
    if asked is None:
        return None
    most = model.max_model_len
    if asked != -1 and not 1 <= asked <= most:
        words = f"{FIELD} is {asked}, and can be 1 to {most}, or -1"
        raise RequestError(words, param=FIELD, value=str(asked), limit=[-1, most])
    if asked == -1 and max_tokens >= most:
        words = f"{FIELD} is -1, and max_tokens {max_tokens} leaves a prompt no room"
        hint = f"ask for at most {most - 1}"
        raise RequestError(words, param=FIELD, value=asked, limit=most, hint=hint)
    return most - max_tokens if asked == -1 else asked
