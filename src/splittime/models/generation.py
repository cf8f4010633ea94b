"""What `generation_config.json` says: which tokens end a text, and how its makers advise to sample.

    --generation-config auto   both apply; a field of a request wins over the advice
                        vllm   sampling is neutral unless a request says otherwise; ends of sequence apply
                        none   the file is not read

`auto` and `vllm` mean what they mean to vLLM. Its fields are read too, and no others: `do_sample` is not one of them,
so a file with `do_sample: false` and a temperature advises that temperature. `max_new_tokens` is how many tokens a
request gets that names no number itself (in vLLM it cuts off larger numbers too).
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError, RequestError
from splittime.core.sampling import SamplingParams
from splittime.models.fields import Fields
from splittime.models.json_file import read_json
from splittime.models.limits import Bounds

NAME = "generation_config.json"
HINT = "--generation-config vllm leaves the file's sampling alone"
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in the file, and in `SamplingParams`."""


class GenerationAdvice(msgspec.Struct, frozen=True):
    """sampling: what is advised, by the names of `SamplingParams`."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = {}


def read_generation(folder: Path, way: str, vocab_size: int) -> GenerationAdvice:
    """Reads it from a checkpoint's folder. Raises `ConfigError` naming what cannot be meant."""
    path = folder / NAME
    if way == "none" or not path.exists():
        return GenerationAdvice()
    values = read_json(path)
    ends = Fields(values, file=NAME).ints("eos_token_id", Bounds(0, vocab_size - 1))
    return GenerationAdvice(ends, _sampling(values) if way == "auto" else {})


def _sampling(values: dict[str, Any]) -> dict[str, float | int]:
    """A null says nothing."""
    given = {ours: values[theirs] for theirs, ours in FIELDS.items() if values.get(theirs) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        msgspec.convert(given, SamplingParams).validate()
    except RequestError as error:
        info = error.info
        said = f"{NAME}: {info.message}"
        raise ConfigError(said, param=info.param, value=info.value, limit=info.limit, hint=HINT) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{NAME}: {error}", param="generation_config", value=str(given), hint=HINT) from None
    return given
