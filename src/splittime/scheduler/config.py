"""The scheduler's settings. All of `LIVE_KNOBS` can be changed while requests run."""

import difflib
from typing import Annotated, Any, Literal

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.settings import Doc, StepLimits, check, settings_of
from splittime.core.step import SPARE_STATES

LIVE_KNOBS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens",
    "policy",
    "batching",
    "starvation_bound_ms",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "paused",
)


class SchedulerConfig(StepLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the scheduler; each says what it does, and the following more of some.

    max_prefill_tokens: bounds how long a step makes the others wait for their next token. None: as many as fit.
    max_model_len: longest prompt plus output, in tokens.
    num_blocks: blocks of the KV cache; it must hold at least one request of max_model_len.
    num_host_slots: blocks of host memory for what is evicted from it; 0: what is evicted is lost.
    num_state_slots: states of sequences that are kept, of models whose layers have some; 0: of others.
    policy: see `scheduler.state`.
    paused: admit and compute nothing until it is false again.
    """

    max_model_len: int = 2048
    num_blocks: int = 1024
    num_host_slots: int = 0
    num_state_slots: int = 0
    max_prefill_tokens: Annotated[
        int | None,
        Doc(
            "Prompt tokens of these; default: what a step computes in 0.25 s, measured once, at least 16. "
            "Not heeded without chunked prefill.",
            1,
        ),
    ] = None
    policy: Annotated[Literal["fcfs", "priority", "shortest_prefill", "deadline"], Doc("Who goes first.")] = "fcfs"
    batching: Annotated[
        Literal["continuous", "static"],
        Doc("continuous admits at every step; static fills a batch and runs it to its end."),
    ] = "continuous"
    starvation_bound_ms: Annotated[float, Doc("A request that has waited longer goes first under every policy.", 0)] = (
        10_000.0
    )
    enable_prefix_caching: Annotated[bool, Doc("Reuse the KV cache of equal prefixes.")] = True
    enable_chunked_prefill: Annotated[bool, Doc("Cut long prompts to fit the token budget.")] = True
    max_loras: Annotated[int, Doc("Adapters that the requests of a step may use; the others' wait.", 1, 64)] = 8
    paused: bool = False

    def validate(self) -> "SchedulerConfig":
        """Returns itself; raises ConfigError naming the first setting out of range."""
        check(self)
        _require(self.num_blocks >= 1, "num_blocks", self.num_blocks, "at least 1")
        _require(self.num_host_slots >= 0, "num_host_slots", self.num_host_slots, "at least 0")
        slots = self.num_state_slots
        _require(slots == 0 or slots > SPARE_STATES, "num_state_slots", slots, f"0, or above {SPARE_STATES}")
        _require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "at least 2: a prompt and an output")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs ({self.max_num_seqs}), so that every running request can decode in each step",
        )
        _require(
            self.num_blocks * self.block_size >= self.max_model_len,
            "num_blocks",
            self.num_blocks,
            f"room for one request of max_model_len ({self.max_model_len} tokens) at block_size {self.block_size}",
        )
        return self

    def with_knobs(self, knobs: dict[str, Any]) -> "SchedulerConfig":
        """A copy with live knobs changed. Raises ConfigError for an unknown knob or a bad value."""
        for name in knobs:
            if name not in LIVE_KNOBS:
                close = difflib.get_close_matches(name, LIVE_KNOBS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"knobs: {', '.join(LIVE_KNOBS)}"
                raise ConfigError(f"{name!r} is not a live knob", param=name, hint=hint)
        try:
            changed = msgspec.convert({**msgspec.to_builtins(self), **knobs}, SchedulerConfig)
        except msgspec.ValidationError as error:
            known = [s for s in settings_of(SchedulerConfig) if s.name in knobs and s.choices]
            choices = "; ".join(f"{setting.name}: {', '.join(setting.choices)}" for setting in known) or None
            raise ConfigError(f"bad knob value: {error}", value=str(knobs), hint=choices) from None
        return changed.validate()

    def knobs(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LIVE_KNOBS}


def _require(holds: bool, name: str, value: Any, limit: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {limit}", param=name, value=value, limit=limit)
