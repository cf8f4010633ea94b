"""What `speculative_config` says, in JSON as vLLM's flag of that name has it: which drafts, and how many at most.

    {"method": "auto"}                                       "suffix", where that costs nothing that could be measured
    {"method": "none"}                                       nothing is guessed
    {"method": "suffix"}                                     the request's own text, and past answers to its tenant
    {"method": "ngram", "num_speculative_tokens": 8}         the request's own text alone
    {"method": "ngram", "prompt_lookup_min": 4}              only behind so many tokens that stood there before
    {"method": "draft_model", "model": "code-draft"}         a smaller model with the same vocabulary
    {"method": "self", "quantization": "int4"}               the model itself, in fewer bits
    {"method": "mtp", "model": "./head"}                     a head on the model; without `model` the checkpoint's own

How many of the drafts a step really verifies, the scheduler decides (`scheduler.speculation`).
"""

from pathlib import Path
from typing import Literal

import msgspec

from splittime.core.errors import ConfigError

MOST_DRAFTS, DEFAULT_DRAFTS = 64, 16
CORPUS_TOKENS = 2**18  # of a tenant's past answers
MOST_TOKENS = 2**21  # of all tenants' together
MOST_TENANTS = 1024  # of whom answers are kept
TOKEN_BYTES = 104  # at most, with its place in the tables: those in use and larger ones that are being filled
LEAST_LOOKUP = 2
AUTO, NONE = '{"method": "auto"}', '{"method": "none"}'
LEAST_STEP_MS = 4.0  # of one request: guessing where nothing can be guessed takes some ten microseconds of a step
OWN_BITS: Literal["int4"] = "int4"  # of the model's copy, unless another quantization is asked for
FIELDS: dict[str, set[str]] = {  # beside num_speculative_tokens, which every method has
    "auto": set(),
    "none": set(),
    "suffix": {"prompt_lookup_min"},
    "ngram": {"prompt_lookup_min"},
    "draft_model": {"model", "quantization"},
    "self": {"quantization"},
    "mtp": {"model", "quantization"},
}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """num_speculative_tokens: drafts of a row, at most. prompt_lookup_min: matching tokens that drafts need. model: of
    drafts, as `--model` takes it, or the folder of a head. quantization: of its weights, "int8" or "int4"; None is the
    model's own, and "int4" for the method "self"."""

    method: Literal["auto", "none", "suffix", "ngram", "draft_model", "self", "mtp"]
    num_speculative_tokens: int = DEFAULT_DRAFTS
    prompt_lookup_min: int | None = None
    model: str | None = None
    quantization: Literal["int8", "int4"] | None = None

    def check(self) -> None:
        """Raises ConfigError for a number out of its bounds, and for a field that the method has no use for."""
        for name, least, most in (("num_speculative_tokens", 1, MOST_DRAFTS), ("prompt_lookup_min", LEAST_LOOKUP, 64)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                message = f"{name} = {value} of speculative_config is not in {least} to {most}"
                raise ConfigError(message, param="speculative_config", value=value, limit=most)
        if self.method == "none" and self.num_speculative_tokens != DEFAULT_DRAFTS:
            message = "speculative_config: the method 'none' has no use for num_speculative_tokens"
            value = self.num_speculative_tokens
            raise ConfigError(message, param="speculative_config", value=value, hint="leave it out")
        for name in ("prompt_lookup_min", "model", "quantization"):
            if getattr(self, name) is not None and name not in FIELDS[self.method]:
                message = f"speculative_config: the method {self.method!r} has no use for {name}"
                raise ConfigError(message, param="speculative_config", value=getattr(self, name), hint="leave it out")
        if self.method == "draft_model" and self.model is None:
            hint = '{"method": "draft_model", "model": "code-draft"}: a folder, a GGUF file or an id, as --model takes'
            raise ConfigError("speculative_config names no model", param="speculative_config", hint=hint)

    @property
    def has_model(self) -> bool:
        """Returns whether a model, or a head, makes the drafts."""
        return self.method in ("draft_model", "self", "mtp")

    @property
    def memory_bytes(self) -> int:
        """Returns what past answers may come to take."""
        return MOST_TOKENS * TOKEN_BYTES if self.method in ("auto", "suffix") else 0


def speculative_config(text: str | None) -> SpeculativeConfig | None:
    """Returns what a setting's text says; None where nothing is to be guessed. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        message = f"speculative_config is not understood: {error}"
        hint = f"Can be: {AUTO}, {NONE}, "
        hint += '{"method": "suffix"}, {"method": "ngram"}, {"method": "self"}, {"method": "draft_model", "model": '
        hint += 'NAME} or {"method": "mtp", "model": FOLDER}, with num_speculative_tokens.'
        raise ConfigError(message, param="speculative_config", value=text, hint=hint) from error
    config.check()
    return None if config.method == "none" else config


def without_place(text: str | None) -> str | None:
    """Returns such a text as anybody may read it: of a model that lies in a folder here, no more than its name."""
    config = speculative_config(text)
    if config is None or config.model is None or not Path(config.model).expanduser().exists():
        return text
    name = Path(config.model).expanduser().resolve().name
    return msgspec.json.encode(msgspec.structs.replace(config, model=name)).decode()
