"""What a scenario is, and what some need on disk: adapters, chat templates."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from benchmarks.scenarios.doctor.kinds import Load
from benchmarks.scenarios.doctor.patients import Patient
from benchmarks.scenarios.doctor.proxies import Spoiler
from benchmarks.scenarios.lora import write_adapter
from splittime.assemble.model_source import locate
from splittime.diagnose.finding import RULES

ADAPTERS = ("a0", "a1", "a2", "a3")
RANK = 2
Settings = tuple[str, ...]

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SLOW_TEMPLATE = "{% for i in range(3000) %}{% for j in range(1500) %}{% endfor %}{% endfor %}" + TEMPLATE


class Ward(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. expected: the finding that must come first, None for a healthy one; a limit comes first where no
    illness is named. also: findings that are true of it too, beside those of which the expected one is the root.
    model: of `large_models`, None for the one that all are asked of. on: "packaged", "other": those that can have it.

    settings: of `splittime serve`; they may hang on the model. furnish: writes files into a folder and returns the
    settings that name them. quota: cores that the server may use. sabotage: what `sabotage/sitecustomize.py` does in
    the server. spoiler: a proxy before it. has_gateway: a gateway of ours before it.
    beside: what goes on while the load runs (`beside`). slo, max_in_flight: of the client, as `splittime bench` takes
    them. blocks_client: its own event loop is blocked now and then. is_early: the load begins with the process.
    embeds: it is asked for embeddings.
    """

    name: str
    expected: str | None
    load: Load
    also: tuple[str, ...] = ()
    settings: Settings | Callable[[Patient], Settings] = ()
    furnish: Callable[[Path, Patient], Settings] | None = None
    quota: float | None = None
    spoiler: Callable[[Patient], Spoiler] | None = None
    has_gateway: bool = False
    sabotage: str = ""
    beside: Callable[[str], AbstractAsyncContextManager[None]] | None = None
    slo: str = ""
    max_in_flight: int | None = None
    blocks_client: bool = False
    is_early: bool = False
    embeds: bool = False
    model: str | None = None
    on: tuple[str, ...] = ("packaged", "other")

    def can_have(self, patient: Patient) -> bool:
        """Returns whether it is made with this model. One with a model of its own is made once, beside the packaged
        one."""
        return ("packaged" if patient.is_packaged else "other") in self.on and (
            self.model is None or patient.is_packaged
        )

    @property
    def may_be_named(self) -> frozenset[str]:
        """Returns the findings that are true of it."""
        if self.expected is None:
            return frozenset()
        return frozenset((self.expected, *self.also, *RULES[self.expected].root_of))

    def flags(self, folder: Path, patient: Patient) -> Settings:
        """Returns all of its settings. folder: for files that it needs."""
        made = self.furnish(folder, patient) if self.furnish is not None else ()
        return (*made, *(self.settings(patient) if callable(self.settings) else self.settings))


def adapters(folder: Path, patient: Patient, count: int) -> Settings:
    """Random adapters of this model."""
    from splittime.models.weights.load import read_config

    config = read_config(locate(patient.arguments[0] if patient.arguments else None))
    for seed, name in enumerate(ADAPTERS[:count]):
        write_adapter(folder / name, config, RANK, seed)
    named = (word for name in ADAPTERS[:count] for word in ("--lora-modules", f"{name}={folder / name}"))
    return ("--enable-lora", *named)


def template(folder: Path, patient: Patient) -> Settings:
    return _template(folder, TEMPLATE)


def slow_template(folder: Path, patient: Patient) -> Settings:
    """One that goes through something long for each request, whatever it says."""
    return _template(folder, SLOW_TEMPLATE)


def _template(folder: Path, text: str) -> Settings:
    path = folder / "template.jinja"
    path.write_text(text)
    return ("--chat-template", str(path))
