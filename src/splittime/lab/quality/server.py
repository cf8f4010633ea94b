"""A model server elsewhere as a model, through the log-probabilities of its OpenAI-compatible API.

A text goes to `POST /v1/completions` as token ids with `echo`, `logprobs` and `max_tokens` 0 (1 where a server refuses
0). vLLM is asked for its `prompt_logprobs`, which name tokens by their ids; names of the form `token_id:17` are read as
ids too. Where alternatives come as text, those texts that one token of the vocabulary alone has are told apart;
others are left out, which only loosens the bound that `texts` makes of them.

What such a server's kernels read is not known, and single steps cannot be asked for: `reads` is None. Nor can a server
be measured on text that tells log-probabilities of its own output alone, as llama.cpp's does (it leaves `echo`
unheeded): that is refused; it can answer questions.
"""

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import orjson

from splittime.core.errors import ConfigError, EngineError, NobodyThere, RequestError
from splittime.lab.quality.model import Sparse, chunks, pieces

NOBODY = "is a server running there?"
TIMEOUT_S = 600.0
TOP = 20
_BY_ID = "token_id:"


class Vocabulary(Protocol):
    """The vocabulary of the model that is served. text: one token alone, as the server spells it."""

    vocab_size: int

    def text(self, token_id: int) -> str: ...


class ServerModel:
    """`quality.model.Model` over HTTP. It is asked for `TOP` alternatives, or for fewer where it has a limit."""

    has_decode = False
    reads = None

    def __init__(self, url: str, vocabulary: Vocabulary, vocab_size: int, api_key: str | None = None) -> None:
        self.url, self.name = url.rstrip("/").removesuffix("/v1"), url
        self.vocab_size = vocab_size
        self._vocabulary, self._api_key = vocabulary, api_key
        self._ends = 0
        card = self._card()
        self._is_vllm = card.get("owned_by") == "vllm"
        self.model = str(card["id"])
        known = card.get("max_model_len")
        self.max_tokens = min(each for each in (known, 1 << 20) if isinstance(each, int)) - 1
        self.facts: Mapping[str, object] = {"server": self.url, "model": self.model, "logprobs": f"the likeliest {TOP}"}

    def predictions(self, token_ids: Sequence[int], begin: int, decode_tokens: int) -> Iterator[Sparse]:
        following, tops = self._scored(token_ids)
        for chunk in chunks(len(token_ids) - 1, 0):
            for first, last in pieces(chunk, begin):
                yield Sparse(first, np.array(following[first + 1 : last + 1]), tops[first + 1 : last + 1])

    def continuations(self, prompt: Sequence[int], endings: Sequence[Sequence[int]]) -> list[float]:
        return [sum(self._scored([*prompt, *ending])[0][len(prompt) :]) for ending in endings]

    def generate(
        self, prompts: Sequence[str], max_tokens: int, stop: Sequence[str], tell: Callable[[int], None]
    ) -> list[str]:
        texts = []
        for number, prompt in enumerate(prompts, 1):
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stop": list(stop)}
            texts.append(str(_field(self._complete(body), "text")))
            tell(number)
        return texts

    # ---- log-probabilities

    def _scored(self, token_ids: Sequence[int]) -> tuple[list[float], list[dict[int, float]]]:
        """Returns for each token its log-probability and the alternatives; the first has none (nan)."""
        choice = self._echoed(token_ids)
        if isinstance(choice.get("prompt_logprobs"), list):
            return self._by_id(token_ids, choice["prompt_logprobs"])
        told = choice.get("logprobs")
        if not isinstance(told, Mapping) or not isinstance(told.get("token_logprobs"), list):
            raise self._tells_nothing()
        values, tops = told["token_logprobs"], told.get("top_logprobs") or []
        count = len(token_ids)
        self._check_length(min(count, len(values)), token_ids)  # more where it was asked for a token of output
        named = [{} if top is None else self._named(top) for top in (*tops, *[None] * count)][:count]
        return [math.nan if value is None else float(value) for value in values[:count]], named

    def _tells_nothing(self) -> EngineError:
        hint = "it must honour echo with logprobs, or prompt_logprobs; --answers alone needs neither"
        return EngineError(f"{self.name} tells no log-probabilities of a prompt's tokens", value=self.model, hint=hint)

    def _check_length(self, told: int, token_ids: Sequence[int]) -> None:
        if told != len(token_ids):
            said = f"{self.name} gave {told} log-probabilities for a prompt of {len(token_ids)} tokens"
            raise EngineError(said, value=told, limit=len(token_ids), hint="does it honour echo and logprobs?")

    def _by_id(
        self, token_ids: Sequence[int], told: Sequence[Mapping[str, Any] | None]
    ) -> tuple[list[float], list[dict[int, float]]]:
        """vLLM's form: for each token None, or `{id: {logprob, rank, decoded_token}}`."""
        self._check_length(len(told), token_ids)
        tops = [{int(key): float(one["logprob"]) for key, one in (entry or {}).items()} for entry in told]
        values = [top.get(token, math.nan) for top, token in zip(tops, token_ids, strict=True)]
        if any(math.isnan(value) for value in values[1:]):
            raise EngineError(f"{self.name} left out the log-probability of a prompt's own token")
        return values, tops

    def _named(self, top: Mapping[str, float]) -> dict[int, float]:
        found = {}
        for text, value in top.items():
            token = int(text.removeprefix(_BY_ID)) if text.startswith(_BY_ID) else self._id_of.get(text)
            if token is not None:
                found[token] = float(value)
        return found

    @cached_property
    def _id_of(self) -> dict[str, int]:
        """By the texts that are one token's alone."""
        owners: dict[str, int] = {}
        shared = set()
        for token in range(self._vocabulary.vocab_size):
            text = self._vocabulary.text(token)
            if text in owners:
                shared.add(text)
            owners[text] = token
        return {text: token for text, token in owners.items() if text not in shared}

    # ---- HTTP

    def _echoed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """With 0 tokens of output; servers that refuse 0 are asked for 1 from then on."""
        wanted = {"prompt_logprobs": TOP} if self._is_vllm else {"echo": True, "logprobs": TOP}
        body = {"prompt": list(token_ids), "temperature": 0, **wanted}
        try:
            return self._complete({**body, "max_tokens": self._ends})
        except RequestError:
            if self._ends:
                raise
            self._ends = 1
            return self._complete({**body, "max_tokens": 1})

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._ask("/v1/completions", {"model": self.model, **body})
        choices = _field(answer, "choices")
        if not choices:
            raise EngineError(f"{self.name} answered without a choice")
        return dict(choices[0])

    def _card(self) -> dict[str, Any]:
        cards = _field(self._ask("/v1/models", None), "data")
        if not cards:
            raise ConfigError(f"{self.name} serves no model", param="candidate", value=self.name)
        return dict(cards[0])

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        data = None if body is None else orjson.dumps(body)
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return dict(orjson.loads(response.read()))
        except urllib.error.HTTPError as error:
            said = f"{self.url}{path} answered {error.code}: {_message(error)}"
            raise (RequestError(said) if error.code in (400, 422) else EngineError(said)) from None
        except urllib.error.URLError as error:
            why = getattr(error.reason, "strerror", None) or error.reason
            raise NobodyThere(f"nothing answers at {self.url}{path}: {why}", hint=NOBODY) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(f"cannot ask {self.url}{path}: {error}", hint=NOBODY) from None


def _field(told: Any, name: str) -> Any:
    if not isinstance(told, Mapping) or told.get(name) is None:
        raise EngineError(f"the server's answer has no {name!r}", hint="does it speak OpenAI's API?")
    return told[name]


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read(2000).decode(errors="replace")
    try:
        return str(orjson.loads(text)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text
