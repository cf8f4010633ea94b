"""What this installation of splittime has, and whether it is sound: `splittime --version`, `splittime doctor --self`.

    kernels() -> Kernels             no torch is imported for it
    examine() -> list[InstallationCheck]
                                     each with what to do if it is not good; nothing is changed, no model is loaded

`bad`: splittime does not work, or many times slower than it could here. `note`: something is missing that some need.
"""

import os
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from splittime.assemble import model_source, settings
from splittime.core.errors import ConfigError
from splittime.kernels.native.library import LibraryMissing, isa_names

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Verdict = Literal["ok", "note", "bad"]

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 1 << 30  # of torch, the packaged model and its KV cache
FOR_DEVELOPERS = {"dev", "docs"}
PORT = 8000  # that of `splittime serve`
REBUILD = (
    "apt-get install g++ (or your system's compiler), then: "
    "ST_BUILD_KERNELS=require pip install --force-reinstall --no-deps --no-cache-dir --no-binary splittime splittime"
)


class Kernels(NamedTuple):
    """What computes on this processor. isa: the instruction set, None for torch's; reason: why these."""

    isa: str | None
    reason: str

    def __str__(self) -> str:
        if self.isa is None:
            return f"torch CPU kernels, which are slower: {self.reason}"
        return f"native, {self.isa} ({self.reason})"


class InstallationCheck(msgspec.Struct, frozen=True):
    """One thing that was looked at. remedy: what to do, of what is not `ok`."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None


def kernels() -> Kernels:
    """Tries every instruction set that runs here, as each start does, and says which one would be used."""
    try:
        from splittime.kernels.native.check import choose_isa  # numpy

        isa, _ = choose_isa()
        return Kernels(isa, f"this processor runs {', '.join(isa_names())}")
    except (LibraryMissing, RuntimeError, ImportError) as error:
        return Kernels(None, str(error))


def examine(port: int = PORT) -> list[InstallationCheck]:
    """Returns all checks, in the order in which a fault in one explains those after it."""
    torch = _torch()
    return [
        _python(),
        *_requirements(),
        torch,
        _kernels(),
        *(() if torch.verdict == "bad" else (_threads(), _memory())),
        _model(),
        _port(port),
        *_extras(),
    ]


def _python() -> InstallationCheck:
    found = f"{sys.version.split()[0]} on {sys.platform}"
    if sys.version_info < MIN_PYTHON:
        return InstallationCheck("python", "bad", found, "make an environment with Python 3.11 or later")
    return InstallationCheck("python", "ok", found)


def _requirements() -> Iterator[InstallationCheck]:
    """One line for all that is needed, or one for each that is missing or of another version."""
    wanted = _wanted()
    faults = [fault for requirement in wanted if (fault := _fault(requirement)) is not None]
    for fault in faults:
        yield InstallationCheck("libraries", "bad", fault, "pip install --upgrade splittime")
    if not wanted:
        remedy = "none is needed where `make setup` was run or PYTHONPATH was meant; else pip install splittime"
        yield InstallationCheck(
            "libraries", "note", "unknown: splittime runs from a folder that was not installed", remedy
        )
    elif not faults:
        yield InstallationCheck("libraries", "ok", f"all {len(wanted)} that are needed")


def _wanted(extra: str = "") -> "list[Requirement]":
    """Returns what splittime, or an extra alone, requires on this platform; nothing where it was not installed."""
    from packaging.requirements import Requirement

    try:
        listed = [Requirement(line) for line in metadata.requires("splittime") or ()]
    except metadata.PackageNotFoundError:
        return []

    def is_wanted(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    return [one for one in listed if is_wanted(one, extra) and not (extra and is_wanted(one, ""))]


def _fault(wanted: "Requirement") -> str | None:
    """Says how a requirement is not met; None if it is."""
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is missing"
    is_met = wanted.specifier.contains(found, prereleases=True)
    return None if is_met else f"{wanted.name} is {found}, not {wanted.specifier}"


def _torch() -> InstallationCheck:
    try:
        import torch
    except (ImportError, OSError) as error:
        return InstallationCheck("torch", "bad", f"cannot be imported: {error}", "pip install --force-reinstall torch")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = f", cards: {cards}, {torch.cuda.get_device_name()}" if cards else ", no card"
    return InstallationCheck("torch", "ok", f"{torch.__version__}{named}")


def _kernels() -> InstallationCheck:
    found = kernels()
    if found.isa is not None:
        return InstallationCheck("kernels", "ok", str(found))
    if sys.platform == "win32":
        return InstallationCheck("kernels", "note", str(found), "the CPU kernels are not made for Windows: use WSL")
    return InstallationCheck("kernels", "bad", str(found), REBUILD)


def _threads() -> InstallationCheck:
    """Says how many threads compute, and whether the settings of this folder and environment can be read."""
    from splittime.core.this_process import num_cores
    from splittime.runner.machine import cpu_name

    cores = num_cores()
    found = f"{cores} of {os.cpu_count()} cores may be used; {cpu_name()}"
    try:
        asked = settings.load({})["num_threads"]
    except ConfigError as error:
        return InstallationCheck(
            "threads", "bad", error.info.message, error.info.hint or "splittime config show tells the settings"
        )
    if asked is not None and asked > cores:
        remedy = f"num_threads is {asked}: leave it out; more threads than cores wait for each other"
        return InstallationCheck("threads", "bad", found, remedy)
    if cores == 1:
        return InstallationCheck("threads", "note", found, "give it a second core: server and engine share this one")
    return InstallationCheck("threads", "ok", found)


def _memory() -> InstallationCheck:
    from splittime.core.this_process import free_memory_bytes

    free = free_memory_bytes()
    found = f"{free / 2**30:.1f} GiB free"
    if free < MIN_MEMORY_BYTES:
        return InstallationCheck(
            "memory", "bad", found, "1 GiB is needed: end other programs, or raise the container's limit"
        )
    return InstallationCheck("memory", "ok", found)


def _model() -> InstallationCheck:
    try:
        return InstallationCheck("model", "ok", f"{model_source.default()}, at {model_source.locate(None)}")
    except ConfigError as error:
        remedy = "pip install --force-reinstall --no-deps splittime"
        return InstallationCheck("model", "bad", error.info.message, remedy)


def _port(port: int) -> InstallationCheck:
    """Loopback must take a server; that another has the usual port is worth a note."""
    for number in (0, port):
        try:
            with socket.create_server(("127.0.0.1", number)):
                pass
        except OSError as error:
            if number == 0:
                return InstallationCheck("port", "bad", f"127.0.0.1: {error}", "bring the loopback interface up")
            return InstallationCheck("port", "note", f"{port} is taken", f"splittime serve --port {port + 1}")
    return InstallationCheck("port", "ok", f"{port} is free on 127.0.0.1")


def _extras() -> Iterator[InstallationCheck]:
    """The extras of pyproject.toml, but for what only developers need."""
    try:
        names = metadata.metadata("splittime").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return
    for extra in sorted(set(names) - FOR_DEVELOPERS):
        if not _wanted(extra):
            continue  # it brings nothing, as vllm, so it says nothing of what is here
        faults = [fault for requirement in _wanted(extra) if (fault := _fault(requirement)) is not None]
        remedy = f"if it is wanted: pip install 'splittime[{extra}]'" if faults else None
        yield InstallationCheck(f"extra {extra}", "note" if faults else "ok", "; ".join(faults) or "present", remedy)
