"""Builds the CPU kernels (src/splittime/kernels/native/csrc) into a shared library. All else: pyproject.toml.

Where there is a C++ compiler, what it refuses ends the install in its own words: an install that quietly lost its
kernels would be many times slower. Without one the install goes on, and splittime computes with torch and says so.
`ST_BUILD_KERNELS=require` ends it there too, `ST_BUILD_KERNELS=skip` builds none. `ST_BUILD_KERNELS=here` builds what
this machine can run: for an install that stays here, as `make serve` makes. `ST_BUILD_KERNELS=tests` builds that and
the emulated set, which is only tested and takes the compiler minutes (`make setup`).

Each isa_*.cpp is compiled for its own instruction set and in parts, as many at once as there are cores.

Nothing in the library is bound to Python (`kernels/native/library.py` loads it with ctypes), so a wheel is tagged
py3-none-PLATFORM; one without the library, py3-none-any.
"""

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

SOURCES = Path("src/splittime/kernels/native/csrc")
FLAGS = [
    "-O3",
    "-g0",
    "-std=gnu++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"]
BF16 = [*AVX512, "-mavx512bf16"]
ISA_FLAGS = {"isa_avx2": AVX2, "isa_avx512": AVX512, "isa_avx512bf16": BF16, "isa_amx": BF16}
NEEDS = {
    "isa_avx2": {"avx2", "fma", "f16c"},
    "isa_avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "isa_avx512bf16": {"avx512_vnni", "avx512_bf16"},
    "isa_amx": {"amx_tile", "amx_int8", "amx_bf16"},
}
"""Of each, by their names in /proc/cpuinfo."""
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
PARTS = ("linear_int", "attention", "linear_float", "table")  # of each isa_*.cpp, those that take longest first
EMULATED = "isa_amx_emulated"
LIBRARY = "_kernels.so"

ASKED = ("auto", "require", "skip", "here", "tests")
BOUND = ("here", "tests")  # to the instruction sets of this machine
SKIPPED = "splittime is installed without its CPU kernels and will compute with torch, which is slower"


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set, then links them."""

    def build_extensions(self) -> None:
        asked = os.environ.get("ST_BUILD_KERNELS", "auto")
        if asked not in ASKED:
            raise SetupError(f"ST_BUILD_KERNELS is {asked!r}, which is none of {', '.join(ASKED)}")
        reason = "ST_BUILD_KERNELS=skip" if asked == "skip" else why_there_is_no_compiler()
        if reason is None:
            self.build_or_say_how_not_to()
        elif asked == "require":
            raise SetupError(f"ST_BUILD_KERNELS=require, but {reason}")
        else:
            print(f"{reason}: {SKIPPED}", file=sys.stderr)
            self.extensions = []

    def build_or_say_how_not_to(self) -> None:
        try:
            super().build_extensions()
        except Exception:
            print("the CPU kernels do not compile; ST_BUILD_KERNELS=skip installs without them", file=sys.stderr)
            raise

    def get_ext_filename(self, fullname: str) -> str:
        """Python's own suffix would name its version."""
        return str(Path(*fullname.split(".")).with_name(LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        asked = os.environ.get("ST_BUILD_KERNELS")
        chosen = [path for path in ext.sources if asked == "tests" or Path(path).stem != EMULATED]
        if asked in BOUND:
            chosen = [path for path in chosen if runs_here(Path(path).stem)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self.compile_part, parts_of(chosen)))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")

    def compile_part(self, part: tuple[str, str | None]) -> str:
        source, name = part
        flags = FLAGS + ISA_FLAGS.get(Path(source).stem, [])
        folder = str(Path(self.build_temp, name or "whole"))
        macros = [("ST_PART", name)] if name else []
        return self.compiler.compile([source], output_dir=folder, macros=macros, extra_postargs=flags)[0]


class TagByPlatform(bdist_wheel):
    """Names the platform that the library was built for, and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        has_library = any(Path(self.bdist_dir).rglob(LIBRARY))
        if has_library and (asked := os.environ.get("ST_BUILD_KERNELS")) in BOUND:
            print(f"this wheel is for processors like this one: ST_BUILD_KERNELS={asked}", file=sys.stderr)
        return "py3", "none", super().get_tag()[2] if has_library else "any"


def parts_of(sources: list[str]) -> list[tuple[str, str | None]]:
    """Returns each source with the part of it to compile, or None for all of it; those that take longest come first,
    so that no core is left with a long one at the end."""
    by_isa = [path for path in reversed(sources) if Path(path).stem.startswith("isa_")]
    whole = [path for path in sources if path not in by_isa]
    return [(path, part) for part in PARTS for path in by_isa] + [(path, None) for path in whole]


def runs_here(source: str) -> bool:
    """Returns whether this machine has the instruction set that a source is for. What cannot be known is built."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return True
    return not flags or NEEDS.get(source, set()) <= flags


def why_there_is_no_compiler() -> str | None:
    """None if there is one. A compiler that was named and is missing is as good as none."""
    if sys.platform == "win32":
        return "the CPU kernels are not made for Windows"
    command = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    return None if shutil.which(command) else f"there is no C++ compiler ({command})"


def sources() -> list[str]:
    found = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    return [path for path in found if IS_X86 or Path(path).stem not in ISA_FLAGS]


setup(
    ext_modules=[Extension("splittime.kernels.native._kernels", sources(), language="c++")],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": TagByPlatform},
)
