"""A schedule for one server: the flags of a load, and what the server says of its own limits."""

import secrets
from typing import Any

import msgspec

from splittime.cli.bench_flags import spec_of
from splittime.loadgen.draw import draw
from splittime.loadgen.limits import Limits
from splittime.loadgen.schedule import Schedule

USUAL_VOCAB_SIZE = 32_000


def drawn(load: dict[str, Any], limits: Limits, salt: str | None = None) -> Schedule:
    """Its notes say what was assumed. Raises `ConfigError`."""
    spec = spec_of(load)
    if spec.prompt_form is None and not limits.takes_ids:
        spec = msgspec.structs.replace(spec, prompt_form="text")
    schedule = draw(
        spec,
        vocab_size=USUAL_VOCAB_SIZE if limits.vocab_size is None else limits.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        salt=None if spec.reuse_prompts else salt or secrets.token_hex(6),
    )
    if limits.vocab_size is not None or spec.prompt_form not in (None, "ids"):
        return schedule
    note = f"the server does not tell its vocabulary: ids below {USUAL_VOCAB_SIZE:,} are used (--vocab-size)"
    return msgspec.structs.replace(schedule, notes=(*schedule.notes, note))


def corrected(limits: Limits, vocab_size: int | None, max_model_len: int | None) -> Limits:
    """What a flag says goes before what the server says."""
    told = {"vocab_size": vocab_size, "max_model_len": max_model_len}
    return msgspec.structs.replace(limits, **{name: value for name, value in told.items() if value is not None})
