"""What is asked of a distillation, refused here by name where it cannot be honoured."""

from dataclasses import asdict, dataclass

from splittime.core.errors import ConfigError


@dataclass(frozen=True)
class DistillSettings:
    """minutes, tokens: the budget, one of them or both. own_outputs: sequences that the teacher writes.

    temperature: of both distributions in the divergence. alpha: weight of the divergence; what is left of 1 is the
    weight of the text's own tokens. matrix_rate, other_rate: peak learning rates of Muon and AdamW.
    """

    minutes: float | None = None
    tokens: int | None = None
    own_outputs: int = 0
    temperature: float = 1.0
    alpha: float = 0.9
    step_tokens: int = 4096
    workers: int = 2
    seed: int = 0
    matrix_rate: float = 0.02
    other_rate: float = 0.008

    def checked(self) -> "DistillSettings":
        """Raises `ConfigError` naming the first that cannot be honoured."""
        if self.minutes is None and self.tokens is None:
            hint = "--minutes 10, --tokens 1000000, or both: what is spent first ends the run"
            raise ConfigError("a distillation needs a budget", param="minutes", hint=hint)
        for name in ("minutes", "tokens", "temperature", "step_tokens", "workers", "matrix_rate", "other_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise _out_of_range(name, value, "above 0")
        if not 0 <= self.alpha <= 1:
            raise _out_of_range("alpha", self.alpha, "from 0 (the text alone) to 1 (the teacher alone)")
        if self.own_outputs < 0 or self.seed < 0:
            name = "seed" if self.own_outputs >= 0 else "own_outputs"
            raise _out_of_range(name, getattr(self, name), "at least 0")
        return self

    def values(self) -> dict[str, object]:
        return asdict(self)


def _out_of_range(name: str, value: float, limit: str) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"{flag} is {value:g}, must be {limit}", param=name, value=value, limit=limit)
