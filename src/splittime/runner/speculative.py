"""What `speculative_config` says, in JSON as vLLM's flag of that name has it: which drafts, and how many at most.

    {"method": "suffix"}                                     the request's own text, and past answers to its tenant
    {"method": "ngram", "num_speculative_tokens": 8}         the request's own text alone
    {"method": "ngram", "prompt_lookup_min": 4}              only behind so many tokens that stood there before

How many of the drafts a step really verifies, the scheduler decides (`scheduler.speculation`).
"""

from typing import Literal

import msgspec

from splittime.core.errors import ConfigError

MOST_DRAFTS = 64
CORPUS_TOKENS = 2**18  # of a tenant's past answers
MOST_TOKENS = 2**21  # of all tenants' together
TOKEN_BYTES = 104  # at most, with its place in the tables: those in use and larger ones that are being filled


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """num_speculative_tokens: drafts of a row, at most. prompt_lookup_min: matching tokens that drafts need."""

    method: Literal["suffix", "ngram"]
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 2

    def check(self) -> None:
        """Raises ConfigError for a number out of its bounds."""
        for name, least, most in (("num_speculative_tokens", 1, MOST_DRAFTS), ("prompt_lookup_min", 2, 64)):
            value = getattr(self, name)
            if not least <= value <= most:
                message = f"{name} = {value} of speculative_config is not in {least} to {most}"
                raise ConfigError(message, param="speculative_config", value=value, limit=most)

    @property
    def memory_bytes(self) -> int:
        """What past answers may come to take."""
        return MOST_TOKENS * TOKEN_BYTES if self.method == "suffix" else 0


def speculative_config(text: str | None) -> SpeculativeConfig | None:
    """Returns what a setting's text says; None where nothing is to be guessed. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        message = f"speculative_config is not understood: {error}"
        hint = 'Can be: {"method": "suffix"} or {"method": "ngram"}, with num_speculative_tokens, prompt_lookup_min.'
        raise ConfigError(message, param="speculative_config", value=text, hint=hint) from error
    config.check()
    return config
