"""Builds the CPU kernels (src/splittime/kernels/native/csrc) into a plain shared library, if there is a C++ compiler.

Everything else about the package is in pyproject.toml. The extension is optional: without a compiler the install goes
on and splittime computes with torch, which it says at start. Each isa_*.cpp is compiled for its own instruction set.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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
ISA_FLAGS = {"isa_avx2": AVX2, "isa_avx512": AVX512, "isa_avx512bf16": [*AVX512, "-mavx512bf16"]}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set, then links them."""

    def build_extension(self, ext: Extension) -> None:
        objects = []
        for source in ext.sources:
            flags = FLAGS + ISA_FLAGS.get(Path(source).stem, [])
            objects += self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags)
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")


def sources() -> list[str]:
    found = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    return [path for path in found if IS_X86 or Path(path).stem not in ISA_FLAGS]


setup(
    ext_modules=[Extension("splittime.kernels.native._kernels", sources(), language="c++", optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
