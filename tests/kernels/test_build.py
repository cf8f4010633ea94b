"""What setup.py does with the kernels: the sources travel whole, and a compiler that fails is not passed over.

Nothing is compiled here: the compilers are programs that succeed or fail at once.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = "src/splittime/kernels/native/csrc"
LIMIT_S = 60


def setup_py(*arguments, **environment):
    command = [sys.executable, "setup.py", *map(str, arguments)]
    environ = {name: value for name, value in os.environ.items() if name not in ("CXX", "ST_BUILD_KERNELS")}
    return subprocess.run(
        command, cwd=ROOT, env=environ | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def build(folder, **environment):
    return setup_py("build_ext", "--build-temp", folder / "temp", "--build-lib", folder / "lib", **environment)


def test_the_sdist_holds_every_source_of_the_kernels(tmp_path):
    done = setup_py("--quiet", "egg_info", "--egg-base", tmp_path)
    assert done.returncode == 0, done.stderr
    listed = (tmp_path / "splittime.egg-info/SOURCES.txt").read_text().split("\n")
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / CSRC).iterdir() if path.is_file()}
    assert {path for path in listed if path.startswith(CSRC)} == ours
    assert {"setup.py", "constraints.txt", "src/splittime/packaged/code/model.safetensors"} <= set(listed)


def test_a_wheel_holds_none_of_them(tmp_path):
    done = setup_py("--quiet", "build_py", "--build-lib", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "splittime/packaged/code/model.safetensors").exists()
    assert (tmp_path / "splittime/server/dashboard").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".cpp", ".h", ".inl")]


def test_a_compiler_that_fails_ends_the_build(tmp_path):
    done = build(tmp_path, CXX="false")
    assert done.returncode != 0
    assert "ST_BUILD_KERNELS=skip installs without them" in done.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler)"), ({"ST_BUILD_KERNELS": "skip"}, "skip")],
)
def test_without_a_compiler_the_install_goes_on_and_says_so(tmp_path, environment, reason):
    done = build(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert reason in done.stderr
    assert "will compute with torch" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"ST_BUILD_KERNELS": "require", "CXX": "no-such-compiler"}, "there is no C++ compiler"),
        ({"ST_BUILD_KERNELS": "perhaps"}, "none of auto, require, skip, here, tests"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_refused(tmp_path, environment, reason):
    done = build(tmp_path, **environment)
    assert done.returncode != 0
    assert reason in done.stderr


@pytest.mark.parametrize(("asked", "only_tested"), [("here", set()), ("tests", {"isa_amx_emulated"})])
def test_here_is_built_what_this_machine_can_run(tmp_path, asked, only_tested):
    """And no more: the compiler is asked for one instruction set of many, or for all, as the machine has them. It works
    for minutes on the emulated one, which nobody who serves a model needs."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >> ' + str(tmp_path / "asked") + "\n" + COMPILER.partition("\n")[2])
    compiler.chmod(0o755)
    done = build(tmp_path, CXX=str(compiler), ST_BUILD_KERNELS=asked)
    assert done.returncode == 0, done.stderr
    built = set(re.findall(r"isa_\w+(?=\.cpp)", (tmp_path / "asked").read_text()))
    flags = set(Path("/proc/cpuinfo").read_text().split())
    marks = {"isa_avx2": "avx2", "isa_avx512": "avx512_vnni", "isa_avx512bf16": "avx512_bf16", "isa_amx": "amx_int8"}
    others = {path.stem for path in (ROOT / CSRC).glob("isa_*.cpp")} - set(marks) - {"isa_amx_emulated"}
    assert built == others | only_tested | {source for source, mark in marks.items() if mark in flags}


COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""  # makes what it was asked for, empty


def wheel(folder, **environment):
    where = ("egg_info", "--egg-base", folder, "build", "--build-base", folder / "build")
    done = setup_py("--quiet", *where, "bdist_wheel", "--bdist-dir", folder / "tree", "-d", folder, **environment)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made.name, zipfile.ZipFile(made).namelist()


def test_a_wheel_is_bound_to_the_platform_and_to_no_python(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    name, files = wheel(tmp_path, CXX=str(compiler), ST_BUILD_KERNELS="require")
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert "splittime/kernels/native/_kernels.so" in files


def test_a_wheel_without_kernels_is_for_any_platform(tmp_path):
    name, files = wheel(tmp_path, ST_BUILD_KERNELS="skip")
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.endswith(".so")]
